"""SpikeDetector: whether a number is far above those of sound steps before it, on the host or the device.

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
    """Judges a gradient norm by those of the sound steps before it.

    A norm is a spike where its logarithm exceeds the median of the last `recent` ones by more than
    max(`deviations` * MAD, ln `factor`), the MAD being that of the changes from step to step: norms may
    fall a thousandfold while a model settles, and that is no scatter. Spikes stay out of the history,
    so that a lasting fault does not become the rule. The median and the MAD, unlike mean and standard
    deviation, are not moved by a few outliers (Leys et al. 2013, doi:10.1016/j.jesp.2013.03.013).

    Args:
        deviations: how many MADs of the change of log-norm.
        factor: a rise that is always allowed.
        recent: how many of the last sound norms give the level.
        history: how many sound norms give the scatter.
        minimum: how many there must be before anything is a spike.
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
        """The largest norm that passes now; None while the history is too short to say."""
        logs = list(self._log_norms)
        if len(logs) < self.minimum:
            return None
        changes = [after - before for before, after in itertools.pairwise(logs)]
        center = statistics.median(changes) if changes else 0.0
        scatter = statistics.median(abs(change - center) for change in changes) if changes else 0.0
        level = statistics.median(logs[-self.recent :])
        return math.exp(level + max(self.deviations * scatter, math.log(self.factor)))

    def accept(self, norm: float) -> None:
        """Remember the norm of a sound step; one that is not positive and finite says nothing."""
        if 0 < norm < math.inf:
            self._log_norms.append(math.log(norm))


class DeviceDetector:
    """The rule of `SpikeDetector` as tensor operations: nothing of it makes the host wait.

    The logarithms are float64 (float32 on MPS, which has no other). Numbers that are not positive and finite
    say nothing, and are not remembered.

    Args:
        device: where the numbers are.
        deviations: how many MADs of the change from number to number.
        factor: a rise that is always allowed, above 1.
        recent: how many of the last sound numbers give the level.
        history: how many sound numbers give the scatter.
        minimum: how many there must be before anything is a spike.

    Raises:
        ValueError: a size below 1, a history shorter than `recent` or `minimum`, or a factor or a number of
            deviations that is none.
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
        """The largest number that passes now, a scalar; infinite while the history is too short to say."""
        known = self._history.statistics()
        margin_S = (self.deviations * known.scatter_S).clamp(min=math.log(self.factor))
        return torch.where(known.enough_S, (known.level_S + margin_S).exp(), math.inf)[0]

    @torch.no_grad()
    def level(self) -> Tensor:
        """The median of the last `recent` numbers, a scalar; NaN where there are none."""
        return self._history.statistics().level_S.exp()[0]

    @torch.no_grad()
    def accept(self, value: Tensor, sound: Tensor) -> None:
        """Remember `value` where `sound` says so.

        Args:
            value: a scalar on the device.
            sound: a boolean scalar on the device.
        """
        self._history.accept(value.reshape(1), sound)

    def state_dict(self) -> dict[str, Any]:
        """The history. A tensor of its own."""
        return {"logs": self._history.logs_SH[0].clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; of a longer history the end is taken.

        Raises:
            ValueError: anything else.
        """
        logs_H = state.get("logs")
        fits = isinstance(logs_H, Tensor) and logs_H.ndim == 1 and logs_H.is_floating_point()
        require(fits, "state['logs']", type(logs_H).__name__, "a row of numbers, as state_dict() gave it")
        assert isinstance(logs_H, Tensor)
        self._history.load(logs_H[None])
