"""Session: run of the gate, with rounds until each test is decided or the time limit is reached."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stackwise.gate import side as side_package
from stackwise.gate.budget import Budget
from stackwise.gate.limit import Limits
from stackwise.gate.open_test import OpenTest
from stackwise.gate.overlay import is_same
from stackwise.gate.process import SideProcess
from stackwise.gate.result import GateResult, Missing, TestResult
from stackwise.gate.round import Ended, Paired, Sampling, Starter, run_round
from stackwise.gate.sequential import Rule
from stackwise.gate.setup_error import SetupErrors
from stackwise.gate.side.channel import CALLABLE
from stackwise.gate.suite import suite_result
from stackwise.gate.tree import TEMPORARY, Tree
from stackwise.gate.turns import OrderCheck, check_order
from stackwise.gate.twins import Twins
from stackwise.gate.verdict import Verdict
from stackwise.support.arguments import check_number, check_sizes
from stackwise.support.temporary_folder import temporary_folder

__all__ = ["GateError", "GateInterruptedError", "Launch", "Progress", "run_gate"]

_SOURCE = Path(next(iter(side_package.__path__)))  # code of the sides
_SILENT = 10.0  # seconds between reports of the progress in a round
# On other systems, libraries of the system do not support a fork without an exec.
_FORKS = sys.platform == "linux"
# Folders of compiled code, which are in TMPDIR or the same for all versions of a project by default.
_COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")
# Maximum length of the folder for temporary files of both sides. They may include sockets, whose path is
# limited to 104 characters.
_LONGEST_TEMPORARY = 50
_NOTHING_OWN = (
    "neither side imported code of its tree, apart from tests, so installed code was compared with itself. "
    "Install the project editable (pip install -e .), or add its source folder to pytest's pythonpath"
)
_INTERRUPTED = "the run was interrupted: tests that were not decided are INCONCLUSIVE"


class GateError(RuntimeError):
    """The run did not measure the code of the trees."""


class GateInterruptedError(KeyboardInterrupt):
    """The session was interrupted.

    Attributes:
        result: result so far. Undecided tests are INCONCLUSIVE.
    """

    def __init__(self, result: GateResult) -> None:
        super().__init__("the gate was interrupted")
        self.result = result


@dataclass(frozen=True)
class Launch:
    """Settings with which the processes of the sides are started.

    Attributes:
        arguments: arguments of pytest, without the tests. A path below `root` is replaced by the same path in
            the side's tree. PYTEST_ADDOPTS of the current process is not added.
        root: folder that the trees are copies of.
        place: working directory, relative to `root`.
        files: file of each test, relative to `root`, including the tests of `file_tests`.
        imports: folders from which packages are imported, relative to `root`, in order.
        seconds: maximum time between two messages of a process. A test that takes longer is treated as hung.
        callables: True if both sides use the same tree, and the base measures the argument `against` of a
            test.
        cache: True if pytest's cache is active. Each side then has its own cache folder.
        file_tests: for each test, all tests of its file in order, including tests that are not measured.
        began: start of the user's run, in seconds since the epoch; None: the start of each round.
        own_head: True if the head is a copy of the current files at `root`, from which the tests were
            collected.
    """

    arguments: tuple[str, ...]
    root: Path
    files: Mapping[str, Path]
    place: Path = Path()
    imports: tuple[Path, ...] = ()
    seconds: float = 600.0
    callables: bool = False
    cache: bool = True
    file_tests: Mapping[str, Sequence[str]] = field(default_factory=dict)
    began: float | None = None
    own_head: bool = False

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, "a number > 0", lambda value: value > 0)


@dataclass(frozen=True)
class Progress:
    """Progress of a session.

    Attributes:
        round: number of the finished round, or of the current round if `passed` is a number; from 1.
        open: number of tests that are begun, undecided, and get more rounds.
        tests: number of all tests.
        confirming: number of open tests that were flagged and get fresh rounds.
        seconds: seconds since the start.
        waiting: number of tests that are not begun, since the time may be too short for them.
        passed: number of tests that the current round has finished; None: the round is over.
        most_left: seconds until the time limit, or until the last round that the rule allows if all rounds
            take equally long. Most runs are shorter.
    """

    round: int
    open: int
    tests: int
    confirming: int
    seconds: float
    waiting: int = 0
    passed: int | None = None
    most_left: float = math.inf


def run_gate(
    base: Tree,
    head: Tree,
    tests: Sequence[str],
    launch: Launch,
    *,
    limits: Mapping[str, Limits] = {},
    asked: Mapping[str, Sequence[str]] = {},
    places: Mapping[str, tuple[str, int]] = {},
    rule: Rule | None = None,
    sampling: Sampling | None = None,
    missing: Missing = "warn",
    most_seconds: float | None = None,
    spent: float = 0.0,
    seed: int = 0,
    environment: Mapping[str, Any] = {},
    notes: Sequence[str] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> GateResult:
    """Compare two trees.

    Args:
        base: tree of the old revision.
        head: tree of the new revision.
        tests: node IDs of the tests to be measured.
        launch: settings of the processes.
        limits: limits by test. Other tests have the default limits.
        asked: required metrics by test. A required metric that cannot be measured is INCONCLUSIVE.
        places: file and line by test.
        rule: rule of the decisions.
        sampling: settings of the measurement of a test in a round.
        missing: treatment of a test that the base does not have.
        most_seconds: time limit of all rounds (see `Budget`); None: as many rounds as the rule needs.
        spent: used part of `most_seconds`, for example by the collection and the trees.
        seed: seed of all random choices.
        environment: description of the machine, for the result.
        notes: notes for the result.
        on_progress: called after each round, and every 10 s in a round.

    Raises:
        GateError: no code of the trees was measured.
        GateInterruptedError: Ctrl-C was pressed. Raised instead of KeyboardInterrupt.
        ValueError: no tests, or numbers out of range.
    """
    check_sizes(tests=len(tests))
    rule, interrupted = rule or Rule(), False
    run = _Run(
        base,
        head,
        launch,
        rule,
        sampling or Sampling(),
        {test: OpenTest(test, limits.get(test, Limits()), tuple(asked.get(test, ()))) for test in tests},
        Budget(most_seconds, rule, spent),
        random.Random(seed),  # noqa: S311
        on_progress,
    )
    try:
        with temporary_folder(TEMPORARY) as folder, _starter(folder, base, head, launch, run.tests) as start:
            while True:
                run.measure_round(start)
                if run.skip_unchanged():
                    break
                run.require_own_code()
                run.choose_tests()
                run.report()
                if not (run.chosen or run.begins_waiting()):
                    break
    except KeyboardInterrupt:
        # Report the decisions so far: their measurement took minutes.
        interrupted = True
    measured = run.tests.values()
    order = check_order([pair for test in measured for pair in test.order])
    results = tuple(
        test.result(*places.get(test.nodeid, ("", 0)), interrupted=interrupted) for test in measured
    )
    result = GateResult(
        base=base.name,
        head=head.name,
        tests=results,
        seconds=run.budget.elapsed,
        rounds=run.number,
        missing=missing,
        environment=dict(environment),
        seed=seed,
        suite=None if interrupted else _suite(measured, results, rule),
        order_bias=order.bias,
        balance=order.balance,
        notes=(
            *notes,
            *run.notes(order),
            *_notes_on(measured, results),
            *((_INTERRUPTED,) if interrupted else ()),
        ),
    )
    if interrupted:
        raise GateInterruptedError(result)
    return result


@dataclass
class _Run:
    """Rounds of a run, one after the other.

    Attributes:
        tests: all tests by name.
        number: number of the current round, from 1.
        begun: tests that were measured and need more rounds.
        chosen: tests in `begun` that are measured in the next round.
        waiting: tests that were not measured yet.
        around: seconds of the last round outside of tests.
        mean: mean seconds per test in the last round.
        imported: modules that a side has imported, relative to its tree.
        opened: files that a side has opened, relative to its tree.
        written: files that both sides have written.
        reported: time of the last report.
    """

    base: Tree
    head: Tree
    launch: Launch
    rule: Rule
    sampling: Sampling
    tests: dict[str, OpenTest]
    budget: Budget
    rng: random.Random
    on_progress: Callable[[Progress], None] | None
    number: int = 0
    begun: list[OpenTest] = field(default_factory=list)
    chosen: list[OpenTest] = field(default_factory=list)
    around: float = 0.0
    mean: float = 0.0
    imported: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.waiting, self.reported = list(self.tests.values()), self.budget.elapsed
        launch, folders = self.launch, {"base": self.base.folder, "head": self.head.folder}
        self.setup = SetupErrors(launch.root, folders, launch.place, launch.imports, launch.own_head)

    def measure_round(self, start: Starter) -> None:
        """Measure the chosen and the waiting tests, until the time for the round is over."""
        self.number += 1
        began, tests_seconds, ended_seconds = self.budget.elapsed, 0.0, 0.0
        names = [test.nodeid for test in (*self.chosen, *self.waiting)]
        measured = run_round(
            names,
            start,
            replace(self.sampling, seconds=_seconds(self.sampling, self.chosen, self.around)),
            self.rng,
            {name for name in names if self.tests[name].wants_memory},
            file_tests=self.launch.file_tests,
            whole_file={test.nodeid for test in self.chosen if test.whole_file},
            in_time=lambda: self.budget.suffices() or not any(test.order for test in self.tests.values()),
            run_began=self.launch.began,
        )
        with closing(measured):  # when the loop is left, so that its processes are killed
            for count, (name, found) in enumerate(measured, start=1):
                found = self._add(name, found)
                tests_seconds += found.seconds
                if isinstance(found, Ended):
                    ended_seconds += found.seconds  # later rounds do not need this time
                self.mean = tests_seconds / count
                if self.budget.elapsed - self.reported > _SILENT:
                    self.report(count)
                if self._stops_after(found, count, self.budget.elapsed - began - ended_seconds):
                    break
        self.around = self.budget.elapsed - began - tests_seconds

    def _add(self, name: str, found: Paired | Ended) -> Paired | Ended:
        """Add the result of a test in the current round, and return it with an explanation of a failure."""
        test = self.tests[name]
        if isinstance(found, Ended):
            found = self.setup.explained(found, first=not test.order)
        else:
            self.imported |= found.imported
            self.opened |= found.opened
            self.written.update(found.written)
        test.add(found, self.rule)
        return found

    def _stops_after(self, found: Paired | Ended, count: int, lasted: float) -> bool:
        """Return True if the round ends with its test number `count`, after `lasted` seconds."""
        measured = any(test.order or test.disturbed for test in self.tests.values())
        if measured and not self.budget.goes_on(0.0 if isinstance(found, Ended) else found.seconds):
            return True
        if count < len(self.chosen):
            return False
        if measured and not self.budget.admits(lasted, next_seconds=self.mean):
            return True
        # Code that hangs in every test would take this long for each of them.
        return isinstance(found, Ended) and "hung" in found.how.values() and not self.budget.suffices()

    def skip_unchanged(self) -> bool:
        """Skip the tests, and return True, if both sides take every changed file that they used from head.

        Files that a build has created are included.
        """
        hidden, used = _hidden(self.base, self.imported), self.imported | self.opened
        if not hidden or not all(is_same(self.base.folder / file, self.head.folder / file) for file in used):
            return False
        for test in self.tests.values():
            if test.ended is None:
                test.skip(f"nothing to compare: {hidden}")
        return True

    def require_own_code(self) -> None:
        """Raise GateError if no test has imported code of its tree on both sides."""
        paired = [test for test in self.tests.values() if test.order]
        if paired and not any(test.own for test in paired):
            raise GateError(_NOTHING_OWN)

    def choose_tests(self) -> None:
        """Choose the tests of the next round."""
        n_trials = sum(test.n_trials for test in self.tests.values())
        begun = [test for test in (*self.begun, *self.waiting) if test.begun and test.open]
        for trial in (trial for test in begun for trial in test.trials.values()):
            trial.is_one_of(n_trials)
        self.waiting = [test for test in self.waiting if not test.begun]
        self.begun = self.budget.keep(begun, self.around)
        self.chosen = self.budget.choose(self.begun, self.around)

    def begins_waiting(self) -> bool:
        """Return True if there is time to begin a waiting test, and no other test is open."""
        time = self.around + self.mean
        return not self.begun and bool(self.waiting) and self.budget.admits(next_seconds=time)

    def report(self, passed: int | None = None) -> None:
        """Report the progress after a round, or after `passed` tests of it."""
        self.reported = self.budget.elapsed
        if self.on_progress is None:
            return
        last_round = (self.rule.looks[-1] - self.number) * self.reported / self.number
        self.on_progress(
            Progress(
                self.number,
                sum(test.open for test in self.begun),
                len(self.tests),
                sum(test.confirming for test in self.begun),
                self.reported,
                len(self.waiting),
                passed,
                min(self.budget.left, last_round if passed is None else math.inf),
            )
        )

    def notes(self, order: OrderCheck) -> Iterator[str]:
        """Yield the notes on the trees, on the files that the sides used, and on the order of the sides."""
        yield from dict.fromkeys((*self.base.notes, *self.head.notes))
        yield from filter(None, [_hidden(self.base, self.imported)])
        for path in sorted(self.written):
            yield f"both sides write {path}: derive its name from STACKWISE_SIDE"
        if not order.balanced:
            yield "one side was first more often than the other: do not trust this"


def _seconds(sampling: Sampling, begun: Sequence[OpenTest], around: float) -> float:
    """Return the seconds for which a round measures each side of a test.

    In total this is half of the overhead of the round. The result is between `seconds` and `longest_seconds`
    of `sampling`. The noise of a round decreases with this time. Without the adjustment, a round that takes 3
    s to start would measure a single remaining test for 0.6 s. But more rounds are better than longer rounds.
    """
    if not begun:
        return sampling.seconds
    beside = around + sum(test.beside_seconds for test in begun)
    fair = beside / 2 / (2 * len(begun))
    return max(sampling.seconds, min(sampling.longest_seconds, fair))


def _suite(tests: Iterable[OpenTest], results: Sequence[TestResult], rule: Rule) -> TestResult | None:
    """Return the regression of all tests together if no single test has regressed."""
    if any(result.verdict is Verdict.REGRESSED for result in results):
        return None
    measured = {result.nodeid for result in results if result.status == "measured"}
    # The differences of a test with mixed sides belong to neither revision.
    valid = [test for test in tests if test.nodeid in measured and not test.mixed and "time" in test.trials]
    return suite_result([test.trials["time"] for test in valid], rule)


def _hidden(base: Tree, imported: Container[str]) -> str:
    """Return a sentence on the changed modules that a side imported and that both sides take from head."""
    files = [str(file) for file in base.hidden if str(file) in imported]
    if not files:
        return ""
    return (
        f"{', '.join(files)}: taken from head on both sides, as part of a folder of tests, so the change was "
        "not compared; if the folder is a package of the project, name it in pyproject.toml"
    )


def _notes_on(tests: Collection[OpenTest], results: Iterable[TestResult]) -> Iterator[str]:
    """Yield a note on everything unusual about the tests."""
    yield from dict.fromkeys(test.mixed for test in tests if test.mixed)
    yield from _other_work(tests)
    yield from _slower_now_and_then(tests)
    dependent = [test.nodeid for test in tests if test.whole_file]
    if dependent:
        yield f"{_first(dependent)}: measured after the earlier tests of its file, which it needs"
    unused = [result.nodeid for result in results if result.status == "unused"]
    if unused:
        yield f"{_first(unused)}: benchmark or throughput is requested and not called, nothing was compared"
    yield from _warned(tests)


def _other_work(tests: Iterable[OpenTest]) -> Iterator[str]:
    """Yield a sentence on each test whose calls handle more tokens on one side than on the other."""
    for test in tests:
        base, head = test.tokens
        if base and head and base != head:
            counts = f"{base} tokens on the base, {head} on the head"
            yield f"{test.nodeid}: a call handles {counts}: the sides do different work"


def _slower_now_and_then(tests: Iterable[OpenTest]) -> Iterator[str]:
    """Yield a sentence on each test whose median call is within the tolerance, while its mean is not."""
    for test in tests:
        trial = test.trials.get("time")
        if trial is None or trial.decision is None or not trial.decision.verdict.ok:
            continue
        means = [statistics.fmean(logs) for _, logs in test.order]
        tolerance, _ = trial.limit.at(trial.base_level)
        if min(means) > tolerance:
            mean = f"the mean of its calls is not ({math.expm1(statistics.fmean(means)):+.1%})"
            yield f"{test.nodeid}: its median call is within the tolerance, {mean}"


def _warned(tests: Iterable[OpenTest]) -> Iterator[str]:
    """Yield each RuntimeWarning of the sides, with the tests and the sides that it is from."""
    sources: dict[tuple[str, str], list[str]] = {}
    for test in tests:
        for text, roles in test.warnings.items():
            sources.setdefault((text, " and ".join(sorted(roles))), []).append(test.nodeid)
    for (text, both), names in sources.items():
        yield f"{_first(names)}: {text} on {both}"


def _first(tests: Sequence[str]) -> str:
    """Return the name of the first test and the number of further tests."""
    return f"{tests[0]} and {len(tests) - 1} more" if len(tests) > 1 else tests[0]


@contextmanager
def _starter(
    folder: Path, base: Tree, head: Tree, launch: Launch, all_tests: Mapping[str, OpenTest]
) -> Iterator[Starter]:
    """Yield the function that starts the processes of a round. Their plugin and logs are in `folder`."""
    is_long = len(str(folder)) > _LONGEST_TEMPORARY
    shorter = temporary_folder(TEMPORARY, Path("/tmp")) if is_long else nullcontext(folder)  # noqa: S108
    shutil.copytree(_SOURCE, folder / "stackwise_side", ignore=shutil.ignore_patterns("__pycache__"))
    with shorter as temporaries:
        yield _Starter(folder, temporaries, {"base": base, "head": head}, launch, all_tests).start


@dataclass(frozen=True)
class _Starter:
    """Start of the processes of both sides, whose temporary files are in `temporaries`."""

    folder: Path
    temporaries: Path
    trees: Mapping[str, Tree]
    launch: Launch
    all_tests: Mapping[str, OpenTest]

    def start(self, tests: Sequence[str]) -> Callable[[str, int], SideProcess]:
        """Return the function that starts a side with a seed, for these tests."""
        twins: Twins | None = None

        def process(role: str, seed: int) -> SideProcess:
            nonlocal twins
            if _FORKS and not (twins and twins.left):
                twins = Twins(seed, self.folder / "twins.log")
            made = self._process(role, seed, tests, twins)
            try:
                made.send(tests=list(tests))
            except BaseException:
                made.kill()
                raise
            return made

        return process

    def _process(self, role: str, seed: int, tests: Sequence[str], twins: Twins | None) -> SideProcess:
        launch, own = self.launch, self.trees[role].folder
        scratch, temporary = self.folder / f"{role}-files", self.temporaries / f"{role}-tmp"
        for fresh in (scratch, temporary):
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
        environment = {
            **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary)),
            # Shared by all rounds, which would otherwise compile again.
            **{n: str(self.folder / f"{role}-compiled" / n) for n in _COMPILED if n not in os.environ},
            "PYTEST_ADDOPTS": "",  # already among the arguments
        }
        # `_SOURCE` is in the working tree if this project itself is compared.
        allowed, foreign = [self.folder, self.temporaries, _SOURCE], list[Path]()
        if launch.callables:
            environment[CALLABLE] = "1"
            allowed.append(launch.root)
        else:
            foreign = [launch.root, self.trees["head" if role == "base" else "base"].folder]
        place = own / launch.place
        return SideProcess(
            role,
            [
                "-p",
                "stackwise_side.plugin",
                *(_moved(argument, launch.root, own) for argument in launch.arguments),
                f"--basetemp={scratch / 'tmp'}",
                # Without the cache plugin, this key is unknown and --strict-config refuses it.
                *(["-o", f"cache_dir={scratch / 'cache'}"] if launch.cache else []),
                # Without the files of finished tests, since their import takes time.
                *dict.fromkeys(str(own / launch.files[test]) for test in tests),
            ],
            folder=place if place.is_dir() else own,
            import_path=[self.folder, *(own / imported for imported in launch.imports)],
            tree=None if launch.callables else own,
            tests=self.trees[role].tests,
            foreign=foreign,
            own=allowed,
            watch=_watches([self.all_tests[test] for test in tests if test in self.all_tests]),
            log=self.folder / f"{role}.log",
            seconds=launch.seconds,
            seed=seed,
            environment=environment,
            twins=twins,
        )


def _watches(tests: Sequence[OpenTest]) -> bool:
    """Return True if sides should report each file that they open in a round of these tests.

    Each test needs one such round. After a round that the reports disturbed, the test first needs a round
    without them.
    """
    return not all(test.watched for test in tests) and all(test.order or not test.disturbed for test in tests)


def _moved(argument: str, root: Path, tree: Path) -> str:
    """Return the argument with each path below `root` replaced by the same path below `tree`.

    A path may lead to `root` through a symbolic link.
    """

    def replaced(match: re.Match[str]) -> str:
        given = Path(match[0])
        for path in (given, given.resolve()):
            if path.is_relative_to(root):
                return str(tree / path.relative_to(root))
        return match[0]

    return re.sub(r"(?:^|(?<=[=,:]))/[^=,:]*", replaced, argument)
