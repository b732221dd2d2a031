"""bench.false_alarms: its bars, the kinds of healthy training, and the runs on file."""

import math

import pytest
import torch

from bench import false_alarms
from bench.healthy_training import HELD_OUT, KINDS
from bench.marked_tables import recorded


def healthy_run(alarms, *, kind="a", mode="with loss_of", steps=2000, error=None):
    return {"kind": kind, "mode": mode, "steps": steps, "alarms": [{}] * alarms, "guard_error": error}


def fault_run(*, fault="x10", noticed=True, stopped=False, distance=0.0):
    run = {"fault": fault, "mode": "with loss_of", "noticed": noticed}
    return run | {"stopped": stopped, "distance": distance}


def verdicts(healthy, faults):
    made = false_alarms.bars(dict(enumerate(healthy)), dict(enumerate(faults)))
    return {bar.name: (bar.value, bar.verdict) for bar in made}


def test_rate_is_that_of_the_worst_kind_and_mode():
    runs = [healthy_run(0), healthy_run(1), healthy_run(3), healthy_run(4, mode="without loss_of")]
    assert verdicts(runs, [])["worst_alarms_per_1000"] == (2.0, "SHORT")
    assert verdicts(runs[:2], [])["worst_alarms_per_1000"] == (0.25, "PASS")


def test_one_guard_error_is_too_many():
    runs = [healthy_run(0), healthy_run(0, error="stopped")]
    assert verdicts(runs, [])["guard_errors"] == (1.0, "SHORT")


@pytest.mark.parametrize(
    "run, noticed, lost",
    [
        (fault_run(), 1.0, 0.0),
        (fault_run(noticed=False), 0.0, 0.0),
        (fault_run(distance=1.1), 1.0, 1.0),
        (fault_run(distance=math.inf), 1.0, 1.0),
        (fault_run(stopped=True), 1.0, 1.0),
        (fault_run(fault="x10 all steps", stopped=True, distance=9.0), 1.0, 0.0),
        (fault_run(fault="x10 all steps", distance=9.0), 1.0, 1.0),
    ],
)
def test_a_fault_is_noticed_or_lost(run, noticed, lost):
    found = verdicts([healthy_run(0)], [run])
    assert found["faults_noticed_at_their_step"][0] == noticed
    assert found["fault_runs_lost"][0] == lost


@pytest.mark.parametrize("kind", KINDS)
def test_kind_trains_under_a_guard(kind):
    torch.manual_seed(0)
    found = false_alarms.train(KINDS[kind](6), recomputes=True)
    assert found["guard_error"] is None


def test_there_are_25_kinds_with_six_held_out():
    assert (len(KINDS), len(HELD_OUT)) == (25, 6)


def test_file_has_every_run_of_every_kind():
    figures = recorded("false_alarms")["figures"]
    assert {run["kind"] for run in figures["healthy"].values()} == set(KINDS)
    assert len(figures["healthy"]) == len(KINDS) * len(false_alarms.MODES) * len(figures["seeds"])
    assert len(figures["seeds"]) * figures["steps"] >= 10_000
