"""Recompute: activations that are computed again for the backward pass, and the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS
from stackwise.checks.probe.parameter_gradient import Apart, Gradients, apart, gradients_of, limit_of
from stackwise.checks.probe.recomputation import NoSwitch, by_its_own_switch, by_wrapping_layers, switched
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.support.system_errors import is_out_of_memory

_ADVICE = (
    "Look for tensors that reach the recomputed part by an attribute or a closure instead of an argument, "
    "use_reentrant=True, preserve_rng_state=False, writing in place into its inputs, and state that each "
    "call changes (counters, caches)."
)


@check
def recompute_gradients(subject: Subject) -> CheckResult:
    """Is every gradient the same if activations are recomputed, in two consecutive passes?"""
    if not any(p.requires_grad for p in subject.model().parameters()):
        return subject.not_applicable("no parameter is trainable")
    try:
        model, plain = _passes(subject, torch.float64, lambda _: None)
        dtype: torch.dtype | None = torch.float64
    except REFUSALS:
        dtype = None
        model, plain = _passes(subject, None, lambda _: None)
    if not any(gradient.any() for gradient in plain[0].of.values()):
        return subject.not_applicable("needs a parameter with a gradient")
    limit = limit_of(subject, model)
    n_operations = _n_operations(subject, dtype, lambda _: None)
    for switch, by_itself in ((by_its_own_switch, True), (by_wrapping_layers, False)):
        try:
            if _n_operations(subject, dtype, switch) == n_operations:
                continue  # nothing was computed twice
            _, again = _passes(subject, dtype, switch)
        except NoSwitch:
            continue
        except Exception as error:  # loud, so nobody trains with it
            if is_out_of_memory(error):
                raise
            return subject.warned(
                meaning=f"Recomputing activations raises {type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}",
                correct_if="the model is never trained with recomputation",
                advice=_ADVICE,
            )
        return _compared(subject, plain, again, limit, by_itself)
    return subject.not_applicable(
        "needs gradient_checkpointing_enable(), set_grad_checkpointing(), or layers that are called"
    )


def _compared(
    subject: Subject, plain: list[Gradients], again: list[Gradients], limit: float, by_itself: bool
) -> CheckResult:
    found = [apart(a, b) for a, b in zip(plain, again, strict=True)]
    worst: Apart = max(found, key=lambda each: each.value)
    how = "by its own switch" if by_itself else "by wrapping its layers"
    if not worst.value <= limit:
        # A model with its own switch promises that it works.
        return subject.failed_unless(
            None if by_itself else "the model is never trained with recomputation",
            worst.value,
            limit,
            where=f"{worst.parameter}, pass {found.index(worst) + 1}",
            meaning=f"With recomputation ({how}) the gradient changes, and the loss by {worst.loss:.2g}.",
            advice=_ADVICE,
        )
    moved = [
        name
        for name, buffer in plain[-1].buffers.items()
        if not torch.equal(buffer.nan_to_num(), again[-1].buffers[name].nan_to_num())
    ]
    if moved:
        return subject.warned(
            worst.value,
            limit,
            where=moved[0],
            meaning="The buffer is updated twice if activations are recomputed. Gradients agree.",
            correct_if="a second update of the buffer does no harm, or activations are never recomputed",
            advice="Update running statistics and counters outside the recomputed part.",
        )
    return subject.passed(worst.value, limit, meaning=how)


def _passes(
    subject: Subject, dtype: torch.dtype | None, switch: Callable[[nn.Module], None]
) -> tuple[nn.Module, list[Gradients]]:
    model = subject.model(train=True, dtype=dtype)
    switched(model, switch)
    return model, gradients_of(subject, model, n_passes=2)


def _n_operations(subject: Subject, dtype: torch.dtype | None, switch: Callable[[nn.Module], None]) -> int:
    """How many operations one pass takes: more where some are computed again."""
    model = subject.model(train=True, dtype=dtype)
    switched(model, switch)
    count = _Count()  # type: ignore[no-untyped-call]
    gradients_of(subject, model, around=lambda: count)
    return count.operations


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))
