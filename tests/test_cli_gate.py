"""`stackwise gate`: what it hands over to pytest."""

import json
import os
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from stackwise.cli import main
from stackwise.cli.gate import Gate
from stackwise.gate.stored import compare_stored


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


def test_options_after_two_dashes_are_those_of_pytest(handed_over):
    with pytest.raises(HandedOverError):
        main(["gate", "main", "--tests", "bench", "--seconds", "60", "--", "--sizes", "3", "-k", "a or b"])
    given = [
        "--stackwise-against=main",
        "--stackwise-gate-seconds=60.0",
        "bench",
        "--sizes",
        "3",
        "-k",
        "a or b",
    ]
    assert handed_over == [[sys.executable, "-m", "pytest", *given]]


def test_options_after_two_dashes_are_refused_for_saved_files(handed_over, capsys):
    assert main(["gate", "old.json", "new.json", "--", "-k", "a"]) == 2
    assert "options after --: got ['-k', 'a']; allowed: none" in capsys.readouterr().err


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
        "--timeout",
        "90",
        "--history",
        "history.db",
    ]
    with pytest.raises(HandedOverError):
        main([*arguments, *options])
    assert handed_over[0][3:] == [
        "--stackwise-against=v1.0",
        "--stackwise-head=HEAD",
        "--stackwise-gate=time=2%",
        "--stackwise-missing=fail",
        "--stackwise-gate-seconds=60.0",
        "--stackwise-gate-timeout=90.0",
        "--stackwise-build=make",
        "--stackwise-gate-report=out",
        "--stackwise-history=history.db",
        "bench",
        "perf/test_it.py::test_a[1]",
    ]


def test_without_a_base(handed_over, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["gate"])
    assert stopped.value.code == 2
    assert not handed_over
    assert capsys.readouterr().err


def saved(folder, name, seconds, peak=None):
    benchmark = {
        "fullname": "bench/test_it.py::test_it",
        "stats": {"min": seconds},
        "options": {"timer": "perf_counter", "disable_gc": False},
        "extra_info": {} if peak is None else {"peak_memory_bytes": peak},
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
    assert main(["gate", old, twice, "--report", str(tmp_path / "out")]) == 1
    assert "REGRESSED" in capsys.readouterr().out
    assert json.loads(report.read_text())["verdict"] == "REGRESSED"
    assert "REGRESSED" in report.with_suffix(".html").read_text()
    # What one saved run knows of its spread is nothing: a small change stays open.
    assert main(["gate", old, saved(tmp_path, "little", 1.02)]) == 7
    assert not handed_over


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["old.json"], "head: got None; allowed: a file that pytest-benchmark has saved"),
        (["old.json", "new.json", "--seconds", "3"], "seconds: got 3.0; allowed: none"),
        (["old.json", "new.json", "--seconds", "0"], "seconds: got 0.0; allowed: none"),
        (["old.json", "new.json", "--timeout", "3"], "timeout: got 3.0; allowed: none"),
        (["old.json", "new.json", "--history", "a.db"], "history: got 'a.db'; allowed: none"),
        (["old.json", "new.json", "--missing", "no"], "missing: got 'no'; allowed: "),
        (["old.json", "new.json", "--limits", "time=2"], "time: got '2'; allowed: "),
    ],
)
def test_saved_files_refused(arguments, message, capsys):
    assert main(["gate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_saved_files_take_a_floor_of_memory_with_its_unit(tmp_path):
    old, more = saved(tmp_path, "old", 1.0, 2**20), saved(tmp_path, "more", 1.0, 2**20 + 2**17)
    assert main(["gate", old, more, "--limits", "time=none,memory_floor=64KiB"]) == 1
    assert main(["gate", old, more, "--limits", "time=none,memory_floor=1MiB"]) == 0


def test_saved_files_of_another_machine_are_no_comparison(tmp_path, capsys):
    old, new = saved(tmp_path, "old", 1.0), saved(tmp_path, "new", 1.0)
    text = Path(old).read_text()
    Path(old).write_text(text.replace('"brand_raw": "x"', '"brand_raw": "y"'))
    assert main(["gate", old, new]) == 5
    assert "nothing was compared" in capsys.readouterr().out


def test_a_new_test_warns_in_the_command_and_in_the_library(tmp_path):
    old, new = saved(tmp_path, "old", 1.0), saved(tmp_path, "new", 1.0)
    Path(new).write_text(Path(new).read_text().replace("test_it", "test_other"))
    found = compare_stored(old, new)
    assert [test.outcome(found.missing) for test in found.tests] == ["warned", "warned"]
    assert main(["gate", old, new]) == found.exit_code == 5  # nothing was compared


def test_the_page_names_every_option():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "gate.md").read_text()
    table = page[page.index("| pytest | configuration file |") : page.index("| exit code |")]
    named = {each.name for each in fields(Gate)} - {"base", "head"}
    assert set(re.findall(r"\| `--(\w+)` \|", table)) == named
