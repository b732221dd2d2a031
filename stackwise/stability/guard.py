"""The guard: notices a broken step before its update is made."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Alarm", "SpikeDetector"]


@dataclass(frozen=True)
class Alarm:
    """A step that must not be taken as it is.

    Attributes:
        step: counted from 0.
        kind: what is wrong.
        value: the loss or the gradient norm.
        limit: the largest norm that passes; None where no finite value would be wrong.
        where: the module or parameters at fault, as far as they are known.
        action: what was done about it.
    """

    step: int
    kind: Literal["non-finite loss", "non-finite gradient", "gradient spike"]
    value: float
    limit: float | None = None
    where: str = ""
    action: Literal["skipped"] = "skipped"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        limit = f" (limit {self.limit:.3g})" if self.limit is not None else ""
        place = f" in {self.where}" if self.where else ""
        return f"step {self.step}: {self.kind} {self.value:.3g}{limit}{place}; update {self.action}"


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
        """Remember the norm of a sound step."""
        if norm > 0:
            self._log_norms.append(math.log(norm))
