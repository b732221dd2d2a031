"""Stored baseline: comparison with saved JSON runs of pytest-benchmark, without a new run of base.

The speed of a machine changes from hour to hour by more than most changes of code do, and a saved run cannot
be repeated next to the new one. So the fastest round of each run is compared, which has the least noise. With
four or more saved runs, the standard deviation between runs is estimated from them. With fewer runs, it is
assumed, and only a large change of time is found.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stackwise.gate.history.judgement import ONE_LOOK, decide
from stackwise.gate.history.machine import Machine
from stackwise.gate.limit import Limit, Limits
from stackwise.gate.result import GateResult, Missing, TestResult, TrialResult
from stackwise.gate.sequential import Rule
from stackwise.gate.verdict import Decision
from stackwise.support.arguments import check_number, require
from stackwise.support.files import parse_json

__all__ = ["compare_stored"]

# Minimum number of saved runs for an estimate of their standard deviation.
_MIN_RUNS = 4
# Assumed standard deviation of log(fastest round) between runs: 4.1 % on a machine with two cores and other
# work (102 runs, docs/reference/history.md). For bytes: random effects of an allocator.
_ASSUMED = {"time": 0.04, "memory": 0.001}
# Degrees of freedom of the assumed value. They are few, so that the interval is wide: another machine may be
# noisier.
_ASSUMED_FREEDOM = 4
# Minimum of the estimate from a few runs: 0.55 % is the lowest noise of interleaved pairs.
_LEAST = {"time": 0.005, "memory": 0.0}
_UNITS = {"time": "s", "memory": "B"}
_NAMES = ("machine", "system", "python_implementation", "python_version")
_CPU_NAMES = ("brand_raw", "count", "arch")

File = str | Path


@dataclass(frozen=True)
class _Stored:
    """Saved run: machine, commit, and for each test the level of each metric and the timer settings."""

    name: str
    machine: dict[str, Any]
    commit: str
    levels: dict[str, dict[str, float]]
    ways: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            content = parse_json(path.read_bytes())
            benchmarks = {each["fullname"]: each for each in content["benchmarks"]}
            machine = _machine(content["machine_info"])
            commit = str((content.get("commit_info") or {}).get("id") or "")
            levels = {name: _levels(each) for name, each in benchmarks.items()}
            ways = {name: _way(each) for name, each in benchmarks.items()}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            said = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}: is no JSON of pytest-benchmark: {said}") from None
        return cls(path.name, machine, commit, levels, ways)


def compare_stored(
    baseline: File | Sequence[File],
    current: File | Sequence[File],
    limits: Limits | Mapping[str, Limits] | None = None,
    *,
    missing: Missing = "warn",
    rule: Rule = ONE_LOOK,
) -> GateResult:
    """Compare saved runs of pytest-benchmark (`--benchmark-json`, `--benchmark-save`) with new runs.

    The time of a run is its fastest round. The memory is the peak that `throughput` has stored. Runs of
    another machine are skipped and named in the notes. A test is INCONCLUSIVE if no saved run remains, or if
    the runs used different clocks.

    Args:
        baseline: one file for each saved run.
        current: file of the new run. Several runs of the same code result in a more precise level.
        limits: limits of all tests, or by full name; None: the default limits.
        missing: treatment of a test that the saved runs do not have.
        rule: rule with the error rates. The false-positive rate is divided by the number of tests, since no
            second measurement confirms a regression.

    Returns:
        result as of the gate, with a note that base and head were not measured side by side.

    Raises:
        ValueError: no files, a file that is not JSON of pytest-benchmark, or new runs of several machines.
        OSError: a file cannot be read.
    """
    old, new = _read("baseline", baseline), _read("current", current)
    machine = new[0].machine
    for run in new[1:]:
        require(run.machine == machine, "current", run.name, f"runs of one machine, that of {new[0].name}")
    alike = [run for run in old if run.machine == machine]
    notes = ["stored: base was not measured beside head, so that intervals are wider than those of the gate"]
    others = [run for run in old if run.machine != machine]
    notes += [f"{run.name} is of another machine: {_differences(run.machine, machine)}" for run in others]
    names = list(dict.fromkeys(name for run in (*new, *old) for name in run.levels))
    judged = max(1, sum(any(name in run.levels for run in new) for name in names))
    tests = []
    for name in names:
        given = limits.get(name, Limits()) if isinstance(limits, Mapping) else limits or Limits()
        tests.append(_compared(name, old, alike, new, given, rule, judged))
    return GateResult(
        base=", ".join(run.name for run in old),
        head=", ".join(run.name for run in new),
        tests=tuple(tests),
        rounds=len(new),
        missing=missing,
        environment=machine,
        notes=tuple(notes),
    )


def _compared(
    name: str,
    old: Sequence[_Stored],
    alike: Sequence[_Stored],
    new: Sequence[_Stored],
    limits: Limits,
    rule: Rule,
    n_tests: int,
) -> TestResult:
    heads = [run for run in new if name in run.levels]
    if not heads:
        return TestResult(name, "missing on head")
    if not any(name in run.levels for run in old):
        return TestResult(name, "missing on base")
    bases = [run for run in alike if name in run.levels]
    ways = {json.dumps(run.ways[name], sort_keys=True) for run in (*bases, *heads)}
    trials = {}
    for metric in _UNITS:
        limit = limits.of(metric)
        base, head = _column(bases, name, metric), _column(heads, name, metric)
        # A new metric has no base to be compared with. Every run has a time, possibly of another machine.
        if limit is None or (metric != "time" and not base):
            continue
        reason = _obstacle(metric, base, head, ways)
        trials[metric] = _trial(metric, base, head, limit, rule, n_tests, reason)
    if not trials:
        return TestResult(name, "skipped", detail="no limit of any metric that was saved")
    return TestResult(name, trials=trials)


def _column(runs: Sequence[_Stored], name: str, metric: str) -> tuple[float, ...]:
    """Return the level of a metric in each run that has it."""
    return tuple(run.levels[name][metric] for run in runs if metric in run.levels[name])


def _obstacle(metric: str, base: tuple[float, ...], head: tuple[float, ...], ways: set[str]) -> str:
    """Return the reason why a metric cannot be compared, or "" if it can be."""
    if not head:
        return f"saved runs have a {metric} of it, and the new ones have none"
    if not base:
        return "no saved run is of this machine, and those of others are not compared"
    is_mixed = metric == "time" and len(ways) > 1
    return f"it was timed in different ways: {', '.join(sorted(ways))}" if is_mixed else ""


def _trial(
    metric: str,
    base: tuple[float, ...],
    head: tuple[float, ...],
    limit: Limit,
    rule: Rule,
    n_tests: int,
    reason: str,
) -> TrialResult:
    if reason:
        decision = Decision.undecided(reason, rounds=len(head))
        return TrialResult(decision, _UNITS[metric], limit.tolerance, 0.0, (), base, head)
    old, new = ([math.log(level) for level in side] for side in (base, head))
    middle = statistics.fmean(old)
    spread, freedom, source = _spread(metric, old, new)
    tolerance, least = limit.at(statistics.median(base))
    decision = decide(
        statistics.fmean(new) - middle,
        spread * math.sqrt(1 / len(old) + 1 / len(new)),
        freedom,
        tolerance,
        least,
        alpha=min(rule.alpha, rule.run_alpha / n_tests),
        miss=rule.miss,
        rounds=len(new),
        doubt="runs differ too much to tell",
        source=source,
    )
    differences = tuple(each - middle for each in new)
    shares = math.expm1(tolerance), math.expm1(least)
    return TrialResult(decision, _UNITS[metric], *shares, differences, base, head)


def _spread(metric: str, old: Sequence[float], new: Sequence[float]) -> tuple[float, int, str]:
    """Return the standard deviation between runs, its degrees of freedom, and the source of both."""
    if len(old) < _MIN_RUNS:
        assumed = _ASSUMED[metric]
        said = (
            f"that runs differ by {assumed:.1%} is assumed, as {len(old)} saved runs do not say it: save "
            f"{_MIN_RUNS} or more, or measure side by side (--stackwise-against)"
        )
        return assumed, _ASSUMED_FREEDOM, said
    squares = sum((len(side) - 1) * statistics.variance(side) for side in (old, new) if len(side) > 1)
    freedom = len(old) + len(new) - 2
    spread = max(math.sqrt(squares / freedom), _LEAST[metric])
    said = f"{len(old)} saved runs differ by {math.expm1(spread):.2%} (sd); none was measured beside this one"
    return spread, freedom, said


def _read(key: str, files: File | Sequence[File]) -> list[_Stored]:
    paths = [files] if isinstance(files, str | Path) else list(files)
    require(bool(paths), key, paths, "one file or more")
    return [_Stored.read(Path(path)) for path in paths]


def _levels(benchmark: Mapping[str, Any]) -> dict[str, float]:
    found = {"time": benchmark["stats"]["min"]}
    peak = (benchmark.get("extra_info") or {}).get("peak_memory_bytes")
    if peak is not None:
        found["memory"] = peak
    for metric, level in found.items():
        check_number(f"{metric} of {benchmark['fullname']}", level, "a number > 0", lambda value: value > 0)
    return {metric: float(level) for metric, level in found.items()}


def _way(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    options = benchmark.get("options") or {}
    return {name: options.get(name) for name in ("timer", "disable_gc")}


def _machine(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that determine the speed, from pytest-benchmark and, if stored, from this plugin."""
    found = {name: info.get(name) for name in _NAMES}
    found |= {f"cpu {name}": (info.get("cpu") or {}).get(name) for name in _CPU_NAMES}
    if info.get("stackwise"):
        found |= Machine.of(info["stackwise"]).facts
    require(any(found.values()), "machine_info", dict(info), "one that says what machine it was")
    return found


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    return ", ".join(f"{name} {one.get(name)} and not {other.get(name)}" for name in names)
