"""GradientMonitor: gradient norm of every parameter, for any training loop.

Shapes: P parameters with a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stackwise.stability.gated_optimizer import check_skips_on_device, start_momentum
from stackwise.stability.telemetry.gradient_norm import (
    GradientNames,
    first_non_finite,
    global_norm,
    gradient_norms,
)
from stackwise.stability.telemetry.ring_buffer import Recorder
from stackwise.support.arguments import check_sizes, require

__all__ = ["GradientMonitor", "GradientRecord", "GradientState"]


class GradientState(NamedTuple):
    """Gradients of one step, on the device.

    Attributes:
        total_norm: global L2 norm, float32 scalar, accepted by `torch.nn.utils.clip_grads_with_norm_`.
        found_inf: float32 scalar, 1 if `total_norm` is not finite, otherwise 0.
        norms_P: L2 norm of each gradient, float32, in the order of the parameters.
    """

    total_norm: Tensor
    found_inf: Tensor
    norms_P: Tensor


@dataclass(frozen=True)
class GradientRecord:
    """Gradients of one step, on the host.

    Attributes:
        step: number passed to `observe`, or a count from 0.
        total_norm: global L2 norm.
        parameter_norms: L2 norm of each gradient by the name of its parameter.
    """

    step: int
    total_norm: float
    parameter_norms: dict[str, float]

    @property
    def first_non_finite(self) -> str | None:
        """Name of the first parameter with a non-finite gradient, in the order of the model."""
        return first_non_finite(self.parameter_norms)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


class GradientMonitor(Recorder[tuple[int, tuple[str, ...]], GradientRecord]):
    """Norms of all gradients after each backward pass. The host does not wait for the device.

    Args:
        parameters: a model, or pairs of name and parameter. Parameters that are added to a model later are
            not observed.
        capacity: maximum number of steps that have not arrived at the host. Arrived records are stored until
            `records` is called.

    Raises:
        ValueError: no parameters, a repeated name, or a capacity below 2.
    """

    def __init__(
        self, parameters: nn.Module | Iterable[tuple[str, nn.Parameter]], *, capacity: int = 64
    ) -> None:
        check_sizes(minimum=2, capacity=capacity)
        named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
        self._named = list(named)
        self._names = GradientNames(self._named)
        names = [name for name, _ in self._named]
        require(bool(names), "parameters", names, "at least one")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        require(not twice, "parameters", twice, "each name once")
        super().__init__(capacity, 1 + len(names))
        self._guarded: list[torch.optim.Optimizer] = []

    def observe(self, step: int | None = None) -> GradientState:
        """Compute the norms of the gradients. Call it after the backward pass and before clipping.

        Args:
            step: number of the record. None: previous number plus one.

        Raises:
            ValueError: no parameter has a gradient, or a gradient is sparse.
        """
        require(
            any(p.grad is not None for _, p in self._named),
            "gradients",
            "none",
            "backward() before observe()",
        )
        with torch.no_grad():
            norms_P = gradient_norms(p for _, p in self._named)
            total = global_norm(norms_P)
            found_inf = (~total.isfinite()).float()
        for optimizer in self._guarded:
            start_momentum(optimizer)
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self._write((self._number(step), self._names()), (total,), norms_P)
        return GradientState(total, found_inf, norms_P)

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip steps with a non-finite gradient from now on, on the device.

        Each `observe` sets `optimizer.found_inf` for the next `optimizer.step()`. A fused optimizer reads it
        in the pass that updates the weights. If it is 1, weights and state do not change. A step without
        `observe` is not skipped. `torch.amp.GradScaler` sets the same attribute itself and needs no guard.

        Raises:
            ValueError: the optimizer does not read `found_inf`, or it is SGD with dampening.
        """
        check_skips_on_device(optimizer)
        optimizer.register_step_post_hook(_forget)
        self._guarded.append(optimizer)

    def _record(self, tag: tuple[int, tuple[str, ...]], row: list[float]) -> GradientRecord:
        (step, names), (total, *norms) = tag, row
        return GradientRecord(step, total, dict(zip(names, norms, strict=False)))


def _forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Clear `found_inf`, because it does not apply to the gradients of the next step."""
    optimizer.found_inf = None  # type: ignore[attr-defined]
