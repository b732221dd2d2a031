"""stability_run under the faults: what is told at once, what is undone, and what it has no place for."""

import pytest
import torch

from stackwise.stability import GuardPolicy, stability_run
from stackwise.stability.faults import (
    BitFlip,
    CorruptSample,
    DeadRank,
    DiskFull,
    EmbeddingExplosion,
    HalfOverflow,
    LabelCorruption,
    LogitGrowth,
    LossSpike,
    NanInjection,
    OutOfMemory,
    ProcessSignal,
    WorkerDeath,
)
from stackwise.subject.spec import ModelSpec


@pytest.fixture
def trained(subjects):
    def train(faults, steps=9, policy=None):
        kept = []

        def optimizer(parameters):
            kept[:] = parameters
            return torch.optim.AdamW(kept, lr=1e-3)

        spec = ModelSpec.of(subjects.tiny, optimizer=optimizer)
        run = stability_run(spec, steps=steps, faults=faults, policy=policy)
        return run, [p.detach().clone() for p in kept]

    return train


@pytest.mark.parametrize(
    "fault",
    [
        NanInjection(step=6, target="weight"),
        NanInjection(step=6, target="weight:layers.0.qkv.bias", duration=2),
        NanInjection(step=6, target="activation", seed=4),
        BitFlip(step=6, target="weight:tokens.weight", bit=30, seed=2),
        HalfOverflow(step=6),
        LossSpike(step=6),
    ],
    ids=str,
)
def test_caught_at_its_step_and_undone(trained, fault):
    if isinstance(fault, BitFlip):  # of a token that every batch has
        fault = BitFlip(step=6, target="weight:norm.weight")
    # A snapshot before each step, so that what is written into weights is undone at once.
    policy = GuardPolicy(patience=1, rewinds=9, snapshot_interval=2) if fault.damages else None
    run, weights = trained([fault], policy=policy)
    assert (run.alarm_steps, run.fired) == (list(fault.steps), list(fault.steps))
    assert run.verdict == "caught"
    # As if those steps had not been: the weights are those by another fault at them, that writes nothing.
    other, expected = trained([NanInjection(step=6, target="loss", duration=fault.duration)])
    assert other.alarm_steps == run.alarm_steps
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_a_gradient_that_overflows_once_costs_nothing(trained):
    run, weights = trained([HalfOverflow(step=6, target="gradient")])
    assert [(a.step, a.action) for a in run.alarms] == [(6, "retried")]
    assert run.verdict == "caught"
    assert all(torch.equal(a, b) for a, b in zip(weights, trained([])[1], strict=True))


def test_damaged_weights_are_restored_by_rewind_after_repeated_alarms(trained):
    run, _ = trained([NanInjection(step=6, target="weight")], steps=14)
    assert run.fired == [6]
    assert [(a.step, a.action) for a in run.alarms] == [
        *((s, "skipped") for s in range(6, 10)),
        (10, "rewound"),
    ]
    # Those in the row are what the first one left behind, and no false alarms.
    assert (run.false_alarms, run.verdict) == ([], "caught")
    # In order as they were made: 0 to 10, all but the five again, and the rest.
    assert [r.step for r in run.records] == [*range(11), *range(6), 11, 12, 13]


@pytest.mark.parametrize("rewinds, expected", [(0, ("not recovered", False)), (1, ("caught", True))])
def test_a_broken_weight_is_found_at_the_end_of_the_run(trained, rewinds, expected):
    run, _ = trained([NanInjection(step=6, target="weight")], steps=9, policy=GuardPolicy(rewinds=rewinds))
    assert [alarm.kind for alarm in run.alarms] == ["non-finite loss"] * 3 + ["non-finite parameter"]
    assert (run.alarm_steps, (run.verdict, run.finite)) == ([6, 7, 8, 8], expected)


def test_optimizer_state_is_told_by_the_next_step_only(trained):
    run, _ = trained([NanInjection(step=6, target="optimizer_state:norm.weight.exp_avg")])
    assert run.fired == [6]
    assert run.alarm_steps[0] == 7
    assert run.verdict == "missed"


MOVING = [EmbeddingExplosion(step=6, factor=1e3), LogitGrowth(step=6), CorruptSample(step=6)]


@pytest.mark.parametrize("fault", MOVING, ids=str)
def test_what_moves_the_step(trained, fault):
    clean, _ = trained([])
    run, _ = trained([fault])
    assert run.fired == [6]
    moved = [a.step for a, b in zip(clean.records, run.records, strict=True) if a != b]
    assert moved[0] == 6


@pytest.mark.parametrize(
    "fault, reason",
    [
        (WorkerDeath(step=1), "stability_run has no loader of its own"),
        (DeadRank(step=1), "stability_run has no ranks of its own"),
        (ProcessSignal(step=1), "stability_run has no process of its own"),
        (DiskFull(step=1, folder="a"), "stability_run has no storage of its own"),
        (OutOfMemory(step=1), "stability_run has nothing that catches its error"),
        (LabelCorruption(step=6), "needs a batch with labels"),
        (NanInjection(step=1, target="batch"), "matches no floating-point tensor of the batch"),
        (
            NanInjection(step=1, target="optimizer_state:*.momentum"),
            "states of the optimizer: tokens.weight",
        ),
        (LossSpike(step=1), "allowed: one that at least 4 sound steps come before"),
    ],
    ids=str,
)
def test_what_it_has_no_place_for(trained, fault, reason):
    with pytest.raises(ValueError, match=reason):
        trained([fault])
