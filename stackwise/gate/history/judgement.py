"""Judgement: a new result held to those before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stackwise.gate.history.baseline import Standing
from stackwise.gate.history.change_point import latest_segment
from stackwise.gate.history.interval import ONE_LOOK, decide
from stackwise.gate.history.point import Point, Result
from stackwise.gate.limit import Limit
from stackwise.gate.sequential import Rule
from stackwise.gate.verdict import Decision, Verdict
from stackwise.support.arguments import check_sizes, require

__all__ = ["MIN_POINTS", "WINDOW", "Judgement", "judge"]

# Of fewer it is not known how far two runs differ.
MIN_POINTS = 8
# Results that are looked at: what is longer ago says nothing of today, and the search takes its square.
WINDOW = 128


@dataclass(frozen=True)
class Judgement:
    """What history says of a result.

    Attributes:
        decision: its verdict; `rounds` are the runs of the new revision.
        standing: whether later results are judged by it.
        points: results of the latest segment, which it was judged by.
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
    rule: Rule = ONE_LOOK,
    n_tests: int = 1,
    seed: int = 0,
) -> Judgement:
    """Hold the runs of a new revision to the latest segment of those before.

    The difference of the first run to the mean of the segment has an interval: Student's prediction
    interval, mean +- t s sqrt(1 + 1/n), of the values of the segment, which are one per run and so know how
    far runs differ. Whole above 0 and above the minimum effect: REGRESSED. Whole below the tolerance: PASS. A
    run that is flagged is to be followed by a second one, which is judged by itself, and whose verdict is the
    verdict; the two share the segment's mean, so that they are not quite independent.

    Args:
        history: that counts (`Store.points` with `counted`), the oldest first.
        new: runs of the revision, in their order: one, and a second where the first was flagged.
        limit: of the metric.
        drifted: why the machine is not as it was (`Band.outside`); "": it is.
        rule: whose chances of error are used.
        n_tests: results that are judged in the whole run.
        seed: of the search for change points.

    Raises:
        ValueError: no new run, or not all of them with a reference or without.
    """
    require(len(new) > 0, "new", len(new), "one run or more")
    referenced = new[0].reference is not None
    require(all((run.reference is not None) == referenced for run in new), "new", "both", "runs of one kind")
    check_sizes(n_tests=n_tests)
    # With a reference or without: their log-ratios are not alike.
    points = [point for point in history if (point.reference is not None) == referenced][-WINDOW:]
    values = [point.log_ratio for point in points]
    start = latest_segment(values, seed=seed)
    points, values = points[start:], values[start:]
    count = len(values)
    if drifted:
        reason = f"the machine is not as it was: {drifted}"
        return Judgement(_undecided(values, new, reason), Standing.EXCLUDED, count)
    if count < MIN_POINTS:
        reason = f"{count} results since the last change, and {MIN_POINTS} are needed"
        return Judgement(_undecided(values, new, reason), Standing.ACCEPTED, count)
    at = limit.at(statistics.median(point.level for point in points))
    # A flag that no second run will look at stands for itself, among as many as are judged.
    alpha = rule.alpha if len(new) > 1 else min(rule.alpha, rule.run_alpha / n_tests)
    decision = _decide(values, new[0], at, alpha, rule.miss)
    if decision.verdict in (Verdict.REGRESSED, Verdict.IMPROVED) and len(new) > 1:
        again = _decide(values, new[1], at, rule.confirmation(n_tests).alpha, rule.miss)
        contrary = {decision.verdict, again.verdict} == {Verdict.REGRESSED, Verdict.IMPROVED}
        if contrary:
            return Judgement(
                _undecided(values, new, "the two runs contradict each other"), Standing.of(None), count
            )
        decision = replace(again, confirmed=again.verdict is decision.verdict, rounds=len(new))
    return Judgement(decision, Standing.of(decision.verdict), count)


def _decide(
    values: Sequence[float], new: Result, limits: tuple[float, float], alpha: float, miss: float
) -> Decision:
    count, spread = len(values), statistics.stdev(values)
    return decide(
        new.log_ratio - statistics.fmean(values),
        spread * math.sqrt(1 + 1 / count),
        count - 1,
        *limits,
        alpha=alpha,
        miss=miss,
        rounds=1,
        doubt=f"runs differ by {math.expm1(spread):.2%} (standard deviation), too much to tell",
        source=f"by the {count} results of the latest segment",
    )


def _undecided(values: Sequence[float], new: Sequence[Result], reason: str) -> Decision:
    estimate = math.expm1(new[0].log_ratio - statistics.fmean(values)) if values else math.nan
    return Decision(
        Verdict.INCONCLUSIVE, estimate, -math.inf, math.inf, 0.0, len(new), confirmed=False, reason=reason
    )
