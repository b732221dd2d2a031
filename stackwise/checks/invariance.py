"""Invariance: what must not matter does not matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stackwise.checks.check import CheckResult, Subject, check
from stackwise.checks.difference import persists_in_float64, relative_difference

BATCH_SIZE = 3


@check
def batch_invariance(subject: Subject) -> CheckResult:
    """Is a row's output the same alone as in a batch (eval mode)?"""
    inputs, limit = subject.inputs(BATCH_SIZE), subject.spec.tolerance

    def gaps(model: nn.Module) -> Tensor:
        together = subject.logits(model, inputs)
        alone = torch.cat([subject.logits(model, inputs[i : i + 1]) for i in range(BATCH_SIZE)])
        return relative_difference(together, alone).flatten(1).amax(dim=1)

    found = gaps(subject.model())
    value = found.max().item()
    if value > limit and persists_in_float64(subject, lambda twin: gaps(twin).max().item()):
        return subject.failed(
            value,
            limit,
            where=f"row {int(found.argmax())} of {BATCH_SIZE}",
            meaning="A row's output depends on the other rows of its batch.",
            advice="Look for a softmax, mean or norm over the batch dimension, BatchNorm in train mode, and "
            "reshape or view across it.",
        )
    return subject.passed(value, limit)
