"""GuardRecord: what the guard saw of a step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["GuardRecord"]


@dataclass(frozen=True)
class GuardRecord:
    """What the guard saw of a step, on the host.

    Attributes:
        step: counted from 0.
        loss: as it was given.
        total_norm: global L2 norm of the gradient, before clipping.
        parameter_norms: the same of each parameter, by name.
        limit: the largest norm that passed; infinite: any finite one.
        divisor: what the gradients were divided by.
        kind: what was wrong; None: nothing.
        skipped: whether the update was left out.
        logit: the largest attention logit; NaN: it was not given.
        loss_limit: the largest loss that passed; infinite: any finite one.
        logit_limit: the largest attention logit that passed; infinite: any.
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
        """Plain values, for JSON."""
        return asdict(self)
