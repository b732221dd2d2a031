"""Asv: asv continuous with interleaved rounds, and what it is sure of by its own test."""

from __future__ import annotations

import json
import math
import shutil
import site
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gate import command
from bench.gate.command import tail
from bench.gate.repository import BASE, SUITE, Repository
from bench.gate.tools.tool import PASS, REGRESSED, Outcome, Tool, ToolFailedError, branches_of, patience
from bench.marked_tables import ROOT

__all__ = ["Asv"]

_SETUP_SECONDS = 2400.0


class Asv(Tool):
    """asv continuous with interleaved rounds."""

    name, packages = "asv continuous", ("asv",)
    effort, least_effort = 2.0, 0.05
    rules = ("factor 1.1", "factor 1.05")

    def prepare(self, repository: Repository) -> None:
        """Make its environment."""
        folder = self._project(repository)
        self._run(folder, "machine", "--yes")
        # It ends with 1 where all went well, since it hands its list of environments on as the code.
        printed = self._run(folder, "setup", codes=(0, 1))
        if not list((folder / "env").glob("*/bin/python")):
            raise ToolFailedError(f"asv made no environment: {tail(printed)}")

    def compare(
        self, repository: Repository, head: str, names: tuple[str, ...], effort: float, seconds: float
    ) -> dict[str, Outcome]:
        folder = self._project(repository)
        shutil.rmtree(folder / "results", ignore_errors=True)
        arguments = ["continuous", BASE, head, "--interleave-rounds", "-a", f"repeat=(2,100000,{effort:.3f})"]
        printed = self._run(folder, *arguments, seconds=patience(seconds), codes=(0, 1))
        # Which of the differences asv is sure of does not depend on the factor.
        sure = self._run(folder, "compare", "--factor=1.000001", BASE, head, seconds=patience(seconds))
        sides = self._results(folder, repository, head)
        return {name: self._outcome(name, sides, sure, printed) for name in names}

    def _run(
        self, folder: Path, *arguments: str, seconds: float = _SETUP_SECONDS, codes: tuple[int, ...] = (0,)
    ) -> str:
        line = [sys.executable, "-m", "asv", *arguments]
        return command.run(line, folder, seconds=seconds, codes=codes, environment={"HOME": str(folder)})

    def _project(self, repository: Repository) -> Path:
        folder = repository.folder / "asv"
        folder.mkdir(exist_ok=True)
        sites = " ".join(f'"{path}"' for path in [*site.getsitepackages(), str(ROOT)])
        configuration = {
            "version": 1,
            "project": "subject",
            "repo": str(repository.origin),
            "branches": [BASE],
            "environment_type": "virtualenv",
            "benchmark_dir": str(repository.origin / "asv_benchmarks"),
            "env_dir": "env",
            "results_dir": "results",
            "html_dir": "html",
            "build_command": [],
            "install_command": [f'python {SUITE / "asv_install.py"} "{{build_dir}}" {sites}'],
            "uninstall_command": [],
        }
        (folder / "asv.conf.json").write_text(json.dumps(configuration))
        return folder

    def _results(self, folder: Path, repository: Repository, head: str) -> dict[str, dict[str, Any]]:
        sides: dict[str, dict[str, Any]] = {}
        for side, branch in branches_of(head).items():
            commit = command.run(["git", "rev-parse", branch], repository.tree(branch))
            [path] = (folder / "results").glob(f"*/{commit[:8]}-*.json")
            record = json.loads(path.read_text())
            [row] = record["results"].values()
            of = dict(zip(record["result_columns"], row, strict=False))
            calls = [call.strip("'") for call in of["params"][0]]
            sides[side] = {
                call: {"median": of["result"][i], "samples": len(of["samples"][i])}
                for i, call in enumerate(calls)
                if of["result"][i] is not None
            }
        return sides

    def _outcome(self, name: str, sides: Mapping[str, Mapping[str, Any]], sure: str, printed: str) -> Outcome:
        for side in sides.values():
            if name not in side:
                raise ToolFailedError(f"asv measured nothing of {name}: {tail(printed)}")
        raw = {side: sides[side][name] for side in ("base", "head")}
        change = raw["head"]["median"] / raw[BASE]["median"] - 1
        mark = _mark(name, sure)
        estimate = change if mark in "+-" else -math.inf
        verdicts = {rule: REGRESSED if estimate > float(rule.split()[1]) - 1 else PASS for rule in self.rules}
        # Its own word at its own factor.
        verdicts["factor 1.1"] = REGRESSED if _mark(name, printed) == "+" else PASS
        return Outcome(verdicts, dict.fromkeys(self.rules, estimate), {**raw, "sure": mark in "+-"})


def _mark(name: str, printed: str) -> str:
    """What asv puts in front of a call in its table: "+" slower, "-" faster, else " "."""
    for line in printed.splitlines():
        if line.startswith("|") and f"time_call({name!r})" in line:
            mark = line.strip("|").split("|")[0].strip()
            return mark or " "
    return " "
