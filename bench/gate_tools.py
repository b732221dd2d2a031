"""Tools that compare two commits of `bench.gate_repository`, each by its own command line.

A tool is given an effort, which its command lines turn into seconds of measuring, and hands over for each
call what its rules say of it and what they said it from. Rules of others are theirs: pytest-benchmark's
`--benchmark-compare-fail`, asv's factor with its test, pyperf's t test. Of CodSpeed the walltime instrument
is its own, and the comparison is what its documentation says: the head's time over the base's, with a
threshold of 10 % where nobody has chosen another. Which time that is it does not say; its pages show the
best one, and the mean is judged beside it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gate_repository import BASE, SUITE, Repository
from stackwise.gate.limit import Limit
from stackwise.gate.trial import Trial

__all__ = ["OURS", "REGRESSED", "TOOLS", "Outcome", "Tool", "ToolFailedError", "missing_tools", "versions"]

OURS = "stackwise"
REGRESSED, PASS, INCONCLUSIVE = "REGRESSED", "PASS", "INCONCLUSIVE"
_ROOT = Path(__file__).parent.parent
_BENCHMARKS = "bench/test_speed.py"
# Of all tools alike.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_TAIL = 2000
_SPARE_SECONDS = 120.0
_PATIENCE = 20.0  # seconds that a command has to end, once it is told to


class ToolFailedError(RuntimeError):
    """A command line ended with neither of the codes that a comparison ends with, or not at all."""


@dataclass(frozen=True)
class Outcome:
    """What a tool said of one call.

    Attributes:
        verdicts: by the names of its rules: "REGRESSED", "PASS", "IMPROVED" or "INCONCLUSIVE".
        estimates: by the same names the relative change of the time, by which a threshold can be moved; -inf
            is below each, where a rule has also to be sure and was not.
        raw: what these were made of.
    """

    verdicts: dict[str, str]
    estimates: dict[str, float]
    raw: dict[str, Any] = field(default_factory=dict)


class Tool(ABC):
    """One of the tools.

    Attributes:
        name: of it.
        packages: that it needs, by their names in the package index.
        effort: to begin with.
        least_effort: with less of it nothing can be compared.
    """

    name: str
    packages: tuple[str, ...]
    effort: float
    least_effort: float

    def prepare(self, repository: Repository) -> None:  # noqa: B027  most have nothing to do
        """What is done once, and counts for no comparison."""

    @abstractmethod
    def compare(
        self, repository: Repository, head: str, names: tuple[str, ...], effort: float, seconds: float
    ) -> dict[str, Outcome]:
        """Compare the branch `head` with the base.

        Args:
            repository: that has both.
            head: the branch.
            names: of the calls.
            effort: how long it measures; the tool's own unit.
            seconds: that the comparison may take; it is ended after four times as many and two minutes.

        Raises:
            ToolFailedError: it did not compare.
        """


class Stackwise(Tool):
    """The gate, by its defaults. It ends when it has decided, and knows only when it has to."""

    name, packages = OURS, ("stackwise",)
    effort, least_effort = 1.0, 1.0

    def compare(
        self,
        repository: Repository,
        head: str,
        names: tuple[str, ...],
        effort: float,
        seconds: float,
    ) -> dict[str, Outcome]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            arguments = [
                f"--stackwise-against={BASE}",
                f"--stackwise-gate-report={report}",
                f"--stackwise-gate-seconds={seconds * effort:.1f}",
            ]
            # Others of the tools bring plugins, which the processes of both sides would load.
            printed = _pytest(repository.tree(head), arguments, ("codspeed",), seconds, codes=(0, 1, 7))
            if not report.exists():
                raise ToolFailedError(f"the gate wrote no report: {printed.strip()[-_TAIL:]}")
            result = json.loads(report.read_text())
        tests = {call_of(test["nodeid"]): test for test in result["tests"]}
        checks = {key: result[key] for key in ("order_bias", "balance", "rounds", "seconds")}
        return {name: self._outcome(tests[name], checks) for name in names}

    def _outcome(self, test: Mapping[str, Any], checks: Mapping[str, Any]) -> Outcome:
        if test["status"] != "measured":
            raise ToolFailedError(f"{test['nodeid']}: {test['status']}: {test['detail']}")
        trial = test["trials"]["time"]
        decision = trial["decision"]
        verdict = decision["verdict"]
        estimate = -math.inf if decision["estimate"] is None else decision["estimate"]
        limit = Limit(trial["tolerance"], trial["minimum_effect"])
        flagged = first_flag(trial["differences"], limit, len(test["trials"]))
        low = -math.inf if decision["low"] is None else decision["low"]
        raw = {
            "low": decision["low"],
            "high": decision["high"],
            "estimate": decision["estimate"],
            "rounds": decision["rounds"],
            "differences": [round(each, 6) for each in trial["differences"]],
            "test_seconds": test["seconds"],
            "base": trial["base"],
            "reason": decision["reason"],
            "others": {m: t["decision"]["verdict"] for m, t in test["trials"].items() if m != "time"},
            **checks,
        }
        return Outcome(
            {"gate": verdict, "flagged": REGRESSED if flagged else verdict},
            {"gate": low, "flagged": estimate},
            raw,
        )


def first_flag(differences: list[float], limit: Limit, n_tests: int) -> bool:
    """Whether the first rounds alone called it slower, before any were made again to confirm that."""
    trial = Trial(limit, n_tests=n_tests)
    for number, difference in enumerate(differences, start=1):
        trial.add(difference, 1.0)
        if trial.confirming or trial.decided:
            return trial.confirming and sum(differences[:number]) > 0
    return False


class PytestBenchmark(Tool):
    """pytest-benchmark: the base has just run when the head is compared with it."""

    name, packages = "pytest-benchmark", ("pytest-benchmark",)
    effort, least_effort = 3.0, 0.1
    rules = ("mean:5%", "mean:10%", "median:5%", "median:10%", "min:5%", "min:10%")

    def compare(
        self,
        repository: Repository,
        head: str,
        names: tuple[str, ...],
        effort: float,
        seconds: float,
    ) -> dict[str, Outcome]:
        with tempfile.TemporaryDirectory() as folder:
            paths = {side: Path(folder) / f"{side}.json" for side in (BASE, "head")}
            printed = ""
            for side, branch in ((BASE, BASE), ("head", head)):
                arguments = [f"--benchmark-max-time={effort}", f"--benchmark-json={paths[side]}"]
                if side == "head":
                    # All rules at once: of several options the last one wins.
                    arguments += [
                        f"--benchmark-compare={paths[BASE]}",
                        "--benchmark-compare-fail",
                        *self.rules,
                    ]
                printed = _pytest(
                    repository.tree(branch),
                    arguments,
                    ("codspeed", "stackwise"),
                    seconds,
                    codes=(0, 1) if side == "head" else (0,),
                )
            if not paths["head"].exists():
                raise ToolFailedError(f"pytest-benchmark wrote no numbers: {printed.strip()[-_TAIL:]}")
            stats = {
                side: {call_of(each["name"]): each["stats"] for each in _benchmarks(path)}
                for side, path in paths.items()
            }
        return {name: self._outcome(name, stats[BASE][name], stats["head"][name], printed) for name in names}

    def _outcome(self, name: str, base: Mapping[str, Any], head: Mapping[str, Any], printed: str) -> Outcome:
        kept = ("mean", "median", "min", "stddev", "rounds")
        raw = {"base": {key: base[key] for key in kept}, "head": {key: head[key] for key in kept}}
        failed = failed_rules(name, printed)
        outcome = judged(raw, self.rules)
        said = {
            rule: REGRESSED if (field_of(rule), *_threshold(rule)) in failed else PASS for rule in self.rules
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


def field_of(rule: str) -> str:
    """Of "mean:5%" the mean."""
    return rule.partition(":")[0]


def _threshold(rule: str) -> tuple[float]:
    return (float(rule.partition(":")[2].rstrip("%")),)


def judged(raw: Mapping[str, Any], rules: tuple[str, ...]) -> Outcome:
    """What rules such as "mean:5%" say of the numbers of two sides."""
    estimates = {rule: raw["head"][field_of(rule)] / raw["base"][field_of(rule)] - 1 for rule in rules}
    verdicts = {
        rule: REGRESSED if 100 * value > _threshold(rule)[0] else PASS for rule, value in estimates.items()
    }
    return Outcome(verdicts, estimates, dict(raw))


class Codspeed(Tool):
    """pytest-codspeed's walltime instrument, and the threshold of its documentation."""

    name, packages = "codspeed walltime", ("pytest-codspeed",)
    effort, least_effort = 3.0, 0.1
    rules = ("min:10%", "min:5%", "mean:10%", "mean:5%")

    def compare(
        self,
        repository: Repository,
        head: str,
        names: tuple[str, ...],
        effort: float,
        seconds: float,
    ) -> dict[str, Outcome]:
        sides = {}
        for side, branch in ((BASE, BASE), ("head", head)):
            tree = repository.tree(branch)
            shutil.rmtree(tree / ".codspeed", ignore_errors=True)
            arguments = [
                "--codspeed",
                "--codspeed-mode=walltime",
                # A quarter of the time for warming up, as by its own numbers.
                f"--codspeed-warmup-time={min(1.0, effort / 3)}",
                f"--codspeed-max-time={effort}",
            ]
            _pytest(tree, arguments, ("stackwise",), seconds, codes=(0,))
            [path] = (tree / ".codspeed").glob("results_*.json")
            sides[side] = {
                call_of(each["name"]): {key: each["stats"][f"{key}_ns"] * 1e-9 for key in ("min", "mean")}
                for each in _benchmarks(path)
            }
        return {
            name: judged({side: sides[side][name] for side in (BASE, "head")}, self.rules) for name in names
        }


class Asv(Tool):
    """asv continuous with interleaved rounds."""

    name, packages = "asv continuous", ("asv",)
    effort, least_effort = 2.0, 0.05
    rules = ("factor 1.1", "factor 1.05")

    def prepare(self, repository: Repository) -> None:
        """Make its environment."""
        folder = self._project(repository)
        environment = {"HOME": str(folder)}
        _command([*self._asv, "machine", "--yes"], folder, 600.0, (0,), environment)
        # It ends with 1 where all went well, since it hands its list of environments on as the code.
        printed = _command([*self._asv, "setup"], folder, 600.0, (0, 1), environment)
        if not list((folder / "env").glob("*/bin/python")):
            raise ToolFailedError(f"asv made no environment: {printed[-_TAIL:]}")

    def compare(
        self,
        repository: Repository,
        head: str,
        names: tuple[str, ...],
        effort: float,
        seconds: float,
    ) -> dict[str, Outcome]:
        folder = self._project(repository)
        shutil.rmtree(folder / "results", ignore_errors=True)
        environment = {"HOME": str(folder)}
        arguments = ["continuous", BASE, head, "--interleave-rounds", "-a", f"repeat=(2,100000,{effort:.3f})"]
        printed = _command([*self._asv, *arguments], folder, seconds, (0, 1), environment)
        # Which of the differences asv is sure of does not depend on the factor.
        sure = _command(
            [*self._asv, "compare", "--factor=1.000001", BASE, head], folder, seconds, (0,), environment
        )
        sides = self._results(folder, repository, head)
        return {name: self._outcome(name, sides, sure, printed) for name in names}

    _asv = (sys.executable, "-m", "asv")

    def _project(self, repository: Repository) -> Path:
        folder = repository.folder / "asv"
        folder.mkdir(exist_ok=True)
        sites = " ".join(f'"{path}"' for path in [*site.getsitepackages(), str(_ROOT)])
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
        for side, branch in ((BASE, BASE), ("head", head)):
            commit = _command(
                ["git", "rev-parse", branch], repository.tree(head if side == "head" else BASE), 60, (0,)
            )
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
                raise ToolFailedError(f"asv measured nothing of {name}: {printed[-_TAIL:]}")
        raw = {side: sides[side][name] for side in (BASE, "head")}
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


class Pyperf(Tool):
    """pyperf compare_to, of as many processes as there is time for."""

    name, packages = "pyperf", ("pyperf",)
    effort, least_effort = 2.0, 2.0
    rules = ("significant", "significant, 5%")
    values, loops, least = 5, 16, 2

    def compare(
        self,
        repository: Repository,
        head: str,
        names: tuple[str, ...],
        effort: float,
        seconds: float,
    ) -> dict[str, Outcome]:
        # Whole processes first; what is left makes each of them longer.
        processes = max(self.least, int(effort))
        values = max(2, round(self.values * effort / processes))
        with tempfile.TemporaryDirectory() as folder:
            paths = {side: Path(folder) / f"{side}.json" for side in (BASE, "head")}
            for side, branch in ((BASE, BASE), ("head", head)):
                arguments = [
                    f"--processes={processes}",
                    f"--values={values}",
                    "--warmups=1",
                    f"--loops={self.loops}",
                    f"--inherit-environ={','.join(_ENVIRONMENT)}",
                    "--quiet",
                    f"--output={paths[side]}",
                ]
                _command(
                    [sys.executable, "pyperf_speed.py", *arguments], repository.tree(branch), seconds, (0,)
                )
            printed = _command(
                [
                    sys.executable,
                    "-m",
                    "pyperf",
                    "compare_to",
                    str(paths[BASE]),
                    str(paths["head"]),
                    "--verbose",
                ],
                repository.folder,
                seconds,
                (0,),
            )
            sides = {side: self._values(path) for side, path in paths.items()}
        return {name: self._outcome(name, sides, printed) for name in names}

    def _values(self, path: Path) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for benchmark in _benchmarks(path):
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
        raise ToolFailedError(f"pyperf says nothing of {name}: {printed[-_TAIL:]}")
    for line in rest.splitlines():
        if line.startswith("Significant"):
            return True
        if line.startswith(("Not significant", "ERROR")):
            return False
    raise ToolFailedError(f"pyperf says nothing of {name}: {printed[-_TAIL:]}")


TOOLS: tuple[Tool, ...] = (Stackwise(), PytestBenchmark(), Asv(), Pyperf(), Codspeed())


def missing_tools() -> list[str]:
    """Packages of tools that are not installed."""
    return [package for tool in TOOLS for package in tool.packages if _version(package) is None]


def versions() -> dict[str, str | None]:
    """Of the packages of all tools."""
    return {package: _version(package) for tool in TOOLS for package in tool.packages}


def _benchmarks(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["benchmarks"]
    return found


def call_of(name: str) -> str:
    """The call that a test such as "bench/test_speed.py::test_speed[gemm]" makes."""
    return name.rpartition("[")[2].rstrip("]")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pytest(
    tree: Path, arguments: list[str], without: tuple[str, ...], seconds: float, codes: tuple[int, ...]
) -> str:
    addopts = " ".join(f"-p no:{plugin}" for plugin in without)
    command = [sys.executable, "-m", "pytest", _BENCHMARKS, "-q", *arguments]
    return _command(command, tree, seconds, codes, {"PYTEST_ADDOPTS": addopts})


def _command(
    command: list[str],
    folder: Path,
    seconds: float,
    codes: tuple[int, ...],
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a command prints, both ways. It is ended with all that it started where it takes too long."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "GIT_"))}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**inherited, **_ENVIRONMENT, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=4 * seconds + _SPARE_SECONDS)
    except BaseException as error:
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise ToolFailedError(f"{' '.join(command)}: took longer than {error.timeout:.0f} s") from None
        raise
    if process.returncode not in codes:
        text = f"{' '.join(command)}: ended with {process.returncode}: {printed.strip()[-_TAIL:]}"
        raise ToolFailedError(text)
    return printed


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and what it started; the gate has processes and trees to take away first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_PATIENCE)
            return
