"""Gradients a thousand times too large at step 8: is it noticed there, and does training come back?

Run it: `pytest examples/pytest/test_gradient_explosion.py -rx`.
"""

import pytest
import torch
from torch import nn

from stackwise import Guard, ModelSpec, TrainerSpec

FAULT = pytest.mark.gradient_explosion(step=8, factor=1000)
RECOVERS = pytest.mark.recovers(within=4, loss_tolerance=0.05)


def model():
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32))


class Loop:
    """A training step of one's own, with momentum: one large gradient is felt for many steps."""

    def __init__(self):
        self.model = model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self, batch):
        logits, labels = self.model(batch["input_ids"][:, :-1]), batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.update(loss)
        return loss.detach()

    def update(self, loss):
        self.optimizer.step()


class ClippedLoop(Loop):
    """Gets over it, and tells nobody."""

    def update(self, loss):
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class GuardedLoop(Loop):
    """Tells of each alarm: it has to come at the broken step."""

    def __init__(self):
        super().__init__()
        self.guard = Guard(self.model, self.optimizer)

    def update(self, loss):
        self.guard.step(loss)


@FAULT
@RECOVERS
@pytest.mark.seq_lengths(8, 32)
def test_model_under_the_guard(stability_run):
    run = stability_run(ModelSpec.of(model, causal=True))
    assert run.alarm_steps == [8]


@FAULT
@RECOVERS
@pytest.mark.parametrize(
    "loop",
    [
        GuardedLoop,
        ClippedLoop,
        pytest.param(Loop, marks=pytest.mark.xfail(strict=True, reason="is thrown far away")),
    ],
)
def test_loop(stability_run, loop):
    stability_run(TrainerSpec.of(loop))
