"""How a part of the prototype bench gets its runs."""

import os
import time
from functools import partial

import pytest

from bench.prototype.part import Work
from bench.prototype.runs import RunStore

PLAN = {"steps": 3}


def give(value, log):
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    yield {"value": value}


def fail():
    raise ArithmeticError("nothing comes of this")
    yield


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def work_of(tmp_path, **options):
    return Work(True, RunStore(tmp_path / "runs.jsonl"), **options)


def test_each_run_is_made_once_in_a_process_of_its_own(tmp_path, log):
    runs = {str(value): partial(give, value, log) for value in range(3)}
    first = work_of(tmp_path, jobs=2).complete(dict(list(runs.items())[:2]), PLAN)
    assert first == {"0": {"value": 0}, "1": {"value": 1}}
    assert work_of(tmp_path).complete(runs, PLAN) == {str(value): {"value": value} for value in range(3)}
    processes = log.read_text().split()
    assert len(set(processes)) == len(processes) == 3
    assert str(os.getpid()) not in processes


def test_another_plan_has_runs_of_its_own(tmp_path, log):
    for steps in (3, 4):
        work_of(tmp_path).complete({"a": partial(give, 1, log)}, {"steps": steps})
    assert len(log.read_text().split()) == 2


def test_after_its_time_nothing_is_begun(tmp_path, log):
    work_of(tmp_path).complete({"a": partial(give, 1, log)}, PLAN)
    work = work_of(tmp_path, until=time.monotonic() - 1)
    assert work.complete({"a": partial(give, 1, log), "b": partial(give, 2, log)}, PLAN) == {
        "a": {"value": 1}
    }
    assert work.missing == ["b"]
    assert work.is_over


def test_a_run_that_fails_ends_the_bench_and_keeps_the_others(tmp_path, log):
    runs = {"a": partial(give, 1, log), "b": fail, "c": partial(give, 2, log)}
    with pytest.raises(RuntimeError, match="b: ArithmeticError: nothing comes of this"):
        work_of(tmp_path).complete(runs, PLAN)
    assert set(work_of(tmp_path, until=0.0).complete(runs, PLAN)) == {"a"}
