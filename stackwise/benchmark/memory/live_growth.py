"""LiveGrowth: trends of live tensors, their bytes, autograd nodes and hooks over equal calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from stackwise.benchmark.memory.growth_trial import collected_by_hand
from stackwise.benchmark.memory.live_memory import census
from stackwise.benchmark.memory.trend import Trend, trend

__all__ = ["LiveGrowth", "live_growth"]


@dataclass(frozen=True)
class LiveGrowth:
    """Trends over equal calls.

    Attributes:
        tensors: number of tensors.
        bytes: bytes of their storages.
        nodes: number of autograd nodes that a tensor refers to.
        hooks: number of registered hooks.
    """

    tensors: Trend
    bytes: Trend
    nodes: Trend
    hooks: Trend

    @property
    def grows(self) -> bool:
        """Return True if any of these numbers continues to rise."""
        return any(each.exceeds(0) for each in (self.tensors, self.bytes, self.nodes, self.hooks))


def live_growth(call: Callable[[], object], *, warmup: int, steps: int = 12) -> LiveGrowth:
    """Return the trends over `steps` calls, after `warmup` calls. Garbage is collected after each call.

    Raises:
        ValueError: fewer than 8 steps.
    """
    for _ in range(warmup):
        call()
    series: list[tuple[int, int, int, int]] = []
    with collected_by_hand() as earlier:
        for _ in range(steps):
            call()
            gc.collect()
            seen = census(earlier, sizes=True)
            # Count tensors only: their type names contain a module. `census` also measures lists and dicts.
            size = sum(number for name, number in seen.sizes.items() if "." in name)
            series.append((seen.tensors, size, seen.nodes, seen.hooks))
    return LiveGrowth(*(trend(values) for values in zip(*series, strict=True)))
