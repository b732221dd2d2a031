"""Invariance: what must not matter does not matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.difference import hear, relative_difference
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

BATCH_SIZE = 3


@check
def batch_invariance(subject: Subject) -> CheckResult:
    """Is a row's output the same alone as in a batch (eval mode)?"""
    inputs = subject.inputs(BATCH_SIZE)

    def gaps(model: nn.Module) -> Tensor:
        together = subject.logits(model, inputs)
        alone = torch.cat([subject.logits(model, inputs[i : i + 1]) for i in range(BATCH_SIZE)])
        return relative_difference(together, alone).flatten(1).amax(dim=1)

    for fill_zeros in (False, True) if subject.starts_at_zero else (False,):
        found = hear(
            subject, lambda model: gaps(model).max().item(), same_shapes=False, fill_zeros=fill_zeros
        )
        if found.real:
            row = int(gaps(subject.model(dtype=found.dtype, fill_zeros=fill_zeros)).argmax())
            return subject.failed(
                found.value,
                found.limit,
                where=f"row {row} of {BATCH_SIZE}" + (" (zero weights made random)" if fill_zeros else ""),
                meaning="A row's output depends on the other rows of its batch.",
                advice="Look for a softmax, mean or norm over the batch dimension, BatchNorm in train mode, "
                "and reshape or view across it.",
            )
    return subject.passed(found.value, found.limit, meaning=found.meaning)
