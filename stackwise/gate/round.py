"""Round: one fresh process of each side, and all tests measured in turns between the two."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from stackwise.gate.mixing import STRAY, Used, why_mixed, written_by_both
from stackwise.gate.process import SideFailedError, SideProcess
from stackwise.gate.side.clock import real_time
from stackwise.gate.turns import ORDERS, difference, standard_error, turns
from stackwise.support.arguments import check_choice, check_number, check_sizes

__all__ = ["SIDES", "Ended", "Paired", "Sampling", "Starter", "run_round"]

SIDES = ("base", "head")
_LEAST_PAIRS = 4
_SURROUNDED = 4.0  # how much longer than its calls alone a test may take for what surrounds them
_REFERENCES = 8  # samples in the shortest round that there may be
# Pairs after which it is looked whether they are enough; odd, so that it comes before either order.
_CHECKED = 13
_FEWEST = 2 * _CHECKED  # pairs of a round that may end early
# Results of a side that do not depend on earlier tests of the file.
_INDEPENDENT = frozenset({"hung", "missing", "not collected", "out of order", "refused"})
_LEAST_BYTES = 1.0  # a call that holds nothing has a ratio to another one all the same


@dataclass(frozen=True)
class Sampling:
    """How a test is measured in a round.

    Attributes:
        seconds: for which each side is measured.
        longest_seconds: the same at most, where a round takes long to start: see `stackwise.gate.session`.
        pairs: the most pairs.
        precision: the standard error of a round's difference, as a logarithm, at which it needs no more pairs
            (0: it makes all of them).
        slice_seconds: shorter calls are made several times in one turn, for as long as this.
        warm_up_seconds: for which each side makes calls before.
        memory: whether the memory of one call is read.
        reference: times the parts of a pinned workload once, which tells results of other days apart from
            those of another speed of the machine; None: there is none.
        order: "abba", or "fixed", which is there to show what it does.
    """

    seconds: float = 0.3
    longest_seconds: float = 1.2
    pairs: int = 1024
    precision: float = 0.0015
    slice_seconds: float = 0.001
    warm_up_seconds: float = 0.05
    memory: bool = True
    reference: Callable[[], tuple[float, ...]] | None = None
    order: str = "abba"

    def __post_init__(self) -> None:
        for key in ("seconds", "longest_seconds", "slice_seconds", "warm_up_seconds"):
            check_number(key, getattr(self, key), "a number > 0, in seconds", lambda value: value > 0)
        check_sizes(pairs=self.pairs)
        check_number("precision", self.precision, "a number >= 0", lambda value: value >= 0)
        check_choice("order", self.order, ORDERS)


@dataclass(frozen=True)
class Paired:
    """What a round measured of a test.

    Attributes:
        base: of each metric the median cost of the base, in the metric's unit.
        head: the same of the head.
        differences: of each metric log(head / base): the median over the pairs in which the base came first,
            and over those in which the head did, and of both the mean.
        head_first: of each pair whether the head was first.
        logs: of each pair log(head / base) of the time.
        seconds: that this took, with what the test does around its calls.
        sampled: seconds of them in which its pairs were made.
        own: whether each side has imported code of its own tree, beside the tests.
        imported: modules that a side has imported until the end of the test, relative to its tree.
        opened: files that a side has opened or run until the end of the test, relative to its tree.
        watched: the sides reported each file that they opened.
        disturbed: they were slowed by this.
        mixed: why the sides did not compare what they should; "": nothing is known against it.
        written: files outside of the trees that both sides wrote.
        reference: the median seconds of each part of a pinned workload, timed among the pairs; () without it.
        tokens: that a call of base handles, and one of head; 0: the work does not say.
        lacking: of each metric that some calls have a number of and others have not, the sides of these.
        whole_file: True if the test was measured only after the earlier tests of its file had run.
        warnings: RuntimeWarnings of each side, by side.
    """

    base: dict[str, float]
    head: dict[str, float]
    differences: dict[str, float]
    head_first: tuple[bool, ...]
    logs: tuple[float, ...]
    seconds: float = 0.0
    sampled: float = 0.0
    own: bool = True
    imported: frozenset[str] = frozenset()
    opened: frozenset[str] = frozenset()
    watched: bool = False
    disturbed: bool = False
    mixed: str = ""
    written: tuple[str, ...] = ()
    reference: tuple[float, ...] = ()
    tokens: tuple[int, int] = (0, 0)
    lacking: dict[str, str] = field(default_factory=dict)
    whole_file: bool = False
    warnings: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """What came of a test in the place of a measurement, on each side where something did.

    Attributes:
        how: of a side "skipped", "failed", "not collected" (its file or class failed), "missing", "crashed",
            "not started" (the process crashed before its first test), "killed" (by the system), "hung", "out
            of order" (it ran another test twice), "refused" (the gate cannot measure it until its set-up is
            changed) or "not measured" (it passed and never called what is measured).
        detail: of the same sides, why.
        seconds: that this took.
        warnings: RuntimeWarnings of each side, by side.
        by_plugin: True if a plugin skipped the test.
    """

    how: dict[str, str] = field(default_factory=dict)
    detail: dict[str, str] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    warnings: dict[str, list[str]] = field(default_factory=dict)
    by_plugin: bool = field(default=False, compare=False)


class _TestEndedError(Exception):
    """A test was over while it should have answered."""


class _Side:
    """A process, and what it has said about its tests."""

    def __init__(self, process: SideProcess) -> None:
        self.process = process
        self.collected: frozenset[str] = frozenset()
        self.not_collected: dict[str, str] = {}  # by file, or by class
        self.ended: dict[str, tuple[str, str]] = {}
        self.only_once: dict[str, bool] = {}
        self.tokens: dict[str, int] = {}
        self.warnings: dict[str, list[str]] = {}
        self.skipped_by_plugin: set[str] = set()
        self.own = False
        self.imported: set[str] = set()
        self.opened: set[str] = set()
        self.watched = self.disturbed = False
        self.used = Used()

    def collect(self) -> None:
        """Hear which tests there are."""
        while True:
            message = self.process.receive()
            if "not_collected" in message:
                self.not_collected[message["not_collected"]] = message["detail"]
            elif "collected" in message:
                self.collected = frozenset(message["collected"])
                return

    def lacks(self, test: str) -> bool:
        """Whether the test was not collected, which ends it."""
        if test in self.collected:
            return False
        around = itertools.accumulate(test.split("::"), "{}::{}".format)
        broken = next((place for place in around if place in self.not_collected), None)
        if broken is None:
            self.ended[test] = ("missing", "there is no test of this name")
        else:
            self.ended[test] = ("not collected", self.not_collected[broken])
        return True

    def come_to(self, test: str) -> bool:
        """Hear until the test waits to be measured (True) or is over."""
        while True:
            message = self.process.receive()
            if message.get("test") != test:
                raise SideFailedError(
                    "out of order",
                    f"it ran {message.get('test')} when {test} was next: a plugin may run tests again",
                )
            if message.get("ready"):
                self.only_once[test] = message["only_once"]
                self.tokens[test] = message.get("tokens", 0)
                return True
            if "ended" in message:
                self.ended.setdefault(test, (message["ended"], message["detail"]))
                if message.get("by_plugin"):
                    self.skipped_by_plugin.add(test)
            if message.get("over"):
                self.own = message["own"]
                self.warnings[test] = message.get("warnings", [])
                self.watched, self.disturbed = message["watched"], message["disturbed"]
                self.imported.update(message["imported"])
                self.opened.update(message["files"]["tree"])
                self.used.add(message["stray"], message["files"])
                if self.used.stray and not self.own:
                    # With code of its own too, the measurement is of a mixture, see `why_mixed`.
                    self.ended[test] = ("refused", f"it imported {self.used.stray}, {STRAY}")
                elif not message["measured"]:
                    self.ended.setdefault(test, ("not measured", "it never called what is to be measured"))
                return False

    def sample(self, test: str, **message: object) -> dict[str, float]:
        """Ask for numbers."""
        answer = self.process.ask(**message)
        if "sample" in answer:
            found: dict[str, float] = answer["sample"]
            return found
        self.ended.setdefault(test, (str(answer.get("ended", "failed")), str(answer.get("detail", answer))))
        if not answer.get("over"):
            self.come_to(test)
        raise _TestEndedError

    def release(self) -> None:
        """Let the test that waits go on, to its end."""
        self.process.send(go_on=True)


Starter = Callable[[Sequence[str]], Callable[[str, int], SideProcess]]


def run_round(
    tests: Sequence[str],
    start: Starter,
    sampling: Sampling,
    rng: random.Random,
    memory: Container[str] | None = None,
    *,
    file_tests: Mapping[str, Sequence[str]] = MappingProxyType({}),
    whole_file: Container[str] = (),
    in_time: Callable[[], bool] = lambda: True,
    run_began: float | None = None,
) -> Generator[tuple[str, Paired | Ended], None, None]:
    """Measure tests and yield the name and the result of each.

    A crash ends its own test only: new processes continue with the next test. A crash while the processes
    start ends all tests that they were started for. If a side runs an earlier test again, new processes
    continue with the same test, once.

    A test may depend on earlier tests of its file. If one was not measured and not all of them had run in its
    process, it is measured again at the end of the round, in new processes that run them first.

    Args:
        tests: names, of which each side may lack some.
        start: for tests, what starts the process of a side with a seed.
        sampling: how each is measured.
        rng: chooses who starts, and seeds the processes, both alike: what a hash seed does to a test is
            the same on both sides of a round and another in the next.
        memory: tests of which memory is read, if `sampling` reads any: to look takes as long as a few hundred
            calls, and is exact; None: all.
        file_tests: of each test of the session that is measured, all tests of its file, in their order.
        whole_file: tests before which the earlier tests of their file run from the start.
        in_time: False if no more time is to be spent on tests that are not measured. The round ends then.
        run_began: when the user's run began, in seconds since the epoch; None: now.
    """
    now = real_time.time()
    times = (now if run_began is None else run_began, now)

    def measure(chosen: Sequence[str], whole: Container[str]) -> Iterator[tuple[str, Paired | Ended, bool]]:
        """Yield of each test its name, its result and whether it may need the earlier tests of its file."""
        left, measured = _with_earlier(chosen, file_tests, whole), frozenset(chosen)
        restarted = set[str]()
        while left:
            began, ran = real_time.perf_counter(), set[str]()
            try:
                with _both(start(tuple(left)), rng) as sides:
                    while left:
                        test, began = left.pop(0), real_time.perf_counter()
                        try:
                            if test in measured:
                                looks = sampling.memory and (memory is None or test in memory)
                                found = _test(test, sides, replace(sampling, memory=looks), rng, times)
                                depends = isinstance(found, Ended) and _may_depend(
                                    found, test, ran, file_tests
                                )
                                yield test, replace(found, seconds=real_time.perf_counter() - began), depends
                            elif in_time():
                                _run_unmeasured(test, sides)
                            else:
                                return
                        except _SideLostError as lost:
                            if lost.error.how == "out of order" and test not in restarted:
                                restarted.add(test)
                                left.insert(0, test)
                            elif test in measured:
                                ended = lost.ended("", began)
                                yield test, ended, _may_depend(ended, test, ran, file_tests)
                            break
                        ran.add(test)
            except _SideLostError as lost:
                left = [test for test in left if test in measured]
                ended = lost.ended("at its start: ", began)
                how = {role: "not started" if how == "crashed" else how for role, how in ended.how.items()}
                each = replace(ended, how=how, seconds=ended.seconds / len(left))
                yield from ((test, each, False) for test in left)
                return

    again: list[str] = []
    for test, found, depends in measure(tests, whole_file):
        if depends:
            again.append(test)
        else:
            yield test, found
    for _, group in itertools.groupby(again, lambda test: test.partition("::")[0]):
        of_file = list(group)
        for test, found, _ in measure(of_file, of_file):
            yield test, found if isinstance(found, Ended) else replace(found, whole_file=True)


def _earlier(test: str, file_tests: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the tests of the same file that come before a test."""
    return itertools.takewhile(lambda other: other != test, file_tests.get(test, ()))


def _with_earlier(
    tests: Sequence[str], file_tests: Mapping[str, Sequence[str]], whole_file: Container[str]
) -> list[str]:
    """Return the tests, preceded by the earlier tests of their file if they are in `whole_file`."""
    order: dict[str, None] = {}
    for test in tests:
        if test in whole_file:
            order |= dict.fromkeys(_earlier(test, file_tests))
        order[test] = None
    return list(order)


def _may_depend(ended: Ended, test: str, ran: set[str], file_tests: Mapping[str, Sequence[str]]) -> bool:
    """Return True if a test may have ended because earlier tests of its file had not run.

    Args:
        ended: result of the test.
        test: its name.
        ran: tests that had run in its process.
        file_tests: as of `run_round`: its keys are the tests that the session measures. The first round runs
            these, and no other test.
    """
    absent = [each for each in _earlier(test, file_tests) if each not in ran]
    if any(each in file_tests for each in absent):
        return not _INDEPENDENT.issuperset(ended.how.values())
    return bool(absent) and (ended.how.get("head") == "failed" or ended.by_plugin)


def _run_unmeasured(test: str, sides: Mapping[str, _Side]) -> None:
    """Run a test on both sides with one call of its benchmark, for the tests that depend on it."""
    for role, side in sides.items():
        if test in side.collected:
            with _lost(role), suppress(_TestEndedError):
                if side.come_to(test):
                    side.sample(test, calls=1)
                    side.release()
                    side.come_to(test)


class _SideLostError(Exception):
    def __init__(self, role: str, error: SideFailedError) -> None:
        super().__init__(str(error))
        self.role, self.error = role, error

    def ended(self, where: str, began: float) -> Ended:
        """What came of a test by this."""
        seconds = real_time.perf_counter() - began
        return Ended({self.role: self.error.how}, {self.role: f"{where}{self.error}"}, seconds)


@contextmanager
def _lost(role: str) -> Iterator[None]:
    try:
        yield
    except SideFailedError as error:
        raise _SideLostError(role, error) from None


@contextmanager
def _both(start: Callable[[str, int], SideProcess], rng: random.Random) -> Iterator[dict[str, _Side]]:
    """New processes of both sides, which have said what tests they have."""
    roles = list(SIDES)
    rng.shuffle(roles)
    sides: dict[str, _Side] = {}
    try:
        seed = rng.randrange(2**31)
        for role in roles:
            with _lost(role):
                sides[role] = _Side(start(role, seed))
        for role in reversed(SIDES):  # if neither can, what is wrong with the head is told
            with _lost(role):
                sides[role].collect()
        yield {role: sides[role] for role in SIDES}
    finally:
        for side in sides.values():
            side.process.kill()


def _test(
    test: str,
    sides: dict[str, _Side],
    sampling: Sampling,
    rng: random.Random,
    times: tuple[float, float],
) -> Paired | Ended:
    waiting = []
    for role, side in sides.items():
        if side.lacks(test):
            continue
        with _lost(role):
            if side.come_to(test):
                waiting.append(role)
    found: Paired | None = None
    if len(waiting) == len(sides):
        try:
            found = _measure(test, sides, sampling, rng)
        except _TestEndedError:
            waiting = [role for role in waiting if test not in sides[role].ended]
    for role in waiting:
        with _lost(role):
            sides[role].release()
    for role in waiting:
        with _lost(role):
            sides[role].come_to(test)
    ended = {role: side.ended[test] for role, side in sides.items() if test in side.ended}
    warned = {role: side.warnings[test] for role, side in sides.items() if side.warnings.get(test)}
    used = {role: side.used for role, side in sides.items()}
    mixed, written = why_mixed(used, *times), tuple(written_by_both(used))
    if ended or found is None:
        hows = {role: how for role, (how, _) in ended.items()}
        is_said = any(STRAY in why for _, why in ended.values())
        more = f"; {mixed}" if mixed and not is_said else ""
        details = {role: f"{why}{more}" for role, (_, why) in ended.items()}
        by_plugin = any(test in side.skipped_by_plugin for side in sides.values())
        return Ended(hows, details, warnings=warned, by_plugin=by_plugin)
    tokens = (sides["base"].tokens[test], sides["head"].tokens[test])
    return replace(
        found,
        own=all(side.own for side in sides.values()),
        imported=frozenset[str]().union(*(side.imported for side in sides.values())),
        opened=frozenset[str]().union(*(side.opened for side in sides.values())),
        watched=all(side.watched for side in sides.values()),
        disturbed=any(side.disturbed for side in sides.values()),
        mixed=mixed,
        written=written,
        tokens=tokens,
        warnings=warned,
    )


def _measure(test: str, sides: dict[str, _Side], sampling: Sampling, rng: random.Random) -> Paired:
    def ask(role: str, **message: object) -> dict[str, float]:
        with _lost(role):
            return sides[role].sample(test, **message)

    if any(side.only_once[test] for side in sides.values()):
        calls = pairs = 1
        alone = False
    else:
        warm = {role: ask(role, warm_up=sampling.warm_up_seconds) for role in rng.sample(SIDES, 2)}
        calls, pairs = _plan(warm, sampling)
        alone = all(each["alone"] for each in warm.values())
    order = turns(pairs, rng, sampling.order)
    samples: dict[str, list[dict[str, float]]] = {role: [] for role in SIDES}
    references = []
    next_reference = 0
    fewest = min(pairs, _FEWEST) if sampling.precision else pairs

    def enough(made: int) -> bool:
        # Of deviations alone, whatever their sign: where nothing has changed, this favours no side.
        if not sampling.precision or made < _FEWEST or made % _CHECKED:
            return False
        return all(
            standard_error(each, order[:made]) < sampling.precision for each in _logs(samples).values()
        )

    began = real_time.perf_counter()
    with _on_one_processor(sides, alone, rng):
        for number, head_first in enumerate(order):
            if enough(number):
                break
            if sampling.reference is not None and number == next_reference:
                references.append(sampling.reference())
                # Odd: what it leaves behind in the caches meets both orders. Farther apart as the round goes
                # on: nobody knows when it ends.
                next_reference += max(fewest // _REFERENCES, number // 4) | 1
            for role in reversed(SIDES) if head_first else SIDES:
                samples[role].append(ask(role, calls=calls))
    sampled = real_time.perf_counter() - began
    order = order[: len(samples["base"])]
    if sampling.memory and not any(side.only_once[test] for side in sides.values()):
        held = {
            role: {"memory": max(_LEAST_BYTES, ask(role, memory=True)["memory"])}
            for role in rng.sample(SIDES, 2)
        }
    else:
        held = {role: {} for role in SIDES}
    for role in SIDES:
        with _lost(role):
            if not all(sample["time"] > 0 for sample in samples[role]):
                raise SideFailedError("crashed", "a call took no time at all")
    logs = _logs(samples)
    levels = {
        role: {m: statistics.median(s[m] for s in samples[role]) for m in logs} | held[role] for role in SIDES
    }
    differences = {metric: difference(values, order) for metric, values in logs.items()}
    if held["base"]:
        differences["memory"] = math.log(held["head"]["memory"] / held["base"]["memory"])
    return Paired(
        levels["base"],
        levels["head"],
        differences,
        tuple(order),
        tuple(logs["time"]),
        sampled=sampled,
        reference=tuple(statistics.median(part) for part in zip(*references, strict=True)),
        lacking=_lacking(samples),
    )


def _logs(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, list[float]]:
    """Of each metric that all samples have, log(head / base) of each pair."""
    # A text that ends at its first token has no time of a later one: on either side, in any call.
    metrics = [m for m in samples["base"][0] if all(s.get(m, 0) > 0 for role in SIDES for s in samples[role])]
    pairs = list(zip(samples["base"], samples["head"], strict=True))
    return {metric: [math.log(head[metric] / base[metric]) for base, head in pairs] for metric in metrics}


def _lacking(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, str]:
    """Of each metric that some samples have and others have not, the sides of these."""
    known = dict.fromkeys(m for role in SIDES for s in samples[role] for m, value in s.items() if value > 0)
    without = {
        metric: [role for role in SIDES if not all(s.get(metric, 0) > 0 for s in samples[role])]
        for metric in known
    }
    return {metric: " and ".join(roles) for metric, roles in without.items() if roles}


@contextmanager
def _on_one_processor(sides: Mapping[str, _Side], alone: bool, rng: random.Random) -> Iterator[None]:
    """Measure both sides on the same processor, if nothing of them computes but their main threads.

    Processors have noise of their own: on a virtual machine of two, whose neighbours were busy, the
    differences of rounds of 20 to 80 us calls had a standard deviation of 8.7 % where the system chose, which
    kept each side where it was, and 1.5 % on one processor.
    """
    if not alone or not hasattr(os, "sched_getaffinity"):
        yield
        return
    processor = rng.choice(sorted(os.sched_getaffinity(0)))
    for side in sides.values():
        side.process.keep_on(processor)
    try:
        yield
    finally:
        for side in sides.values():
            side.process.keep_on(None)


def _plan(warm: Mapping[str, Mapping[str, float]], sampling: Sampling) -> tuple[int, int]:
    """Calls in a turn, and pairs, of a test whose sides take so long for a call, and from one to the next."""
    call = [each["call"] for each in warm.values()]
    period = max(each["period"] for each in warm.values())
    # One side may have become a thousand times as slow: the other's short calls are not its measure.
    bearable = sampling.seconds / (_LEAST_PAIRS * max(max(call), period / _SURROUNDED))
    calls = max(1, math.ceil(min(sampling.slice_seconds / min(call), bearable)))
    fitting = min(sampling.seconds / (calls * max(call)), _SURROUNDED * sampling.seconds / (calls * period))
    return calls, min(sampling.pairs, max(_LEAST_PAIRS, int(fitting)))
