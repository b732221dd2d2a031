"""Popular training loops under `Guard`: a NaN is skipped in its step, and a healthy run has no alarm."""

import numpy as np
import pytest
import torch

from stackwise.stability.guard import Guard, GuardPolicy
from tests.popular import nanochat, nanogpt, vit

STEPS, BROKEN = 200, 40


def nanogpt_run(steps, dtype="float32"):
    """Return the guard after training with two micro-batches a step. A gradient has a NaN at BROKEN."""
    loop, text = nanogpt.Loop(dtype), nanogpt.text()
    loader = [nanogpt.get_batch(text, 8, 16) for _ in range(2 * steps)]
    guard = Guard(
        loop.model,
        loop.optimizer,
        scaler=loop.scaler,
        policy=GuardPolicy(clip=loop.grad_clip),
        loss_of=lambda model, batch: loop.loss(batch) / 2,
    )
    total, micro_batches, broken = 0.0, 0, steps < STEPS
    for batch in guard.batches(loader):
        loop.set_lr(guard.steps)
        loss = loop.loss(batch) / 2
        loop.scaler.scale(loss).backward()
        total, micro_batches = total + loss.detach(), micro_batches + 1
        if micro_batches == 2:
            if guard.steps == BROKEN and broken:
                loop.model.transformer.h[1].attn.c_attn.weight.grad[0, 0], broken = torch.nan, False
            guard.step(total)
            total, micro_batches = 0.0, 0
    return guard


def nanochat_run(steps):
    """Return the guard after training with AdamW and Muon. A NaN appears in the head at BROKEN."""
    loop, text = nanochat.Loop(), nanogpt.text()
    loader = [nanogpt.get_batch(text, 8, 16) for _ in range(steps)]
    adamw, muon = loop.optimizer
    guard = Guard(loop.model, adamw, others={"muon": muon}, loss_of=lambda model, batch: loop.loss(batch))
    broken = steps < STEPS
    for batch in guard.batches(loader):
        loop.set_schedule(guard.steps)
        loss = loop.loss(batch)
        loss.backward()
        if guard.steps == BROKEN and broken:
            loop.model.lm_head.weight.grad[0, 0], broken = torch.nan, False
        if not guard.step(loss).found_inf:
            muon.step()
        muon.zero_grad()
    return guard


def vit_run(steps, loop=vit.Loop):
    """Return the guard after training with an average of the weights. A NaN appears in an image at BROKEN."""
    loop = loop()
    loader = [vit.images(16) for _ in range(steps)]
    if steps < STEPS:
        loader[BROKEN][0][3, 0, 0, 0] = torch.nan
    guard = Guard(
        loop.model,
        loop.optimizer,
        scheduler=loop.scheduler,
        others={"ema": loop.ema},
        policy=GuardPolicy(clip=loop.grad_clip),
        loss_of=lambda model, batch: loop.loss(batch),
    )
    for batch in guard.batches(loader):
        loss = loop.loss(batch)
        loss.backward()
        if not guard.step(loss).found_inf:
            loop.ema.update_parameters(loop.model)
    assert all(value.isfinite().all() for value in loop.ema.state_dict().values())
    return guard


RUNS = [
    pytest.param(nanogpt_run, id="nanogpt"),
    pytest.param(lambda steps: nanogpt_run(steps, "bfloat16"), id="nanogpt-bfloat16", marks=pytest.mark.slow),
    pytest.param(nanochat_run, id="nanochat"),
    pytest.param(vit_run, id="vit"),
    pytest.param(
        lambda steps: vit_run(steps, vit.ConvolutionalLoop), id="vit-convolutional", marks=pytest.mark.slow
    ),
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  the loop draws from the global state, as timm does


@pytest.mark.parametrize("train", RUNS)
def test_healthy_run_has_no_alarm(train):
    guard = train(STEPS)

    assert [str(alarm) for alarm in guard.alarms] == []
    losses = [record.loss for record in guard.records()]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("train", RUNS)
def test_nan_is_skipped_in_its_step(train):
    guard = train(60)

    assert [alarm.step for alarm in guard.alarms] == [BROKEN]
    assert guard.alarms[0].kind.startswith("non-finite")
    assert all(p.isfinite().all() for p in guard.model.parameters())


def test_overflow_is_left_to_the_scaler():
    guard = nanogpt_run(60, "float16")

    assert guard.alarms == []
    assert guard._scaler.get_scale() == 2.0**15
    assert all(p.isfinite().all() for p in guard.model.parameters())


def test_container_of_optimizers_skips_a_nan_of_an_inner_optimizer():
    loop, text = nanochat.ContainerLoop(), nanogpt.text()
    loader = [nanogpt.get_batch(text, 8, 16) for _ in range(60)]
    guard = Guard(loop.model, loop.optimizer, loss_of=lambda model, batch: loop.loss(batch))
    broken = True

    for batch in guard.batches(loader):
        loop.set_schedule(guard.steps)
        loss = loop.loss(batch)
        loss.backward()
        if guard.steps == BROKEN and broken:
            loop.model.transformer.h[1].attn.c_q.weight.grad[0, 0], broken = torch.nan, False
        guard.step(loss)

    [alarm] = guard.alarms
    assert (alarm.step, alarm.where) == (BROKEN, "transformer.h.1.attn.c_q.weight")
