"""Bugs of what a training step takes for its targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.loop import Loop, loop_spec_of
from tests.zoo.mutant import mutant


@torch.no_grad()
def loss_of_few(spec: TrainerSpec) -> Tensor:
    """Of a batch whose targets are mostly to be ignored."""
    run, batch = spec.create(), spec.batch()
    run.model.eval()
    batch["labels"][:, 3:] = -100
    return run.loss(batch)


class OwnLoss(Loop):
    """The loss is computed by the loop, of the model's logits."""

    def loss(self, batch):
        logits = self.model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        return self.reduce(logits, batch["labels"][:, 1:].flatten())

    def reduce(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / self.counted(targets)

    def counted(self, targets: Tensor) -> Tensor:
        return (targets != -100).sum().clamp(min=1)


def own_loss() -> TrainerSpec:
    return loop_spec_of(OwnLoss)


@mutant("ignored-token", twin=own_loss, family="loss", source="classic", observable=loss_of_few)
def ignored_targets_are_token_0():
    """Labels are clamped to the vocabulary: what is to be ignored is trained on as token 0."""

    class Mutant(OwnLoss):
        def reduce(self, logits, targets):
            return F.cross_entropy(logits, targets.clamp(min=0))

    return loop_spec_of(Mutant)


@mutant("ignored-counted", twin=own_loss, family="loss", source="classic", observable=loss_of_few)
def ignored_targets_are_counted():
    """The sum over targets is divided by all positions, those that are ignored too."""

    class Mutant(OwnLoss):
        def counted(self, targets):
            return torch.tensor(targets.numel())

    return loop_spec_of(Mutant)
