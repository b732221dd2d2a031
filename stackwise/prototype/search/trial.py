"""TrialOutcome and SearchTrial: what one configuration was found to do, and its place in a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from numbers import Real
from statistics import fmean, median
from typing import Any, Literal, Self, get_args

from stackwise.config import StackWiseConfig
from stackwise.support.arguments import check_choice, require

__all__ = ["Outcome", "SearchTrial", "TrialOutcome", "TrialStatus", "merge_outcomes"]

Outcome = Literal["success", "spiky", "diverged", "nan", "error"]
TrialStatus = Literal["success", "spiky", "diverged", "nan", "error", "pruned", "running", "waiting"]
_WORSE = get_args(Outcome)


@dataclass(frozen=True)
class TrialOutcome:
    """What became of a configuration under one seed. Numbers may be NumPy's; they are kept as Python's.

    Attributes:
        status: "success"; "spiky", "diverged" or "nan" as the run's verdict says; "error": it raised.
        loss: in nats, lower is better; infinite where there is none.
        tokens_per_second: of a training step; None: not measured.
        peak_bytes: the most memory of a training step; None: not measured.
        reason: in a line, of all but a success.

    Raises:
        ValueError: another status, a loss that is no number or not finite of a success, a speed or a peak
            that is no finite number.
    """

    status: Outcome
    loss: float
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        check_choice("status", self.status, _WORSE)
        self._keep("loss", float, finite=self.status == "success")
        if self.tokens_per_second is not None:
            self._keep("tokens_per_second", float, finite=True)
        if self.peak_bytes is not None:
            self._keep("peak_bytes", int, finite=True)

    def _keep(self, key: str, kind: type, *, finite: bool) -> None:
        value = getattr(self, key)
        sound = isinstance(value, Real) and (math.isfinite(value) or not finite)
        require(sound, key, value, "a finite number" if finite else "a number")
        object.__setattr__(self, key, kind(value))


def merge_outcomes(outcomes: Sequence[TrialOutcome]) -> TrialOutcome:
    """One of several seeds: the mean loss, the median speed, the largest peak, and the worst status."""
    require(len(outcomes) > 0, "outcomes", len(outcomes), "one or more")
    worst = max(outcomes, key=lambda each: _WORSE.index(each.status))
    rates = [each.tokens_per_second for each in outcomes if each.tokens_per_second is not None]
    peaks = [each.peak_bytes for each in outcomes if each.peak_bytes is not None]
    return TrialOutcome(
        status=worst.status,
        loss=fmean(each.loss for each in outcomes),
        tokens_per_second=median(rates) if rates else None,
        peak_bytes=max(peaks) if peaks else None,
        reason=worst.reason,
    )


@dataclass(frozen=True)
class SearchTrial:
    """One configuration of a search.

    Attributes:
        number: of the trial in its study. Numbers may be missing: a trial that was lost, or that drew what
            another one had drawn, is no result.
        values: by key of the space, and by key that was solved for: what was drawn, moved into the budget.
        config: what came of them.
        status: that of its outcome; "pruned": ended early, since others were better at that point; "running"
            and "waiting" where a search goes on.
        reason: in a line, of all but a success.
        loss: mean over seeds, in nats; of a pruned one the last that was seen; None: none is known.
        losses: one for each seed that came to its end.
        tokens_per_second: of a training step; None: not measured.
        peak_bytes: the most memory of a training step; None: not measured.
        parameters: of `config`.
        score: of a success; None: none, or not asked for.
        seconds: that the trial took; None: it has not ended.
        worker: the machine and process that ran it.
    """

    number: int
    values: dict[str, Any]
    config: StackWiseConfig
    status: TrialStatus
    reason: str = ""
    loss: float | None = None
    losses: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    parameters: int = 0
    score: float | None = None
    seconds: float | None = None
    worker: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: what is not finite is None."""
        plain = asdict(self) | {"config": self.config.to_dict()}
        plain["losses"] = [loss if math.isfinite(loss) else None for loss in self.losses]
        plain["loss"] = self.loss if self.loss is not None and math.isfinite(self.loss) else None
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Self:
        """What `to_dict` gave, also after JSON."""
        losses = tuple(math.inf if loss is None else loss for loss in plain["losses"])
        return cls(**plain | {"config": StackWiseConfig.from_json(plain["config"]), "losses": losses})
