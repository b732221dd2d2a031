"""Rule: when the rounds so far are enough to decide, and what they say.

A round gives one difference, log(head / base). Calls within a process are not independent, rounds of fresh
processes are: so the differences of rounds are what is counted (Kalibera & Jones, ISMM 2013). At looks fixed
beforehand their mean gets a repeated confidence interval (Jennison & Turnbull, JRSS B 51, 1989): t quantiles,
corrected for all looks together by `boundary`. Its two ends answer two questions, each with a chance of error
that is known however early it stops: is head surely less than the tolerance slower, and is it surely slower
at all? A flag needs fresh rounds to become a verdict; they are independent, and chances multiply.

Why this one: both sides are started alike and in random order, so that identical code gives differences that
are symmetric about 0, and Student's t errs less often than it says where symmetric tails are heavy
(Benjamini, Technometrics 25, 1983). Tests that assume nothing but symmetry need many rounds, as so few signs
can only be so unlikely. In simulation at 0.55 % per round, with the same chances of error, identical code
passed after 4.5 rounds with t, 7.0 with an e-process (Vovk & Wang, arXiv 2208.08925) and 9.0 with Wilcoxon or
signs, and 5 % were flagged after 4.7, 9 and 13. Flags are shared out between the looks with the shape 0.4,
since skewed differences deceive t most where rounds are few; passes with 0.5 (Pocock), since most tests end
there. Looks are close together where most tests end: with 4, 6, 9, 13 and more, 2 % at 0.6 % per round were
confirmed within 12 rounds in 46 of 100 runs, with these in 90. tests/gate/test_error_rates.py holds these
numbers, and what skewed and dependent differences cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from stackwise.gate.boundary import check_looks, quantiles
from stackwise.gate.outlier import without_outliers
from stackwise.gate.verdict import Decision, Verdict
from stackwise.support.arguments import check_number, check_sizes

__all__ = ["Rule", "surely_differs"]

_FLAG_SHAPE, _PASS_SHAPE = 0.4, 0.5


@dataclass(frozen=True)
class Rule:
    """When to decide.

    Attributes:
        alpha: the chance that a test of which nothing has changed is flagged as slower, over all looks; the
            same for faster.
        looks: the numbers of rounds after which it is decided or goes on. After the last it is INCONCLUSIVE.
        fresh_looks: the same in the fresh rounds of a flagged test, which have to say less by themselves.
        miss: the chance that a change as large as the tolerance passes, over all looks. In the fresh rounds
            of a flagged test it is a third of this, so that it passes with 4/3 of `miss` in all.
        confirm: in place of `alpha`, in the fresh rounds.
        run_alpha: the chance that in a run of which nothing has changed any test is found slower. Where many
            tests would exceed it, the fresh rounds are held to less than `confirm`.
    """

    alpha: float = 0.0025
    looks: tuple[int, ...] = (4, 5, 6, 7, 8, 10, 12, 15, 19, 25)
    fresh_looks: tuple[int, ...] = (3, 4, 5, 6, 8, 11, 16, 25)
    miss: float = 0.015
    confirm: float = 0.05
    run_alpha: float = 0.01

    def __post_init__(self) -> None:
        for key in ("alpha", "miss", "confirm", "run_alpha"):
            check_number(
                key, getattr(self, key), "a number above 0 and below 0.5", lambda value: 0 < value < 0.5
            )
        for key in ("looks", "fresh_looks"):
            check_looks(getattr(self, key), key)

    def confirmation(self, n_tests: int) -> Rule:
        """The rule of the fresh rounds, where `n_tests` trials are made in the run.

        Of identical code `alpha * n_tests` flags are to be expected, and each is confirmed with the alpha of
        this rule: together at most `run_alpha`.
        """
        check_sizes(n_tests=n_tests)
        alpha = min(self.confirm, self.run_alpha / (self.alpha * n_tests))
        return replace(self, alpha=alpha, miss=self.miss / 3, looks=self.fresh_looks)

    def look(
        self, differences: Sequence[float], tolerance: float, minimum_effect: float, *, last: bool = False
    ) -> Decision | None:
        """What the rounds so far say; None: more of them are needed, or this is no number to look at.

        Args:
            differences: of each round, log(head / base).
            tolerance: as a logarithm, see `Limit.at`.
            minimum_effect: likewise.
            last: no more rounds will be made, so that what is undecided is INCONCLUSIVE.
        """
        rounds = len(differences)
        if rounds not in self.looks:
            return None
        last = last or rounds == self.looks[-1]
        place = self.looks.index(rounds)
        values = without_outliers(differences, tolerance)
        after = _after(rounds, rounds - len(values))
        mean, spread = float(values.mean()), float(values.std(ddof=1))
        # Equal differences have a spread of their rounding.
        if float(np.ptp(values)) <= 1e-12 * abs(mean):
            spread = 0.0
        error = spread / math.sqrt(len(values))
        to_flag = quantiles(self.looks, self.alpha, _FLAG_SHAPE)[place] * error
        to_pass = quantiles(self.looks, self.miss, _PASS_SHAPE)[place] * error

        faster = mean + to_flag < 0 and mean < -minimum_effect
        passes = mean + to_pass < tolerance
        slower = mean - to_flag > 0 and mean > minimum_effect

        def decided(verdict: Verdict, below: float, above: float, level: float, why: str) -> Decision:
            estimate, low, high = (math.expm1(each) for each in (mean, mean - below, mean + above))
            return Decision(verdict, estimate, low, high, level, rounds, confirmed=False, reason=why)

        if faster:
            return decided(
                Verdict.IMPROVED,
                to_flag,
                to_flag,
                1 - 2 * self.alpha,
                f"significantly lower cost {after}",
            )
        if passes and mean < -minimum_effect and not last:  # it may be faster, which more rounds can tell
            return None
        if passes:
            why = f"below the tolerance {after}"
            return decided(Verdict.PASS, to_pass, to_pass, 1 - 2 * self.miss, why)
        if slower:
            return decided(
                Verdict.REGRESSED,
                to_flag,
                to_flag,
                1 - 2 * self.alpha,
                f"significantly higher cost {after}",
            )
        if not last:
            return None
        why = f"undecided {after} with a standard deviation of {spread:.2%}"
        return decided(Verdict.INCONCLUSIVE, to_flag, to_pass, 1 - self.alpha - self.miss, why)


def surely_differs(
    differences: Sequence[float], tolerance: float, chance: float
) -> tuple[float, float, float] | None:
    """Mean and ends of the t interval that is wrong on either side with `chance`; None: it has 0 in it.

    One look only, without outliers: at more looks it would be wrong more often.
    """
    values = without_outliers(differences, tolerance)
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    beside = -float(stdtrit(len(values) - 1, chance)) * error
    return (mean, mean - beside, mean + beside) if abs(mean) > beside else None


def _after(rounds: int, left_out: int) -> str:
    """Return the number of rounds as the end of a sentence."""
    return f"after {rounds} rounds" + (f" ({left_out} removed as outliers)" if left_out else "")
