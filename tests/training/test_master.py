"""MasterAdamW against AdamW of PyTorch over float32 weights, fed with the same gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stackwise.model import append_stack, create_simple_rack, remove_stack, unfreeze_stack
from stackwise.training.master import MasterAdamW
from stackwise.training.objective import next_token_loss

SHAPES = [(7, 5), (33,), (2, 3, 4), ()]


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give(params, seed, scale=1.0):
    """bfloat16 gradients, the same for each list of parameters."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [(scale * torch.randn(p.shape, generator=generator)).bfloat16() for p in params]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient.to(p.dtype)


def masters(optimizer, params):
    return [optimizer.state[p]["master"] for p in params]


@pytest.mark.parametrize("compiled", [False, True])
def test_follows_adamw_in_float32(compiled):
    settings = {"lr": 3e-2, "betas": (0.8, 0.97), "eps": 1e-6}
    ours, theirs = weights(), weights()
    groups = [[0, 1], [2, 3]]
    decay = [0.3, 0.0]

    def split(params):
        return [
            {"params": [params[i] for i in group], "weight_decay": w}
            for group, w in zip(groups, decay, strict=True)
        ]

    optimizer = MasterAdamW(split(ours), **settings, compile=compiled)
    reference = torch.optim.AdamW(split(theirs), **settings)
    for step in range(12):
        give(ours, step)
        give(theirs, step)
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 3e-2 / (1 + step)
        optimizer.step()
        reference.step()
        for mine, p, q in zip(masters(optimizer, ours), ours, theirs, strict=True):
            torch.testing.assert_close(mine, q.detach(), rtol=2e-6, atol=1e-6)
            assert p.dtype == torch.bfloat16 and p.detach().equal(mine.bfloat16())


def test_updates_that_bfloat16_would_lose_add_up():
    p = nn.Parameter(torch.full((4,), 256.0))
    optimizer = MasterAdamW([p], lr=1e-3, betas=(0.0, 0.0))
    for _ in range(1500):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[p]["master"][0].item() == pytest.approx(256 - 1.5, abs=0.05)
    assert p[0].item() < 256  # the spacing of bfloat16 here is 1: each step alone changes nothing


@given(seed=st.integers(0, 50), divisor=st.floats(1.0, 1e4))
def test_gradients_are_divided_by_grad_scale(seed, divisor):
    ours, theirs = weights(), weights()
    optimizer, reference = MasterAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95))
    reference.param_groups[0]["weight_decay"] = 0.0
    give(ours, seed, 10.0)
    give(theirs, seed, 10.0)
    for p in theirs:
        p.grad /= divisor
    optimizer.grad_scale = torch.tensor(divisor)
    optimizer.step()
    reference.step()
    for mine, q in zip(masters(optimizer, ours), theirs, strict=True):
        torch.testing.assert_close(mine, q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "compiled, first",
    [(False, True), (False, False), (True, True), pytest.param(True, False, marks=pytest.mark.slow)],
)
def test_a_step_with_found_inf_changes_nothing(first, compiled):
    ours, twin = weights(), weights()
    optimizer, reference = MasterAdamW(ours, lr=1e-2, compile=compiled), MasterAdamW(twin, lr=1e-2)
    for step in range(4):
        if (step == 0) == first:
            for p in ours:
                p.grad = torch.full_like(p, math.nan)
            optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
            optimizer.found_inf = torch.tensor(0.0)
        give(ours, step)
        give(twin, step)
        optimizer.step()
        reference.step()
    for p, q in zip(ours, twin, strict=True):
        torch.testing.assert_close(optimizer.state[p]["master"], reference.state[q]["master"])
        assert optimizer.state[p]["step"].item() == 4


def test_parameters_without_gradient_stay_and_keep_their_own_step_count():
    ours, theirs = weights(), weights()
    optimizer = MasterAdamW(ours, lr=1e-2)
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(5):
        give(ours, step)
        give(theirs, step)
        if step % 2:
            ours[1].grad = theirs[1].grad = None
        optimizer.step()
        reference.step()
    for mine, q in zip(masters(optimizer, ours), theirs, strict=True):
        torch.testing.assert_close(mine, q.detach(), rtol=2e-6, atol=1e-6)
    assert optimizer.state[ours[1]]["step"].item() == 3


def test_full_precision_shows_the_masters_and_puts_the_weights_back():
    ours, still = weights(), nn.Parameter(torch.full((3,), 1.001), requires_grad=False)
    # The first is in two places, as a tied weight is.
    module = nn.ModuleList([nn.ParameterList([*ours, still]), nn.ParameterList([ours[0]])])
    optimizer = MasterAdamW(ours, [still], lr=1e-2)
    give(ours, 0)
    optimizer.step()
    accumulators = [p.view_as(p).grad_fn.next_functions[0][0] for p in ours]

    def fail_within():
        with optimizer.full_precision(module):
            *shown, shown_still = module[0]
            assert all(p.dtype == torch.float32 for p in shown)
            assert all(p.equal(m) for p, m in zip(shown, masters(optimizer, ours), strict=True))
            assert shown_still.equal(torch.full((3,), 1.001)) and not shown_still.requires_grad
            assert module[1][0] is shown[0]
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fail_within()
    assert all(p is q for p, q in zip(module.parameters(), (*ours, still), strict=True))
    assert still.dtype == torch.bfloat16
    # What DDP hooks itself to: a parameter whose dtype changes for a moment gets another.
    assert all(
        p.view_as(p).grad_fn.next_functions[0][0] is a for p, a in zip(ours, accumulators, strict=True)
    )


def test_finish_leaves_float32_weights_as_precise_as_the_masters():
    ours = weights()
    optimizer = MasterAdamW(ours, lr=1e-2)
    give(ours, 0)
    optimizer.step()
    kept = [m.clone() for m in masters(optimizer, ours)]
    optimizer.finish()
    assert all(p.data.equal(m) and p.grad is None for p, m in zip(ours, kept, strict=True))


def test_other_dtypes_are_refused_and_left_alone():
    sound, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"parameters: got dtype torch.float64; allowed: float32"):
        MasterAdamW([sound, other])
    assert sound.dtype == torch.float32


def test_a_parameter_that_thaws_trains_from_its_float32_value():
    trained, still = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5), requires_grad=False)
    original = still.detach().clone()
    optimizer = MasterAdamW([trained], [still], lr=1e-2)
    optimizer.param_groups[0]["params"].append(still)
    still.requires_grad_()
    for _ in range(5):
        give([trained, still], 0)
        optimizer.step()
    moved = optimizer.state[still]["master"].clone()
    assert 0.02 < (moved - original).abs().max() < 0.1
    optimizer.finish()
    assert still.detach().equal(moved)


def test_state_survives_a_round_trip_in_float32():
    def run(interrupted):
        params = weights()
        optimizer = MasterAdamW(params, lr=1e-2)
        for step in range(6):
            if interrupted and step == 3:
                saved = optimizer.state_dict()
                params = [nn.Parameter(p.detach().float()) for p in params]
                optimizer = MasterAdamW(params, lr=1e-2)
                optimizer.load_state_dict(saved)
            give(params, step)
            optimizer.step()
        return masters(optimizer, params), params

    for (whole, p), (parts, q) in zip(
        zip(*run(False), strict=True), zip(*run(True), strict=True), strict=True
    ):
        assert parts.dtype == torch.float32 and parts.equal(whole) and p.equal(q)


class TestSurgery:
    """Stacks that come and go keep float32 values, and leave with them."""

    @staticmethod
    def rack():
        torch.manual_seed(0)
        return create_simple_rack(2, 1, d_model=16, d_ff=24, n_heads=2, vocab_size=11)

    @staticmethod
    def step(rack, optimizer):
        next_token_loss(rack, {"input_ids": torch.arange(10)[None]}).backward()
        optimizer.step()
        optimizer.zero_grad()

    @pytest.mark.parametrize("frozen", [True, False])
    def test_a_stack_that_joins(self, frozen):
        rack, stack = self.rack(), self.rack().get_stack(0)
        if frozen:
            stack.freeze()
        before = {name: p.detach().clone() for name, p in stack.named_parameters()}
        optimizer = MasterAdamW(rack.parameters(), lr=1e-6)
        append_stack(rack, stack, optimizer)
        self.step(rack, optimizer)
        optimizer.finish()
        assert {p.dtype for p in rack.parameters()} == {torch.float32}
        for name, p in stack.named_parameters():
            # Rounding to bfloat16 would show as 2^-9 of a weight.
            torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0 if frozen else 2e-6)
        rack(torch.zeros(1, 3, dtype=torch.int64))

    @pytest.mark.parametrize("frozen", [True, False])
    def test_a_stack_that_joins_as_the_identity(self, frozen):
        """Its masters are zero too: they are what is saved, and what a step of no length leaves."""
        rack, stack, ids = self.rack(), self.rack().get_stack(0), torch.arange(10)[None]
        if frozen:
            stack.freeze()
        optimizer = MasterAdamW(rack.parameters(), lr=0.0)
        self.step(rack, optimizer)
        with optimizer.full_precision(rack), torch.no_grad():
            before = rack(ids)
        append_stack(rack, stack, optimizer, identity=True)
        self.step(rack, optimizer)
        with optimizer.full_precision(rack), torch.no_grad():
            assert torch.equal(rack(ids), before)
        optimizer.finish()
        with torch.no_grad():
            assert torch.equal(rack(ids), before)

    @pytest.mark.parametrize("frozen", [True, False])
    def test_a_stack_that_leaves(self, frozen):
        rack = self.rack()
        if frozen:
            rack.get_stack(1).freeze()
        trained = [p for p in rack.parameters() if p.requires_grad]
        optimizer = MasterAdamW(trained, [p for p in rack.parameters() if not p.requires_grad], lr=1e-3)
        self.step(rack, optimizer)
        wide = {p: optimizer.state[p]["master"].clone() for p in trained}
        stack = remove_stack(rack, 1, optimizer)
        for p in stack.parameters():
            assert p.dtype == torch.float32 and (frozen or p.detach().equal(wide[p]))
        self.step(rack, optimizer)
        assert {p.dtype for p in rack.parameters()} == {torch.bfloat16}

    def test_a_stack_that_thaws(self):
        rack = self.rack()
        rack.get_stack(0).freeze()
        frozen = list(rack.get_stack(0).parameters())
        before = [p.detach().clone() for p in frozen]
        optimizer = MasterAdamW([p for p in rack.parameters() if p.requires_grad], frozen, lr=1e-2)
        unfreeze_stack(rack, 0, optimizer)
        for _ in range(5):
            self.step(rack, optimizer)
        optimizer.finish()
        assert all((p - old).abs().max() > 0.01 for p, old in zip(frozen, before, strict=True))
