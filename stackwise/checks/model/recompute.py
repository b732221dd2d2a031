"""Recompute: activation recomputation in the backward pass does not change the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS, reason_of
from stackwise.checks.probe.parameter_gradient import Gradients, compare_gradients, gradients_of, limit_of
from stackwise.checks.probe.recomputation import NoSwitch, by_its_own_switch, by_wrapping_layers, switched
from stackwise.checks.probe.update import norm
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.support.system_errors import reraise_if_out_of_memory

_NEVER = "the model is never trained with recomputation"
_ADVICE = (
    "Look for tensors that reach the recomputed part by an attribute or a closure instead of an argument, "
    "use_reentrant=True, preserve_rng_state=False, in-place changes of its inputs, and state that each "
    "call changes (counters, caches)."
)


@check
def recompute_gradients(subject: Subject) -> CheckResult:
    """Is every gradient the same if activations are recomputed, in two consecutive passes?"""
    dtype, model, plain = _plain_passes(subject)
    size = norm(plain[0].by_name.values())
    if not (size and math.isfinite(size)):
        return subject.not_applicable("needs a finite gradient that is not 0; see finite_gradients")
    if plain[0].moved_backward:  # the model recomputes by itself
        return _updated_twice(subject, plain[0].moved_backward[0], correct_if=None)
    counted = _counted(subject, dtype, lambda _: None)
    for switch in (by_its_own_switch, by_wrapping_layers):
        try:
            if _counted(subject, dtype, switch).operations == counted.operations:
                continue  # nothing is recomputed
            _, recomputed = _passes(subject, dtype, switch)
        except NoSwitch:
            continue
        except Exception as error:
            reraise_if_out_of_memory(error)
            return subject.warned(
                meaning=f"Recomputing activations raises {reason_of(error)}",
                correct_if=_NEVER,
                advice=_ADVICE,
            )
        has_switch = switch is by_its_own_switch
        result = _compared(subject, plain, recomputed, limit_of(subject, model), has_switch)
        pairs = ((n, b.nan_to_num(), recomputed[-1].buffers[n]) for n, b in plain[-1].buffers.items())
        moved = next((name for name, a, b in pairs if not torch.equal(a, b.nan_to_num())), None)
        # A model that recomputes by itself also decides which state is updated.
        if moved is not None and result.status == "passed" and not counted.recomputes:
            return _updated_twice(
                subject,
                moved,
                "a second update does no harm, or activations are never recomputed",
            )
        return result
    return subject.not_applicable(
        "needs gradient_checkpointing_enable(), set_grad_checkpointing(), or layers that are called"
    )


def _compared(
    subject: Subject, plain: list[Gradients], recomputed: list[Gradients], limit: float, has_switch: bool
) -> CheckResult:
    worst = compare_gradients(plain, recomputed)
    how = "by its own switch" if has_switch else "by wrapping its layers"
    if not worst.value <= limit:
        return subject.failed_unless(
            None if has_switch else _NEVER,  # a model with its own switch promises that it works
            worst.value,
            limit,
            where=worst.where,
            meaning=f"With recomputation ({how}) the gradient changes, and the loss by {worst.loss:.2g}.",
            advice=_ADVICE,
        )
    return subject.passed(worst.value, limit, meaning=how)


def _updated_twice(subject: Subject, name: str, correct_if: str | None) -> CheckResult:
    return subject.failed_unless(
        correct_if,
        1.0,
        0.0,
        where=name,
        meaning="The buffer is updated twice if activations are recomputed: also in the backward pass.",
        advice="Update running statistics and counters outside the recomputed part.",
    )


def _plain_passes(subject: Subject) -> tuple[torch.dtype | None, nn.Module, list[Gradients]]:
    """Return dtype (float64 if the model runs in it, or None), model and gradients of plain passes."""
    try:
        return torch.float64, *_passes(subject, torch.float64, lambda _: None)
    except REFUSALS:
        return None, *_passes(subject, None, lambda _: None)


def _passes(
    subject: Subject, dtype: torch.dtype | None, switch: Callable[[nn.Module], None]
) -> tuple[nn.Module, list[Gradients]]:
    model = subject.model(train=True, dtype=dtype)
    switched(model, switch)
    return model, gradients_of(subject, model, n_passes=2)


def _counted(subject: Subject, dtype: torch.dtype | None, switch: Callable[[nn.Module], None]) -> _Count:
    """Return the count of the operations of one pass. Recomputation adds operations."""
    model = subject.model(train=True, dtype=dtype)
    switched(model, switch)
    count = _Count()  # type: ignore[no-untyped-call]
    gradients_of(subject, model, around=lambda: count)
    return count


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count operations, and find a model that recomputes by itself.

    Attributes:
        operations: number of operations of the forward and backward pass.
        recomputes: operations for a further backward pass ran in the backward pass.
    """

    operations, recomputes = 0, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:  # -1: no backward pass
            self.recomputes = True
        return function(*args, **(kwargs or {}))
