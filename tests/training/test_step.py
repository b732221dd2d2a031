"""TrainStep: what one step does, in each precision, compiled and not."""

import copy
import functools
import math

import pytest
import torch

from stackwise.config import TrainingConfig
from stackwise.model import create_simple_rack
from stackwise.training.loss_scale import LossScale
from stackwise.training.objective import Objective, next_token_loss
from stackwise.training.phase_model import PhaseModel
from stackwise.training.step import MicroBatch, TrainStep


def rack_of(seed=0, n_stacks=2):
    torch.manual_seed(seed)
    return create_simple_rack(n_stacks, 1, d_model=32, d_ff=48, n_heads=4, n_kv_heads=2, vocab_size=61)


def settings(**changes):
    return TrainingConfig.from_dict({"grad_clip": None, "optimizer": {"weight_decay": 0.1}, **changes})


def batch(seed=0, rows=4):
    return {"input_ids": torch.randint(61, (rows, 17), generator=torch.Generator().manual_seed(seed))}


def step_of(rack, settings):
    """A step of the whole Rack, which takes batches as loaders give them."""
    objective = Objective(settings.objective, rack.vocab_size)
    step = TrainStep(PhaseModel(rack, objective), settings, rack)

    def run(*batches, lr):
        return step([MicroBatch(objective.targets(each, (0,))) for each in batches], lr)

    run.optimizer = step.optimizer
    return run


def flat(rack):
    return torch.cat([p.detach().float().flatten() for p in rack.parameters()])


def reference_step(rack, ids, lr, clip):
    """The same by the book: clip_grad_norm_ and the for-loop AdamW."""
    decayed = [p for n, p in rack.named_parameters() if p.ndim == 2 and "embedding" not in n]
    kept = [p for n, p in rack.named_parameters() if p.ndim < 2 or "embedding" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
    )
    for each in ids:
        next_token_loss(rack, each).backward()
        torch.nn.utils.clip_grad_norm_(rack.parameters(), clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
def test_in_float32_it_is_adamw_after_clipping(clip):
    rack = rack_of()
    twin = copy.deepcopy(rack)
    step = step_of(rack, settings(precision="fp32", grad_clip=clip))
    for seed in range(4):
        step(batch(seed), lr=1e-2)
    reference_step(twin, [batch(seed) for seed in range(4)], 1e-2, clip)
    torch.testing.assert_close(flat(rack), flat(twin), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "precision, compiled",
    [("bf16", False), ("bf16_weights", False), pytest.param("bf16_weights", True, marks=pytest.mark.slow)],
)
def test_the_other_precisions_train_to_the_same_loss(precision, compiled):
    losses = {}
    for name, changes in {"fp32": {}, "other": {"precision": precision, "compile": compiled}}.items():
        step = step_of(rack_of(), settings(**{"precision": "fp32", "grad_clip": 1.0, **changes}))
        losses[name] = [step(batch(), lr=3e-3).loss.item() for _ in range(25)]
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.5
    assert losses["other"] == pytest.approx(losses["fp32"], rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_weights"])
def test_outcome_has_loss_before_update_and_norm_before_clipping(precision):
    rack = rack_of()
    twin = copy.deepcopy(rack)
    outcome = step_of(rack, settings(precision=precision, grad_clip=1e-6))(batch(), lr=1e-3)
    loss = next_token_loss(twin, batch())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=1e-2)
    assert outcome.grad_norm.item() == pytest.approx(norm.item(), rel=3e-2)
    assert not outcome.skipped and not outcome.loss.requires_grad
    assert all(p.grad is None for p in rack.parameters())


@pytest.mark.parametrize(
    "precision, backend",
    [
        ("fp32", None),
        ("bf16_weights", None),
        ("bf16_weights", "aot_eager"),
        pytest.param("bf16_weights", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_not_finite_is_left_out(precision, backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    rack = rack_of(n_stacks=1)
    step = step_of(rack, settings(precision=precision, compile=backend is not None, grad_clip=1.0))
    step(batch(), lr=1e-3)
    before = flat(rack)
    with torch.no_grad():
        kept = rack.final_norm.weight[0].clone()
        rack.final_norm.weight[0] = math.inf
    assert step(batch(), lr=1e-3).skipped
    with torch.no_grad():
        rack.final_norm.weight[0] = kept
    assert flat(rack).equal(before)


def test_nothing_to_train_is_refused():
    rack = rack_of()
    rack.freeze()
    with pytest.raises(ValueError, match="every parameter is frozen"):
        step_of(rack, settings(precision="bf16_weights"))
    assert {p.dtype for p in rack.parameters()} == {torch.float32}


def test_frozen_weights_keep_their_dtype_and_their_bits():
    rack = rack_of()
    rack.get_stack(0).freeze()
    before = copy.deepcopy(rack.get_stack(0).state_dict())
    step = step_of(rack, settings(precision="bf16_weights"))
    step(batch(), lr=1e-2)
    step.optimizer.finish()
    after = rack.get_stack(0).state_dict()
    assert all(after[name].equal(before[name]) for name in before)


def test_again_is_the_same_step_with_its_loss_scale():
    """Of several batches the last backward pass is the caller's, and all have one scale."""
    rack = rack_of()
    objective = Objective(settings().objective, rack.vocab_size)
    step = TrainStep(PhaseModel(rack, objective), settings(), rack)
    step.loss_scale = LossScale(torch.device("cpu"), initial=2.0**40)
    batches = [MicroBatch(objective.targets(batch(seed), (0,))) for seed in range(3)]
    loss, _ = step.backward(batches)
    wanted = [p.grad.clone() for p in step.model.parameters()]
    step.optimizer.zero_grad()
    again = step.again(batches)
    step.loss_scale.scale(again).backward()
    torch.testing.assert_close(again.detach(), loss)
    for p, gradient in zip(step.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))
