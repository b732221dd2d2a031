"""Codspeed: pytest-codspeed's walltime instrument, and the comparison that its documentation tells of.

The instrument is its own. The comparison is what its documentation says: the head's time over the base's,
with a threshold of 10 % where nobody has chosen another. Which time that is it does not say; its pages show
the best one, and the mean is judged beside it.
"""

from __future__ import annotations

import shutil

from bench.gate.repository import Repository
from bench.gate.tools.benchmarks import benchmarks_in, call_of, run_benchmarks
from bench.gate.tools.share_rule import judged
from bench.gate.tools.tool import Outcome, Tool, branches_of

__all__ = ["Codspeed"]


class Codspeed(Tool):
    """pytest-codspeed's walltime instrument, and the threshold of its documentation."""

    name, packages = "codspeed walltime", ("pytest-codspeed",)
    effort, least_effort = 3.0, 0.1
    rules = ("min:10%", "min:5%", "mean:10%", "mean:5%")

    def compare(
        self, repository: Repository, head: str, names: tuple[str, ...], effort: float, seconds: float
    ) -> dict[str, Outcome]:
        sides = {}
        for side, branch in branches_of(head).items():
            tree = repository.tree(branch)
            shutil.rmtree(tree / ".codspeed", ignore_errors=True)
            arguments = [
                "--codspeed",
                "--codspeed-mode=walltime",
                # A quarter of the time for warming up, as by its own numbers.
                f"--codspeed-warmup-time={min(1.0, effort / 3)}",
                f"--codspeed-max-time={effort}",
            ]
            run_benchmarks(tree, arguments, without=("stackwise",), seconds=seconds)
            [path] = (tree / ".codspeed").glob("results_*.json")
            sides[side] = {
                call_of(each["name"]): {key: each["stats"][f"{key}_ns"] * 1e-9 for key in ("min", "mean")}
                for each in benchmarks_in(path)
            }
        by_call = {name: {side: found[name] for side, found in sides.items()} for name in names}
        return {name: judged(raw, self.rules) for name, raw in by_call.items()}
