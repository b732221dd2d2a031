"""SpikeDetector: detects numbers much larger than in earlier healthy steps, on the host or the device.

Shapes: H numbers of the history.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stackwise.stability.guard.log_history import LogHistory
from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["DeviceDetector", "SpikeDetector"]


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


class DeviceDetector:
    """The rule of `SpikeDetector` as tensor operations, which never make the host wait.

    The logarithms are float64 (float32 on MPS, which has no float64). Numbers that are not positive and
    finite are ignored.

    Args:
        device: device of the numbers.
        deviations: allowed rise in MADs of the change from number to number.
        factor: rise that is always allowed, above 1.
        recent: number of the last healthy numbers that define the level.
        history: number of healthy numbers that define the scatter.
        minimum: number of healthy numbers before anything is a spike.

    Raises:
        ValueError: a size below 1, a history shorter than `recent` or `minimum`, or an invalid factor or
            number of deviations.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        deviations: float = 6.0,
        factor: float = 3.0,
        recent: int = 8,
        history: int = 128,
        minimum: int = 4,
    ) -> None:
        check_number("deviations", deviations, "a number >= 0", lambda d: d >= 0)
        check_number("factor", factor, "a number above 1", lambda f: f > 1)
        check_sizes(recent=recent)
        check_number("minimum", minimum, "an integer >= 1", lambda m: m >= 1 and m == int(m))
        check_sizes(max(recent, minimum), history=history)
        self.deviations, self.factor = deviations, factor
        self._history = LogHistory(device, signals=1, recent=recent, history=history, minimum=minimum)

    @torch.no_grad()
    def limit(self) -> Tensor:
        """Return the largest number that passes now, a scalar; infinite if the history is too short."""
        known = self._history.statistics()
        margin_S = (self.deviations * known.scatter_S).clamp(min=math.log(self.factor))
        return torch.where(known.enough_S, (known.level_S + margin_S).exp(), math.inf)[0]

    @torch.no_grad()
    def level(self) -> Tensor:
        """Return the median of the last `recent` numbers, a scalar; NaN if the history is empty."""
        return self._history.statistics().level_S.exp()[0]

    @torch.no_grad()
    def accept(self, value: Tensor, sound: Tensor) -> None:
        """Record `value` if `sound` is true.

        Args:
            value: scalar on the device.
            sound: boolean scalar on the device.
        """
        self._history.accept(value.reshape(1), sound)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the history."""
        return {"logs": self._history.logs_SH[0].clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Of a longer history, the last numbers are used.

        Raises:
            ValueError: not a state of a detector.
        """
        logs_H = state.get("logs")
        fits = isinstance(logs_H, Tensor) and logs_H.ndim == 1 and logs_H.is_floating_point()
        require(fits, "state['logs']", type(logs_H).__name__, "a row of numbers, as state_dict() gave it")
        assert isinstance(logs_H, Tensor)
        self._history.load(logs_H[None])
