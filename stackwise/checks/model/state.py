"""State: what a call leaves behind in the model."""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.checks.check import check
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject


@check
def eval_buffers(subject: Subject) -> CheckResult:
    """Are all buffers unchanged if a call in eval mode is repeated?"""
    model = subject.model()
    with torch.no_grad(), subject.fixed_randomness():
        # The first call may compute a table or fill a cache. The same call again adds nothing to them.
        subject.spec.logits(model, subject.inputs(2))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        subject.spec.logits(model, subject.inputs(2))
    changed = [
        name
        for name, buffer in model.named_buffers()
        if name in before and buffer.shape == before[name].shape and not _same(buffer, before[name])
    ]
    if not changed:
        return subject.passed(0.0, 0.0)
    return subject.failed(
        float(len(changed)),
        0.0,
        where=listed(changed),
        meaning="A call in eval mode changes buffers, so an evaluation changes the model.",
        advice="Update statistics and counters only if self.training is True. Keep caches out of buffers.",
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Return True if all bits are equal, also those of NaN and of float8."""
    one, two = (each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (a, b))
    return torch.equal(one, two)
