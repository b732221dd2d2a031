"""Invariance: what must not matter does not matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stackwise.checks.check import CheckResult, Subject, check
from stackwise.checks.difference import hear, relative_difference

BATCH_SIZE = 3
_EXACT = 1e-6  # other shapes, other order of sums; parts of a float64 model may stay float32


@check
def batch_invariance(subject: Subject) -> CheckResult:
    """Is a row's output the same alone as in a batch (eval mode)?"""
    inputs = subject.inputs(BATCH_SIZE)

    def gaps(model: nn.Module) -> Tensor:
        together = subject.logits(model, inputs)
        alone = torch.cat([subject.logits(model, inputs[i : i + 1]) for i in range(BATCH_SIZE)])
        return relative_difference(together, alone).flatten(1).amax(dim=1)

    found = hear(subject, lambda model: gaps(model).max().item(), exact_limit=_EXACT)
    if found.real:
        return subject.failed(
            found.value,
            found.limit,
            where=f"row {int(gaps(subject.model(dtype=found.dtype)).argmax())} of {BATCH_SIZE}",
            meaning="A row's output depends on the other rows of its batch.",
            advice="Look for a softmax, mean or norm over the batch dimension, BatchNorm in train mode, and "
            "reshape or view across it.",
        )
    return subject.passed(found.value, found.limit, meaning=found.meaning)
