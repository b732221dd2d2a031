"""Record: results of a gate in the form of the history, and their judgement by the history."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stackwise.gate.history.drift import Band
from stackwise.gate.history.judgement import WINDOW, Judgement, judge
from stackwise.gate.history.machine import Machine
from stackwise.gate.history.point import Result
from stackwise.gate.history.reference import ReferenceTime, log_ratio, median_time
from stackwise.gate.history.store import Store
from stackwise.gate.limit import Limits
from stackwise.gate.result import GateResult
from stackwise.support.arguments import require

__all__ = ["judge_run", "judged_results", "results_of"]


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
