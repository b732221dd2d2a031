"""Stackwise: the gate itself, by its command line."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gate.command import tail
from bench.gate.repository import BASE, Repository
from bench.gate.tools.benchmarks import call_of, run_benchmarks
from bench.gate.tools.tool import INCONCLUSIVE, REGRESSED, Outcome, Tool, ToolFailedError
from stackwise.gate.limit import Limit
from stackwise.gate.trial import Trial

__all__ = ["OURS", "Stackwise", "first_flag", "outcome_of"]

OURS = "stackwise"


class Stackwise(Tool):
    """The gate, by its defaults. It ends when it has decided, and knows only when it has to."""

    name, packages = OURS, ("stackwise",)
    effort, least_effort = 1.0, 1.0

    def compare(
        self, repository: Repository, head: str, names: tuple[str, ...], effort: float, seconds: float
    ) -> dict[str, Outcome]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            arguments = [
                f"--stackwise-against={BASE}",
                f"--stackwise-gate-report={report}",
                f"--stackwise-gate-seconds={seconds * effort:.1f}",
            ]
            # Others of the tools bring plugins, which the processes of both sides would load.
            printed = run_benchmarks(
                repository.tree(head), arguments, without=("codspeed",), seconds=seconds, codes=(0, 1, 7)
            )
            if not report.exists():
                raise ToolFailedError(f"the gate wrote no report: {tail(printed)}")
            result = json.loads(report.read_text())
        tests = {call_of(test["nodeid"]): test for test in result["tests"]}
        checks = {key: result[key] for key in ("order_bias", "balance", "rounds", "seconds")}
        return {name: self._outcome(tests[name], checks) for name in names}

    def _outcome(self, test: Mapping[str, Any], checks: Mapping[str, Any]) -> Outcome:
        if test["status"] == "not begun":
            # It knows nothing in the time that there was, which is an answer.
            rules = ("gate", "flagged")
            raw = {"reason": test["detail"], "others": {}, **checks}
            return Outcome(dict.fromkeys(rules, INCONCLUSIVE), dict.fromkeys(rules, -math.inf), raw)
        if test["status"] != "measured":
            raise ToolFailedError(f"{test['nodeid']}: {test['status']}: {test['detail']}")
        trial = test["trials"]["time"]
        raw = {
            "test_seconds": test["seconds"],
            "base": trial["base"],
            "others": {m: t["decision"]["verdict"] for m, t in test["trials"].items() if m != "time"},
            **checks,
        }
        limit = Limit(trial["tolerance"], trial["minimum_effect"])
        return outcome_of(trial["decision"], trial["differences"], limit, len(test["trials"]), raw)


def outcome_of(
    decision: Mapping[str, Any],
    differences: Sequence[float],
    limit: Limit,
    n_tests: int,
    raw: Mapping[str, Any],
) -> Outcome:
    """What the gate said of a call.

    Args:
        decision: as a dictionary.
        differences: of the rounds that it is of.
        limit: of the call's time.
        n_tests: how many trials were decided together.
        raw: what else is kept of it.
    """
    low, estimate = (_known(decision[key]) for key in ("low", "estimate"))
    verdict, flagged = decision["verdict"], first_flag(list(differences), limit, n_tests)
    kept = {key: decision[key] for key in ("low", "high", "estimate", "rounds", "reason")}
    return Outcome(
        {"gate": verdict, "flagged": REGRESSED if flagged else verdict},
        {"gate": low, "flagged": estimate},
        {**raw, **kept, "differences": [round(each, 6) for each in differences]},
    )


def _known(value: float | None) -> float:
    return -math.inf if value is None else value


def first_flag(differences: list[float], limit: Limit, n_tests: int) -> bool:
    """Whether the first rounds alone called it slower, before any were made again to confirm that."""
    trial = Trial(limit, n_tests=n_tests)
    for number, difference in enumerate(differences, start=1):
        trial.add(difference, 1.0)
        if trial.confirming or trial.decided:
            return trial.confirming and sum(differences[:number]) > 0
    return False
