"""Detectors on the host: of spikes among the norms of steps, and of gradients that were clipped before."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping

__all__ = ["ClippingDetector", "SpikeDetector"]

_EQUAL_STEPS = 8  # consecutive equal norms that are not a coincidence
_EQUAL = 1e-5  # relative change of the norm that is treated as none
_CHANGED = 1e-3  # change of a parameter's norm, relative to the norm, that shows another gradient


class SpikeDetector:
    """Judge of a gradient norm by the norms of earlier healthy steps.

    A norm is a spike if its logarithm exceeds the median of the last `recent` ones by more than
    max(`deviations` * MAD, ln `factor`). MAD is the median absolute deviation of the changes from step to
    step. It measures changes because norms may fall a thousandfold while a model settles, which is no
    scatter. Spikes are excluded from the history, so a lasting fault does not become the baseline. Unlike
    mean and standard deviation, the median and the MAD are robust against a few outliers (Leys et al. 2013,
    doi:10.1016/j.jesp.2013.03.013).

    Args:
        deviations: allowed rise in MADs of the change of the log-norm.
        factor: rise that is always allowed.
        recent: number of the last healthy norms that define the level.
        history: number of healthy norms that define the scatter.
        minimum: number of healthy norms before anything is a spike.
    """

    def __init__(
        self,
        *,
        deviations: float = 6.0,
        factor: float = 3.0,
        recent: int = 8,
        history: int = 128,
        minimum: int = 4,
    ) -> None:
        self.deviations, self.factor, self.recent, self.minimum = deviations, factor, recent, minimum
        self._log_norms: deque[float] = deque(maxlen=history)

    def limit(self) -> float | None:
        """Return the largest norm that passes now; None while the history is too short."""
        logs = list(self._log_norms)
        if len(logs) < self.minimum:
            return None
        changes = [after - before for before, after in itertools.pairwise(logs)]
        center = statistics.median(changes) if changes else 0.0
        scatter = statistics.median(abs(change - center) for change in changes) if changes else 0.0
        level = statistics.median(logs[-self.recent :])
        return math.exp(level + max(self.deviations * scatter, math.log(self.factor)))

    def accept(self, norm: float) -> None:
        """Record the norm of a healthy step, if it is positive and finite."""
        if 0 < norm < math.inf:
            self._log_norms.append(math.log(norm))


class ClippingDetector:
    """Detector of steps with equal gradient norms although the norms of parameters differ.

    Gradients that are clipped before the guard sees them hide every spike.
    """

    def __init__(self) -> None:
        self._norm = math.nan
        self._norms: Mapping[str, float] = {}
        self._equal_steps = 0

    def detects(self, norm: float, norms: Mapping[str, float]) -> bool:
        """Record a healthy step. Return True once, after enough consecutive steps with equal norms.

        Args:
            norm: norm of all gradients.
            norms: gradient norm of each parameter, by name.
        """
        equal = abs(norm - self._norm) <= _EQUAL * norm and any(
            abs(each - self._norms.get(name, each)) > _CHANGED * norm for name, each in norms.items()
        )
        if self._equal_steps < _EQUAL_STEPS:  # otherwise it was detected before
            self._equal_steps = self._equal_steps + 1 if equal else 0
            self._norm, self._norms = norm, norms
            return self._equal_steps == _EQUAL_STEPS
        return False
