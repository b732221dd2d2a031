"""Rule: sequential test of the paired differences of the rounds.

A round has one difference, log(head / base). Calls within a process are dependent, but rounds of fresh
processes are independent. So the sample consists of the differences of rounds (Kalibera & Jones, ISMM 2013).
At looks that are fixed in advance, their mean has a repeated confidence interval (Jennison & Turnbull, JRSS B
51, 1989): t quantiles, corrected for all looks together by `boundary`. Its two ends answer two questions,
each at an error rate that does not depend on the time of the decision. Is the slowdown significantly below
the tolerance? Is it significantly above 0? A flag needs fresh rounds to become a verdict. They are
independent, so the error rates are multiplied.

Reasons for this test: both sides are started alike and in random order, so the differences of identical code
are symmetric about 0. For heavy symmetric tails, the error rate of Student's t is below its nominal rate
(Benjamini, Technometrics 25, 1983). Tests that assume only symmetry need many rounds, since the signs of a
few rounds are never improbable enough. In simulations with a noise of 0.55 % per round and the same error
rates, identical code passed after 4.5 rounds with t, 7.0 with an e-process (Vovk & Wang, arXiv 2208.08925)
and 9.0 with Wilcoxon or signs, and a change of 5 % was flagged after 4.7, 9 and 13 rounds.

The error rate of flags is distributed among the looks with the shape 0.4, since skewed differences mislead t
most if rounds are few. The error rate of passes has the shape 0.5 (Pocock), since most tests pass at an early
look. Looks are close together at the numbers of rounds at which most tests are decided. With looks at 4, 6,
9, 13 and more rounds, a change of 2 % at a noise of 0.6 % per round was confirmed within 12 rounds in 46 of
100 runs, with the present looks in 90. tests/gate/test_error_rates.py checks these numbers, and the effect of
skewed and dependent differences.

Outliers are rounds in which the processes of one side were disturbed. On shared machines, about one process
in some hundred is a tenth or a third slower than the rest for its full lifetime. One such round among ten
quiet ones widens Student's interval so much that no decision is possible for dozens of rounds. Outliers are
selected by their distance only, no matter which side was disturbed, so the differences of identical code
remain symmetric about 0. The unit of the distance is the median absolute deviation, which outliers do not
affect (Hampel, JASA 69, 1974). A distance of 25 is 17 standard deviations of normal rounds. With 8 rounds,
the median deviation may be half of its usual value. A limit of 10 would also cut the long tail of skewed
rounds and shift their mean: 3.9 % of identical code was flagged at 3 % of noise, instead of 2.4 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from stackwise.gate.boundary import check_looks, quantiles
from stackwise.gate.verdict import Decision, Verdict
from stackwise.support.arguments import check_number, check_sizes

__all__ = ["Rule", "criteria", "surely_differs", "without_outliers"]

_FLAG_SHAPE, _PASS_SHAPE = 0.4, 0.5
# Minimum number of rounds for an estimate of the usual deviation.
_LEAST_ROUNDS = 8
_DEVIATIONS = 25.0
# Minimum distance of an outlier in tolerances. A nearer round cannot hide a change that has to be found.
_TOLERANCES = 2.0
# Maximum share of outliers: one round in 6. A larger share is a property of the code.
_ONE_IN = 6
# Exact numbers, such as bytes, deviate only by rounding. They have no spread as a unit of the distance.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Rule:
    """Sequential decision rule.

    Attributes:
        alpha: probability that an unchanged test is flagged as slower, over all looks; the same for faster.
        looks: numbers of rounds after which a test may be decided. After the last look, an undecided test is
            INCONCLUSIVE.
        fresh_looks: looks in the fresh rounds of a flagged test, which need less evidence.
        miss: probability that a change as large as the tolerance passes, over all looks. In the fresh rounds
            of a flagged test it is a third of this, so the total probability is 4/3 of `miss`.
        confirm: replaces `alpha` in the fresh rounds.
        run_alpha: probability that any test of an unchanged run is found slower. If a run has many tests, the
            fresh rounds have a smaller error rate than `confirm` for this reason.
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
        """Return the rule of the fresh rounds in a run with `n_tests` trials.

        For identical code, `alpha * n_tests` flags are expected, and each is confirmed with the alpha of this
        rule. Together these are at most `run_alpha`.
        """
        check_sizes(n_tests=n_tests)
        alpha = min(self.confirm, self.run_alpha / (self.alpha * n_tests))
        return replace(self, alpha=alpha, miss=self.miss / 3, looks=self.fresh_looks)

    def look(
        self, differences: Sequence[float], tolerance: float, minimum_effect: float, *, last: bool = False
    ) -> Decision | None:
        """Return the decision after the rounds so far; None: more rounds are needed, or this is not a look.

        Args:
            differences: log(head / base) of each round.
            tolerance: logarithm, see `Limit.at`.
            minimum_effect: logarithm, see `Limit.at`.
            last: True if no more rounds follow. An undecided test is then INCONCLUSIVE.
        """
        rounds = len(differences)
        if rounds not in self.looks:
            return None
        last = last or rounds == self.looks[-1]
        place = self.looks.index(rounds)
        values = without_outliers(differences, tolerance)
        after = _after(rounds, rounds - len(values))
        mean, spread = float(values.mean()), float(values.std(ddof=1))
        # The standard deviation of equal differences is only their rounding error.
        if float(np.ptp(values)) <= 1e-12 * abs(mean):
            spread = 0.0
        error = spread / math.sqrt(len(values))
        to_flag = quantiles(self.looks, self.alpha, _FLAG_SHAPE)[place] * error
        to_pass = quantiles(self.looks, self.miss, _PASS_SHAPE)[place] * error

        verdict = criteria(mean, to_flag, to_pass, tolerance, minimum_effect)
        # More rounds can prove that a passing test is faster.
        is_open = verdict is Verdict.INCONCLUSIVE or (verdict is Verdict.PASS and mean < -minimum_effect)
        if is_open and not last:
            return None
        below, above, level, why = {
            Verdict.IMPROVED: (to_flag, to_flag, 1 - 2 * self.alpha, f"significantly lower cost {after}"),
            Verdict.PASS: (to_pass, to_pass, 1 - 2 * self.miss, f"below the tolerance {after}"),
            Verdict.REGRESSED: (to_flag, to_flag, 1 - 2 * self.alpha, f"significantly higher cost {after}"),
            Verdict.INCONCLUSIVE: (
                to_flag,
                to_pass,
                1 - self.alpha - self.miss,
                f"undecided {after} with a standard deviation of {spread:.2%}",
            ),
        }[verdict]
        estimate, low, high = (math.expm1(each) for each in (mean, mean - below, mean + above))
        return Decision(verdict, estimate, low, high, level, rounds, confirmed=False, reason=why)


def criteria(
    difference: float, to_flag: float, to_pass: float, tolerance: float, minimum_effect: float
) -> Verdict:
    """Return the verdict on a difference.

    Args:
        difference: log(head / base).
        to_flag: distance from 0 at which a difference is significant.
        to_pass: distance from the tolerance at which a difference is significantly smaller.
        tolerance: logarithm, see `Limit.at`.
        minimum_effect: logarithm, see `Limit.at`.
    """
    if difference + to_flag < 0 and difference < -minimum_effect:
        return Verdict.IMPROVED
    if difference + to_pass < tolerance:
        return Verdict.PASS
    if difference - to_flag > 0 and difference > minimum_effect:
        return Verdict.REGRESSED
    return Verdict.INCONCLUSIVE


def surely_differs(
    differences: Sequence[float], tolerance: float, chance: float
) -> tuple[float, float, float] | None:
    """Return mean and ends of the t interval with the error rate `chance` per side; None: it contains 0.

    The interval is computed without outliers. It is valid for one look only: more looks would increase the
    error rate.
    """
    values = without_outliers(differences, tolerance)
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    beside = -float(stdtrit(len(values) - 1, chance)) * error
    return (mean, mean - beside, mean + beside) if abs(mean) > beside else None


def without_outliers(differences: Sequence[float], tolerance: float) -> NDArray[np.float64]:
    """Return the differences without outliers, in their order.

    An outlier is more than 25 median absolute deviations and more than two tolerances from the median. No
    difference is removed in three cases: there are fewer than 8, more than one in 6 would be removed, or more
    than half are equal, such as numbers of bytes.

    Args:
        differences: log(head / base) of each round.
        tolerance: logarithm, see `Limit.at`.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < _LEAST_ROUNDS:
        return values
    distances = np.abs(values - np.median(values))
    usual = float(np.median(distances))
    near = distances <= max(_DEVIATIONS * usual, _TOLERANCES * tolerance)
    few = len(values) - int(near.sum()) <= len(values) // _ONE_IN
    return values[near] if few and usual > _ROUNDING else values


def _after(rounds: int, left_out: int) -> str:
    """Return the number of rounds as the end of a sentence."""
    return f"after {rounds} rounds" + (f" ({left_out} removed as outliers)" if left_out else "")
