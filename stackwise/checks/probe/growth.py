"""Growth: memory that is not released after each of many equal calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

from stackwise.benchmark.memory.growth_trial import collected_by_hand
from stackwise.benchmark.memory.live_memory import Earlier, census
from stackwise.benchmark.memory.trend import Trend, trend
from stackwise.checks.result import CheckResult, Examined

__all__ = ["growth_result"]

# Calls before the first measurement, and before the second one, when buffers of bounded size are full.
_WARMUP, _LATE = 4, 128
_MEASURED = 12
# Largest number of bytes per call that may be values for a log.
_LARGE = 1024
_TENSORS, _BYTES, _NODES, _HOOKS = "tensors", "bytes of tensors", "autograd nodes", "hooks"


def growth_result(subject: Examined, calls: Mapping[str, Callable[[], object]]) -> CheckResult:
    """Return the result of many equal calls. A rise is measured again for each call after further calls.

    Args:
        subject: the object that the result names.
        calls: functions that call the model once, or execute a training step, by the name of the call, such
            as "call in eval mode".
    """
    warned = None
    with collected_by_hand() as earlier:
        if not _rises([*calls.values()], earlier, warmup=_WARMUP):
            return subject.passed(0.0, 0.0)
        for noun, call in calls.items():
            rises = _rises([call], earlier, warmup=_LATE)
            if not rises:
                continue
            result = _reported(subject, rises, noun)
            if result.status == "failed":
                return result
            warned = warned or result
    return warned or subject.passed(0.0, 0.0)


def _rises(calls: Sequence[Callable[[], object]], earlier: Earlier, *, warmup: int) -> dict[str, Trend]:
    """Return the numbers of live objects that continue to rise over equal rounds of calls."""
    series: dict[str, list[int]] = {name: [] for name in (_TENSORS, _BYTES, _NODES, _HOOKS)}
    for index in range(warmup + _MEASURED):
        for call in calls:
            call()
        gc.collect()  # otherwise reference cycles of the warm-up fill the memory
        if index < warmup:
            continue
        seen = census(earlier, sizes=True)
        # Count tensors only: their type names contain a module. `census` also measures lists and dicts.
        size = sum(n_bytes for name, n_bytes in seen.sizes.items() if "." in name)
        for values, value in zip(series.values(), (seen.tensors, size, seen.nodes, seen.hooks), strict=True):
            values.append(value)
    trends = {name: trend(values) for name, values in series.items()}
    return {name: each for name, each in trends.items() if each.exceeds(0)}


def _reported(subject: Examined, rises: Mapping[str, Trend], noun: str) -> CheckResult:
    texts = [f"{rise.per_step:.4g} {name}" for name, rise in rises.items()]
    is_small = not ({_NODES, _HOOKS} & rises.keys()) and not (
        _BYTES in rises and rises[_BYTES].exceeds(_LARGE)
    )
    return subject.failed_unless(
        "the values are for a log that is cleared later" if is_small else None,
        rises[_BYTES].per_step if _BYTES in rises else 0.0,
        0.0,
        where=noun,
        meaning=f"Each {noun} leaves {' and '.join(texts)} in memory, also after {_LATE} equal ones.",
        advice="Look for a sum of losses without detach() or item(), for outputs that are appended to a "
        "list, and for hooks of each call. stackwise.benchmark.memory.memory_growth lists allocations.",
    )
