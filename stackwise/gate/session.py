"""Session: rounds, until every test is decided."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stackwise.argument import check_number, check_sizes
from stackwise.gate import side as side_package
from stackwise.gate.limit import Limit, Limits
from stackwise.gate.process import SideProcess
from stackwise.gate.result import GateResult, Missing, Status, TestResult, TrialResult
from stackwise.gate.round import Ended, Paired, Sampling, run_round
from stackwise.gate.sequential import Rule
from stackwise.gate.side.channel import CALLABLE
from stackwise.gate.tree import Tree
from stackwise.gate.trial import Trial
from stackwise.gate.turns import check_order

__all__ = ["GateError", "Launch", "Progress", "run_gate"]

# What a test fails with where the base lacks what it calls.
_LACKING = ("ImportError", "ModuleNotFoundError", "AttributeError", "NameError", "TypeError", "fixture ")
_UNITS = {"time": "s", "ttft": "s", "tpot": "s", "memory": "B"}
_NOTHING_OWN = (
    "neither side has imported any code of its tree but the tests: what is installed was compared with "
    "itself. Install the project editable (pip install -e .), or name its folder in pytest's pythonpath"
)


class GateError(RuntimeError):
    """What was measured is not what was to be compared."""


@dataclass(frozen=True)
class Launch:
    """How the process of a side is started.

    Attributes:
        arguments: of pytest, but for the tests; a path of `root` in them means the same place in the side's
            tree.
        root: the folder that the trees are copies of.
        place: the folder to start in, relative to the root.
        files: of each test its file, relative to the root.
        imports: folders that packages are imported from, relative to the root, the first ones first.
        seconds: the most time between two messages of a process; a test that takes longer hangs.
        callables: whether both sides are the same tree, and the base measures what a test names as `against`.
    """

    arguments: tuple[str, ...]
    root: Path
    files: Mapping[str, Path]
    place: Path = Path()
    imports: tuple[Path, ...] = ()
    seconds: float = 600.0
    callables: bool = False

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, "a number > 0", lambda value: value > 0)


@dataclass(frozen=True)
class Progress:
    """Where a session is.

    Attributes:
        round: that is over, from 1.
        open: tests that are not decided yet.
        tests: all of them.
        confirming: of the open ones those that were flagged, and get fresh rounds.
        seconds: since the start.
    """

    round: int
    open: int
    tests: int
    confirming: int
    seconds: float


@dataclass
class _Test:
    """A test while it is measured."""

    nodeid: str
    limits: Limits
    trials: dict[str, Trial] = field(default_factory=dict)
    base: dict[str, list[float]] = field(default_factory=dict)
    head: dict[str, list[float]] = field(default_factory=dict)
    ended: Ended | None = None
    own: bool = False
    seconds: float = 0.0
    reference: list[tuple[float, ...]] = field(default_factory=list)
    order: list[tuple[tuple[bool, ...], tuple[float, ...]]] = field(default_factory=list)

    @property
    def open(self) -> bool:
        if self.ended is not None:
            return False
        return not self.order or any(not trial.decided for trial in self.trials.values())

    @property
    def confirming(self) -> bool:
        return self.open and any(trial.confirming and not trial.decided for trial in self.trials.values())

    def add(self, found: Paired | Ended, rule: Rule, n_trials: int) -> None:
        if isinstance(found, Ended):
            self.ended = found
            return
        self.seconds += found.seconds
        self.own = self.own or found.own
        self.order.append((found.head_first, found.logs))
        if found.reference:
            self.reference.append(found.reference)
        for metric, difference in found.differences.items():
            limit = self.limits.of(metric)
            if limit is None:
                continue
            trial = self.trials.setdefault(metric, Trial(limit, rule, n_trials))
            if not trial.decided:
                trial.add(difference, found.base[metric])
                self.base.setdefault(metric, []).append(found.base[metric])
                self.head.setdefault(metric, []).append(found.head[metric])

    def result(self, file: str, line: int) -> TestResult:
        where: dict[str, Any] = {"file": file, "line": line, "seconds": self.seconds}
        reason, detail = "the time is up", ""
        if self.ended is not None:
            status, detail = _status(self.ended)
            # What was found before stands, unless the head is broken.
            if not self.trials or status in ("crashed on head", "hung on head"):
                return TestResult(self.nodeid, status, {}, detail, **where)
            reason = f"it was {status} in round {len(self.order) + 1}: {detail}"
        if not self.trials:
            return TestResult(self.nodeid, "skipped", {}, "its marker leaves no metric to be judged", **where)
        trials = {metric: self._trial(metric, trial, reason) for metric, trial in self.trials.items()}
        return TestResult(self.nodeid, "measured", trials, detail, reference=tuple(self.reference), **where)

    def _trial(self, metric: str, trial: Trial, reason: str) -> TrialResult:
        decision = trial.conclude(reason)
        limit: Limit = trial.limit
        tolerance, least = map(math.expm1, limit.at(trial.base_level))
        return TrialResult(
            decision,
            _UNITS[metric],
            tolerance,
            least,
            trial.differences,
            tuple(self.base[metric]),
            tuple(self.head[metric]),
        )


def run_gate(
    base: Tree,
    head: Tree,
    tests: Sequence[str],
    launch: Launch,
    *,
    limits: Mapping[str, Limits] | None = None,
    places: Mapping[str, tuple[str, int]] | None = None,
    rule: Rule | None = None,
    sampling: Sampling | None = None,
    missing: Missing = "warn",
    most_seconds: float | None = None,
    seed: int = 0,
    environment: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> GateResult:
    """Compare two trees.

    Args:
        base: the old one.
        head: the new one.
        tests: pytest's names of the tests to be measured.
        launch: how processes are started.
        limits: of tests, by name; of the others the defaults.
        places: file and line of tests, by name.
        rule: when to decide.
        sampling: how a test is measured in a round.
        missing: what a test is that the base does not have.
        most_seconds: no new round is begun after this time; None: as many as the rule asks for.
        seed: of all that is by chance.
        environment: of the machine, for the result.
        notes: for the result.
        on_progress: called after each round.

    Raises:
        GateError: no code of the trees was measured.
        ValueError: no tests, or numbers out of range.
    """
    check_sizes(tests=len(tests))
    if most_seconds is not None:
        check_number("most_seconds", most_seconds, "a number > 0", lambda value: value > 0)
    rule, sampling = rule or Rule(), sampling or Sampling()
    limits, places = limits or {}, places or {}
    began, rng = time.monotonic(), random.Random(seed)  # noqa: S311
    all_tests = {test: _Test(test, limits.get(test, Limits())) for test in tests}
    n_trials = sum(limit is not None for test in all_tests.values() for limit in test.limits.all)
    number = 0
    with _starter(base, head, launch) as start:
        for number in itertools.count(1):
            open_tests = [test.nodeid for test in all_tests.values() if test.open]
            for name, found in run_round(open_tests, start(open_tests), sampling, rng):
                all_tests[name].add(found, rule, n_trials)
            measured = [test for test in all_tests.values() if test.order]
            if measured and not any(test.own for test in measured):
                raise GateError(_NOTHING_OWN)
            seconds = time.monotonic() - began
            still_open = [test for test in all_tests.values() if test.open]
            if on_progress is not None:
                flagged = sum(test.confirming for test in still_open)
                on_progress(Progress(number, len(still_open), len(tests), flagged, seconds))
            if not still_open:
                break
            # A crash ends a round: what came behind it was not looked at yet.
            looked_at = all(test.order or test.ended for test in all_tests.values())
            if most_seconds is not None and seconds > most_seconds and looked_at:
                break
    order = check_order([pair for test in all_tests.values() for pair in test.order])
    return GateResult(
        base=base.name,
        head=head.name,
        tests=tuple(test.result(*places.get(name, ("", 0))) for name, test in all_tests.items()),
        seconds=time.monotonic() - began,
        rounds=number,
        missing=missing,
        environment=dict(environment or {}),
        seed=seed,
        order_bias=order.bias if order.pairs else None,
        balance=1 - order.head_first / order.pairs if order.pairs else None,
        notes=(
            *notes,
            *base.notes,
            *(() if order.balanced else ("one side was first more often than the other: do not trust this",)),
        ),
    )


@contextmanager
def _starter(
    base: Tree, head: Tree, launch: Launch
) -> Iterator[Callable[[Sequence[str]], Callable[[str, int], SideProcess]]]:
    """What starts processes, for as long as this lasts: their plugin and what they print lie in a folder."""
    folder = Path(tempfile.mkdtemp(prefix="stackwise-gate-")).resolve()
    trees = {"base": base, "head": head}
    source = Path(next(iter(side_package.__path__)))
    shutil.copytree(source, folder / "stackwise_side", ignore=shutil.ignore_patterns("__pycache__"))

    def start(tests: Sequence[str]) -> Callable[[str, int], SideProcess]:
        def process(role: str, seed: int) -> SideProcess:
            own = trees[role].folder
            # Not those of tests that are through: to import them takes time.
            files = dict.fromkeys(str(own / launch.files[test]) for test in tests)
            other = trees["head" if role == "base" else "base"].folder
            foreign = [] if launch.callables else [launch.root, other]
            place = own / launch.place
            scratch = folder / f"{role}-files"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            made = SideProcess(
                role,
                [
                    "-p",
                    "stackwise_side.plugin",
                    *(_moved(argument, launch.root, own) for argument in launch.arguments),
                    f"--basetemp={scratch / 'tmp'}",
                    "-o",
                    f"cache_dir={scratch / 'cache'}",
                    *files,
                ],
                folder=place if place.is_dir() else own,
                import_path=[folder, *(own / imported for imported in launch.imports)],
                tree=None if launch.callables else own,
                tests=trees[role].tests,
                foreign=foreign,
                log=folder / f"{role}.log",
                seconds=launch.seconds,
                seed=seed,
                environment={CALLABLE: "1"} if launch.callables else {},
            )
            made.send(tests=list(tests))
            return made

        return process

    try:
        yield start
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _moved(argument: str, root: Path, tree: Path) -> str:
    """The argument with places below `root` as the same below `tree`."""
    place = rf"(?:^|(?<=[=,:])){re.escape(str(root))}(?=$|{re.escape(os.sep)})"
    return re.sub(place, lambda _: str(tree), argument)


def _status(ended: Ended) -> tuple[Status, str]:
    """What is said of a test that was not measured: what is wrong with the head comes first."""
    for role in ("head", "base"):
        how, detail = ended.how.get(role), ended.detail.get(role, "")
        match role, how:
            case "head", "skipped":
                return "skipped", detail
            case "head", "missing":
                # It was collected where this run was started.
                return "crashed on head", f"missing in its tree: {detail}"
            case "head", "hung":
                return "hung on head", detail
            case "head", str():
                return "crashed on head", detail
            case "base", "skipped" | "missing":
                return "missing on base", f"{how}: {detail}"
            case "base", "failed" if detail.startswith(_LACKING):
                return "missing on base", f"{how}: {detail}"
            case "base", "hung":
                return "hung on base", detail
            case "base", str():
                return "crashed on base", detail
    raise AssertionError("a test that was not measured was neither on base nor on head")
