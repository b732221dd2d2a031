"""Session: rounds, until every test is decided."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stackwise.argument import check_number, check_sizes
from stackwise.gate import side as side_package
from stackwise.gate.limit import Limits
from stackwise.gate.open_test import OpenTest
from stackwise.gate.process import SideProcess
from stackwise.gate.result import GateResult, Missing
from stackwise.gate.round import Ended, Sampling, Starter, run_round
from stackwise.gate.sequential import Rule
from stackwise.gate.setup_error import SetupErrors
from stackwise.gate.side.channel import CALLABLE
from stackwise.gate.side.clock import real_time
from stackwise.gate.temporary_folder import temporary_folder
from stackwise.gate.tree import Tree
from stackwise.gate.turns import check_order
from stackwise.gate.twin_supply import TwinSupply
from stackwise.gate.twins import Twins

__all__ = ["GateError", "GateInterruptedError", "Launch", "Progress", "run_gate"]

_OVERRUN = 1.05  # share of the time limit after which a round ends before its last test
_SILENT = 10.0  # seconds after which progress of a round is told
# Elsewhere system libraries bear no fork behind which no other program is started.
_FORKS = sys.platform == "linux"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
# Most characters of the folder in which the temporary files of both sides are: among them may be sockets,
# whose whole path has 104 at most.
_LONGEST_TEMPORARY = 50
_NOTHING_OWN = (
    "neither side has imported any code of its tree but the tests: what is installed was compared with "
    "itself. Install the project editable (pip install -e .), or name its folder in pytest's pythonpath"
)


class GateError(RuntimeError):
    """What was measured is not what was to be compared."""


class GateInterruptedError(KeyboardInterrupt):
    """The session was interrupted.

    Attributes:
        result: what was decided before; the rest is INCONCLUSIVE.
    """

    def __init__(self, result: GateResult) -> None:
        super().__init__("the gate was interrupted")
        self.result = result


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
        cache: whether pytest has its cache, which then has a folder of its own on each side.
        own_head: True if the head is a copy of the files at `root` as they are, from which the tests were
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
    own_head: bool = False

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, "a number > 0", lambda value: value > 0)


@dataclass(frozen=True)
class Progress:
    """Where a session is.

    Attributes:
        round: that is over, or is going on if `passed` is a number; from 1.
        open: tests that are begun, not decided yet, and get more rounds.
        tests: all of them.
        confirming: of the open ones those that were flagged, and get fresh rounds.
        seconds: since the start.
        waiting: tests that are not begun, since the time may not be enough for them.
        passed: number of tests that the current round has been through; None: the round is over.
    """

    round: int
    open: int
    tests: int
    confirming: int
    seconds: float
    waiting: int = 0
    passed: int | None = None


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
        asked: metrics that are asked for of a test, by its name: one that cannot be measured is INCONCLUSIVE.
        places: file and line of tests, by name.
        rule: when to decide.
        sampling: how a test is measured in a round.
        missing: how to treat a test that the base does not have.
        most_seconds: limit of the whole; None: as many rounds as the rule asks for. No round is begun whose
            first test would end later, and a round ends before a test that would exceed it by 5 %. If the
            time is not enough for the rounds to the first look of all tests, it goes to the first ones.
        seed: of all that is by chance.
        environment: of the machine, for the result.
        notes: for the result.
        on_progress: called after each round, and every 10 s in a round.

    Raises:
        GateError: no code of the trees was measured.
        GateInterruptedError: Ctrl-C, in the place of KeyboardInterrupt.
        ValueError: no tests, or numbers out of range.
    """
    check_sizes(tests=len(tests))
    if most_seconds is not None:
        check_number("most_seconds", most_seconds, "a number > 0", lambda value: value > 0)
    rule, sampling = rule or Rule(), sampling or Sampling()
    limits, asked, places = limits or {}, asked or {}, places or {}
    folders = {"base": base.folder, "head": head.folder}
    setup = SetupErrors(launch.root, folders, launch.place, launch.imports, launch.own_head)
    began, rng = real_time.monotonic(), random.Random(seed)  # noqa: S311
    all_tests = {
        test: OpenTest(test, limits.get(test, Limits()), tuple(asked.get(test, ()))) for test in tests
    }

    def suffices(rounds: int, round_seconds: float = 0.0, overrun: float = 1.0) -> bool:
        """Return True if there is time left for so many rounds."""
        elapsed = real_time.monotonic() - began
        return most_seconds is None or elapsed + rounds * round_seconds <= overrun * most_seconds

    # Fewer rounds than the first look has say nothing of a test. Where the time is short it goes to the first
    # tests, and a test is begun when those before it leave enough of it.
    first_look = rule.looks[0]
    number, begun, waiting, interrupted = 0, list[OpenTest](), list(all_tests.values()), False
    around = 0.0  # seconds of a round that are no test's
    told = began

    def tell(passed: int | None) -> None:
        nonlocal told
        told = real_time.monotonic()
        if on_progress is not None:
            flagged, opened = sum(test.confirming for test in begun), [test for test in begun if test.open]
            on_progress(
                Progress(number, len(opened), len(tests), flagged, told - began, len(waiting), passed)
            )

    try:
        with temporary_folder() as folder, _starter(folder, base, head, launch) as start:
            while True:
                number += 1
                round_began, tests_seconds, ended_seconds = real_time.monotonic(), 0.0, 0.0
                names = [test.nodeid for test in (*begun, *waiting)]
                memory = {name for name in names if all_tests[name].wants_memory}
                # Closed where it is left, so that its processes end.
                longer = replace(sampling, seconds=_seconds(sampling, begun, around))
                with closing(run_round(names, start, longer, rng, memory)) as measured:
                    for count, (name, found) in enumerate(measured, start=1):
                        found = setup.explained(found) if isinstance(found, Ended) else found
                        all_tests[name].add(found, rule)
                        tests_seconds += found.seconds
                        if isinstance(found, Ended):
                            ended_seconds += found.seconds  # which later rounds do not take
                        lasted = real_time.monotonic() - round_began - ended_seconds
                        any_measured = any(test.order for test in all_tests.values())
                        if real_time.monotonic() - told > _SILENT:
                            tell(count)
                        another = 0.0 if isinstance(found, Ended) else found.seconds
                        if any_measured and not suffices(1, another, _OVERRUN):
                            break
                        is_over = any_measured and not suffices(first_look - 1, lasted)
                        # A code that hangs everywhere would take this long for each test.
                        hangs = isinstance(found, Ended) and "hung" in found.how.values()
                        if count >= len(begun) and (is_over or (hangs and not suffices(0))):
                            break
                paired = [test for test in all_tests.values() if test.order]
                if paired and not any(test.own for test in paired):
                    raise GateError(_NOTHING_OWN)
                around = real_time.monotonic() - round_began - tests_seconds
                n_trials = sum(test.n_trials for test in all_tests.values())
                begun = [test for test in (*begun, *waiting) if test.begun and test.open]
                for trial in (trial for test in begun for trial in test.trials.values()):
                    trial.is_one_of(n_trials)
                waiting = [test for test in waiting if not test.begun]
                time_is_up = not suffices(1 if begun else 0, around + _first_seconds(begun))
                while len(begun) > 1 and not time_is_up:
                    # The first round is slow, since nothing is cached: its measure is not held strictly.
                    needed = max(0, first_look - len(begun[-1].order) - (number == 1))
                    if suffices(needed, around + sum(test.round_seconds for test in begun), _OVERRUN):
                        break
                    begun.pop()
                tell(None)
                if time_is_up or (not begun and not (waiting and suffices(first_look, around))):
                    break
    except KeyboardInterrupt:
        # What was decided is known: to measure it took minutes.
        interrupted = True
    order = check_order([pair for test in all_tests.values() for pair in test.order])
    result = GateResult(
        base=base.name,
        head=head.name,
        tests=tuple(
            test.result(*places.get(name, ("", 0)), interrupted=interrupted)
            for name, test in all_tests.items()
        ),
        seconds=real_time.monotonic() - began,
        rounds=number,
        missing=missing,
        environment=dict(environment or {}),
        seed=seed,
        order_bias=order.bias if order.pairs else None,
        balance=1 - order.head_first / order.pairs if order.pairs else None,
        notes=(
            *notes,
            *dict.fromkeys((*base.notes, *head.notes)),
            *(() if order.balanced else ("one side was first more often than the other: do not trust this",)),
            *_other_work(all_tests.values()),
            *_slower_now_and_then(all_tests.values()),
            *(("the run was interrupted: what was open then is INCONCLUSIVE",) if interrupted else ()),
        ),
    )
    if interrupted:
        raise GateInterruptedError(result)
    return result


def _first_seconds(begun: Sequence[OpenTest]) -> float:
    """Return the seconds that the first test takes in a round, without which it says nothing."""
    return begun[0].round_seconds if begun else 0.0


def _seconds(sampling: Sampling, begun: Sequence[OpenTest], around: float) -> float:
    """For which a round measures each side of a test: all together for half as long as it takes to start.

    What noise of the machine leaves in a round falls with this time, and where one test is left of many, a
    round that takes 3 s to start would measure it for 0.6 s. But more rounds say more than longer ones.
    """
    if not begun:
        return sampling.seconds
    beside = around + sum(test.beside_seconds for test in begun)
    fair = beside / 2 / (2 * len(begun))
    return max(sampling.seconds, min(sampling.longest_seconds, fair))


def _other_work(tests: Iterable[OpenTest]) -> Iterator[str]:
    """Of each test whose calls do not handle as many tokens on both sides a sentence that says so."""
    for test in tests:
        base, head = test.tokens
        if base and head and base != head:
            counts = f"{base} tokens on the base, {head} on the head"
            yield f"{test.nodeid}: a call handles {counts}: it is not the same work"


def _slower_now_and_then(tests: Iterable[OpenTest]) -> Iterator[str]:
    """Of each test whose median call is not too slow, while the mean is, a sentence that says so."""
    for test in tests:
        trial = test.trials.get("time")
        if trial is None or trial.decision is None or not trial.decision.verdict.ok:
            continue
        means = [statistics.fmean(logs) for _, logs in test.order]
        tolerance, _ = trial.limit.at(trial.base_level)
        if min(means) > tolerance:
            mean = f"the mean of its calls is not ({math.expm1(statistics.fmean(means)):+.1%})"
            yield f"{test.nodeid}: its median call is within the tolerance, {mean}"


@contextmanager
def _starter(folder: Path, base: Tree, head: Tree, launch: Launch) -> Iterator[Starter]:
    """What starts processes, for as long as this lasts: their plugin and what they print lie in `folder`."""
    trees = {"base": base, "head": head}
    is_long = len(str(folder)) > _LONGEST_TEMPORARY
    shorter = ExitStack()
    temporaries = shorter.enter_context(temporary_folder(Path("/tmp"))) if is_long else folder  # noqa: S108
    source = Path(next(iter(side_package.__path__)))
    supply = TwinSupply(folder)

    def start(tests: Sequence[str]) -> Callable[[str, int], SideProcess]:
        twins: list[Twins] = []
        purpose = frozenset(launch.files[test] for test in tests)

        def process(role: str, seed: int) -> SideProcess:
            if _FORKS and not (twins and twins[-1].left):
                twins.append(supply.next(seed, purpose))
            own = trees[role].folder
            # Not those of tests that are through: to import them takes time.
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
                # By default it is in TMPDIR. Each round would compile anew.
                **({} if _COMPILED in os.environ else {_COMPILED: str(folder / f"{role}-compiled")}),
                **({CALLABLE: "1"} if launch.callables else {}),
            }
            made = supply.sides[role] = SideProcess(
                role,
                [
                    "-p",
                    "stackwise_side.plugin",
                    *(_moved(argument, launch.root, own) for argument in launch.arguments),
                    f"--basetemp={scratch / 'tmp'}",
                    # Without the cache's plugin there is no such key, and --strict-config refuses it.
                    *(["-o", f"cache_dir={scratch / 'cache'}"] if launch.cache else []),
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


def _moved(argument: str, root: Path, tree: Path) -> str:
    """The argument with places below `root` as the same below `tree`."""
    place = rf"(?:^|(?<=[=,:])){re.escape(str(root))}(?=$|{re.escape(os.sep)})"
    return re.sub(place, lambda _: str(tree), argument)
