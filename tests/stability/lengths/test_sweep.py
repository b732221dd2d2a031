"""Lengths beside each other: numbers of models whose logits are known, and what is refused."""

import math
import re

import pytest
import torch
from torch import nn

from stackwise.stability.lengths import LengthPoint, LengthSweep, length_sweep
from stackwise.stability.lengths.instability import SeedRun
from stackwise.subject.spec import ModelSpec


class Known(nn.Module):
    """Logits are ones, times a power of the length; one weight trains."""

    def __init__(self, power=0.0, spoilt=None):
        super().__init__()
        self.scale, self.power, self.spoilt = nn.Parameter(torch.ones(7)), power, spoilt

    def forward(self, ids):
        out = self.scale.expand(*ids.shape, 7) * ids.shape[1] ** self.power
        if self.spoilt is not None and ids.shape[1] >= self.spoilt:
            out = out * math.nan
        return out


def spec(**arguments):
    return ModelSpec(lambda: Known(**arguments), "known", "tokens", 7, causal=True)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_growth_is_the_exponent(power):
    sweep = length_sweep(spec(power=power), (8, 2, 32), steps=2)
    assert [p.seq_len for p in sweep.points] == [2, 8, 32]
    assert [p.logit_max for p in sweep.points] == pytest.approx([n**power for n in (2, 8, 32)])
    assert [p.loss for p in sweep.points] == pytest.approx([math.log(7)] * 3)
    assert sweep.growth == pytest.approx(power, abs=1e-6)
    # Four times as much passes, 16 times does not.
    assert [text[:4] for text in sweep.problems] == (["T=32"] if power == 1.0 else [])
    assert str(sweep).startswith(f"known: logits grow as T^{abs(power):.2f}")


def test_what_is_not_finite_is_named_with_its_length():
    sweep = length_sweep(spec(spoilt=9), (4, 8, 16), steps=2)
    [problem] = sweep.problems
    assert problem.startswith("T=16: loss nan")
    assert [p.run.verdict for p in sweep.points] == ["stable", "stable", "unstable"]


def point(seq_len, loss, run):
    return LengthPoint("m", seq_len, 4, loss, 1.0, 1.0, 1.0, (SeedRun(0, run, ()),))


@pytest.mark.parametrize(
    "trained, losses, lengths",
    [
        (None, (1.0, 1.0, 9.0), []),
        (8, (1.0, 1.0, 1.5), []),
        (8, (1.0, 1.0, 1.6), ["T=32"]),
        (8, (1.0, 3.0, 1.6), []),
        (4, (1.0, 1.6, 1.6), ["T=8:", "T=32"]),
        (99, (1.0, 1.6, 9.0), []),
    ],
)
def test_losses_beyond_the_trained_length(trained, losses, lengths):
    run = length_sweep(spec(), (4,), steps=1).points[0].run
    points = [point(n, loss, run) for n, loss in zip((4, 8, 32), losses, strict=True)]
    sweep = LengthSweep("m", points, trained, 0.5, 4.0)
    assert [text[:4] for text in sweep.problems] == lengths


def test_first_unstable_is_the_shortest_of_the_lengths():
    assert length_sweep(spec(), (4, 8), steps=1).first_unstable is None
    sweep = length_sweep(spec(spoilt=7), (4, 8, 16), steps=1, seeds=2)
    assert sweep.first_unstable == 8
    plain = sweep.to_dict()
    assert plain["first_unstable"] == 8
    assert [each["length"]["why"] == "" for each in plain["points"]] == [True, False, False]
    assert repr(sweep) == "<LengthSweep of known: T=4 stable, T=8 unstable, T=16 unstable>"


def test_finite_length_says_what_is_wrong_with_its_training():
    # Logits grow as T^2, and gradient norms with them: 16 times at four times the length.
    arguments = {"steps": 4, "logit_factor": 100.0, "tokens_per_step": 16}
    [problem] = length_sweep(spec(power=2.0), (4, 16), **arguments).problems
    said = re.match(r"T=16: training of seed 0: gradient norms (.*) times those of the shortest", problem)
    assert float(said[1]) == pytest.approx(16.0, rel=0.3)
    assert length_sweep(spec(power=2.0), (4, 16), **arguments, gradient_factor=100.0).problems == []


def test_growth_is_not_judged_where_the_shortest_length_is_in_trouble():
    sweep = length_sweep(spec(spoilt=4), (4, 8), steps=8)
    assert sweep.notes == [
        "gradient growth is not judged: it is held against T=4, where every seed is unstable itself"
    ]
    assert length_sweep(spec(spoilt=8), (4, 8), steps=8).notes == []


@pytest.mark.parametrize(
    "steps, told", [(8, []), (7, ["divergence is not judged: it takes 8 steps, and got 7"])]
)
def test_a_training_too_short_to_diverge_is_told(steps, told):
    sweep = length_sweep(spec(), (4, 8), steps=steps)
    assert sweep.notes == told
    assert all(text in str(sweep) for text in told)


def test_all_lengths_begin_alike_and_each_is_trained():
    seen = []

    class Seen(Known):
        def forward(self, ids):
            if not self.training:
                seen.append(ids)
            return super().forward(ids)

    sweep = length_sweep(ModelSpec(Seen, "seen", "tokens", 7, causal=True), (4, 16), steps=5, batch_size=3)
    whole = seen[-1]
    assert whole.shape == (3, 16)
    assert all(torch.equal(ids, whole[:, : ids.shape[1]]) for ids in seen)
    assert [len(p.run.records) for p in sweep.points] == [5, 5]
    assert all(p.tokens_per_second > 0 for p in sweep.points)
    plain = sweep.points[0].to_dict()
    assert plain["length"]["seq_len"] == plain["seq_len"] == 4


@pytest.mark.parametrize(
    "lengths, arguments, message",
    [
        ((), {}, "lengths: got .*; allowed: at least one"),
        ((4, 4), {}, "lengths: got .*; allowed: each once"),
        ((1,), {}, "lengths: got 1; allowed: an integer >= 2"),
        ((4,), {"trained_length": 2}, "trained_length: got 2; allowed: at least the shortest"),
        ((4,), {"logit_factor": 0.5}, "logit_factor: got 0.5"),
        ((4,), {"loss_tolerance": -1}, "loss_tolerance: got -1"),
        ((4,), {"batch_size": 0}, "batch_size: got 0"),
    ],
)
def test_what_is_refused(lengths, arguments, message):
    with pytest.raises(ValueError, match=message):
        length_sweep(spec(), lengths, **arguments)
