"""Round: one fresh process per side, and interleaved measurements of all tests."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from stackwise.gate.mixing import STRAY, Used, why_mixed, written_by_both
from stackwise.gate.process import SideFailedError, SideProcess
from stackwise.gate.side.clock import real_time
from stackwise.gate.turns import ORDERS, difference, standard_error, turns
from stackwise.support.arguments import check_choice, check_number, check_sizes

__all__ = ["SIDES", "Ended", "Paired", "Sampling", "Starter", "run_round"]

SIDES = ("base", "head")
_LEAST_PAIRS = 4
_SURROUNDED = 4.0  # maximum duration of a test relative to its calls, for the work around them
_REFERENCES = 8  # minimum number of reference samples in a round
# Number of pairs between checks of the precision. It is odd, so that checks alternate between both orders.
_CHECKED = 13
_FEWEST = 2 * _CHECKED  # minimum number of pairs in a round that may stop early
# Results of a side that do not depend on earlier tests of the file.
_INDEPENDENT = frozenset({"hung", "missing", "not collected", "out of order", "refused"})
_LEAST_BYTES = 1.0  # lower bound, so that the ratio of a call without memory is finite


@dataclass(frozen=True)
class Sampling:
    """Settings of the measurement of a test in a round.

    Attributes:
        seconds: time of the measurement per side.
        longest_seconds: maximum of `seconds` if a round takes long to start, see `stackwise.gate.session`.
        pairs: maximum number of pairs.
        precision: standard error of a round's difference, as a logarithm, at which the round stops early; 0:
            it measures all pairs.
        slice_seconds: minimum time of a turn. A shorter call is repeated within its turn.
        warm_up_seconds: time of the warm-up per side.
        memory: True to measure the memory of one call.
        reference: returns the seconds of each part of a pinned workload, which separate a change of the code
            from a change of the machine's speed between days. None: no reference.
        order: "abba", or "fixed" to demonstrate the bias of a fixed order.
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
    """Measurement of a test in a round.

    Attributes:
        base: median cost of the base per metric, in the metric's unit.
        head: median cost of the head per metric, in the metric's unit.
        differences: log(head / base) per metric. For a time, this is the mean of two medians: over the
            pairs with the base first, and over the pairs with the head first.
        head_first: for each pair, True if the head was first.
        logs: log(head / base) of the time, per pair.
        seconds: duration, including the work of the test around its calls.
        sampled: part of `seconds` in which the pairs were measured.
        own: True if both sides have imported code of their own trees, apart from tests.
        imported: modules that a side has imported until the end of the test, relative to its tree.
        opened: files that a side has opened or run until the end of the test, relative to its tree.
        watched: True if both sides reported each file that they opened.
        disturbed: True if these reports slowed down a side.
        mixed: reason why the comparison is not valid; "" if no reason is known.
        written: files outside of the trees that both sides wrote.
        reference: median seconds of each part of a pinned workload, timed between the pairs; empty without a
            reference.
        tokens: tokens per call of base and of head; 0: unknown.
        lacking: for each metric that is missing in some calls only, the sides of these calls.
        whole_file: True if the test was measured only after the earlier tests of its file had run.
        warnings: RuntimeWarnings by side.
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
    """Outcome of a test that could not be measured, per side.

    Attributes:
        how: outcome of each affected side: "skipped", "failed", "not collected" (its file or class failed),
            "missing", "crashed", "not started" (the process crashed before its first test), "killed" (by the
            system), "hung", "out of order" (the side ran another test instead, also after a restart),
            "refused" (the gate cannot measure it until its set-up is changed) or "not measured" (it passed
            and never called the measured function).
        detail: reason for the outcome of each side.
        seconds: duration.
        warnings: RuntimeWarnings by side.
        by_plugin: True if a plugin skipped the test.
    """

    how: dict[str, str] = field(default_factory=dict)
    detail: dict[str, str] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    warnings: dict[str, list[str]] = field(default_factory=dict)
    by_plugin: bool = field(default=False, compare=False)


class _TestEndedError(Exception):
    """A test finished although it had to answer a request."""


class _Side:
    """Process of a side, and its reports on its tests."""

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
        """Receive the names of the collected tests."""
        while True:
            message = self.process.receive()
            if "not_collected" in message:
                self.not_collected[message["not_collected"]] = message["detail"]
            elif "collected" in message:
                self.collected = frozenset(message["collected"])
                return

    def lacks(self, test: str) -> bool:
        """Return True if the test was not collected, and record its outcome."""
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
        """Wait for a test. Return True if it is ready to be measured, False if it is over."""
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
                    # If the side has also imported its own code, the comparison is mixed, see `why_mixed`.
                    self.ended[test] = ("refused", f"it imported {self.used.stray}, {STRAY}")
                elif not message["measured"]:
                    self.ended.setdefault(test, ("not measured", "it never called what is to be measured"))
                return False

    def sample(self, test: str, **message: object) -> dict[str, float]:
        """Request a measurement of the waiting test and return its values by metric.

        Raises:
            _TestEndedError: the test finished instead.
        """
        answer = self.process.ask(**message)
        if "sample" in answer:
            found: dict[str, float] = answer["sample"]
            return found
        self.ended.setdefault(test, (str(answer.get("ended", "failed")), str(answer.get("detail", answer))))
        if not answer.get("over"):
            self.come_to(test)
        raise _TestEndedError

    def release(self) -> None:
        """Let the waiting test continue to its end."""
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

    A crash affects its own test only: new processes continue with the next test. A crash while the processes
    start is the result of all tests that they were started for. If a side repeats an earlier test, new
    processes continue with the same test, once.

    A test may depend on earlier tests of its file. If a test was not measured, and not all earlier tests of
    its file had run in its process, the test is repeated at the end of the round. New processes then run the
    earlier tests first.

    Args:
        tests: names of the tests. Either side may lack some of them.
        start: returns, for a list of tests, the function that starts the process of a side with a seed.
        sampling: settings of each measurement.
        rng: source of the orders and of the seeds of the processes. Both sides of a round have the same seed,
            so a hash seed affects both in the same way. The next round has another seed.
        memory: tests with a memory measurement if `sampling` has one; None: all tests. The measurement is
            exact and takes as long as a few hundred calls.
        file_tests: for each measured test of the session, all tests of its file, in their order.
        whole_file: tests before which the earlier tests of their file run from the start.
        in_time: returns False if no more time is to be spent on tests that are not measured. The round then
            stops.
        run_began: start of the user's run, in seconds since the epoch; None: now.
    """
    now = real_time.time()
    times = (now if run_began is None else run_began, now)
    if memory is None:
        memory = tests

    def measure(chosen: Sequence[str], whole: Container[str]) -> Iterator[tuple[str, Paired | Ended, bool]]:
        """Yield name and result of each test, and True if it may need the earlier tests of its file."""
        left, measured = _with_earlier(chosen, file_tests, whole), frozenset(chosen)
        restarted = set[str]()
        while left:
            began, ran, is_lost = real_time.perf_counter(), set[str](), False
            try:
                with _both(start(tuple(left)), rng) as sides:
                    while left and not is_lost:
                        test, began = left.pop(0), real_time.perf_counter()
                        try:
                            if test in measured:
                                own = replace(sampling, memory=sampling.memory and test in memory)
                                found = _test(test, sides, own, rng, times)
                            elif in_time():
                                _run_unmeasured(test, sides)
                            else:
                                return
                        except _SideLostError as lost:
                            if lost.how == "out of order" and test not in restarted:
                                restarted.add(test)
                                left.insert(0, test)
                                break
                            is_lost, found = True, lost.ended
                        if test in measured:
                            found = replace(found, seconds=real_time.perf_counter() - began)
                            yield test, found, _may_depend(found, test, ran, file_tests)
                        ran.add(test)
            except _SideLostError as lost:
                left = [test for test in left if test in measured]
                each = replace(lost.ended, seconds=(real_time.perf_counter() - began) / len(left))
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
    """Yield the tests of the same file that precede a test."""
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


def _may_depend(
    found: Paired | Ended, test: str, ran: set[str], file_tests: Mapping[str, Sequence[str]]
) -> bool:
    """Return True if a test may have failed because earlier tests of its file had not run.

    Args:
        found: result of the test.
        test: its name.
        ran: tests that had run in its process.
        file_tests: as in `run_round`: its keys are the tests that the session measures. The first round runs
            these, and no other test.
    """
    if isinstance(found, Paired):
        return False
    absent = [each for each in _earlier(test, file_tests) if each not in ran]
    if any(each in file_tests for each in absent):
        return not _INDEPENDENT.issuperset(found.how.values())
    return bool(absent) and (found.how.get("head") == "failed" or found.by_plugin)


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
    """A side was lost. `ended` is the outcome of its current test."""

    def __init__(self, role: str, how: str, detail: str) -> None:
        super().__init__(detail)
        self.how, self.ended = how, Ended({role: how}, {role: detail})


@contextmanager
def _lost(role: str, *, starts: bool = False) -> Iterator[None]:
    try:
        yield
    except SideFailedError as error:
        if not starts:
            raise _SideLostError(role, error.how, str(error)) from None
        how = "not started" if error.how == "crashed" else error.how
        raise _SideLostError(role, how, f"at its start: {error}") from None


@contextmanager
def _both(start: Callable[[str, int], SideProcess], rng: random.Random) -> Iterator[dict[str, _Side]]:
    """Start new processes of both sides, and yield them after their collection of tests."""
    roles = list(SIDES)
    rng.shuffle(roles)
    sides: dict[str, _Side] = {}
    try:
        seed = rng.randrange(2**31)
        for role in roles:
            with _lost(role, starts=True):
                sides[role] = _Side(start(role, seed))
        for role in reversed(SIDES):  # head first: if both fail, its error is reported
            with _lost(role, starts=True):
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
    return _outcome(test, sides, found, times)


def _outcome(
    test: str, sides: Mapping[str, _Side], found: Paired | None, times: tuple[float, float]
) -> Paired | Ended:
    """Return the result of a finished test, with everything that the sides reported on it."""
    ended = {role: side.ended[test] for role, side in sides.items() if test in side.ended}
    warned = {role: side.warnings[test] for role, side in sides.items() if side.warnings.get(test)}
    used = {role: side.used for role, side in sides.items()}
    mixed, written = why_mixed(used, *times), tuple(written_by_both(used))
    both = tuple(sides.values())
    if ended or found is None:
        by_plugin = any(test in side.skipped_by_plugin for side in both)
        return Ended(*_explained(ended, mixed), warnings=warned, by_plugin=by_plugin)
    return replace(
        found,
        own=all(side.own for side in both),
        imported=frozenset[str]().union(*(side.imported for side in both)),
        opened=frozenset[str]().union(*(side.opened for side in both)),
        watched=all(side.watched for side in both),
        disturbed=any(side.disturbed for side in both),
        mixed=mixed,
        written=written,
        tokens=(sides["base"].tokens[test], sides["head"].tokens[test]),
        warnings=warned,
    )


def _explained(ended: Mapping[str, tuple[str, str]], mixed: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return how the test ended on each side, and the detail, with the reason for a mixed comparison."""
    is_said = any(STRAY in detail for _, detail in ended.values())
    more = f"; {mixed}" if mixed and not is_said else ""
    return (
        {role: how for role, (how, _) in ended.items()},
        {role: f"{detail}{more}" for role, (_, detail) in ended.items()},
    )


def _measure(test: str, sides: dict[str, _Side], sampling: Sampling, rng: random.Random) -> Paired:
    def ask(role: str, **message: object) -> dict[str, float]:
        with _lost(role):
            return sides[role].sample(test, **message)

    only_once = any(side.only_once[test] for side in sides.values())
    calls, pairs, alone = 1, 1, False
    if not only_once:
        warm = {role: ask(role, warm_up=sampling.warm_up_seconds) for role in rng.sample(SIDES, 2)}
        calls, pairs = _plan(warm, sampling)
        alone = all(each["alone"] for each in warm.values())
    order = turns(pairs, rng, sampling.order)
    began = real_time.perf_counter()
    with _on_one_processor(sides, alone, rng):
        samples, references = _sample(partial(ask, calls=calls), order, sampling)
    sampled = real_time.perf_counter() - began
    order = order[: len(samples["base"])]
    logs = _logs(samples)
    levels = {role: {m: statistics.median(s[m] for s in samples[role]) for m in logs} for role in SIDES}
    differences = {metric: difference(values, order) for metric, values in logs.items()}
    if sampling.memory and not only_once:
        for role in rng.sample(SIDES, 2):
            levels[role]["memory"] = max(_LEAST_BYTES, ask(role, memory=True)["memory"])
        differences["memory"] = math.log(levels["head"]["memory"] / levels["base"]["memory"])
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


def _sample(
    ask: Callable[[str], dict[str, float]], order: Sequence[bool], sampling: Sampling
) -> tuple[dict[str, list[dict[str, float]]], list[tuple[float, ...]]]:
    """Return the samples of each side, in pairs of this order, and the samples of the reference."""
    samples: dict[str, list[dict[str, float]]] = {role: [] for role in SIDES}
    references, next_reference = [], 0
    fewest = min(len(order), _FEWEST) if sampling.precision else len(order)
    for number, head_first in enumerate(order):
        if _is_precise(samples, order[:number], sampling.precision):
            break
        if sampling.reference is not None and number == next_reference:
            references.append(sampling.reference())
            # The distance is odd, so that effects on the caches meet both orders. It grows during the round,
            # since the end of the round is unknown.
            next_reference += max(fewest // _REFERENCES, number // 4) | 1
        for role in reversed(SIDES) if head_first else SIDES:
            samples[role].append(ask(role))
    for role in SIDES:
        if not all(sample["time"] > 0 for sample in samples[role]):
            raise _SideLostError(role, "crashed", "a call took no time at all")
    return samples, references


def _is_precise(
    samples: Mapping[str, Sequence[Mapping[str, float]]], order: Sequence[bool], precision: float
) -> bool:
    """Return True if the differences of the pairs so far are precise enough to end the round."""
    # Only the size of deviations matters, not their sign. If nothing has changed, this favours no side.
    if not precision or len(order) < _FEWEST or len(order) % _CHECKED:
        return False
    return all(standard_error(each, order) < precision for each in _logs(samples).values())


def _logs(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, list[float]]:
    """Return log(head / base) of each pair, for each metric that all samples have."""
    # A text with a single token has no later tokens to time. This may happen on either side, in any call.
    metrics = [m for m in samples["base"][0] if all(s.get(m, 0) > 0 for role in SIDES for s in samples[role])]
    pairs = list(zip(samples["base"], samples["head"], strict=True))
    return {metric: [math.log(head[metric] / base[metric]) for base, head in pairs] for metric in metrics}


def _lacking(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, str]:
    """Return, for each metric that is missing in some samples only, the sides of these samples."""
    known = dict.fromkeys(m for role in SIDES for s in samples[role] for m, value in s.items() if value > 0)
    without = {
        metric: [role for role in SIDES if not all(s.get(metric, 0) > 0 for s in samples[role])]
        for metric in known
    }
    return {metric: " and ".join(roles) for metric, roles in without.items() if roles}


@contextmanager
def _on_one_processor(sides: Mapping[str, _Side], alone: bool, rng: random.Random) -> Iterator[None]:
    """Run both sides on the same processor, if only their main threads compute.

    Processors differ in their noise. On a virtual machine with two processors and busy neighbours, the
    differences of rounds of 20 to 80 us calls had a standard deviation of 8.7 % if the system assigned the
    processors, since it did not move the sides. On one processor the standard deviation was 1.5 %.
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
    """Return the calls per turn and the number of pairs, from the warm-up of both sides."""
    call = [each["call"] for each in warm.values()]
    period = max(each["period"] for each in warm.values())
    # One side may be a thousand times slower, so the short calls of the other side must not decide.
    bearable = sampling.seconds / (_LEAST_PAIRS * max(max(call), period / _SURROUNDED))
    calls = max(1, math.ceil(min(sampling.slice_seconds / min(call), bearable)))
    fitting = min(sampling.seconds / (calls * max(call)), _SURROUNDED * sampling.seconds / (calls * period))
    return calls, min(sampling.pairs, max(_LEAST_PAIRS, int(fitting)))
