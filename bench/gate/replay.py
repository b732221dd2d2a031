"""Replay: what the gate's rule, as it is now, says of the rounds that are on file.

Rounds do not depend on the rule, but for how many of them are made. Where it decides as early as it did, or
earlier, or the time was up, a replay is what a run would have said. Where it wants more rounds than were made
it is INCONCLUSIVE here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.gate.runs import Run
from bench.gate.tools import OURS
from bench.gate.tools.stackwise import outcome_of
from bench.gate.tools.tool import Outcome
from stackwise.gate.limit import Limit
from stackwise.gate.trial import Trial

__all__ = ["changed", "replayed"]

_TIME = "the time is up"


def replayed(runs: Sequence[Run]) -> list[Run]:
    """Those of the gate judged anew, the others as they are."""
    return [_replayed(run) if run.tool == OURS and run.error is None else run for run in runs]


def changed(before: Sequence[Run], after: Sequence[Run]) -> dict[str, int]:
    """How many decisions of the gate there are, and how many became another, by what they were and are."""
    counts = {"decisions": 0}
    for old, new in zip(before, after, strict=True):
        if old.tool != OURS:
            continue
        for name, outcome in old.outcomes.items():
            counts["decisions"] += 1
            was, now = outcome.verdicts["gate"], new.outcomes[name].verdicts["gate"]
            if was != now:
                key = f"{was} to {now}"
                counts[key] = counts.get(key, 0) + 1
    return counts


def _replayed(run: Run) -> Run:
    n_tests = sum(1 + len(outcome.raw["others"]) for outcome in run.outcomes.values())
    outcomes = {name: _judged_anew(outcome, n_tests) for name, outcome in run.outcomes.items()}
    return replace(run, outcomes=outcomes)


def _judged_anew(outcome: Outcome, n_tests: int) -> Outcome:
    raw = outcome.raw
    if not raw.get("differences"):  # not begun
        return outcome
    trial = Trial(Limit(), n_tests=n_tests)
    for difference, base in zip(raw["differences"], raw["base"], strict=True):
        trial.add(difference, base)
        if trial.decided:
            break
    was_up = raw["reason"].endswith(_TIME)
    decision = trial.conclude(_TIME if was_up else "no more rounds are on file", together=was_up)
    kept = {**raw, "base": raw["base"][: len(trial.differences)]}
    return outcome_of(decision.to_dict(), trial.differences, Limit(), n_tests, kept)
