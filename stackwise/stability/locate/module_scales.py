"""ModuleScales: how large what goes in and out of each module is at sound steps, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from stackwise.stability.locate.trace import SizeKey, Trace
from stackwise.support.arguments import require

__all__ = ["ModuleScales"]


@dataclass(frozen=True)
class ModuleScales:
    """References of one model; made by `observe`.

    Attributes:
        sizes: root mean squares as `Trace.sizes` has them, the largest of all steps.
        calls: (module, number) of every call.
        expected: the inputs and outputs that had a NaN or an infinity at a sound step, as additive masks do.
    """

    sizes: Mapping[SizeKey, float]
    calls: frozenset[tuple[str, int]]
    expected: frozenset[SizeKey]

    @classmethod
    def observe(cls, model: nn.Module, *runs: Callable[[], object]) -> ModuleScales:
        """Watch sound steps.

        Scales drift while a model learns, and gradients depend on the size of a batch: watch again from time
        to time, with batches as they are trained on.

        Args:
            model: whose modules are watched.
            runs: each computes the loss of a sound batch and calls backward() on it, once; it may be the
                training step itself. The caller puts gradients, buffers and random states back.

        Raises:
            ValueError: no run.
        """
        require(bool(runs), "runs", runs, "at least one function")
        sizes: dict[SizeKey, float] = {}
        calls: set[tuple[str, int]] = set()
        expected: set[SizeKey] = set()
        for run in runs:
            with Trace(model) as trace:
                run()
            for key, size in trace.sizes().items():
                sizes[key] = max(size, sizes.get(key, 0.0))
            for call in trace.calls:
                calls.add((call.module, call.number))
                for what, places in (("input", call.inputs), ("output", call.outputs)):
                    for index, reading in enumerate(trace.of(places)):
                        if not reading.is_finite:
                            expected.add((what, call.module, call.number, index))
        return cls(sizes, frozenset(calls), frozenset(expected))

    def ratio(self, key: SizeKey, size: float | None) -> float | None:
        """How many times its reference `size` is; None where either is missing or the reference is 0."""
        reference = self.sizes.get(key)
        return size / reference if size is not None and reference else None
