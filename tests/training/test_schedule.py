"""The learning rate: exact at its ends, monotone between them, the published curve in the decay."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from stackwise.training import get_lr_with_warmup
from stackwise.training.schedule import get_lr_with_warmup as of_module

KINDS = ["cosine", "linear", "constant"]
DECAYING = ["cosine", "linear"]
# (base_lr, min_lr): among them pairs where base + (min - base) is not min in floating point.
RATES = [(1e-3, 1e-5), (1e-4, 1e-5), (3e-4, 3e-5), (6e-4, 6e-5), (0.1, 1e-6), (1.0, 0.0), (0.3, 0.3)]
# (warmup_steps, base_lr): among them pairs where base * warmup / warmup is not base in floating point.
WARMUPS = [(1, 1e-3), (3, 0.1), (13, 1e-4), (20, 1e-4), (49, 1e-4), (48, 0.1)]
# Arguments that are refused: what the message must name, beside the value and what is allowed.
REFUSED = [
    ({"schedule": "cosin"}, "schedule", ["'cosin'", "cosine", "linear", "constant"]),
    ({"schedule": None}, "schedule", ["None", "cosine", "linear", "constant"]),
    ({"warmup_steps": -1}, "warmup_steps", ["-1", "0", "10"]),
    ({"warmup_steps": 11}, "warmup_steps", ["11", "0", "10"]),
    ({"total_steps": 0, "warmup_steps": 0}, "total_steps", ["0", ">= 1"]),
    ({"total_steps": -5, "warmup_steps": 0}, "total_steps", ["-5", ">= 1"]),
    ({"step": -1}, "step", ["-1", ">= 0"]),
    ({"min_lr": 2.0}, "min_lr", ["2.0", "1.0"]),
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

    @pytest.mark.parametrize("kind", KINDS)
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

    def test_defaults(self):
        values = [get_lr_with_warmup(step, 2, 10, 1.0) for step in range(10)]
        assert values == curve(2, 10, 1.0, 0.0, "cosine") != curve(2, 10, 1.0, 0.0, "linear")


class TestRefused:
    @pytest.mark.parametrize("changes, key, parts", REFUSED)
    def test_message(self, changes, key, parts):
        arguments = {"step": 0, "warmup_steps": 2, "total_steps": 10, "base_lr": 1.0, "min_lr": 0.0} | changes
        with pytest.raises(ValueError, match=key) as refusal:
            get_lr_with_warmup(**arguments)
        assert [part for part in parts if part not in str(refusal.value)] == []
