"""LossScale against GradScaler of PyTorch, and against a run that is not scaled at all."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stackwise.config import OptimizerConfig
from stackwise.stability.telemetry import clip_divisor, global_norm, gradient_norms
from stackwise.training.loss_scale import LossScale, create_loss_scale
from stackwise.training.optimizer import create_optimizer

CPU = torch.device("cpu")
MAX_NORM = 0.05


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def batch(seed):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed, factor=1.0):
    return (model(batch(seed)) * factor).square().mean()


def train(model, optimizer, scale, losses):
    """The order that the class describes. Norms as they are recorded."""
    norms = []
    for loss_now in losses:
        loss = loss_now(model)
        (loss if scale is None else scale.scale(loss)).backward()
        divisor = torch.ones(()) if scale is None else scale.divisor()
        norm = global_norm(gradient_norms(model.parameters())) / divisor
        found_inf = (~(loss.isfinite() & norm.isfinite())).float()
        optimizer.grad_scale = divisor * clip_divisor(norm, MAX_NORM)
        optimizer.found_inf = found_inf
        optimizer.step()
        optimizer.zero_grad()
        if scale is not None:
            scale.update(found_inf)
        norms.append(norm.item())
    return norms


@given(
    st.lists(st.booleans(), max_size=40),
    st.sampled_from([2.0**16, 3.0, 2.0**127]),
    st.integers(1, 5),
)
def test_goes_where_gradscaler_goes(overflows, initial, interval):
    ours = LossScale(CPU, initial=initial, growth_interval=interval)
    theirs = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    theirs.scale(torch.zeros(()))
    for overflow in overflows:
        weight.grad = torch.full((2,), math.inf if overflow else 0.0)
        theirs.unscale_(optimizer)
        theirs.update()
        ours.update(torch.tensor(float(overflow)))
        assert ours.divisor().item() == theirs.get_scale()
    assert ours.scale(torch.tensor(3.0)).equal(ours.divisor() * 3)


def test_training_is_that_of_gradscaler_in_its_documented_order():
    ours, theirs = model_of(), model_of()
    losses = [lambda m, s=s: loss_of(m, s, math.inf if s == 3 else 1.0) for s in range(8)]
    optimizer = create_optimizer(ours, OptimizerConfig(lr=1e-2))
    scale = LossScale(CPU, initial=2.0**10, growth_interval=3)
    norms = train(ours, optimizer, scale, losses)
    # The same groups: what decays is not in question here.
    groups = create_optimizer(theirs, OptimizerConfig(lr=1e-2)).param_groups
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for loss_now, norm in zip(losses, norms, strict=True):
        reference.zero_grad()
        scaler.scale(loss_now(theirs)).backward()
        scaler.unscale_(reference)
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        assert norm == pytest.approx(expected.item(), rel=1e-5, nan_ok=True) or not math.isfinite(norm)
        scaler.step(reference)
        scaler.update()
    assert scale.divisor().item() == scaler.get_scale()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_norm_and_clipping_are_those_of_an_unscaled_run():
    """A check before the division would record a norm 2**12 as large, and clip each step to nothing."""
    losses = [lambda m, s=s: loss_of(m, s) for s in range(5)]
    scaled, plain = model_of(), model_of()
    scale = LossScale(CPU, initial=2.0**12)
    with_scale = train(scaled, create_optimizer(scaled, OptimizerConfig(lr=1e-2)), scale, losses)
    without = train(plain, create_optimizer(plain, OptimizerConfig(lr=1e-2)), None, losses)
    # Powers of two change no digit: equal, not close.
    assert with_scale == without
    assert min(without) > MAX_NORM
    for p, q in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert p.equal(q)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_an_overflow_halves_the_scale_and_changes_nothing_else(kind):
    model = model_of()
    optimizer = create_optimizer(model, OptimizerConfig(lr=1e-2))
    scale = LossScale(CPU, initial=8.0)
    train(model, optimizer, scale, [lambda m: loss_of(m, 0)])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    # A root's derivative is infinite at zero; its value is not.
    overflow = {"loss": lambda m: loss_of(m, 1, math.inf), "gradient": lambda m: (loss_of(m, 1) * 0).sqrt()}
    train(model, optimizer, scale, [overflow[kind]])
    assert scale.divisor().item() == 4.0
    weights, state = before
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())
    for number, after in optimizer.state_dict()["state"].items():
        assert all(value.equal(state[number][key]) for key, value in after.items())


def test_goes_on_from_its_state():
    def run(stop):
        scale = LossScale(CPU, initial=4.0, growth_interval=3)
        values = []
        for step in range(12):
            if step == stop:
                state = scale.state_dict()
                scale = LossScale(CPU, initial=4.0, growth_interval=3)
                scale.load_state_dict(state)
            scale.update(torch.tensor(float(step == 5)))
            values.append(scale.divisor().item())
        return values

    assert all(run(stop) == run(None) for stop in range(12))
    # Three sound steps, twice; the step left out; three and three again. By hand.
    assert run(None) == [4, 4, 8, 8, 8, 4, 4, 4, 8, 8, 8, 16]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_weights", "float8"])
def test_none_where_the_exponents_are_those_of_float32(precision):
    assert create_loss_scale(precision, CPU) is None


def test_of_fp16():
    assert create_loss_scale("fp16", CPU).divisor().item() == 2**16


@pytest.mark.parametrize(
    "option, value",
    [("initial", 0.0), ("growth_interval", 0)],
)
def test_refused(option, value):
    with pytest.raises(ValueError, match=rf"{option}: got {value}; allowed: "):
        LossScale(CPU, **{option: value})


def test_update_waits_for_nothing():
    """On tensors without values, whatever would read one fails."""
    scale = LossScale(torch.device("meta"))
    scale.update(torch.zeros((), device="meta"))
    assert scale.scale(torch.zeros((), device="meta")).device.type == "meta"
