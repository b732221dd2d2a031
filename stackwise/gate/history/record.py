"""Record: what a run found, judged by the history and put into it."""

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


def results_of(
    gate: GateResult, references: Mapping[str, Sequence[ReferenceTime]] | None = None
) -> list[Result]:
    """What a gate found of head, for the history. What was not measured is left out.

    Args:
        gate: the result.
        references: by node id, the reference's time in each round of the test; None: as the tests say.
            Without any the history has levels alone, which know every drift of the machine.

    Raises:
        ValueError: a test whose reference was not timed in each of its rounds.
    """
    found = []
    for test in gate.tests:
        said = [ReferenceTime(*each) for each in test.reference]
        given = said if references is None else references.get(test.nodeid, ())
        for metric, trial in test.trials.items():
            if not trial.head:
                continue
            # A metric that was decided early has no more rounds, though the test has.
            times = () if trial.unit == "B" else tuple(given[: len(trial.head)])
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
                    samples=trial.head,
                    reference_samples=times,
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
    seed: int = 0,
) -> dict[tuple[str, str], Judgement]:
    """Hold what a run found to the history of its machine. Nothing is stored.

    Args:
        store: the history.
        machine: that the run was on; no other's results are looked at.
        results: what it found.
        limits: of all tests, or by node id.
        branch: whose results count.
        commit: that was run: what is stored of it already is no history of it; "": not known.
        again: what a second run found of tests that the first had flagged.
        seed: of the search for change points.

    Returns:
        by test and metric, for those metrics that have a limit.

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
        found[name] = judge(history, new, limit, drifted=reason, n_tests=len(results), seed=seed)
    return found


def judged_results(
    results: Sequence[Result], judgements: Mapping[tuple[str, str], Judgement]
) -> list[Result]:
    """The results with what the history said of them, to be stored."""
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
    """Why the machine is not as it was; "" where it is, where nothing is known, or without a reference."""
    times = [each.reference for each in results if each.reference is not None]
    band = Band.of(store.references(machine)) if times else None
    if band is None:
        return ""
    gemm, copy = (statistics.fmean(getattr(each, part) for each in times) for part in ("gemm", "copy"))
    return band.outside(ReferenceTime(gemm, copy))
