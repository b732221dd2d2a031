"""`stackwise history`: what is stored is listed, shown, plotted, added and accepted."""

import json
import math
import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta

import pytest
import tyro

from stackwise.cli.history import History, _cost
from stackwise.gate.history.machine import Machine
from stackwise.gate.history.point import Result, Run
from stackwise.gate.history.reference import ReferenceTime
from stackwise.gate.history.store import Store
from stackwise.gate.result import EXIT_INCONCLUSIVE, EXIT_NOTHING, GateResult, TestResult, TrialResult
from stackwise.gate.verdict import Decision, Verdict

TEST = "bench/test_a.py::test_step[1]"
MACHINE = Machine.of({"cpu": "Some CPU", "torch_threads": 2, "python": "3.11.7", "torch": "2.13.0"})


def run(*arguments):
    return tyro.cli(History, args=[str(each) for each in arguments]).run()


@pytest.fixture
def place(tmp_path):
    """A history of 24 days, in which a test became 20 % slower after twelve."""
    with Store(tmp_path / "history.db") as store:
        for number in range(24):
            created = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number)
            level = 0.01 * (1.2 if number >= 12 else 1.0) * (1 + 0.001 * (-1) ** number)
            verdict = Verdict.REGRESSED if number >= 12 else Verdict.PASS
            results = [
                Result(TEST, "time", level, level, ReferenceTime(1e-3, 4e-3), verdict),
                Result(TEST + "::b", "memory", 3 * 2**20, 1.0),
            ]
            store.add(Run(MACHINE, f"{number:02d}abc" * 8, "main", created), results)
    return tmp_path / "history.db"


def test_list(place, capsys):
    assert run("list", "--store", place) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{MACHINE.key}  Some CPU, 2 threads, Python 3.11.7, torch 2.13.0",
        f"  {TEST}  time  24 results, the last 2026-01-24 00:00 of 23abc23abc23: 11.99 ms  REGRESSED",
        f"  {TEST}::b  memory  24 results, the last 2026-01-24 00:00 of 23abc23abc23: 3 MiB  -",
    ]
    assert run("list", "--store", place, "--metric", "memory") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert run("list", "--store", place, "--machine", "none") == 0
    assert capsys.readouterr().out == "no results\n"


def test_show_tells_where_it_changed(place, capsys):
    assert run("show", TEST, "--store", place) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{TEST} (time) on {MACHINE.key}, Some CPU, 2 threads, Python 3.11.7, torch 2.13.0"
    assert len(lines) == 26
    assert lines[13] == "  -- another level from here on, p = 0.01"
    assert "12abc12abc12  main" in lines[14] and lines[14].endswith("REGRESSED     excluded")
    assert run("show", TEST, "--store", place, "--last", "3") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_plot(place, tmp_path, capsys):
    assert (
        run("plot", "test_step[1]::b", "--metric", "memory", "--store", place, "--output", tmp_path / "a.svg")
        == 0
    )
    assert capsys.readouterr().out == f"written: {tmp_path}/a.svg\n"
    ET.parse(tmp_path / "a.svg")
    with pytest.raises(ValueError, match="branch: got 'none'"):
        run("plot", TEST, "--store", place, "--output", tmp_path / "b.svg", "--branch", "none")
    assert not (tmp_path / "b.svg").exists()


def test_accept(place, capsys):
    assert run("accept", TEST, "--store", place, "--commit", "15", "--reason", "more layers") == 0
    assert capsys.readouterr().out == f"accepted: {TEST} (time) at 11.99 ms, 15abc15abc15\n"
    with Store(place, create=False) as store:
        assert store.baseline(MACHINE, TEST, "time", "main").reason == "more layers"
        counted = store.points(MACHINE, TEST, "time", branch="main", counted=True)
    assert [point.commit[:2] for point in counted] == ["15"]


@pytest.mark.parametrize(
    "commit, said", [("99", "of which bench/test_a.py"), ("1", "several commits begin with"), ("", "got ''")]
)
def test_accept_takes_one_commit(place, commit, said):
    with pytest.raises(ValueError, match=f"commit: got .*{said}|commit: {said}"):
        run("accept", TEST, "--store", place, "--commit", commit, "--reason", "x")


def test_one_test_on_one_machine_is_meant(place):
    with pytest.raises(ValueError, match=r"test: got 'other' \(time\), of which there is no result"):
        run("show", "other", "--store", place)
    other = Machine.of({"cpu": "Another CPU"})
    with Store(place) as store:
        results = [Result(name, "time", 1.0, 0.0) for name in (TEST, "bench/test_a.py::test_step[12]")]
        store.add(Run(other), results)
    with pytest.raises(ValueError, match="test: got 'test_step', which is in 2: "):
        run("show", "test_step", "--store", place)
    with pytest.raises(
        ValueError, match=f"machine: got None; allowed: the beginning of one of .*{other.key}"
    ):
        run("show", TEST, "--store", place)
    assert run("show", TEST, "--store", place, "--machine", other.key[:6]) == 0


@pytest.fixture
def save(tmp_path):
    """A gate's report, in which head costs so many seconds in each of two rounds."""

    def make(seconds=0.01, name="gate.json", environment=MACHINE.facts):
        decision = Decision(Verdict.PASS, 0.0, -0.01, 0.01, 0.98, 2, confirmed=False, reason="")
        trial = TrialResult(decision, "s", 0.02, 0.01, (0.0, 0.0), (0.01, 0.01), (seconds, seconds))
        tests = (TestResult(TEST, trials={"time": trial}),)
        gate = GateResult("main", "head", tests, environment=environment)
        path = tmp_path / name
        path.write_text(json.dumps(gate.to_dict()))
        return path

    return make


@pytest.fixture
def report(save):
    return save()


def test_add(report, tmp_path, capsys):
    place = tmp_path / "new.db"
    assert run("add", report, "--store", place, "--commit", "abc", "--branch", "main") == 0
    assert run("add", report, "--store", place, "--commit", "abc", "--branch", "main") == 0
    assert capsys.readouterr().out == f"added: 1 results\n{report}: is there already\n"
    with Store(place, create=False) as store:
        [point] = store.points(MACHINE, TEST, "time", branch="main", counted=True)
    assert (point.commit, point.level, point.verdict) == ("abc", 0.01, Verdict.PASS)


@pytest.mark.parametrize("content", ["{}", "[]", "nothing", '{"version": 99}'])
def test_add_refuses_what_is_no_report(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x.json: is no report of the gate"):
        run("add", tmp_path / "x.json", "--store", tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()


@pytest.fixture
def steady(tmp_path):
    """A history of twelve days without a reference, as of reports that have none."""
    with Store(tmp_path / "steady.db") as store:
        for number in range(12):
            created = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number)
            level = 0.01 * (1 + 0.001 * (-1) ** number)
            result = Result(TEST, "time", level, math.log(level), verdict=Verdict.PASS)
            store.add(Run(MACHINE, "", "main", created), [result])
    return tmp_path / "steady.db"


@pytest.mark.parametrize(
    "seconds, code, shown",
    [
        (0.010, 0, "PASS          bench/test_a.py::test_step[1] (time): +0.0% (-0.3% to +0.3%); the whole"),
        (
            0.012,
            1,
            "REGRESSED     bench/test_a.py::test_step[1] (time): +20.0% (+19.7% to +20.3%); the whole",
        ),
        (0.009, 0, "IMPROVED      bench/test_a.py::test_step[1] (time): -10.0% (-10.2% to -9.8%); the whole"),
    ],
)
def test_judge(save, steady, capsys, seconds, code, shown):
    assert run("judge", save(seconds), "--store", steady) == code
    [line] = capsys.readouterr().out.splitlines()
    # The interval's ends may be rounded either way.
    assert re.sub(r"\(.*?% to .*?%\)", "", line).startswith(re.sub(r"\(.*?% to .*?%\)", "", shown))
    with Store(steady, create=False) as store:
        assert store.series()[0].n_points == 12


def test_judge_says_where_nothing_is_known(save, steady, capsys):
    assert run("judge", save(), "--store", steady, "--branch", "none") == EXIT_INCONCLUSIVE
    assert capsys.readouterr().out.startswith(
        f"INCONCLUSIVE  {TEST} (time): 0 results since the last change, and 8 are needed"
    )


def test_judge_of_a_report_in_which_nothing_is_judged(save, steady, capsys):
    assert run("judge", save(), "--store", steady, "--limits", "time=none") == EXIT_NOTHING
    assert capsys.readouterr().out.startswith("nothing to judge: ")


def test_judge_does_not_hold_a_commit_to_itself(save, steady, tmp_path, capsys):
    report = save(0.012)
    for number in range(8):
        again = save(0.012 + number * 1e-9, f"gate{number}.json")
        assert run("add", again, "--store", steady, "--commit", "abc", "--branch", "main") == 0
    assert run("judge", report, "--store", steady, "--commit", "abc") == 1
    assert run("judge", report, "--store", steady, "--commit", "def") == 0


@pytest.mark.parametrize(
    "level, metric, shown",
    [
        (160.0, "memory", "160 B"),
        (3.5 * 2**20, "memory", "3.5 MiB"),
        (2.0**45, "memory", "32 TiB"),
        (0.0, "memory", "0 B"),
        (0.0, "time", "0 ns"),
        (12.0, "time", "12 s"),
        (0.25, "ttft", "250 ms"),
        (3e-5, "tpot", "30 us"),
        (2e-9, "time", "2 ns"),
    ],
)
def test_costs_are_told_in_their_unit(level, metric, shown):
    assert _cost(level, metric) == shown


def test_judge_takes_limits_and_a_second_run(save, steady, capsys):
    slower = save(0.012)
    assert run("judge", slower, "--store", steady, "--limits", "time=30%") == 0
    assert run("judge", slower, "--store", steady, "--again", save(0.01, "again.json")) == 0
    assert run("judge", slower, "--store", steady, "--again", save(0.012, "again.json")) == 1
    other = save(0.012, "other.json", environment={"cpu": "Another CPU"})
    with pytest.raises(ValueError, match=r"other.json: is of another machine: cpu: Some CPU, Another CPU"):
        run("judge", slower, "--store", steady, "--again", other)
    with pytest.raises(ValueError, match=r"gate.json: does not say what machine it is of"):
        run("judge", save(environment={}), "--store", steady)


@pytest.mark.parametrize("action", ["list", "show", "plot", "accept"])
def test_nothing_is_made_by_looking(tmp_path, action):
    others = {"list": [], "show": ["t"], "plot": ["t", "--output", "x.svg"]}
    others["accept"] = ["t", "--commit", "a", "--reason", "b"]
    with pytest.raises(ValueError, match="there is no history"):
        run(action, "--store", tmp_path / "none.db", *others[action])
    assert list(tmp_path.iterdir()) == []
