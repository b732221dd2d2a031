"""One NaN in an activation at step 5: is it noticed there, and does training come back?

Run it: `pytest examples/pytest/test_nan_injection.py -rx`.
"""

import pytest
import torch
from torch import nn

from stackwise import Guard, ModelSpec, TrainerSpec

FAULT = pytest.mark.nan_injection(step=5, target="activation:1")
RECOVERS = pytest.mark.recovers(within=4, loss_tolerance=0.05)


def model():
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32))


class Loop:
    """A training step of one's own, which makes every update."""

    def __init__(self):
        self.model = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batch):
        logits, labels = self.model(batch["input_ids"][:, :-1]), batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.update(loss)
        return loss.detach()

    def update(self, loss):
        self.optimizer.step()


class SkippingLoop(Loop):
    """Leaves out what is not finite, and tells nobody."""

    def update(self, loss):
        if nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).isfinite():
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
def test_model_under_the_guard(stability_run):
    run = stability_run(ModelSpec.of(model, causal=True))
    assert [(alarm.step, alarm.where) for alarm in run.alarms] == [(5, "1 (forward)")]


@FAULT
@RECOVERS
@pytest.mark.parametrize(
    "loop",
    [
        GuardedLoop,
        SkippingLoop,
        pytest.param(Loop, marks=pytest.mark.xfail(strict=True, reason="takes the NaN into its weights")),
    ],
)
def test_loop(stability_run, loop):
    stability_run(TrainerSpec.of(loop))
