"""Escalation: chooses the response to consecutive alarms."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from stackwise.config import GuardPolicy
from stackwise.stability.guard.alarm import Action, Alarm, hashable

__all__ = ["Answer", "Escalation"]


class Answer(NamedTuple):
    """Response to an alarm whose update was skipped.

    Attributes:
        action: "skipped", "retried", "rewound" or "raised".
        innocent: True: the batches of the step are replayed. False: they are quarantined.
        first: True if it is the first alarm since the last healthy step or rewind.
    """

    action: Action
    innocent: bool
    first: bool


class Escalation:
    """Policy that skips a step, rewinds or stops, in this order, with the patience of a `GuardPolicy`.

    Attributes:
        consecutive_alarms: number of alarms since the last healthy step or rewind.
    """

    def __init__(self, policy: GuardPolicy) -> None:
        self._policy = policy
        self.consecutive_alarms = self._sound = self._rewinds = 0
        # Batches of the step that led to the last rewind, if they may be innocent.
        self._doubtful: tuple[Hashable, ...] | None = None
        self._sound_since = True  # True if a healthy step followed that rewind

    def sound(self, batches: tuple[Hashable, ...]) -> None:
        """Record a healthy step; `batches` are the ids of its batches."""
        if self._doubtful == batches:
            self._doubtful = None
        self.consecutive_alarms = 0
        self._sound += 1
        self._sound_since = True
        if self._sound >= (self._policy.snapshot_interval or self._policy.history):
            self._rewinds = 0

    @property
    def exhausted(self) -> bool:
        """True if there are more consecutive alarms than `patience`, and no rewind is available."""
        return self.consecutive_alarms > self._policy.patience

    def answer(self, alarm: Alarm, *, can_rewind: bool) -> Answer:
        """Count an alarm and return the response to it.

        A finite spike ends training only if a recomputation has shown that its batch is not the cause.
        Otherwise it may be data of a new kind.
        """
        self.consecutive_alarms += 1
        first = self.consecutive_alarms == 1
        worn = self.consecutive_alarms >= self._policy.patience
        rewinds = worn and self._rewinds < self._policy.rewinds and can_rewind
        innocent = self._may_be_innocent(alarm, rewinds)
        self._sound = 0
        if rewinds:
            self._doubtful = alarm.batch if innocent else None
            self._sound_since = False
            self._rewinds += 1
            self.consecutive_alarms = 0
            return Answer("rewound", innocent, first)
        may_be_data = alarm.is_finite_spike and alarm.reproduced is not False
        if self.exhausted and not may_be_data:
            return Answer("raised", innocent, first)
        return Answer("retried" if innocent else "skipped", innocent, first)

    def rewinds_broken_state(self, *, located: bool) -> bool:
        """Return True if training may rewind because of a non-finite parameter or optimizer state.

        Args:
            located: True if the step that caused it is known. A rewind that searches for the step is not
                counted.
        """
        if self._rewinds >= self._policy.rewinds:
            return False
        self._rewinds += located
        self._sound = self.consecutive_alarms = 0
        return True

    def _may_be_innocent(self, alarm: Alarm, rewinds: bool) -> bool:
        """Return True if a step with a healthy recomputation is to be retried with the same batches.

        If the same step is bad in the loop every time, its batches are treated as the cause. This does not
        apply if other steps were bad in the same way, without a healthy step between them. A rewind tests
        this.
        """
        if alarm.reproduced is not False or alarm.batch is None:
            return False
        early = self.consecutive_alarms < self._policy.patience
        if alarm.batch == self._doubtful:
            return early and not self._sound_since
        return early or rewinds or (self._doubtful is not None and not self._sound_since)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "consecutive_alarms": self.consecutive_alarms,
            "sound": self._sound,
            "rewinds": self._rewinds,
            "doubtful": self._doubtful,
            "sound_since": self._sound_since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.consecutive_alarms, self._sound, self._rewinds = (
            state["consecutive_alarms"],
            state["sound"],
            state["rewinds"],
        )
        doubtful, self._sound_since = state["doubtful"], state["sound_since"]
        self._doubtful = None if doubtful is None else tuple(map(hashable, doubtful))
