"""Budget: choice of the tests that get another round before the time limit of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stackwise.gate.open_test import OpenTest
from stackwise.gate.sequential import Rule
from stackwise.gate.side.clock import real_time
from stackwise.gate.trial import LEAST_FRESH
from stackwise.support.arguments import check_number

__all__ = ["Budget"]

_OVERRUN = 1.05  # share of the limit after which a round ends before its last test


class Budget:
    """Time limit of a run. The clock starts when this object is created.

    A test has no verdict before the first look of the rule, and a slowdown is confirmed one round later at
    the earliest. If the limit is too short for that many rounds of all tests, the first tests get them. The
    last rounds are for flagged tests.

    Args:
        seconds: time limit, after which no round should run; None: no limit.
        rule: rule of the decisions.
        spent: seconds of the limit that were used before the creation, for example to write the trees.

    Raises:
        ValueError: `seconds` is not above 0.
    """

    def __init__(self, seconds: float | None, rule: Rule, spent: float = 0.0) -> None:
        if seconds is not None:
            check_number("most_seconds", seconds, "a number > 0", lambda value: value > 0)
        self._seconds, self._began = seconds, real_time.monotonic() - spent
        self._first_look = rule.looks[0]
        self._rounds = self._first_look + LEAST_FRESH

    @property
    def elapsed(self) -> float:
        """Seconds since the creation, plus `spent`."""
        return real_time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the limit; infinite without a limit."""
        return math.inf if self._seconds is None else max(0.0, self._seconds - self.elapsed)

    def suffices(self, seconds: float = 0.0) -> bool:
        """Return True if at least `seconds` are left before the limit."""
        return self._seconds is None or self.elapsed + seconds <= self._seconds

    def goes_on(self, next_seconds: float) -> bool:
        """Return True if the current round may measure another test, with an overrun of the limit by 5 %.

        Args:
            next_seconds: seconds that the test is expected to take.
        """
        return self._seconds is None or self.elapsed + next_seconds <= _OVERRUN * self._seconds

    def admits(self, lasted: float = 0.0, *, next_seconds: float) -> bool:
        """Return True if one more test can be begun and get all rounds that it needs.

        Args:
            lasted: duration of the current round so far, in seconds.
            next_seconds: seconds that the test is expected to add to a round.
        """
        return self.suffices(next_seconds + (self._rounds - 1) * (lasted + next_seconds))

    def keep(self, begun: Sequence[OpenTest], around: float) -> list[OpenTest]:
        """Return the tests that can still get the rounds that they need. Drop the last tests first.

        Args:
            begun: open tests, in the order in which they were begun.
            around: seconds of a round in which no test runs, such as the start of the processes.
        """
        kept = list(begun)
        while len(kept) > 1 and len(kept[-1].order) < self._first_look:
            missing = self._rounds - len(kept[-1].order)
            if self.suffices(missing * (around + sum(test.round_seconds for test in kept))):
                break
            kept.pop()
        return kept

    def choose(self, begun: Sequence[OpenTest], around: float) -> list[OpenTest]:
        """Return the tests of the next round, in their order. If time is short, prefer flagged tests.

        Args:
            begun: open tests.
            around: seconds of a round in which no test runs, such as the start of the processes.
        """
        total, chosen = around, set[str]()
        for test in sorted(begun, key=lambda test: not test.confirming):
            if self.suffices(total + test.round_seconds):
                total += test.round_seconds
                chosen.add(test.nodeid)
        return [test for test in begun if test.nodeid in chosen]
