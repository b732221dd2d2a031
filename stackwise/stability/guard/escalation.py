"""Escalation: what is done about alarms, one after the other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from stackwise.config import GuardPolicy
from stackwise.stability.guard.alarm import Action, Alarm, hashable

__all__ = ["Answer", "Escalation"]


class Answer(NamedTuple):
    """What is done about an alarm whose update was left out.

    Attributes:
        action: "skipped", "retried", "rewound" or "raised".
        innocent: whether its batches are given again; else they are in quarantine.
        first: whether it is the first alarm in a row, none of them answered by going back.
    """

    action: Action
    innocent: bool
    first: bool


class Escalation:
    """Leaves a step out, goes back, stops, in this order, with `GuardPolicy`'s patience.

    Attributes:
        in_row: alarms without a sound step between.
    """

    def __init__(self, policy: GuardPolicy) -> None:
        self._policy = policy
        self.in_row = self._sound = self._rewinds = 0
        # Batches that were rewound from, and may be innocent.
        self._doubtful: tuple[Hashable, ...] | None = None
        self._sound_since = True  # whether a step was sound since then

    def sound(self, batches: tuple[Hashable, ...]) -> None:
        """A step was made as it was; `batches` are the ids of what it was made of."""
        if self._doubtful == batches:
            self._doubtful = None
        self.in_row = 0
        self._sound += 1
        self._sound_since = True
        if self._sound >= (self._policy.snapshot_interval or self._policy.history):
            self._rewinds = 0

    @property
    def exhausted(self) -> bool:
        """True if there are more consecutive alarms than `patience`, and no rewind was left."""
        return self.in_row > self._policy.patience

    def answer(self, alarm: Alarm, *, can_rewind: bool) -> Answer:
        """Decide what is done about an alarm.

        A finite spike ends training only if a recomputation has shown that its batch does not cause it.
        Otherwise it may be data of a new kind.
        """
        self.in_row += 1
        first = self.in_row == 1
        worn = self.in_row >= self._policy.patience
        rewinds = worn and self._rewinds < self._policy.rewinds and can_rewind
        innocent = self._may_be_innocent(alarm, rewinds)
        self._sound = 0
        if rewinds:
            self._doubtful = alarm.batch if innocent else None
            self._sound_since = False
            self._rewinds += 1
            self.in_row = 0
            return Answer("rewound", innocent, first)
        may_be_data = alarm.is_finite_spike and alarm.reproduced is not False
        if self.exhausted and not may_be_data:
            return Answer("raised", innocent, first)
        return Answer("retried" if innocent else "skipped", innocent, first)

    def rewinds_broken_state(self, *, located: bool) -> bool:
        """Return True if training may go back from a non-finite parameter or optimizer state.

        Args:
            located: the step that caused it is known. To go back and find it is not counted as a rewind.
        """
        if self._rewinds >= self._policy.rewinds:
            return False
        self._rewinds += located
        self._sound = self.in_row = 0
        return True

    def _may_be_innocent(self, alarm: Alarm, rewinds: bool) -> bool:
        """Whether a step is to be made again with the batches that it had: it broke in the loop alone.

        Where it breaks there time after time it is the batches all the same, unless other steps, with no
        sound one between, broke in the same way. A rewind is how to know.
        """
        if alarm.reproduced is not False or alarm.batch is None:
            return False
        early = self.in_row < self._policy.patience
        if alarm.batch == self._doubtful:
            return early and not self._sound_since
        return early or rewinds or (self._doubtful is not None and not self._sound_since)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "in_row": self.in_row,
            "sound": self._sound,
            "rewinds": self._rewinds,
            "doubtful": self._doubtful,
            "sound_since": self._sound_since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.in_row, self._sound, self._rewinds = state["in_row"], state["sound"], state["rewinds"]
        doubtful, self._sound_since = state["doubtful"], state["sound_since"]
        self._doubtful = None if doubtful is None else tuple(map(hashable, doubtful))
