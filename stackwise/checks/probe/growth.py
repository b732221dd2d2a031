"""Growth: memory that is not released after each of many equal calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

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
_NOUNS = ("tensors", "bytes of tensors", "autograd nodes", "hooks")


@dataclass(frozen=True)
class _Growth:
    """Trends of the numbers of live tensors, bytes of their storages, autograd nodes and hooks."""

    tensors: Trend
    bytes: Trend
    nodes: Trend
    hooks: Trend

    @property
    def rising(self) -> dict[str, Trend]:
        """Return the numbers that continue to rise."""
        trends = zip(_NOUNS, (self.tensors, self.bytes, self.nodes, self.hooks), strict=True)
        return {noun: each for noun, each in trends if each.exceeds(0)}


def growth_result(subject: Examined, calls: Mapping[str, Callable[[], object]]) -> CheckResult:
    """Return the result of many equal calls. A rise is measured again for each call after further calls.

    Args:
        subject: the object that the result names.
        calls: functions that call the model once, or execute a training step, by the name of the call, such
            as "call in eval mode".
    """
    warned = None
    with collected_by_hand() as earlier:
        if not _growth(calls.values(), earlier, warmup=_WARMUP).rising:
            return subject.passed(0.0, 0.0)
        for noun, call in calls.items():
            growth = _growth([call], earlier, warmup=_LATE)
            if not growth.rising:
                continue
            result = _reported(subject, growth, noun)
            if result.status == "failed":
                return result
            warned = warned or result
    return warned or subject.passed(0.0, 0.0)


def _growth(calls: Iterable[Callable[[], object]], earlier: Earlier, *, warmup: int) -> _Growth:
    """Return the trends over equal rounds of calls, after `warmup` rounds."""
    calls = list(calls)
    series: list[tuple[int, int, int, int]] = []
    for number in range(warmup + _MEASURED):
        for call in calls:
            call()
        if number < warmup:
            continue
        gc.collect()
        seen = census(earlier, sizes=True)
        # Count tensors only: their type names contain a module. `census` also measures lists and dicts.
        size = sum(number for name, number in seen.sizes.items() if "." in name)
        series.append((seen.tensors, size, seen.nodes, seen.hooks))
    return _Growth(*(trend(values) for values in zip(*series, strict=True)))


def _reported(subject: Examined, growth: _Growth, noun: str) -> CheckResult:
    texts = [f"{rise.per_step:.4g} {name}" for name, rise in growth.rising.items()]
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
