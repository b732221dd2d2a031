"""GradientController: clips gradients, and warns from the records of a monitor if this happens too often."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from stackwise.stability.telemetry.gradient_monitor import GradientMonitor, GradientRecord
from stackwise.stability.telemetry.gradient_norm import first_non_finite
from stackwise.support.arguments import check_number, check_sizes, require

if TYPE_CHECKING:
    from stackwise.stability.guard import Guard, GuardRecord

__all__ = ["GradientController", "GradientWarning"]


@dataclass(frozen=True)
class GradientWarning:
    """Warning about the gradients of a training.

    Attributes:
        step: number of the step.
        kind: "frequent clipping", "explosion" or "non-finite".
        value: number of clipped steps in the window, or the gradient norm.
        limit: largest value without a warning.
        where: parameter with the largest norm, or the first non-finite one; "" for clipping.
    """

    step: int
    kind: Literal["frequent clipping", "explosion", "non-finite"]
    value: float
    limit: float
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kind == "frequent clipping":
            return (
                f"step {self.step}: {self.value:.0f} clipped steps (more than {self.limit:.0f}) in the window"
            )
        norm = f"gradient norm {self.value:.3g} (limit {self.limit:.3g})"
        return f"step {self.step}: {self.kind}, {norm}, {self.where}"


class GradientController:
    """Counts the last steps with a gradient above a norm, and warns. It never waits for a device.

    A warning of frequent clipping is issued once per window. Norms are of all gradients as one vector, before
    clipping.

    Args:
        source: `GradientMonitor` or `Guard` whose records are read. They are removed from it.
        max_norm: norm to which gradients are clipped.
        window: number of the last steps that are counted.
        allowed: number of clipped steps in the window without a warning.
        explosion: norm above which each step is warned of.

    Raises:
        ValueError: a norm that is not positive, a window below 1, or `allowed` not below `window`.
    """

    def __init__(
        self,
        source: GradientMonitor | Guard,
        *,
        max_norm: float = 1.0,
        window: int = 100,
        allowed: int = 10,
        explosion: float = 100.0,
    ) -> None:
        check_number("max_norm", max_norm, "a number above 0", lambda n: n > 0)
        check_number("explosion", explosion, "a number above 0", lambda n: n > 0)
        check_sizes(window=window)
        check_sizes(0, allowed=allowed)
        require(allowed < window, "allowed", allowed, f"0 to {window - 1}, with window={window}")
        self._source, self.max_norm = source, max_norm
        self._allowed, self._explosion = allowed, explosion
        self._clipped: deque[bool] = deque(maxlen=window)
        self._silent = 0  # steps until the next warning of frequent clipping may be issued
        self.clips = 0  # since the start

    @property
    def clips_in_window(self) -> int:
        """Number of clipped steps in the window."""
        return sum(self._clipped)

    def clip(self, parameters: nn.Module, step: int | None = None) -> Tensor:
        """Observe and clip the gradients on the device.

        Call it between the backward pass and the optimizer step. This is for a `GradientMonitor`. A `Guard`
        clips by its policy.

        Args:
            parameters: model.
            step: number of the record; None: one more than before.

        Returns:
            The norm before clipping, a scalar on the device.

        Raises:
            ValueError: the source is no `GradientMonitor`.
        """
        source = self._source
        if not isinstance(source, GradientMonitor):
            raise ValueError(
                f"source: got {type(source).__name__!r}; allowed: a GradientMonitor, to clip with"
            )
        total: Tensor = source.observe(step).total_norm
        torch.nn.utils.clip_grads_with_norm_(parameters.parameters(), self.max_norm, total)
        return total

    def read(self) -> list[GradientWarning]:
        """Return warnings from the records that have arrived since the last call."""
        return [warning for record in self._source.records() for warning in self._seen(record)]

    def _seen(self, record: GradientRecord | GuardRecord) -> list[GradientWarning]:
        warnings: list[GradientWarning] = []
        norm, norms = record.total_norm, record.parameter_norms
        clipped = not norm <= self.max_norm  # NaN is included
        self._clipped.append(clipped)
        self.clips += clipped
        if not math.isfinite(norm):
            where = first_non_finite(norms) or ""
            warnings.append(GradientWarning(record.step, "non-finite", norm, math.inf, where))
        elif norm > self._explosion:
            where = max(norms, key=lambda name: norms[name], default="")
            warnings.append(GradientWarning(record.step, "explosion", norm, self._explosion, where))
        self._silent = max(0, self._silent - 1)
        if self.clips_in_window > self._allowed and not self._silent:
            self._silent = self._clipped.maxlen or 0
            count = float(self.clips_in_window)
            warnings.append(GradientWarning(record.step, "frequent clipping", count, float(self._allowed)))
        return warnings
