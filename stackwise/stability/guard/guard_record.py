"""GuardRecord: measurements, limits and decision of one step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["GuardRecord"]


@dataclass(frozen=True)
class GuardRecord:
    """Measurements, limits and decision of one step, on the host.

    Attributes:
        step: number of the step, from 0.
        loss: loss that was passed to the guard.
        total_norm: global L2 norm of the gradient, before clipping.
        parameter_norms: gradient norm of each parameter, by name.
        limit: largest norm that passed; infinite: any finite norm.
        divisor: divisor of the gradients.
        kind: type of the problem; None: the step was healthy.
        skipped: True if the update was skipped.
        logit: largest attention logit; NaN: none was passed to the guard.
        loss_limit: largest loss that passed; infinite: any finite loss.
        logit_limit: largest attention logit that passed; infinite: any.
    """

    step: int
    loss: float
    total_norm: float
    parameter_norms: dict[str, float]
    limit: float
    divisor: float
    kind: str | None
    skipped: bool
    logit: float = math.nan
    loss_limit: float = math.inf
    logit_limit: float = math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)
