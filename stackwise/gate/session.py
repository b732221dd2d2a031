"""Session: run of the gate, with rounds until each test is decided or the time limit is reached."""

from __future__ import annotations

import filecmp
import math
import os
import random
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stackwise.gate import side as side_package
from stackwise.gate.budget import Budget
from stackwise.gate.limit import Limits
from stackwise.gate.open_test import OpenTest
from stackwise.gate.process import SideProcess
from stackwise.gate.result import GateResult, Missing, TestResult
from stackwise.gate.round import Ended, Sampling, Starter, run_round
from stackwise.gate.sequential import Rule
from stackwise.gate.setup_error import SetupErrors
from stackwise.gate.side.channel import CALLABLE
from stackwise.gate.suite import suite_result
from stackwise.gate.tree import TEMPORARY, Tree
from stackwise.gate.turns import check_order
from stackwise.gate.twin_supply import TwinSupply
from stackwise.gate.twins import Twins
from stackwise.gate.verdict import Verdict
from stackwise.support.arguments import check_number, check_sizes
from stackwise.support.temporary_folder import temporary_folder

__all__ = ["GateError", "GateInterruptedError", "Launch", "Progress", "run_gate"]

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
    limits: Mapping[str, Limits] | None = None,
    asked: Mapping[str, Sequence[str]] | None = None,
    places: Mapping[str, tuple[str, int]] | None = None,
    rule: Rule | None = None,
    sampling: Sampling | None = None,
    missing: Missing = "warn",
    most_seconds: float | None = None,
    spent: float = 0.0,
    seed: int = 0,
    environment: Mapping[str, Any] | None = None,
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
    rule, sampling = rule or Rule(), sampling or Sampling()
    limits, asked, places = limits or {}, asked or {}, places or {}
    folders = {"base": base.folder, "head": head.folder}
    setup = SetupErrors(launch.root, folders, launch.place, launch.imports, launch.own_head)
    budget, rng = Budget(most_seconds, rule, spent), random.Random(seed)  # noqa: S311
    all_tests = {
        test: OpenTest(test, limits.get(test, Limits()), tuple(asked.get(test, ()))) for test in tests
    }
    number, begun, waiting, interrupted = 0, list[OpenTest](), list(all_tests.values()), False
    chosen = list[OpenTest]()  # begun tests of the next round
    around = mean = 0.0  # seconds of a round outside of tests, and mean seconds per test
    imported: set[str] = set()
    opened: set[str] = set()
    written: set[str] = set()
    reported = budget.elapsed

    def report(passed: int | None = None) -> None:
        nonlocal reported
        reported = budget.elapsed
        if on_progress is not None:
            flagged, n_open = sum(test.confirming for test in begun), sum(test.open for test in begun)
            rounds_left = (rule.looks[-1] - number) * reported / number if passed is None else math.inf
            most_left = min(budget.left, rounds_left)
            on_progress(
                Progress(number, n_open, len(tests), flagged, reported, len(waiting), passed, most_left)
            )

    try:
        with temporary_folder(TEMPORARY) as folder, _starter(folder, base, head, launch, all_tests) as start:
            while True:
                number += 1
                round_began, tests_seconds, ended_seconds = budget.elapsed, 0.0, 0.0
                names = [test.nodeid for test in (*chosen, *waiting)]
                memory = {name for name in names if all_tests[name].wants_memory}
                # Closed when the loop is left, so that its processes are killed.
                longer = replace(sampling, seconds=_seconds(sampling, chosen, around))
                whole = {test.nodeid for test in chosen if test.whole_file}
                with closing(
                    run_round(
                        names,
                        start,
                        longer,
                        rng,
                        memory,
                        file_tests=launch.file_tests,
                        whole_file=whole,
                        in_time=lambda: (
                            budget.suffices() or not any(test.order for test in all_tests.values())
                        ),
                        run_began=launch.began,
                    )
                ) as measured:
                    for count, (name, found) in enumerate(measured, start=1):
                        if isinstance(found, Ended):
                            found = setup.explained(found, first=not all_tests[name].order)
                        all_tests[name].add(found, rule)
                        tests_seconds += found.seconds
                        mean = tests_seconds / count
                        if isinstance(found, Ended):
                            ended_seconds += found.seconds  # later rounds do not need this time
                        else:
                            imported |= found.imported
                            opened |= found.opened
                            written.update(found.written)
                        if budget.elapsed - reported > _SILENT:
                            report(count)
                        lasted = budget.elapsed - round_began - ended_seconds
                        any_measured = any(test.order or test.disturbed for test in all_tests.values())
                        another = 0.0 if isinstance(found, Ended) else found.seconds
                        if any_measured and not budget.goes_on(another):
                            break
                        is_over = any_measured and not budget.admits(lasted, next_seconds=mean)
                        # Code that hangs in every test would take this long for each of them.
                        hangs = isinstance(found, Ended) and "hung" in found.how.values()
                        if count >= len(chosen) and (is_over or (hangs and not budget.suffices())):
                            break
                if _compares_nothing(base, head, imported, opened):
                    for test in all_tests.values():
                        if test.ended is None:
                            test.skip(f"nothing to compare: {_hidden(base, imported)}")
                    break
                paired = [test for test in all_tests.values() if test.order]
                if paired and not any(test.own for test in paired):
                    raise GateError(_NOTHING_OWN)
                around = budget.elapsed - round_began - tests_seconds
                n_trials = sum(test.n_trials for test in all_tests.values())
                begun = [test for test in (*begun, *waiting) if test.begun and test.open]
                for trial in (trial for test in begun for trial in test.trials.values()):
                    trial.is_one_of(n_trials)
                waiting = [test for test in waiting if not test.begun]
                begun = budget.keep(begun, around)
                chosen = budget.choose(begun, around)
                report()
                begins = not begun and bool(waiting) and budget.admits(next_seconds=around + mean)
                if not chosen and not begins:
                    break
    except KeyboardInterrupt:
        # Report the decisions so far: their measurement took minutes.
        interrupted = True
    order = check_order([pair for test in all_tests.values() for pair in test.order])
    results = tuple(
        test.result(*places.get(name, ("", 0)), interrupted=interrupted) for name, test in all_tests.items()
    )
    result = GateResult(
        base=base.name,
        head=head.name,
        tests=results,
        seconds=budget.elapsed,
        rounds=number,
        missing=missing,
        environment=dict(environment or {}),
        seed=seed,
        suite=None if interrupted else _suite(all_tests.values(), results, rule),
        order_bias=order.bias if order.pairs else None,
        balance=1 - order.head_first / order.pairs if order.pairs else None,
        notes=(
            *notes,
            *dict.fromkeys((*base.notes, *head.notes)),
            *filter(None, [_hidden(base, imported)]),
            *(f"both sides write {path}: derive its name from STACKWISE_SIDE" for path in sorted(written)),
            *(() if order.balanced else ("one side was first more often than the other: do not trust this",)),
            *_notes_on(all_tests.values(), results),
            *((_INTERRUPTED,) if interrupted else ()),
        ),
    )
    if interrupted:
        raise GateInterruptedError(result)
    return result


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


def _compares_nothing(base: Tree, head: Tree, imported: Set[str], opened: Set[str]) -> bool:
    """Return True if both sides take every changed file that they used from head.

    Files that a build has created are included.
    """
    if not _hidden(base, imported):
        return False
    return not any(_differs(base.folder / file, head.folder / file) for file in imported | opened)


def _differs(one: Path, other: Path) -> bool:
    """Return True if two files differ, or only one of them exists."""
    exist = [os.path.isfile(path) for path in (one, other)]  # noqa: PTH113 - a name may be too long
    return any(exist) and not (all(exist) and filecmp.cmp(one, other, shallow=False))


def _notes_on(tests: Collection[OpenTest], results: Iterable[TestResult]) -> Iterator[str]:
    """Yield a note on everything unusual about the tests."""
    yield from dict.fromkeys(test.mixed for test in tests if test.mixed)
    yield from _other_work(tests)
    yield from _slower_now_and_then(tests)
    yield from _dependent(tests)
    yield from _unused(results)
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


def _dependent(tests: Iterable[OpenTest]) -> Iterator[str]:
    """Yield a sentence on the tests that fail unless earlier tests of their file run before them."""
    dependent = [test.nodeid for test in tests if test.whole_file]
    if dependent:
        yield f"{_first(dependent)}: measured after the earlier tests of its file, which it needs"


def _unused(tests: Iterable[TestResult]) -> Iterator[str]:
    """Yield a sentence on the tests that request `benchmark` or `throughput` and do not call it."""
    unused = [test.nodeid for test in tests if test.status == "unused"]
    if unused:
        yield f"{_first(unused)}: benchmark or throughput is requested and not called, nothing was compared"


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
    trees = {"base": base, "head": head}
    is_long = len(str(folder)) > _LONGEST_TEMPORARY
    shorter = ExitStack()
    temporaries = shorter.enter_context(temporary_folder(TEMPORARY, Path("/tmp"))) if is_long else folder  # noqa: S108
    source = Path(next(iter(side_package.__path__)))
    supply = TwinSupply(folder)

    def start(tests: Sequence[str]) -> Callable[[str, int], SideProcess]:
        twins: list[Twins] = []
        purpose = frozenset(launch.files[test] for test in tests)

        def process(role: str, seed: int) -> SideProcess:
            if _FORKS and not (twins and twins[-1].left):
                twins.append(supply.next(seed, purpose))
            own = trees[role].folder
            # Without the files of finished tests, since their import takes time.
            files = dict.fromkeys(str(own / launch.files[test]) for test in tests)
            other = trees["head" if role == "base" else "base"].folder
            foreign = [] if launch.callables else [launch.root, other]
            place = own / launch.place
            scratch, temporary = folder / f"{role}-files", temporaries / f"{role}-tmp"
            for fresh in (scratch, temporary):
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir()
            environment = {
                **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary)),
                # Shared by all rounds, which would otherwise compile again.
                **{n: str(folder / f"{role}-compiled" / n) for n in _COMPILED if n not in os.environ},
                **({CALLABLE: "1"} if launch.callables else {}),
                "PYTEST_ADDOPTS": "",  # already among the arguments
            }
            made = supply.sides[role] = SideProcess(
                role,
                [
                    "-p",
                    "stackwise_side.plugin",
                    *(_moved(argument, launch.root, own) for argument in launch.arguments),
                    f"--basetemp={scratch / 'tmp'}",
                    # Without the cache plugin, this key is unknown and --strict-config refuses it.
                    *(["-o", f"cache_dir={scratch / 'cache'}"] if launch.cache else []),
                    *files,
                ],
                folder=place if place.is_dir() else own,
                import_path=[folder, *(own / imported for imported in launch.imports)],
                tree=None if launch.callables else own,
                tests=trees[role].tests,
                foreign=foreign,
                # `source` is in the working tree if this project itself is compared.
                own=[folder, temporaries, source, *([launch.root] if launch.callables else [])],
                watch=_watches([all_tests[test] for test in tests if test in all_tests]),
                log=folder / f"{role}.log",
                seconds=launch.seconds,
                seed=seed,
                environment=environment,
                twins=twins[-1] if twins else None,
            )
            try:
                made.send(tests=list(tests))
            except BaseException:
                made.kill()
                raise
            return made

        return process

    try:
        shutil.copytree(source, folder / "stackwise_side", ignore=shutil.ignore_patterns("__pycache__"))
        yield start
    finally:
        supply.end()
        shorter.close()


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
