"""The learning rate: exact at its ends, monotone between them, the published curve in the decay."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from stackwise.training import get_lr_with_warmup
from stackwise.training.schedule import get_lr_with_warmup as of_module

KINDS = ["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
DECAYING = ["cosine", "linear", "wsd"]
# (base_lr, min_lr): among them pairs where base + (min - base) is not min in floating point.
RATES = [(1e-3, 1e-5), (1e-4, 1e-5), (3e-4, 3e-5), (6e-4, 6e-5), (0.1, 1e-6), (1.0, 0.0), (0.3, 0.3)]
# (warmup_steps, base_lr): among them pairs where base * warmup / warmup is not base in floating point.
WARMUPS = [(1, 1e-3), (3, 0.1), (13, 1e-4), (20, 1e-4), (49, 1e-4), (48, 0.1)]
# Arguments that are refused: what the message must name, beside the value and what is allowed.
REFUSED = [
    ({"schedule": "cosin"}, "schedule", ["'cosin'", *KINDS]),
    ({"schedule": None}, "schedule", ["None", *KINDS]),
    ({"warmup_steps": -1}, "warmup_steps", ["-1", "0", "10"]),
    ({"warmup_steps": 11}, "warmup_steps", ["11", "0", "10"]),
    ({"total_steps": 0, "warmup_steps": 0}, "total_steps", ["0", ">= 1"]),
    ({"total_steps": -5, "warmup_steps": 0}, "total_steps", ["-5", ">= 1"]),
    ({"step": -1}, "step", ["-1", ">= 0"]),
    ({"min_lr": 2.0}, "min_lr", ["2.0", "1.0"]),
    ({"decay_fraction": 0.0}, "decay_fraction", ["0.0", "above 0"]),
    ({"decay_fraction": 1.5}, "decay_fraction", ["1.5", "at most 1"]),
    ({"decay_fraction": math.nan}, "decay_fraction", ["nan", "at most 1"]),
]

runs = st.integers(1, 60).flatmap(
    lambda total: st.tuples(st.integers(0, total), st.just(total), st.integers(0, 2 * total))
)
rates = st.tuples(st.floats(1e-8, 10.0), st.floats(0.0, 1.0)).map(lambda pair: (pair[0], pair[0] * pair[1]))


def curve(warmup_steps, total_steps, base_lr, min_lr, kind):
    return [
        get_lr_with_warmup(step, warmup_steps, total_steps, base_lr, min_lr, kind)
        for step in range(total_steps)
    ]


class TestEnds:
    def test_public_name(self):
        assert get_lr_with_warmup is of_module

    @pytest.mark.parametrize("warmup_steps", [1, 2, 5, 20])
    def test_first_step(self, warmup_steps):
        assert get_lr_with_warmup(0, warmup_steps, 50, 1e-3) == pytest.approx(1e-3 / warmup_steps, rel=1e-12)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("warmup_steps, base_lr", WARMUPS)
    def test_last_warmup_step(self, warmup_steps, base_lr, kind):
        assert get_lr_with_warmup(warmup_steps - 1, warmup_steps, 100, base_lr, 0.0, kind) == base_lr

    @pytest.mark.parametrize("kind", DECAYING)
    @pytest.mark.parametrize("base_lr, min_lr", RATES)
    def test_last_step(self, base_lr, min_lr, kind):
        assert get_lr_with_warmup(99, 5, 100, base_lr, min_lr, kind) == min_lr

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "inverse_sqrt"])
    def test_step_after_warmup(self, kind):
        assert get_lr_with_warmup(20, 20, 100, 1e-3, 1e-5, kind) == 1e-3

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_warmup(self, kind):
        assert get_lr_with_warmup(0, 0, 100, 1e-3, 1e-5, kind) == 1e-3

    @pytest.mark.parametrize("kind", DECAYING)
    @pytest.mark.parametrize("step", [100, 101, 10**9])
    def test_beyond_the_end(self, step, kind):
        assert get_lr_with_warmup(step, 20, 100, 1e-3, 1e-5, kind) == pytest.approx(1e-5, rel=1e-12)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("total_steps", [1, 2, 7])
    def test_all_warmup(self, total_steps, kind):
        values = curve(total_steps, total_steps, 0.5, 0.25, kind)
        assert values == pytest.approx([0.5 * (step + 1) / total_steps for step in range(total_steps)])

    @pytest.mark.parametrize("kind", KINDS)
    def test_beyond_all_warmup(self, kind):
        """Nothing was left to decay over, so the value that holds is the peak."""
        assert get_lr_with_warmup(50, 10, 10, 0.5, 0.25, kind) == 0.5


class TestShape:
    @given(runs, rates, st.sampled_from(KINDS))
    def test_bounds(self, run, base_and_min, kind):
        (warmup_steps, total_steps, step), (base_lr, min_lr) = run, base_and_min
        lr = get_lr_with_warmup(step, warmup_steps, total_steps, base_lr, min_lr, kind)
        assert 0 <= lr <= base_lr
        if step >= warmup_steps:
            assert lr >= min_lr

    @given(runs, rates, st.sampled_from(KINDS))
    def test_monotone(self, run, base_and_min, kind):
        warmup_steps, total_steps, _ = run
        values = curve(warmup_steps, total_steps, *base_and_min, kind)
        pairs = list(itertools.pairwise(values))
        assert all(later > earlier for earlier, later in pairs[: max(0, warmup_steps - 1)])
        assert all(later <= earlier for earlier, later in pairs[max(0, warmup_steps - 1) :])

    @given(runs, rates, st.sampled_from(KINDS))
    def test_last_value_holds(self, run, base_and_min, kind):
        warmup_steps, total_steps, step = run
        beyond = get_lr_with_warmup(total_steps + step, warmup_steps, total_steps, *base_and_min, kind)
        assert beyond == curve(warmup_steps, total_steps, *base_and_min, kind)[-1]

    def test_warmup_is_linear(self):
        rises = [
            later - earlier for earlier, later in itertools.pairwise(curve(8, 20, 1.0, 0.0, "cosine")[:8])
        ]
        assert rises == pytest.approx([1 / 8] * 7)

    def test_constant(self):
        assert set(curve(4, 50, 1e-3, 1e-5, "constant")[3:]) == {1e-3}

    def test_linear_midpoint(self):
        assert get_lr_with_warmup(15, 5, 26, 1.0, 0.2, "linear") == pytest.approx(0.6, rel=1e-12)

    def test_linear_has_one_slope(self):
        falls = [a - b for a, b in itertools.pairwise(curve(3, 20, 1.0, 0.5, "linear")[3:])]
        assert falls == pytest.approx([0.5 / 16] * 16)

    @pytest.mark.parametrize("warmup_steps, total_steps", [(0, 30), (5, 30), (29, 31), (1, 4)])
    @pytest.mark.parametrize("base_lr, min_lr", [(1e-3, 0.0), (1e-3, 1e-4)])
    def test_cosine_as_torch_has_it(self, warmup_steps, total_steps, base_lr, min_lr):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base_lr)
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=total_steps - 1 - warmup_steps, eta_min=min_lr
        )
        for lr in curve(warmup_steps, total_steps, base_lr, min_lr, "cosine")[warmup_steps:]:
            assert lr == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-15)
            optimizer.step()
            theirs.step()

    @given(runs, rates)
    def test_cosine_formula(self, run, base_and_min):
        """Loshchilov & Hutter 2017, equation 5."""
        (warmup_steps, total_steps, step), (base_lr, min_lr) = run, base_and_min
        assume(warmup_steps <= step < total_steps and total_steps - warmup_steps > 1)
        angle = math.pi * (step - warmup_steps) / (total_steps - 1 - warmup_steps)
        expected = min_lr + (base_lr - min_lr) * (1 + math.cos(angle)) / 2
        lr = get_lr_with_warmup(step, warmup_steps, total_steps, base_lr, min_lr)
        assert lr == pytest.approx(expected, abs=1e-12 * base_lr)

    @given(runs, rates)
    def test_inverse_sqrt_formula(self, run, base_and_min):
        """Vaswani et al. 2017, section 5.3: min(step ** -0.5, step * warmup ** -1.5), counted from 1."""
        (warmup_steps, total_steps, step), (base_lr, min_lr) = run, base_and_min
        number, warmup = min(step, total_steps - 1) + 1, max(warmup_steps, 1)
        peak = warmup**-0.5
        expected = base_lr * min(number**-0.5, number * warmup**-1.5) / peak
        lr = get_lr_with_warmup(step, warmup_steps, total_steps, base_lr, min_lr, "inverse_sqrt")
        assert lr == pytest.approx(expected if step < warmup_steps else max(min_lr, expected), rel=1e-12)

    def test_inverse_sqrt_quarters_of_the_time(self):
        """Exact where the root is: four times the steps, half the rate."""
        for warmup_steps in (1, 5, 25):
            at_four_times = get_lr_with_warmup(
                4 * warmup_steps - 1, warmup_steps, 1000, 0.75, 0.0, "inverse_sqrt"
            )
            assert at_four_times == 0.375

    def test_defaults(self):
        values = [get_lr_with_warmup(step, 2, 10, 1.0) for step in range(10)]
        assert values == curve(2, 10, 1.0, 0.0, "cosine") != curve(2, 10, 1.0, 0.0, "linear")


class TestWarmUpStableDecay:
    @given(runs, rates, st.integers(1, 100).map(lambda percent: Fraction(percent, 100)))
    def test_three_straight_lines(self, run, base_and_min, fraction):
        """Hu et al. 2024, section 4.2, written out in whole steps."""
        (warmup_steps, total_steps, step), (base_lr, min_lr) = run, base_and_min
        step = min(step, total_steps - 1)
        falling = max(1, round(fraction * total_steps))
        # Halves are rounded in floating point as well, and may go either way there.
        assume((fraction * total_steps) % 1 != Fraction(1, 2))
        stable_until = max(total_steps - 1 - falling, warmup_steps)
        if step < warmup_steps:
            expected = Fraction(base_lr) * Fraction(step + 1, warmup_steps)
        elif step <= stable_until or total_steps == 1:
            expected = Fraction(base_lr)
        else:
            left = Fraction(total_steps - 1 - step, total_steps - 1 - stable_until)
            expected = Fraction(min_lr) + (Fraction(base_lr) - Fraction(min_lr)) * left
        if warmup_steps == step == total_steps - 1 > 0:
            expected = Fraction(min_lr)
        lr = get_lr_with_warmup(step, warmup_steps, total_steps, base_lr, min_lr, "wsd", float(fraction))
        assert lr == pytest.approx(float(expected), rel=1e-12, abs=1e-15 * base_lr)

    def test_as_torch_has_it(self):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        parts = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 4, 1.0, total_iters=3),
            torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10),
        ]
        theirs = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3, 39])
        for step in range(50):
            lr = get_lr_with_warmup(step, 4, 50, 0.5, 0.05, "wsd", 0.2)
            assert lr == pytest.approx(theirs.get_last_lr()[0], rel=1e-9), step
            optimizer.step()
            theirs.step()

    @pytest.mark.parametrize("fraction, falling", [(0.001, 1), (0.1, 10), (0.2, 20), (0.29, 29), (0.99, 99)])
    def test_so_many_steps_are_below_the_peak(self, fraction, falling):
        values = [get_lr_with_warmup(step, 0, 100, 1.0, 0.25, "wsd", fraction) for step in range(100)]
        assert values[: 100 - falling] == [1.0] * (100 - falling)
        assert all(value < 1.0 for value in values[100 - falling :])
        assert values[-1] == 0.25

    def test_all_of_it_falls(self):
        """Then it is the linear schedule."""
        for warmup_steps in (0, 3, 19, 20):
            values = [get_lr_with_warmup(s, warmup_steps, 20, 1.0, 0.1, "wsd", 1.0) for s in range(20)]
            assert values == curve(warmup_steps, 20, 1.0, 0.1, "linear")

    def test_warmup_that_reaches_into_the_decay(self):
        """15 steps up, then down from the peak in the 4 that are left of the 10 of the decay."""
        values = [get_lr_with_warmup(step, 15, 20, 1.0, 0.0, "wsd", 0.5) for step in range(14, 20)]
        assert values == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


class TestRefused:
    @pytest.mark.parametrize("changes, key, parts", REFUSED)
    def test_message(self, changes, key, parts):
        arguments = {"step": 0, "warmup_steps": 2, "total_steps": 10, "base_lr": 1.0, "min_lr": 0.0} | changes
        with pytest.raises(ValueError, match=key) as refusal:
            get_lr_with_warmup(**arguments)
        assert [part for part in parts if part not in str(refusal.value)] == []
