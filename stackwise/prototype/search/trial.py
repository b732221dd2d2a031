"""TrialOutcome and SearchTrial: result of one configuration, and its place in a search."""

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
    """Outcome of a configuration with one seed. Numbers of NumPy are converted to Python's.

    Attributes:
        status: "success"; "spiky", "diverged" or "nan" from the verdict of the run; "error" for an exception.
        loss: loss in nats; lower is better. Infinite if unknown.
        tokens_per_second: speed of a training step. None: not measured.
        peak_bytes: peak memory of a training step. None: not measured.
        reason: reason in one line, except for a success.

    Raises:
        ValueError: unknown status; a loss that is not a number, or not finite for a success; a speed or a
            peak that is not a finite number.
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
    """Return one outcome for several seeds: mean loss, median speed, largest peak, and worst status."""
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
        number: number of the trial in its study. Numbers may be missing, because lost and duplicate trials
            are not results.
        values: sampled values, moved into the budget, by key of the space and by solved key.
        config: resulting configuration.
        status: status of its outcome; "pruned" for an early stop, because other trials were better at that
            point; "running" and "waiting" in an unfinished search.
        reason: reason in one line, except for a success.
        loss: mean over seeds in nats; for a pruned trial, the last known loss. None: unknown.
        losses: loss of each finished seed.
        tokens_per_second: speed of a training step. None: not measured.
        peak_bytes: peak memory of a training step. None: not measured.
        parameters: number of parameters of `config`.
        score: score of a success. None: not a success, or not computed.
        seconds: duration of the trial. None: not finished.
        worker: machine and process that ran it.
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
        """Return plain values for JSON. Values that are not finite are None."""
        plain = asdict(self) | {"config": self.config.to_dict()}
        plain["losses"] = [loss if math.isfinite(loss) else None for loss in self.losses]
        plain["loss"] = self.loss if self.loss is not None and math.isfinite(self.loss) else None
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Self:
        """Return the trial that `to_dict` encoded, also after JSON."""
        losses = tuple(math.inf if loss is None else loss for loss in plain["losses"])
        return cls(**plain | {"config": StackWiseConfig.from_json(plain["config"]), "losses": losses})
