"""PytestBenchmark: pytest-benchmark, which compares the head with a stored base by its own options."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gate.command import tail
from bench.gate.repository import BASE, Repository
from bench.gate.tools.benchmarks import benchmarks_in, call_of, run_benchmarks
from bench.gate.tools.share_rule import field_of, judged, threshold_of
from bench.gate.tools.tool import PASS, REGRESSED, Outcome, Tool, ToolFailedError, branches_of

__all__ = ["PytestBenchmark", "failed_rules"]


class PytestBenchmark(Tool):
    """pytest-benchmark: the base has just run when the head is compared with it."""

    name, packages = "pytest-benchmark", ("pytest-benchmark",)
    effort, least_effort = 3.0, 0.1
    rules = ("mean:5%", "mean:10%", "median:5%", "median:10%", "min:5%", "min:10%")

    def compare(
        self, repository: Repository, head: str, names: tuple[str, ...], effort: float, seconds: float
    ) -> dict[str, Outcome]:
        with tempfile.TemporaryDirectory() as folder:
            paths = {side: Path(folder) / f"{side}.json" for side in branches_of(head)}
            printed = ""
            for side, branch in branches_of(head).items():
                arguments = [f"--benchmark-max-time={effort}", f"--benchmark-json={paths[side]}"]
                if side == "head":
                    # All rules at once: of several options the last one wins.
                    arguments += [
                        f"--benchmark-compare={paths[BASE]}",
                        "--benchmark-compare-fail",
                        *self.rules,
                    ]
                printed = run_benchmarks(
                    repository.tree(branch),
                    arguments,
                    without=("codspeed", "stackwise"),
                    seconds=seconds,
                    codes=(0, 1) if side == "head" else (0,),
                )
            if not paths["head"].exists():
                raise ToolFailedError(f"pytest-benchmark wrote no numbers: {tail(printed)}")
            stats = {
                side: {call_of(each["name"]): each["stats"] for each in benchmarks_in(path)}
                for side, path in paths.items()
            }
        return {name: self._outcome(name, stats[BASE][name], stats["head"][name], printed) for name in names}

    def _outcome(self, name: str, base: Mapping[str, Any], head: Mapping[str, Any], printed: str) -> Outcome:
        kept = ("mean", "median", "min", "stddev", "rounds")
        raw = {"base": {key: base[key] for key in kept}, "head": {key: head[key] for key in kept}}
        failed = failed_rules(name, printed)
        outcome = judged(raw, self.rules)
        said = {
            rule: REGRESSED if (field_of(rule), threshold_of(rule)) in failed else PASS for rule in self.rules
        }
        return Outcome(said, outcome.estimates, raw)


_FAILED = re.compile(
    r"test_speed\[(?P<name>\w+)\] \(.*?\) - Field '(?P<field>\w+)' has failed "
    r"PercentageRegressionCheck: (?P<seen>[\d.]+) > (?P<limit>[\d.]+)"
)


def failed_rules(name: str, printed: str) -> set[tuple[str, float]]:
    """Field and threshold, in percent, of each check of a call that pytest-benchmark says to have failed."""
    return {
        (match["field"], float(match["limit"]))
        for match in _FAILED.finditer(printed)
        if match["name"] == name
    }
