"""Record: results of a gate in the form of the history, and their judgement by the history."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from scipy.special import stdtrit

from stackwise.gate.history.judgement import WINDOW, Judgement, judge
from stackwise.gate.history.machine import Machine
from stackwise.gate.history.point import Result
from stackwise.gate.history.reference import ReferenceTime, log_ratio, median_time
from stackwise.gate.history.store import Store
from stackwise.gate.limit import Limits
from stackwise.gate.result import GateResult
from stackwise.support.arguments import check_number, require

__all__ = ["Band", "judge_run", "judged_results", "results_of"]

# Minimum number of runs for an estimate of their spread.
_MIN_RUNS = 8
# Minimum distance of the limits from the mean, even if eight runs were equal.
_NARROWEST = math.log1p(0.02)
_PARTS = {"gemm": "the product of matrices", "copy": "the copy of memory"}


def results_of(gate: GateResult) -> list[Result]:
    """Return the results of head in a gate, for the history. A metric without a measurement is skipped.

    Without a reference the history has levels only, which include every drift of the machine.

    Raises:
        ValueError: a test without a reference time in each of its rounds.
    """
    found = []
    for test in gate.tests:
        references = [ReferenceTime(*each) for each in test.reference]
        for metric, trial in test.trials.items():
            if not trial.head:
                continue
            # A metric that was decided early has fewer rounds than its test.
            times = () if trial.unit == "B" else tuple(references[: len(trial.head)])
            require(
                not times or len(times) == len(trial.head),
                f"references of {test.nodeid}",
                len(times),
                f"one for each of {len(trial.head)} rounds",
            )
            level = statistics.median(trial.head)
            found.append(
                Result(
                    test.nodeid,
                    metric,
                    level,
                    log_ratio(trial.head, times) if times else math.log(level),
                    median_time(times) if times else None,
                    trial.decision.verdict,
                    trial.decision.to_dict(),
                )
            )
    return found


def judge_run(
    store: Store,
    machine: Machine,
    results: Sequence[Result],
    limits: Limits | Mapping[str, Limits],
    *,
    branch: str = "main",
    commit: str = "",
    again: Sequence[Result] = (),
) -> dict[tuple[str, str], Judgement]:
    """Judge the results of a run by the history of its machine, and return the judgements. Store no results.

    Args:
        store: the history.
        machine: machine of the run. Results of another machine are not used.
        results: results of the run.
        limits: limits of all tests, or by node ID.
        branch: branch of the results that are used.
        commit: commit of the run. Its stored results are not part of its history; "": unknown.
        again: results of a second run for tests that the first one had flagged.

    Returns:
        judgements by test and metric, for metrics with a limit.

    Raises:
        ValueError: a test without limits.
    """
    second = {(each.test, each.metric): each for each in again}
    drifted = _drifted(store, machine, results)
    found = {}
    for each in results:
        if not isinstance(limits, Limits):
            require(each.test in limits, "limits", sorted(limits), f"those of {each.test} too")
        limit = (limits if isinstance(limits, Limits) else limits[each.test]).of(each.metric)
        if limit is None:
            continue
        name = each.test, each.metric
        points = store.points(machine, *name, branch=branch, counted=True, last=WINDOW)
        history = [point for point in points if not commit or point.commit != commit]
        new = [each, second[name]] if name in second else [each]
        reason = "" if each.reference is None else drifted
        found[name] = judge(history, new, limit, drifted=reason, n_tests=len(results))
    return found


def judged_results(
    results: Sequence[Result], judgements: Mapping[tuple[str, str], Judgement]
) -> list[Result]:
    """Return the results with their judgements, for the store."""
    found = []
    for each in results:
        said = judgements.get((each.test, each.metric))
        if said is None:
            found.append(each)
        else:
            decision = said.decision
            told = replace(each, verdict=decision.verdict, decision=decision.to_dict())
            found.append(replace(told, standing=said.standing))
    return found


def _drifted(store: Store, machine: Machine, results: Sequence[Result]) -> str:
    """Return the reason why the machine has changed; "" if it has not, or without a reference or a band."""
    times = [each.reference for each in results if each.reference is not None]
    band = Band.of(store.references(machine)) if times else None
    if band is None:
        return ""
    gemm, copy = (statistics.fmean(getattr(each, part) for each in times) for part in ("gemm", "copy"))
    return band.outside(ReferenceTime(gemm, copy))


@dataclass(frozen=True)
class Band:
    """Expected times of the reference in the next run.

    Slow drift moves the band, and the ratios to the reference cancel it. A time outside of the band is a
    sudden change: another clock rate, a busy neighbour, or memory that became slower while the processor did
    not. The ratio of a test to the reference may then be different too, so the test is not judged.

    Attributes:
        gemm: minimum and maximum seconds of the matrix product.
        copy: minimum and maximum seconds of the memory copy.
        runs: number of runs from which the band is computed.
    """

    gemm: tuple[float, float]
    copy: tuple[float, float]
    runs: int

    @classmethod
    def of(cls, references: Sequence[ReferenceTime], *, alpha: float = 0.001) -> Self | None:
        """Return the prediction interval of the next run.

        It is Student's t interval of the logarithms, and at least 2 % to each side.

        Args:
            references: reference times of the previous runs, one each.
            alpha: probability that a run of the same machine is outside of the band, per part.

        Returns:
            the band; None with fewer than 8 runs.
        """
        check_number("alpha", alpha, "a number between 0 and 1", lambda value: 0 < value < 1)
        count = len(references)
        if count < _MIN_RUNS:
            return None
        quantile = -float(stdtrit(count - 1, alpha / 2)) * math.sqrt(1 + 1 / count)
        found = {}
        for part in _PARTS:
            logs = [math.log(getattr(each, part)) for each in references]
            middle = statistics.fmean(logs)
            half = max(quantile * statistics.stdev(logs), _NARROWEST)
            found[part] = math.exp(middle - half), math.exp(middle + half)
        return cls(**found, runs=count)

    def outside(self, reference: ReferenceTime) -> str:
        """Return a sentence on the parts of the reference that are outside of the band; "" if none is."""
        said = []
        for part, name in _PARTS.items():
            (low, high), seconds = getattr(self, part), getattr(reference, part)
            if not low <= seconds <= high:
                expected = f"{low * 1e3:.3g} to {high * 1e3:.3g} ms"
                said.append(f"{name} took {seconds * 1e3:.3g} ms where {expected} were expected")
        return " and ".join(said)
