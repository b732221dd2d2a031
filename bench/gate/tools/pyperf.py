"""Pyperf: pyperf compare_to and its t test, of as many processes as there is time for."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.gate import command
from bench.gate.command import tail
from bench.gate.repository import BASE, Repository
from bench.gate.tools.benchmarks import benchmarks_in
from bench.gate.tools.tool import PASS, REGRESSED, Outcome, Tool, ToolFailedError, branches_of, patience

__all__ = ["Pyperf"]


class Pyperf(Tool):
    """pyperf compare_to, of as many processes as there is time for."""

    name, packages = "pyperf", ("pyperf",)
    effort, least_effort = 2.0, 2.0
    rules = ("significant", "significant, 5%")
    values, loops, least = 5, 16, 2

    def compare(
        self, repository: Repository, head: str, names: tuple[str, ...], effort: float, seconds: float
    ) -> dict[str, Outcome]:
        # Whole processes first; what is left makes each of them longer.
        processes = max(self.least, int(effort))
        values = max(2, round(self.values * effort / processes))
        with tempfile.TemporaryDirectory() as folder:
            paths = {side: Path(folder) / f"{side}.json" for side in branches_of(head)}
            for side, branch in branches_of(head).items():
                arguments = [
                    f"--processes={processes}",
                    f"--values={values}",
                    "--warmups=1",
                    f"--loops={self.loops}",
                    f"--inherit-environ={','.join(command.ENVIRONMENT)}",
                    "--quiet",
                    f"--output={paths[side]}",
                ]
                line = [sys.executable, "pyperf_speed.py", *arguments]
                command.run(line, repository.tree(branch), seconds=patience(seconds))
            line = [sys.executable, "-m", "pyperf", "compare_to", *map(str, paths.values()), "--verbose"]
            printed = command.run(line, repository.folder, seconds=patience(seconds))
            sides = {side: self._values(path) for side, path in paths.items()}
        return {name: self._outcome(name, sides, printed) for name in names}

    def _values(self, path: Path) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for benchmark in benchmarks_in(path):
            values = [value for run in benchmark["runs"] for value in run.get("values", [])]
            found[benchmark["metadata"]["name"]] = values
        return found

    def _outcome(self, name: str, sides: Mapping[str, Mapping[str, list[float]]], printed: str) -> Outcome:
        means = {side: sum(values[name]) / len(values[name]) for side, values in sides.items()}
        change = means["head"] / means[BASE] - 1
        estimate = change if _is_significant(name, printed) else -math.inf
        verdicts = {
            "significant": REGRESSED if estimate > 0 else PASS,
            "significant, 5%": REGRESSED if estimate > 0.05 else PASS,
        }
        raw = {"means": means, "values": {side: len(values[name]) for side, values in sides.items()}}
        return Outcome(verdicts, dict.fromkeys(self.rules, estimate), {**raw, "sure": estimate > -math.inf})


def _is_significant(name: str, printed: str) -> bool:
    """What pyperf says in its verbose comparison of a benchmark."""
    _, begin, rest = printed.partition(f"{name}\n{'=' * len(name)}\n")
    if not begin:
        raise ToolFailedError(f"pyperf says nothing of {name}: {tail(printed)}")
    for line in rest.splitlines():
        if line.startswith("Significant"):
            return True
        if line.startswith(("Not significant", "ERROR")):
            return False
    raise ToolFailedError(f"pyperf says nothing of {name}: {tail(printed)}")
