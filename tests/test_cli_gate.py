"""`stackwise gate`: what it hands over to pytest."""

import json
import os
import sys

import pytest

from stackwise.cli import main


class HandedOverError(Exception):
    """This process would be another one now."""


@pytest.fixture
def handed_over(monkeypatch):
    commands = []

    def execute(path, command):
        assert path == sys.executable
        commands.append(command)
        raise HandedOverError

    monkeypatch.setattr(os, "execv", execute)
    return commands


def test_base_alone(handed_over):
    with pytest.raises(HandedOverError):
        main(["gate", "main"])
    assert handed_over == [[sys.executable, "-m", "pytest", "--stackwise-against=main"]]


def test_all_of_it(handed_over):
    arguments = ["gate", "v1.0", "HEAD", "--tests", "bench", "perf/test_it.py::test_a[1]"]
    options = [
        "--limits",
        "time=2%",
        "--missing",
        "fail",
        "--seconds",
        "60",
        "--build",
        "make",
        "--report",
        "out",
    ]
    with pytest.raises(HandedOverError):
        main([*arguments, *options])
    assert handed_over[0][3:] == [
        "--stackwise-against=v1.0",
        "--stackwise-head=HEAD",
        "--stackwise-gate=time=2%",
        "--stackwise-missing=fail",
        "--stackwise-gate-seconds=60.0",
        "--stackwise-build=make",
        "--stackwise-gate-report=out",
        "bench",
        "perf/test_it.py::test_a[1]",
    ]


def test_without_a_base(handed_over, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["gate"])
    assert stopped.value.code == 2
    assert not handed_over
    assert capsys.readouterr().err


def saved(folder, name, seconds):
    benchmark = {
        "fullname": "bench/test_it.py::test_it",
        "stats": {"min": seconds},
        "options": {"timer": "perf_counter", "disable_gc": False},
        "extra_info": {},
    }
    machine = {"cpu": {"brand_raw": "x", "count": 2}, "python_version": "3.11", "system": "Linux"}
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps({"benchmarks": [benchmark], "machine_info": machine, "commit_info": {"id": name}})
    )
    return str(path)


def test_saved_files_are_compared_and_nothing_is_run(handed_over, tmp_path, capsys):
    old, twice = saved(tmp_path, "old", 1.0), saved(tmp_path, "new", 2.0)
    report = tmp_path / "out.json"
    assert main(["gate", old, twice, "--report", str(report)]) == 1
    assert "REGRESSED" in capsys.readouterr().out
    assert json.loads(report.read_text())["verdict"] == "REGRESSED"
    # What one saved run knows of its spread is nothing: a small change stays open.
    assert main(["gate", old, saved(tmp_path, "little", 1.02)]) == 7
    assert not handed_over


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["old.json"], "head: got None; allowed: a file that pytest-benchmark has saved"),
        (["old.json", "new.json", "--seconds", "3"], "seconds: got 3.0; allowed: none"),
        (["old.json", "new.json", "--missing", "no"], "missing: got 'no'; allowed: "),
        (["old.json", "new.json", "--limits", "time=2"], "time: got '2'; allowed: "),
    ],
)
def test_saved_files_refused(arguments, message, capsys):
    assert main(["gate", *arguments]) == 2
    assert message in capsys.readouterr().err
