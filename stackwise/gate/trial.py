"""Trial: differences of one metric of one test, and the decision from them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from stackwise.gate.limit import Limit
from stackwise.gate.sequential import Rule, surely_differs
from stackwise.gate.verdict import Decision, Verdict
from stackwise.support.arguments import check_number, check_sizes

__all__ = ["LEAST_FRESH", "Trial"]


# Minimum number of fresh rounds that have to agree if all rounds together are to confirm a flag.
LEAST_FRESH = 1


class Trial:
    """Sequential test of one metric of one test.

    If the rule finds that head is slower or faster, the trial is flagged. Fresh rounds follow and are judged
    separately. If they agree, the flag becomes the verdict. If the time limit is reached before enough fresh
    rounds, all rounds are judged together, once (`conclude`).

    Args:
        limit: limit of the metric.
        rule: rule of the decisions.
        n_tests: number of trials in the whole run, including this one.
    """

    def __init__(self, limit: Limit, rule: Rule | None = None, n_tests: int = 1) -> None:
        check_sizes(n_tests=n_tests)
        self.limit, self.rule = limit, rule or Rule()
        self._fresh_rule = self.rule.confirmation(n_tests)
        self._differences: list[float] = []
        self._levels: list[float] = []
        self._flag: Decision | None = None
        self._decision: Decision | None = None

    @property
    def differences(self) -> tuple[float, ...]:
        """Paired differences log(head / base) of all rounds."""
        return tuple(self._differences)

    @property
    def base_level(self) -> float:
        """Median cost of base over the rounds, in the metric's unit; NaN before the first round."""
        return statistics.median(self._levels) if self._levels else math.nan

    @property
    def confirming(self) -> bool:
        """True if the trial was flagged. It stays True after the fresh rounds."""
        return self._flag is not None

    @property
    def decided(self) -> bool:
        """True if no more rounds are needed."""
        return self._decision is not None

    @property
    def decision(self) -> Decision | None:
        """Decision of the trial; None: more rounds are needed."""
        return self._decision

    def is_one_of(self, n_tests: int) -> None:
        """Update the number of trials in the whole run. The number of a flagged trial is not changed."""
        if self._flag is None:
            self._fresh_rule = self.rule.confirmation(n_tests)

    def add(self, difference: float, base_level: float) -> None:
        """Add a round.

        Args:
            difference: log(head / base) of the round, see `stackwise.gate.turns.difference`.
            base_level: cost of base in the round, in the metric's unit.

        Raises:
            ValueError: a difference that is not finite, or a level that is not above 0.
        """
        check_number("difference", difference, "a finite number", lambda _: True)
        check_number("base_level", base_level, "a number above 0, in the metric's unit", lambda v: v > 0)
        assert not self.decided, "a decided trial takes no more rounds"
        self._differences.append(float(difference))
        self._levels.append(float(base_level))
        found = self._rule().look(self._stage(), *self.limit.at(self.base_level))
        if found is None:
            return
        if self._flag is None and found.verdict in (Verdict.REGRESSED, Verdict.IMPROVED):
            self._flag = found
        else:
            self._decision = self._final(found)

    def conclude(self, why: str, *, together: bool = False) -> Decision:
        """Decide from the rounds so far, unless the trial is decided already.

        A PASS at the last look is valid. A regression that was not confirmed is INCONCLUSIVE.

        Args:
            why: reason why no more rounds follow, as half a sentence: "the time is up".
            together: True if all rounds together may confirm a flag, once. Their error rate is the product of
                the rates of flag and confirmation. The reason for the stop must not depend on the measured
                differences.
        """
        if self._decision is None:
            looks = [look for look in self._rule().looks if look <= len(self._stage())]
            found = None
            if looks:
                limits = self.limit.at(self.base_level)
                found = self._rule().look(self._stage()[: looks[-1]], *limits, last=True)
            if found is not None and self._flag is None and found.verdict != Verdict.PASS:
                found = replace(found, verdict=Verdict.INCONCLUSIVE)
            if found is None:
                rounds = self._stage() or self._differences
                mean = math.expm1(statistics.fmean(rounds)) if rounds else math.nan
                few = f"{len(self._stage())} rounds are too few for a decision"
                found = Decision.undecided(few, mean)
            decision = (self._together() if together else None) or self._final(found)
            reason = f"{decision.reason}; {why}" if self._differences else why
            self._decision = replace(decision, reason=reason)
        return self._decision

    def _together(self) -> Decision | None:
        """Return the flagged verdict if all rounds together confirm it, otherwise None.

        The fresh rounds must have the same sign as the flag. A flag that fresh rounds contradict was decided
        earlier.
        """
        fresh = self._stage()
        # Equal differences, for example of bytes, have no spread that measures their certainty. One more
        # round is required instead.
        least = LEAST_FRESH + (len(set(self._differences)) == 1)
        if self._flag is None or len(fresh) < least:
            return None
        chance = self.rule.alpha * self._fresh_rule.alpha
        tolerance, minimum_effect = self.limit.at(self.base_level)
        found = surely_differs(self._differences, tolerance, chance)
        if found is None:
            return None
        sign = 1 if self._flag.verdict is Verdict.REGRESSED else -1
        if min(sign * found[0], sign * statistics.median(fresh)) <= minimum_effect:
            return None
        estimate, low, high = map(math.expm1, found)
        rounds = len(self._differences)
        reason = f"{self._flag.reason}, and over all {rounds} together"
        return Decision(self._flag.verdict, estimate, low, high, 1 - 2 * chance, rounds, True, reason)

    def _rule(self) -> Rule:
        return self.rule if self._flag is None else self._fresh_rule

    def _stage(self) -> list[float]:
        """Return the differences that the current rule judges."""
        return self._differences[self._flag.rounds if self._flag else 0 :]

    def _final(self, found: Decision) -> Decision:
        """Return the verdict from the result of the first rounds or of the fresh rounds."""
        rounds = len(self._differences)
        if self._flag is None:
            return replace(found, rounds=rounds)
        if found.verdict == self._flag.verdict:
            reason = f"{self._flag.reason}, confirmed by {found.rounds} new ones"
            return replace(found, rounds=rounds, confirmed=True, reason=reason)
        said = replace(found, rounds=rounds, reason=f"{self._flag.reason}; in new rounds: {found.reason}")
        match self._flag.verdict, found.verdict:
            case _, Verdict.PASS:
                return said
            case Verdict.IMPROVED, Verdict.INCONCLUSIVE:  # the flag has proved that head is not slower
                return replace(self._flag, verdict=Verdict.PASS, rounds=rounds, reason=said.reason)
        return replace(said, verdict=Verdict.INCONCLUSIVE)
