"""ModuleScales: sizes of the inputs and outputs of each module at healthy steps, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from stackwise.stability.locate.trace import SizeKey, Trace
from stackwise.support.arguments import require

__all__ = ["ModuleScales"]


@dataclass(frozen=True)
class ModuleScales:
    """Reference sizes of one model, created by `observe`.

    Attributes:
        sizes: root mean squares by the keys of `Trace.sizes`, the largest of all steps.
        calls: (module, number) of every call.
        expected: inputs and outputs with a NaN or an infinity at a healthy step, such as additive masks.
    """

    sizes: Mapping[SizeKey, float]
    calls: frozenset[tuple[str, int]]
    expected: frozenset[SizeKey]

    @classmethod
    def observe(cls, model: nn.Module, *runs: Callable[[], object]) -> ModuleScales:
        """Observe healthy steps.

        Scales change while a model learns, and gradients depend on the batch size. Repeat this from time to
        time, with batches like those of the training.

        Args:
            model: model whose modules are observed.
            runs: functions that each compute the loss of a healthy batch and call backward() on it, once. A
                run may be the training step. The caller restores gradients, buffers and random states.

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
                expected |= {key for key, place in call.places() if not trace.readings[place].is_finite}
        return cls(sizes, frozenset(calls), frozenset(expected))

    def ratio(self, key: SizeKey, size: float | None) -> float | None:
        """Return `size` as a multiple of its reference; None if one is missing or the reference is 0."""
        reference = self.sizes.get(key)
        return size / reference if size is not None and reference else None
