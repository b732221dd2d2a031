"""Trial: all differences of one metric of one test, and what was decided from them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from stackwise.gate.limit import Limit
from stackwise.gate.sequential import Rule, surely_differs
from stackwise.gate.verdict import Decision, Verdict
from stackwise.support.arguments import check_number, check_sizes

__all__ = ["LEAST_FRESH", "Trial"]


# Fresh rounds that have to say the same where all rounds together are what decides.
LEAST_FRESH = 1


class Trial:
    """One metric of one test, round by round.

    Where the rule finds it slower or faster this is a flag. Fresh rounds follow, which are judged by
    themselves, and the flag becomes the verdict if they say the same. Where the time is up before they are
    enough for that, all rounds are judged together, once (`conclude`).

    Args:
        limit: of the metric.
        rule: when to decide.
        n_tests: how many trials the whole run has, this one too.
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
        """Of every round, log(head / base)."""
        return tuple(self._differences)

    @property
    def base_level(self) -> float:
        """The median cost of base over the rounds, in the metric's unit; NaN before the first."""
        return statistics.median(self._levels) if self._levels else math.nan

    @property
    def confirming(self) -> bool:
        """Whether it was flagged, and is in its fresh rounds or through them."""
        return self._flag is not None

    @property
    def decided(self) -> bool:
        """Whether no more rounds are needed."""
        return self._decision is not None

    @property
    def decision(self) -> Decision | None:
        """What was decided; None: more rounds are needed."""
        return self._decision

    @property
    def rounds_to_look(self) -> int:
        """How many rounds are to be made before the next decision can fall; 0 where it has fallen."""
        if self.decided:
            return 0
        rounds = len(self._stage())
        return next(look for look in self._rule().looks if look > rounds) - rounds

    def is_one_of(self, n_tests: int) -> None:
        """Say anew how many trials the whole run has, where that is known better by now.

        A trial that was flagged stays with what was known then.
        """
        if self._flag is None:
            self._fresh_rule = self.rule.confirmation(n_tests)

    def add(self, difference: float, base_level: float) -> None:
        """One round more.

        Args:
            difference: log(head / base) of the round, see `stackwise.gate.turns.difference`.
            base_level: what base cost, in the metric's unit.

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
        """Decide with what there is, unless it was decided before.

        What the last look proved is proved; a flag that was not confirmed is INCONCLUSIVE.

        Args:
            why: no more rounds are made, as half a sentence: "the time is up".
            together: whether all rounds may confirm a flag, once, held to the chances of flag and
                confirmation multiplied; where what ends the rounds has nothing to do with what was found.
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
                found = Decision(Verdict.INCONCLUSIVE, mean, -math.inf, math.inf, 0.0, 0, False, few)
            decision = (self._together() if together else None) or self._final(found)
            reason = f"{decision.reason}; {why}" if self._differences else why
            self._decision = replace(decision, reason=reason)
        return self._decision

    def _together(self) -> Decision | None:
        """What was flagged, if the fresh rounds go the same way and all rounds prove it; else None.

        A flag that fresh rounds deny has been decided before.
        """
        fresh = self._stage()
        # Equal differences, as of bytes, have no spread that could say how sure they are: their number does.
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
        """The differences that the present rule judges."""
        return self._differences[self._flag.rounds if self._flag else 0 :]

    def _final(self, found: Decision) -> Decision:
        """The verdict, given what was found in the first rounds or in the fresh ones."""
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
            case Verdict.IMPROVED, Verdict.INCONCLUSIVE:  # that it is not slower was proved by the flag
                return replace(self._flag, verdict=Verdict.PASS, rounds=rounds, reason=said.reason)
        return replace(said, verdict=Verdict.INCONCLUSIVE)
