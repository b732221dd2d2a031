"""What the benchmark of recovery takes for recovered, and what it says of runs that are on file."""

import json
import math

import pytest
import torch
from torch import nn

from bench import claim as claim_module
from bench import recovery
from bench.marked_tables import recorded
from bench.recovery import CONTROLS, FAULTS, NOTHING, OURS, Found, Twin, arm_of, bars, beside, culprit

AT = 20


def run(fault, losses, *, arm=NOTHING, seed=0, alarms=(), **more):
    names = {"arm": arm, "optimizer": "sgd", "fault": fault, "at": AT, "seed": seed, "place": "a.norm"}
    return {**names, "alarms": list(alarms), "losses": dict(zip(("70", "700"), losses, strict=True)), **more}


def found(*runs):
    """The runs, and a twin for each seed, whose losses are 2 and 1."""
    twins = [run("clean", (2.0, 1.0), seed=seed) for seed in sorted({each["seed"] for each in runs})]
    return Found({str(number): [each] for number, each in enumerate([*twins, *runs])}, 700)


def values(made):
    return {bar.name: (bar.value, bar.verdict) for bar in made}


@pytest.mark.parametrize(
    "losses, gap", [((2.0, 1.0), 0.0), ((2.01, 0.97), 0.03), ((math.nan, 1.0), math.inf)]
)
def test_distance_is_the_largest_from_the_twin(losses, gap):
    broken = run("x10", losses)
    assert found(broken).distance(broken) == pytest.approx(gap)
    assert Found({"a": [broken]}, 700).distance(broken) is None


@pytest.mark.parametrize(
    "alarms, losses, accepted",
    [
        ([AT], (2.01, 1.0), True),
        ([AT, 40], (2.01, 1.0), True),
        ([], (2.01, 1.0), False),
        ([AT + 1], (2.01, 1.0), False),
        ([3, AT], (2.01, 1.0), False),
        ([AT], (2.0, 1.03), False),
        ([AT], (math.nan, 1.0), False),
    ],
    ids=["recovered", "twice", "no alarm", "late", "false alarm", "far", "nan"],
)
def test_a_run_is_accepted_by_its_alarm_and_by_its_losses(alarms, losses, accepted):
    broken = run("x10", losses, alarms=alarms)
    assert found(broken).is_accepted(broken) is accepted


def test_a_run_without_a_twin_is_not_accepted():
    broken = run("x10", (2.0, 1.0), alarms=[AT])
    assert not Found({"a": [broken]}, 700).is_accepted(broken)


def test_a_control_that_comes_back_by_chance_fails_by_its_alarms():
    lucky, lost = run("x10", (2.01, 1.01)), run("x1000", (math.nan, math.nan), seed=1)
    of_both = found(lucky, lost)
    assert values(bars(of_both))["negative controls fail"] == (1.0, "PASS")
    assert beside(of_both) == {"negative controls far from the twin": 0.5}


def test_a_control_that_passes_for_recovered_is_told():
    noticed, lost = run("x10", (2.01, 1.01), alarms=[AT]), run("nan", (math.nan, math.nan), seed=1)
    assert values(bars(found(noticed, lost)))["negative controls fail"] == (0.5, "SHORT")


def test_other_faults_and_arms_are_no_negative_controls():
    others = [run("x10 ten steps", (2.0, 1.0)), run("x10", (2.0, 1.0), arm="ZClip")]
    assert found(*others).negative_controls() == []
    assert beside(found(*others)) == {"negative controls far from the twin": None}


def test_what_the_guard_should_name():
    names = {fault: culprit(run(fault, (2.0, 1.0))) for fault in FAULTS}
    assert names["nan"] == names["inf"] == ("a.norm (forward)",)
    assert names["x1000 ten batches"] == ("the loss",)
    assert names["x10"][0] == "all modules (gradients x"


def test_a_twin_lacks_what_is_in_quarantine_and_ends_with_its_run():
    ours = run("nan", (2.0, 1.0), arm=OURS, alarms=[AT, 31], stopped="", quarantined=[AT])
    assert str(Twin.of(ours, 700)) == "twin without [20] until 700; sgd; 20; 0"
    assert Twin.of({**ours, "stopped": "no way on"}, 700).end == 31


@pytest.mark.parametrize("name", ["OLMo skip-step", "OLMo skip-step, finite history"])
def test_a_norm_far_above_those_before_is_left_out(name):
    arm, parameter = arm_of(name), nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    taken = [arm([parameter], 2.0 + 0.01 * (step % 3), 1.0 + 0.1 * (step % 5)) for step in range(80)]
    assert all(taken)
    assert not arm([parameter], 2.0, 10.0)
    assert arm.alarmed


def test_runs_on_file_are_judged_anew_and_none_is_made(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    monkeypatch.setattr(recovery, "all_isolated", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which main sets, put back
    broken = found(run("x10", (2.01, 1.01)))
    before = claim_module.Claim("recovery", quick=True, figures={"runs": broken.runs}, commit="0123456")
    path = before.write()
    written = json.loads(path.read_text())
    assert recovery.main(["--quick", "--judge"]) == 0
    record = json.loads(path.read_text())
    assert record["bars"][-1]["name"] == "negative controls fail"
    assert record["figures"] == {"runs": broken.runs, "negative controls far from the twin": 0.0}
    kept = ("date", "commit", "machine", "load_average")
    assert {key: record[key] for key in kept} == {key: written[key] for key in kept}
    assert "bar negative controls fail" in capsys.readouterr().out


def test_bars_on_file_are_those_of_its_runs():
    record = recorded("recovery")
    of_file = Found(record["figures"]["runs"], record["figures"]["steps"])
    assert [bar.to_dict() for bar in bars(of_file)] == record["bars"]
    assert beside(of_file).items() <= record["figures"].items()
    assert {each["fault"] for each in of_file.all} == {*CONTROLS, *FAULTS}
