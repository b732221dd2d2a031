"""Growth: memory that is not released after each of many equal calls."""

from __future__ import annotations

from collections.abc import Callable

from stackwise.benchmark.memory.live_growth import live_growth
from stackwise.checks.result import CheckResult, Examined

__all__ = ["growth_result"]

# Calls before the first measurement, and before the second one, when buffers of bounded size are full.
_WARMUP, _LATE = 4, 128
# Largest number of bytes per call that may be values for a log.
_LARGE = 1024


def growth_result(subject: Examined, call: Callable[[], object], noun: str) -> CheckResult:
    """Return the result of many equal calls. A rise is measured again after further calls.

    Args:
        subject: the object that the result names.
        call: a function that calls the model once, or executes a training step.
        noun: the call in words, such as "call in eval mode".
    """
    growth = live_growth(call, warmup=_WARMUP)
    if growth.grows:
        growth = live_growth(call, warmup=_LATE)
    if not growth.grows:
        return subject.passed(0.0, 0.0)
    rises = {
        "tensors": growth.tensors,
        "bytes of tensors": growth.bytes,
        "autograd nodes": growth.nodes,
        "hooks": growth.hooks,
    }
    texts = [f"{rise.per_step:.4g} {name}" for name, rise in rises.items() if rise.exceeds(0)]
    is_small = not (growth.nodes.exceeds(0) or growth.hooks.exceeds(0) or growth.bytes.exceeds(_LARGE))
    return subject.failed_unless(
        "the values are for a log that is cleared later" if is_small else None,
        max(growth.bytes.per_step, 0.0),
        0.0,
        where=noun,
        meaning=f"Each {noun} leaves {' and '.join(texts)} in memory, also after {_LATE} equal ones.",
        advice="Look for a sum of losses without detach() or item(), for outputs that are appended to a "
        "list, and for hooks that are registered in each call. stackwise.benchmark.memory.memory_growth "
        "lists lines of code that allocate.",
    )
