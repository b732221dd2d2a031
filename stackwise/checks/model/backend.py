"""Backend: attention computed by another kernel is the same attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.parameter_gradient import apart, gradients_of, limit_of
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject


@check
def backend_gradients(subject: Subject) -> CheckResult:
    """Are loss and gradients the same by the plain formula of attention as by the kernel chosen for speed?"""
    if not any(p.requires_grad for p in subject.model().parameters()):
        return subject.not_applicable("no parameter is trainable")
    # Without dropout, which another kernel draws in another order.
    try:
        model = subject.model(train=True, dtype=torch.float64)
        usual = gradients_of(subject, model, around=WithoutDropout)[0]
    except REFUSALS:
        model = subject.model(train=True)
        usual = gradients_of(subject, model, around=WithoutDropout)[0]
    watch = AttentionCalls()

    @contextmanager
    def plainly() -> Iterator[None]:
        with WithoutDropout(), watch, sdpa_kernel(SDPBackend.MATH):
            yield

    plain = gradients_of(subject, model, around=plainly)[0]
    found, limit = apart(usual, plain), limit_of(subject, model)
    value = max(found.value, found.loss)
    if not watch.seen and value == 0:
        return subject.not_applicable("needs a call of scaled_dot_product_attention")
    if not value <= limit:
        return subject.failed(
            value,
            limit,
            where=found.parameter,
            meaning="Under sdpa_kernel(SDPBackend.MATH) the gradient or the loss is another one.",
            advice="Look for branches on the kernel in use: a mask or a window that one of them drops, "
            "is_causal beside a mask, another scale.",
        )
    return subject.passed(value, limit)


class AttentionCalls(TorchFunctionMode):
    """Notes whether torch's own attention is called."""

    seen = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or function is F.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))
