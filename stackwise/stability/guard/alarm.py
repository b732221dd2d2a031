"""Alarm: a step that must not be taken as it is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["AFTER_UPDATE", "Action", "Alarm", "AlarmKind", "GuardError", "hashable"]

AlarmKind = Literal[
    "non-finite loss",
    "non-finite gradient",
    "non-finite buffer",
    "non-finite parameter",
    "non-finite optimizer state",
    "gradient spike",
    "loss spike",
    "logit growth",
]
Action = Literal["skipped", "clipped", "retried", "rewound", "raised"]
# Kinds that are found after the update, which can no longer be skipped.
AFTER_UPDATE = ("non-finite parameter", "non-finite optimizer state")
_SAID: dict[Action, str] = {
    "skipped": "update skipped",
    "clipped": "gradient clipped",
    "retried": "update skipped, step repeated",
    "rewound": "update skipped, training rewound",
    "raised": "update skipped, training stopped",
}


@dataclass(frozen=True)
class Alarm:
    """A step that must not be taken as it is, or whose update has broken weights or optimizer.

    Attributes:
        step: counted from 0.
        kind: what is wrong. A non-finite parameter or optimizer state is found after the update: in the step
            that the alarm names, or in an earlier one if `batch` is None.
        value: the loss, the gradient norm, or the attention logit; NaN for all other kinds.
        limit: the largest value that passes. None: no finite value would be wrong.
        where: the module or parameters at fault, as far as they are known.
        action: what was done about it.
        batch: ids of the batches that the step was made of; None: they are not known.
        reproduced: whether the step broke again when it was computed again; None: it was not.
        bundle: folder of the diagnostic bundle; "": there is none.
    """

    step: int
    kind: AlarmKind
    value: float
    limit: float | None = None
    where: str = ""
    action: Action = "skipped"
    batch: tuple[Hashable, ...] | None = None
    reproduced: bool | None = None
    bundle: str = ""

    @property
    def is_finite_spike(self) -> bool:
        """True for a finite loss or gradient norm that is far above those before."""
        return self.kind in ("gradient spike", "loss spike")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "batch": None if self.batch is None else _listed(self.batch)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Alarm:
        """What `to_dict` gave, also where it went through JSON."""
        batch = values.get("batch")
        return cls(**{**values, "batch": None if batch is None else tuple(map(hashable, batch))})

    def __str__(self) -> str:
        limit = f" (limit {self.limit:.3g})" if self.limit is not None else ""
        place = f" in {self.where}" if self.where else ""
        again = "; a recomputation was normal" if self.reproduced is False else ""
        said = _SAID[self.action]
        if self.kind in AFTER_UPDATE:
            return f"step {self.step}: {self.kind}{place}; {said.removeprefix('update skipped, ')}"
        value = "" if self.kind == "non-finite buffer" else f" {self.value:.3g}"
        return f"step {self.step}: {self.kind}{value}{limit}{place}; {said}{again}"


class GuardError(ArithmeticError):
    """Training cannot go on. Weights, optimizer and scheduler are those before the broken step.

    If the alarm is a non-finite parameter or optimizer state, weights and optimizer state may still be
    non-finite.

    Attributes:
        alarm: the last one.
        alarms: all of the run.
    """

    def __init__(self, alarm: Alarm, alarms: Sequence[Alarm]) -> None:
        self.alarm, self.alarms = alarm, list(alarms)
        bundle = f". Diagnosis: {alarm.bundle}" if alarm.bundle else ""
        super().__init__(f"{alarm}. {len(self.alarms)} alarms, first: {self.alarms[0]}{bundle}")


def _listed(identity: Any) -> Any:
    """The id of a batch as JSON has it."""
    return list(map(_listed, identity)) if isinstance(identity, list | tuple) else identity


def hashable(identity: Any) -> Hashable:
    """The id of a batch as it was: JSON has lists for tuples."""
    return tuple(map(hashable, identity)) if isinstance(identity, list | tuple) else identity
