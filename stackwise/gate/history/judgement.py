"""Judgement: comparison of a new result with its history."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from stackwise.gate.history.change_point import latest_segment
from stackwise.gate.history.point import Point, Result, Standing
from stackwise.gate.limit import Limit
from stackwise.gate.sequential import Rule, criteria
from stackwise.gate.verdict import Decision, Verdict
from stackwise.support.arguments import check_sizes, require

__all__ = ["MIN_POINTS", "ONE_LOOK", "WINDOW", "Judgement", "decide", "judge"]

# Error rates of a single look. The looks of this rule are not used.
ONE_LOOK = Rule(alpha=0.01, miss=0.01, confirm=0.05, run_alpha=0.01)
# Minimum number of results for an estimate of their spread.
MIN_POINTS = 8
# Maximum number of results. Older ones are not relevant, and the time of the search is quadratic.
WINDOW = 128
_REASONS = {
    Verdict.IMPROVED: "the whole interval is below 0",
    Verdict.PASS: "the whole interval is below the tolerance",
    Verdict.REGRESSED: "the whole interval is above 0",
}


@dataclass(frozen=True)
class Judgement:
    """Judgement of a result by its history.

    Attributes:
        decision: decision; its `rounds` are the runs of the new revision.
        standing: use of the result in the judgement of later results.
        points: number of results in the latest segment, by which the result was judged.
    """

    decision: Decision
    standing: Standing
    points: int


def judge(
    history: Sequence[Point],
    new: Sequence[Result],
    limit: Limit,
    *,
    drifted: str = "",
    n_tests: int = 1,
) -> Judgement:
    """Compare the runs of a new revision with the latest segment of its history.

    The difference between the first run and the mean of the segment has Student's prediction interval, mean
    +- t s sqrt(1 + 1/n). The segment has one value per run, so it measures the spread between runs. If the
    interval is above 0 and the difference is above the minimum effect, the verdict is REGRESSED. If the
    interval is below the tolerance, the verdict is PASS. A flagged run should be followed by a second run.
    The second run is judged separately, and its verdict is final. If the two runs contradict each other, the
    verdict is INCONCLUSIVE. Both use the mean of the segment, so they are not quite independent.

    Args:
        history: results to compare with (`Store.points` with `counted`), oldest first.
        new: runs of the revision in order: one, and a second one if the first was flagged.
        limit: limit of the metric.
        drifted: reason why the machine has changed (`Band.outside`); "": it has not changed.
        n_tests: number of judged results in the whole run.

    Raises:
        ValueError: no new run, or runs both with and without a reference.
    """
    require(len(new) > 0, "new", len(new), "one run or more")
    referenced = new[0].reference is not None
    require(all((run.reference is not None) == referenced for run in new), "new", "both", "runs of one kind")
    check_sizes(n_tests=n_tests)
    # Log-ratios with and without a reference are not comparable.
    points = [point for point in history if (point.reference is not None) == referenced][-WINDOW:]
    values = [point.log_ratio for point in points]
    start = latest_segment(values)
    points, values = points[start:], values[start:]
    count = len(values)
    if drifted:
        reason = f"the machine is not as it was: {drifted}"
        return Judgement(_undecided(values, new, reason), Standing.EXCLUDED, count)
    if count < MIN_POINTS:
        reason = f"{count} results since the last change, and {MIN_POINTS} are needed"
        return Judgement(_undecided(values, new, reason), Standing.ACCEPTED, count)
    at = limit.at(statistics.median(point.level for point in points))
    # Without a second run a flag is final, so its error rate is divided by the number of judged results.
    alpha = ONE_LOOK.alpha if len(new) > 1 else min(ONE_LOOK.alpha, ONE_LOOK.run_alpha / n_tests)
    decision = _decide(values, new[0], at, alpha)
    if decision.verdict in (Verdict.REGRESSED, Verdict.IMPROVED) and len(new) > 1:
        again = _decide(values, new[1], at, ONE_LOOK.confirmation(n_tests).alpha)
        contrary = {decision.verdict, again.verdict} == {Verdict.REGRESSED, Verdict.IMPROVED}
        if contrary:
            return Judgement(
                _undecided(values, new, "the two runs contradict each other"), Standing.of(None), count
            )
        decision = replace(again, confirmed=again.verdict is decision.verdict, rounds=len(new))
    return Judgement(decision, Standing.of(decision.verdict), count)


def decide(
    difference: float,
    error: float,
    freedom: float,
    tolerance: float,
    minimum_effect: float,
    *,
    alpha: float,
    miss: float,
    rounds: int,
    doubt: str,
    source: str,
) -> Decision:
    """Return a decision by the criteria of the gate (`stackwise.gate.sequential.criteria`).

    Args:
        difference: log(head / base).
        error: standard error of the difference; 0 for exact values.
        freedom: degrees of freedom of the standard error.
        tolerance: logarithm of the tolerance.
        minimum_effect: logarithm of the minimum effect.
        alpha: probability that an unchanged cost is found slower; the same for faster.
        miss: probability that a change as large as the tolerance passes.
        rounds: number of rounds, for the Decision.
        doubt: reason for an INCONCLUSIVE verdict, as half a sentence.
        source: source of the interval, as half a sentence.
    """
    flag, above = (-float(stdtrit(freedom, chance)) * error for chance in (alpha, miss))
    verdict = criteria(difference, flag, above, tolerance, minimum_effect)
    reason = doubt if verdict is Verdict.INCONCLUSIVE else _REASONS[verdict]
    above = flag if verdict is Verdict.IMPROVED else above
    return Decision(
        verdict,
        math.expm1(difference),
        math.expm1(difference - flag),
        math.expm1(difference + above),
        level=1 - alpha - (alpha if verdict is Verdict.IMPROVED else miss),
        rounds=rounds,
        confirmed=False,
        reason=f"{reason}; {source}",
    )


def _decide(values: Sequence[float], new: Result, limits: tuple[float, float], alpha: float) -> Decision:
    count, spread = len(values), statistics.stdev(values)
    return decide(
        new.log_ratio - statistics.fmean(values),
        spread * math.sqrt(1 + 1 / count),
        count - 1,
        *limits,
        alpha=alpha,
        miss=ONE_LOOK.miss,
        rounds=1,
        doubt=f"runs differ by {math.expm1(spread):.2%} (standard deviation), too much to tell",
        source=f"by the {count} results of the latest segment",
    )


def _undecided(values: Sequence[float], new: Sequence[Result], reason: str) -> Decision:
    estimate = math.expm1(new[0].log_ratio - statistics.fmean(values)) if values else math.nan
    return Decision.undecided(reason, estimate, len(new))
