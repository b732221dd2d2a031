"""Alarm: a bad training step and the response to it."""

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
    """Bad training step, or step whose update made weights or optimizer state non-finite.

    Attributes:
        step: number of the step, from 0.
        kind: type of the problem. A non-finite parameter or optimizer state is found after the update: in the
            step that the alarm names, or in an earlier one if `batch` is None.
        value: the loss, the gradient norm, or the attention logit; NaN for all other kinds.
        limit: largest value that passes. None: every finite value passes.
        where: bad module or parameters, if known.
        action: response to the alarm.
        batch: ids of the batches of the step; None: not known.
        reproduced: True if the recomputed step was bad too. None: unknown, for example because it was not
            recomputed.
        bundle: folder of the diagnostic bundle; "": none was written.
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
        """True for a finite loss or gradient norm that is much larger than before."""
        return self.kind in ("gradient spike", "loss spike")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "batch": None if self.batch is None else _listed(self.batch)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Alarm:
        """Return the alarm of a `to_dict` result, which may have passed through JSON."""
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
    """Error that stops training. Weights, optimizer and scheduler are those before the bad step.

    If the alarm is a non-finite parameter or optimizer state, weights and optimizer state may still be
    non-finite.

    Attributes:
        alarm: last alarm.
        alarms: all alarms of the run.
    """

    def __init__(self, alarm: Alarm, alarms: Sequence[Alarm]) -> None:
        self.alarm, self.alarms = alarm, list(alarms)
        bundle = f". Diagnosis: {alarm.bundle}" if alarm.bundle else ""
        super().__init__(f"{alarm}. {len(self.alarms)} alarms, first: {self.alarms[0]}{bundle}")


def _listed(identity: Any) -> Any:
    """Return the id of a batch as JSON stores it."""
    return list(map(_listed, identity)) if isinstance(identity, list | tuple) else identity


def hashable(identity: Any) -> Hashable:
    """Return the original id of a batch. JSON stores tuples as lists."""
    return tuple(map(hashable, identity)) if isinstance(identity, list | tuple) else identity
