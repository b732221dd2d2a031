"""A round and a session, with processes that say what they are told to say."""

import itertools
import json
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from stackwise.gate import budget, session
from stackwise.gate import round as round_module
from stackwise.gate.limit import Limit, Limits
from stackwise.gate.open_test import OpenTest
from stackwise.gate.process import SideFailedError
from stackwise.gate.result import GateResult
from stackwise.gate.round import Ended, Paired, Sampling, run_round
from stackwise.gate.sequential import Rule
from stackwise.gate.session import GateError, GateInterruptedError, Launch, Progress, run_gate
from stackwise.gate.tree import Tree
from stackwise.gate.verdict import Verdict

SHORT = Sampling(seconds=1.0, pairs=10, slice_seconds=0.01)
HANG = 600.0
A, B, C = (f"bench/test_it.py::test_{name}" for name in "abc")


class Clock:
    """Seconds, as they are told to pass."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


NOT_COLLECTED = {
    "not imported": "ImportError: cannot import name 'new' from 'work' (/tmp/work.py)",
    "broken": "RuntimeError: the server does not answer (work.py:1)",
}


NO_FILES = {"tree": [], "foreign": [], "read": [], "written": []}


class Script:
    """A process of a side, played: `tests` are what each costs, or a word for what goes wrong."""

    clock = Clock()
    imported, watched = (), False

    def __init__(self, role, tests, log):
        self.role, self.tests, self.log = role, tests, log
        self.alive, self.own = True, True
        self.now = None
        self.looked = []
        self.collect(tests)

    def collect(self, asked):
        broken = {test: NOT_COLLECTED.get(str(self.tests[test])) for test in asked}
        self.collected = [test for test, why in broken.items() if why is None]
        self.answers = [
            {"not_collected": test.rpartition("::")[0], "detail": why} for test, why in broken.items() if why
        ]
        self.answers += [{"collected": self.collected}]
        self.to_come = list(self.collected)

    def _next(self):
        if not self.to_come:
            return
        self.now = self.to_come.pop(0)
        match self.tests[self.now]:
            case "skip":
                self.answers += [{"test": self.now, "ended": "skipped", "when": "setup", "detail": "no GPU"}]
                self._over(False)
            case "plugin skips":
                ended = {"ended": "skipped", "detail": "test_b depends on test_c", "by_plugin": True}
                self.answers += [{"test": self.now, "when": "setup", **ended}]
                self._over(False)
            case "fail":
                self._failed("call")
                self._over(False)
            case "pass":
                self._over(False)
            case {"needs": earlier} if earlier not in self.collected:
                self._failed("call")
                self._over(False)
            case "lacks":
                detail = "AttributeError: module 'work' has no attribute 'new'"
                self.answers += [{"test": self.now, "ended": "failed", "when": "call", "detail": detail}]
                self._over(False)
            case "no fixture":
                detail = "fixture 'new' not found\navailable fixtures: benchmark"
                self.answers += [{"test": self.now, "ended": "failed", "when": "setup", "detail": detail}]
                self._over(False)
            case "crash":
                self.answers += [SideFailedError("crashed", "it was ended by SIGSEGV")]
            case "kill":
                self.answers += [SideFailedError("killed", "the system killed it (SIGKILL)")]
            case "hang":
                self.answers += [SideFailedError("hung", "nothing was heard of it for 9 s")]
            case _:
                given = {"only_once": False, "tokens": 0} | self.tests[self.now]
                told = {key: given[key] for key in ("only_once", "tokens")}
                self.answers += [{"test": self.now, "ready": True, **told}]

    def _failed(self, when):
        self.answers += [{"test": self.now, "ended": "failed", "when": when, "detail": "E  Oops"}]

    def _over(self, measured):
        cost = self.tests[self.now] if isinstance(self.tests[self.now], dict) else {}
        said = {"measured": measured, "own": cost.get("own", self.own), "imported": self.imported}
        said |= {"watched": self.watched, "disturbed": self.watched and bool(cost.get("disturbed"))}
        said |= {"stray": cost.get("stray", ""), "files": NO_FILES | cost.get("files", {})}
        said |= {"warnings": cost.get("warnings", [])}
        self.answers += [{"test": self.now, "over": True, **said}]
        if "twice" in self.tests[self.now]:
            self._failed("call")
        self._next()

    def send(self, **message):
        match message:
            case {"warm_up": _}:
                cost = self.tests[self.now]
                period = cost.get("period", cost["time"])
                warm = {"call": cost["time"], "period": period, "alone": cost.get("alone", 0.0)}
                self.answers += [{"sample": warm}]
            case {"calls": calls}:
                self.log.append((self.now, self.role, calls))
                cost = self.tests[self.now]
                if cost.get("fails"):
                    self.answers += [
                        {"test": self.now, "ended": "failed", "when": "call", "detail": "E  Oops"}
                    ]
                    self._over(True)
                    return
                kept = {key: cost[key] for key in ("time", "ttft", "tpot") if key in cost}
                self.answers += [{"sample": kept}]
            case {"memory": True}:
                self.looked.append(self.now)
                self.answers += [{"sample": {"memory": self.tests[self.now]["memory"]}}]
            case {"go_on": True}:
                if self.role == "head":
                    self.clock.now += self.tests[self.now].get("takes", 0.0)
                if self.tests[self.now].get("fails_after"):
                    self._failed("teardown")
                self._over(True)

    def receive(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            self.clock.now += HANG if answer.how == "hung" else 0.0
            raise answer
        if "collected" in answer:
            self._next()
        return answer

    def ask(self, **message):
        self.send(**message)
        return self.receive()

    def keep_on(self, processor):
        self.log.append((self.now, self.role, f"on {processor}"))

    def kill(self):
        self.alive = False


def cost(seconds=0.1, memory=1000.0, **more):
    return {"time": seconds, "memory": memory, **more}


def play(base, head, sampling=SHORT, seed=0, tests=(A, B)):
    log, made = [], []

    def start(asked):
        def process(role, _):
            given = base if role == "base" else head
            made.append(Script(role, {test: cost for test, cost in given.items() if test in asked}, log))
            return made[-1]

        return process

    found = dict(run_round(tests, start, sampling, random.Random(seed)))
    assert not any(process.alive for process in made)
    return found, log


def test_costs_levels_and_differences():
    found, log = play({A: cost(0.1), B: cost(0.2, 500.0)}, {A: cost(0.11), B: cost(0.2, 600.0)})
    assert isinstance(found[A], Paired)
    assert found[A].differences == pytest.approx({"time": math.log(1.1), "memory": 0.0})
    assert found[B].differences == pytest.approx({"time": 0.0, "memory": math.log(1.2)})
    assert (found[A].base, found[A].head) == (
        {"time": 0.1, "memory": 1000.0},
        {"time": 0.11, "memory": 1000.0},
    )
    # The second to be measured takes nine pairs (of 0.11 s) and five (of 0.2 s).
    assert [sum(test == name for test, *_ in log) for name in (A, B)] == [18, 10]


def test_being_second_costs_both_sides_the_same():
    """Of the pairs of either order the median is far away; that of all lies anywhere between the two."""
    reads, noise = itertools.count(), random.Random(0)

    class Second(dict):
        def __getitem__(self, key):
            value = super().__getitem__(key)
            if key != "time":
                return value
            return value * (1.2 if next(reads) % 2 else 1.0) * math.exp(noise.gauss(0, 0.003))

    for seed in range(20):
        found, _ = play({A: Second(cost())}, {A: Second(cost(0.105))}, seed=seed, tests=(A,))
        assert found[A].differences["time"] == pytest.approx(math.log(1.05), abs=0.01)


def test_sides_take_turns():
    _, log = play({A: cost()}, {A: cost()}, tests=(A,))
    pairs = [(one[1], other[1]) for one, other in zip(log[::2], log[1::2], strict=True)]
    assert {*map(frozenset, pairs)} == {frozenset(("base", "head"))}
    assert all(one != other for one, other in itertools.pairwise(pairs))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system keeps no thread where it is")
def test_sides_share_one_processor_if_only_main_threads_compute():
    seen = set()
    for seed in range(20):
        _, log = play({A: cost(alone=1.0)}, {A: cost(alone=1.0)}, seed=seed, tests=(A,))
        assert log[0][2] == log[1][2] != "on None"
        assert {each[1] for each in log[:2]} == {each[1] for each in log[-2:]} == {"base", "head"}
        assert [each[2] for each in log[-2:]] == ["on None", "on None"]
        seen.add(log[0][2])
    assert seen == {f"on {processor}" for processor in os.sched_getaffinity(0)}
    for base, head in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        _, log = play({A: cost(alone=base)}, {A: cost(alone=head)}, tests=(A,))
        assert not any(str(each[2]).startswith("on") for each in log)


def test_both_sides_have_the_same_seed_and_each_round_another():
    seeds = []

    def start(role, seed):
        seeds.append(seed)
        return Script(role, {A: cost()}, [])

    rng = random.Random(0)
    for _ in range(3):
        dict(run_round((A,), lambda _: start, SHORT, rng))
    assert seeds[::2] == seeds[1::2]
    assert len({*seeds}) == 3


def test_short_calls_are_made_several_times_and_on_both_sides_as_often():
    _, log = play({A: cost(0.003)}, {A: cost(0.004)}, tests=(A,))
    assert {calls for *_, calls in log} == {4}  # 0.01 s of the faster one
    assert len(log) == 20  # the most pairs


def test_long_calls_are_made_four_times_at_least():
    _, log = play({A: cost(60.0)}, {A: cost(60.0)}, tests=(A,))
    assert len(log) == 8


def test_no_memory_where_it_is_not_wanted():
    found, _ = play({A: {"time": 0.1}}, {A: {"time": 0.1}}, Sampling(memory=False), tests=(A,))
    assert set(found[A].differences) == {"time"}


def test_a_reference_is_timed_among_the_pairs():
    times = iter([(0.1, 0.3), *[(0.2, 0.4)] * 100])
    sampling = Sampling(pairs=24, seconds=100.0, reference=lambda: next(times))
    found, _ = play({A: cost()}, {A: cost()}, sampling, tests=(A,))
    assert found[A].reference == (0.2, 0.4)
    assert len(list(times)) == 101 - 8
    assert play({A: cost()}, {A: cost()}, tests=(A,))[0][A].reference == ()


def test_a_reference_is_timed_as_often_in_a_round_that_ends_early():
    def timed(spread):
        taken = []
        sampling = Sampling(seconds=10.0, reference=lambda: taken.append(1) or (1.0,))
        found, _ = play({A: noisy(spread, 0)}, {A: noisy(spread, 1)}, sampling, tests=(A,))
        return len(found[A].logs), len(taken)

    assert timed(0.0) == (26, 8)
    assert timed(0.5) == (1024, 25)  # it is no part of each of them


@pytest.mark.parametrize("precision", [0.0, 1e-9])
@pytest.mark.parametrize("pairs", [4, 9, 16, 32, 192])
def test_what_a_reference_leaves_in_the_caches_meets_both_orders(pairs, precision):
    log, before, rng = [], [], random.Random(0)

    class Logged(dict):
        def __getitem__(self, key):
            value = super().__getitem__(key)
            if key != "time":
                return value
            log.append("call")
            # So noisy that no round is known well enough to end early.
            return value * math.exp(rng.gauss(0, 0.5)) if precision else value

    sampling = Sampling(
        pairs=pairs, seconds=1000.0, precision=precision, reference=lambda: before.append(len(log)) or (1.0,)
    )
    play({A: Logged(cost())}, {A: Logged(cost())}, sampling, tests=(A,))
    orders = [((number - before[0]) // 2) % 2 for number in before]
    assert 4 <= len(orders) <= (20 if precision else 12)
    assert abs(2 * sum(orders) - len(orders)) <= 1


def noisy(spread, seed):
    rng = random.Random(seed)

    class Noisy(dict):
        def __getitem__(self, key):
            value = super().__getitem__(key)
            return value * math.exp(rng.gauss(0, spread)) if key == "time" else value

    return Noisy(cost(1e-3))


def test_a_round_makes_no_more_pairs_than_it_needs():
    def pairs(spread, **given):
        sampling = Sampling(seconds=10.0, pairs=192, **given)
        found, log = play({A: noisy(spread, 0)}, {A: noisy(spread, 1)}, sampling, tests=(A,))
        assert 2 * len(found[A].logs) == 2 * len(found[A].head_first) == len(log)
        return len(found[A].logs)

    assert pairs(0.0) == 26
    assert 26 < pairs(0.005) < 192
    assert pairs(0.1) == 192
    assert pairs(0.0, precision=0.0) == 192
    assert pairs(0.005) < pairs(0.005, precision=0.001)


def test_to_end_early_favours_no_side():
    # One side is 1 % slower, with bursts on both.
    found = []
    for seed in range(60):
        sides = [{A: noisy(0.01, 2 * seed + which)} for which in (0, 1)]
        measured, _ = play(*sides, Sampling(seconds=10.0), seed, tests=(A,))
        found.append(measured[A].differences["time"])
    # 60 differences of 0.0015 or more, of which the mean varies by 0.0002 or more.
    assert abs(sum(found) / len(found)) < 0.0008


def test_a_call_that_holds_nothing():
    found, _ = play({A: cost(memory=0.0)}, {A: cost(memory=0.0)}, tests=(A,))
    assert found[A].differences["memory"] == 0.0


@pytest.mark.parametrize(
    ("word", "how", "detail"),
    [
        ("skip", "skipped", "no GPU"),
        ("fail", "failed", "E  Oops"),
        ("pass", "not measured", "it never called what is to be measured"),
        (cost(stray="/x.py", own=False), "refused", "it imported /x.py, so the gate would measure"),
        ("not imported", "not collected", "ImportError: cannot import name 'new' from 'work'"),
    ],
)
@pytest.mark.parametrize("role", ["base", "head"])
def test_unmeasurable_test_does_not_affect_other_tests(word, how, detail, role):
    sides = {"base": {A: cost(), B: cost()}, "head": {A: cost(), B: cost()}}
    sides[role][A] = word
    found, _ = play(**sides)
    assert found[A].how == {role: how}
    assert detail in found[A].detail[role]
    assert isinstance(found[B], Paired)


@pytest.mark.parametrize("key", ["fails", "fails_after"])
@pytest.mark.parametrize("role", ["base", "head"])
def test_a_call_that_fails_and_a_test_that_fails_after_it(key, role):
    sides = {"base": {A: cost(), B: cost()}, "head": {A: cost(), B: cost()}}
    sides[role][A] = cost(**{key: True})
    found, _ = play(**sides)
    assert found[A].how == {role: "failed"}
    assert isinstance(found[B], Paired)


@pytest.mark.parametrize(("word", "how"), [("crash", "crashed"), ("hang", "hung")])
@pytest.mark.parametrize("role", ["base", "head"])
def test_lost_process_affects_only_its_current_test(word, how, role):
    sides = {"base": {A: cost(), B: cost(), C: cost()}, "head": {A: cost(), B: cost(), C: cost()}}
    sides[role][B] = word
    found, log = play(**sides, tests=(A, B, C))
    assert list(found) == [A, B, C]
    assert found[B].how == {role: how}
    assert isinstance(found[A], Paired)
    assert isinstance(found[C], Paired)
    assert [test for test, _ in itertools.groupby(log, key=lambda each: each[0])] == [A, C]


def test_each_process_pair_gets_the_remaining_tests_and_its_own_seed():
    asked, seeds = [], []
    head = {A: "crash", B: cost(), C: "crash"}

    def start(tests):
        asked.append(tests)

        def process(role, seed):
            seeds.append(seed)
            given = head if role == "head" else dict.fromkeys(head, cost())
            return Script(role, {test: given[test] for test in tests}, [])

        return process

    dict(run_round((A, B, C), start, SHORT, random.Random(0)))
    assert asked == [(A, B, C), (B, C)]  # behind the last one there is nothing to be started for
    assert seeds[::2] == seeds[1::2]
    assert len({*seeds}) == 2


@pytest.mark.parametrize("at", ["start", "collection"])
def test_new_processes_that_end_at_their_start_end_what_is_left(at):
    made = []

    def start(tests):
        def process(role, _):
            if tests != (A, B, C) and role == "base":
                lost = SideFailedError("crashed", "no more memory")
                if at == "start":
                    raise lost
                made.append(Script(role, {}, []))
                made[-1].answers = [lost]
                return made[-1]
            made.append(Script(role, {test: "crash" if test == A else cost() for test in tests}, []))
            return made[-1]

        return process

    found = dict(run_round((A, B, C), start, SHORT, random.Random(0)))
    assert found[B] == found[C] == Ended({"base": "not started"}, {"base": "at its start: no more memory"})
    assert not any(process.alive for process in made)


def test_processes_end_where_a_round_is_left():
    made = []

    def process(role, _):
        made.append(Script(role, {A: cost(), B: cost()}, []))
        return made[-1]

    found = run_round((A, B), lambda _: process, SHORT, random.Random(0))
    assert next(found)[0] == A
    assert all(each.alive for each in made)
    found.close()
    assert len(made) == 2 and not any(each.alive for each in made)


class Unread(list):
    """A list that nothing may look through."""

    def __iter__(self):
        raise AssertionError("thousands of tests of a file would take quadratic time")


def test_measured_test_does_not_look_for_the_earlier_tests_of_its_file():
    file_tests = Unread([A, B])

    def process(role, _):
        return Script(role, {A: cost(), B: cost()}, [])

    found = run_round(
        (A, B), lambda _: process, SHORT, random.Random(0), file_tests={A: file_tests, B: file_tests}
    )
    assert all(isinstance(each, Paired) for _, each in found)


def test_a_test_that_one_side_lacks():
    found, _ = play({B: cost()}, {A: cost(), B: cost()})
    assert found[A] == Ended({"base": "missing"}, {"base": "there is no test of this name"})
    assert isinstance(found[B], Paired)


@pytest.mark.parametrize("test", [A, "bench/test_it.py::TestOf::test_it"], ids=["file", "class"])
def test_a_test_of_what_one_side_cannot_collect(test):
    found, _ = play({test: "broken"}, {test: cost()}, tests=(test,))
    assert found[test] == Ended({"base": "not collected"}, {"base": NOT_COLLECTED["broken"]})


# A whole session.


@pytest.fixture
def sides(monkeypatch):
    """Sets what both sides cost; functions are asked with the number of the round."""
    rounds = []

    def of(base, head):
        def start(role, arguments, watch, **_):
            if not rounds or role in rounds[-1]:
                rounds.append({})
            number = len(rounds) - 1
            given = base if role == "base" else head
            tests = {name: what(number) if callable(what) else what for name, what in given.items()}
            made = Script(role, tests, [])
            made.watched = watch
            rounds[-1][role] = made
            played = made.send

            def send(**message):
                if "tests" in message:
                    made.collect([test for test in message["tests"] if test in tests])
                else:
                    played(**message)

            made.send = send
            return made

        monkeypatch.setattr(session, "SideProcess", start)
        monkeypatch.setattr(session, "_FORKS", False)
        return rounds

    return of


def gate(tmp_path, tests=(A, B), **given):
    launch = Launch(("-q",), tmp_path, dict.fromkeys(tests, Path("bench/test_it.py")))
    return run_gate(
        Tree(tmp_path / "base", "old"), Tree(tmp_path / "head", "new"), tests, launch, sampling=SHORT, **given
    )


def test_all_is_decided(sides, tmp_path):
    jitter = random.Random(0)
    rounds = sides(
        {A: lambda _: cost(0.1 * math.exp(jitter.gauss(0, 0.002))), B: cost(memory=1e9)},
        {A: lambda _: cost(0.11 * math.exp(jitter.gauss(0, 0.002))), B: cost(memory=1.2e9)},
    )
    seen = []
    found = gate(tmp_path, on_progress=seen.append)
    one, other = found.tests
    assert one.trials["time"].decision.verdict == Verdict.REGRESSED
    assert one.trials["time"].decision.confirmed
    assert one.trials["time"].decision.estimate == pytest.approx(0.1, abs=0.01)
    assert one.trials["memory"].decision.verdict == Verdict.PASS
    assert other.trials["time"].decision.verdict == Verdict.PASS
    assert other.trials["memory"].decision.verdict == Verdict.REGRESSED
    assert other.trials["memory"].decision.estimate == pytest.approx(0.2)
    assert (found.base, found.head) == ("old", "new")
    assert found.rounds == len(rounds) == len(seen)
    assert found.balance == pytest.approx(0.5, abs=0.1)
    assert seen[-1] == Progress(found.rounds, 0, 2, 0, seen[-1].seconds, most_left=seen[-1].most_left)
    assert all(later.most_left >= 0 for later in seen)
    assert any(progress.confirming for progress in seen)


def test_progress_has_the_seconds_until_the_last_round_or_the_limit(sides, tmp_path):
    for limit in (None, 1000.0, 1e-3):
        sides({A: cost()}, {A: cost()})
        seen = []
        gate(tmp_path, (A,), on_progress=seen.append, most_seconds=limit)
        first = seen[0]
        if limit == 1e-3:
            assert first.most_left == 0
        else:
            assert first.most_left == pytest.approx(24 * first.seconds)  # a rule has at most 25 rounds


def test_memory_is_not_looked_at_once_it_is_decided(sides, tmp_path):
    """Nor where nothing judges it."""
    jitter = random.Random(1)
    rounds = sides(
        {A: cost(), B: cost()},
        {A: lambda _: cost(0.1 * math.exp(jitter.gauss(0, 0.05))), B: cost()},
    )
    found = gate(tmp_path, limits={B: Limits(memory=None)})
    assert found.rounds > Rule().looks[0]
    looked = [[pair[role].looked for role in ("base", "head")] for pair in rounds]
    first_look = Rule().looks[0]
    assert looked[:first_look] == [[[A], [A]]] * first_look
    assert looked[first_look:] == [[[], []]] * (len(rounds) - first_look)
    assert found.tests[0].trials["memory"].decision.verdict == Verdict.PASS
    assert set(found.tests[1].trials) == {"time"}


def test_decided_tests_are_not_measured_again(sides, tmp_path):
    jitter = random.Random(1)
    rounds = sides(
        {A: cost(), B: cost()},
        {A: cost(), B: lambda _: cost(0.1 * math.exp(jitter.gauss(0, 0.05)))},
    )
    found = gate(tmp_path)
    first = Rule().looks[0]
    assert found.tests[0].trials["time"].decision.rounds == first
    assert all(A in r["head"].collected for r in rounds[:first])
    assert not any(A in r["head"].collected for r in rounds[first:])


def test_the_time_is_up(sides, tmp_path):
    sides({A: cost(), B: cost(), C: cost()}, {A: "skip", B: cost(), C: cost()})
    found = gate(tmp_path, (A, B, C), most_seconds=1e-9)
    assert found.rounds == 1
    assert (found.tests[0].status, found.tests[0].detail) == (
        "skipped on head",
        "no GPU; the base runs it",
    )
    assert found.tests[1].verdict == Verdict.INCONCLUSIVE
    assert found.tests[1].trials["time"].decision.reason.endswith("the time is up")
    assert found.tests[2].status == "not begun"
    assert found.tests[2].outcome("fail") == "inconclusive"


def test_a_crash_costs_no_other_test_a_round(sides, tmp_path):
    pairs = sides({A: cost(), B: cost()}, {A: "crash", B: cost()})
    found = gate(tmp_path)
    assert found.tests[0].status == "crashed on head"
    assert "SIGSEGV" in found.tests[0].detail
    assert found.tests[1].verdict == Verdict.PASS
    first_look = Rule().looks[0]
    assert found.rounds == found.tests[1].trials["time"].decision.rounds == first_look
    assert len(pairs) == first_look + 1


def test_processes_that_are_gone_before_they_hear_of_their_tests(sides, tmp_path, monkeypatch):
    sides({A: cost()}, {A: cost()})
    whole, made = session.SideProcess, []

    def start(role, arguments, **given):
        process = whole(role, arguments, **given)
        made.append(process)
        if role == "head":

            def send(**_):
                raise SideFailedError("crashed", "it ended with code 4")

            process.send = send
        return process

    monkeypatch.setattr(session, "SideProcess", start)
    found = gate(tmp_path, (A,))
    assert found.tests[0].status == "crashed on head"
    assert found.tests[0].detail == "at its start: it ended with code 4"
    assert made and not any(process.alive for process in made)


# Where the time is short.


@pytest.fixture
def clock(monkeypatch):
    """What time it is for a session: tests let pass what they say that they take."""
    made = Clock()
    monkeypatch.setattr(Script, "clock", made)
    monkeypatch.setattr(budget, "real_time", SimpleNamespace(monotonic=made))
    monkeypatch.setattr(round_module, "real_time", SimpleNamespace(perf_counter=made, time=made))
    return made


def many(count):
    return tuple(f"bench/test_it.py::test_{number}" for number in range(count))


def slow_start(monkeypatch, clock, seconds):
    """Processes of a pair take so long to start, by the number of the pair."""
    whole, heads = session.SideProcess, itertools.count()

    def start(role, arguments, **given):
        if role == "head":
            clock.now += seconds(next(heads))
        return whole(role, arguments, **given)

    monkeypatch.setattr(session, "SideProcess", start)


def test_a_round_measures_for_as_long_as_it_takes_to_start(sides, tmp_path, clock, monkeypatch):
    """All tests at first, then the one that is still open."""
    jitter, asked = random.Random(1), []
    whole = session.run_round

    def noted(names, start, sampling, *rest, **given):
        asked.append((len(names), sampling.seconds))
        return whole(names, start, sampling, *rest, **given)

    monkeypatch.setattr(session, "run_round", noted)
    names = many(4)
    noisy = {names[0]: lambda _: cost(0.1 * math.exp(jitter.gauss(0, 0.02)), takes=0.4)}
    same = {name: cost(takes=0.4) for name in names}
    sides(same, same | noisy)
    slow_start(monkeypatch, clock, lambda _: 4.0)
    gate(tmp_path, names)
    # Half of four seconds to start and 0.4 beside each test, for two sides of each.
    assert asked[0] == (4, 1.0) and asked[1] == (4, 1.0)
    assert asked[-1] == (1, pytest.approx(4.4 / 4))

    monkeypatch.setattr(session, "run_round", whole)
    tests = [OpenTest(name, Limits(), beside_seconds=0.4) for name in names]
    sampling = Sampling()
    assert session._seconds(sampling, [], 9.0) == 0.3
    assert session._seconds(sampling, tests, 0.0) == 0.3
    assert session._seconds(sampling, tests, 2.0) == 0.3
    assert session._seconds(sampling, tests[:1], 2.0) == pytest.approx(0.6)
    assert session._seconds(sampling, tests[:1], 20.0) == 1.2


def test_short_time_goes_to_the_first_tests(sides, tmp_path, clock):
    tests = many(10)
    costs = dict.fromkeys(tests, cost(takes=1.0))
    sides(costs, costs)
    seen = []
    found = gate(tmp_path, tests, most_seconds=20.0, on_progress=seen.append)
    # With the fourth, four rounds and one for the confirmation take all of the time.
    first_look = Rule().looks[0]
    for test in found.tests[:4]:
        assert test.verdict == Verdict.PASS
        assert test.trials["time"].decision.rounds == first_look
    assert [(test.status, test.outcome("fail")) for test in found.tests[4:]] == [
        ("not begun", "inconclusive")
    ] * 6
    assert found.tests[4].detail == "the time was not enough for all tests"
    assert (found.verdict, found.exit_code) == (Verdict.INCONCLUSIVE, 7)
    after_rounds = [each for each in seen if each.passed is None]
    assert [(each.open, each.waiting) for each in after_rounds] == [(4, 6)] * 3 + [(0, 6)]
    assert found.seconds <= 21.0


def test_with_time_for_all_tests_all_are_begun_at_once(sides, tmp_path, clock):
    tests = many(10)
    costs = dict.fromkeys(tests, cost(takes=1.0))
    sides(costs, costs)
    found = gate(tmp_path, tests, most_seconds=50.0)
    assert {test.verdict for test in found.tests} == {Verdict.PASS}
    assert (found.rounds, found.seconds) == (4, 40.0)


def test_tests_that_wait_are_begun_where_later_rounds_are_faster(sides, tmp_path, clock, monkeypatch):
    tests = many(10)
    costs = dict.fromkeys(tests, cost(takes=1.0))
    sides(costs, costs)
    slow_start(monkeypatch, clock, lambda number: 1.0 if number else 10.0)
    seen = []
    found = gate(tmp_path, tests, most_seconds=75.0, on_progress=seen.append)
    assert [each.waiting for each in seen if each.passed is None][:2] == [5, 0]
    assert {test.verdict for test in found.tests} == {Verdict.PASS}
    assert {test.trials["time"].decision.rounds for test in found.tests} == {4}
    assert found.seconds < 75


def test_no_round_is_begun_for_new_tests_that_no_time_is_left_for(sides, tmp_path, clock, monkeypatch):
    tests = many(3)
    costs = dict.fromkeys(tests, cost(takes=1.0))
    sides(costs, costs)
    slow_start(monkeypatch, clock, lambda number: 9.0 if number else 12.0)
    found = gate(tmp_path, tests, most_seconds=70.0)
    # 12 + 2, and three times 9 + 2: in the rest no new test comes to its first look.
    assert [test.status for test in found.tests] == ["measured", "measured", "not begun"]
    assert [test.verdict for test in found.tests[:2]] == [Verdict.PASS] * 2
    assert (found.rounds, found.seconds) == (4, 47.0)


def slower(change, noise=0.01, seed=1):
    """Cost of a test that takes a second per round and whose time differs from round to round."""
    draw = random.Random(seed)
    return lambda _: cost(0.1 * (1 + change) * math.exp(draw.gauss(0, noise)), takes=1.0)


def test_a_slower_suite_that_is_longer_than_the_limit_fails(sides, tmp_path, clock):
    tests = many(200)
    sides(
        {name: slower(0.0, seed=number) for number, name in enumerate(tests)},
        {name: slower(0.7, seed=1000 + number) for number, name in enumerate(tests)},
    )
    found = gate(tmp_path, tests, most_seconds=100.0)
    assert (found.verdict, found.exit_code) == (Verdict.REGRESSED, 1)
    assert [test.verdict for test in found.tests[:20]] == [Verdict.REGRESSED] * 20
    assert {test.status for test in found.tests[20:]} == {"not begun"}
    assert found.seconds <= 100


@pytest.mark.parametrize(
    ("change", "one", "verdict", "suite"),
    [
        (0.06, 0.06, Verdict.REGRESSED, Verdict.REGRESSED),
        (0.0, 0.0, Verdict.INCONCLUSIVE, None),
        (0.06, 0.7, Verdict.REGRESSED, None),
    ],
    ids=["slower", "the same", "one test is proved slower"],
)
def test_suite_is_compared_if_no_test_is_proved_slower(change, one, verdict, suite, sides, tmp_path, clock):
    """The time is enough for five rounds, in which no test is known well enough."""
    tests = many(40)
    changes = {name: one if name == tests[0] else change for name in tests}
    sides(
        {name: slower(0.0, noise=0.04, seed=number) for number, name in enumerate(tests)},
        {name: slower(changes[name], noise=0.04, seed=1000 + n) for n, name in enumerate(tests)},
    )
    found = gate(tmp_path, tests, most_seconds=200.0)
    regressed = [test.nodeid for test in found.tests if test.verdict is Verdict.REGRESSED]
    assert regressed == ([tests[0]] if one > change else [])
    assert (found.suite and found.suite.verdict) == suite
    assert found.verdict == verdict
    assert found.seconds <= 200


def test_the_last_round_goes_to_flagged_tests(sides, tmp_path, clock):
    """The first four tests are too noisy to be decided, and the time is short in the last round."""
    tests = many(8)
    noisy = {name: slower(0.0, noise=0.1, seed=number) for number, name in enumerate(tests[:4])}
    calm = {name: slower(0.0, seed=9 * number) for number, name in enumerate(tests[4:], 1)}
    slow = {name: slower(0.2, seed=7 * number) for number, name in enumerate(tests[4:], 1)}
    sides(
        noisy | calm,
        {name: slower(0.0, noise=0.1, seed=100 + number) for number, name in enumerate(noisy)} | slow,
    )
    found = gate(tmp_path, tests, most_seconds=44.0)
    assert [test.verdict for test in found.tests[4:]] == [Verdict.REGRESSED] * 4
    assert {test.verdict for test in found.tests[:4]} == {Verdict.INCONCLUSIVE}
    assert found.seconds <= 44


def test_tests_are_given_up_where_later_rounds_are_slower(sides, tmp_path, clock):
    tests = many(4)
    costs = dict.fromkeys(tests, lambda number: cost(takes=3.0 if number else 1.0))
    sides(costs, costs)
    found = gate(tmp_path, tests, most_seconds=34.0)
    assert [test.verdict for test in found.tests] == [Verdict.PASS] * 2 + [Verdict.INCONCLUSIVE] * 2
    assert [test.trials["time"].decision.rounds for test in found.tests] == [4, 4, 2, 2]
    assert found.seconds <= 34.0
    assert found.tests[3].trials["time"].decision.reason.endswith("too few for a decision; the time is up")


def test_duration_of_a_lost_process_is_excluded_from_later_rounds(sides, tmp_path, clock):
    tests = many(10)
    costs = dict.fromkeys(tests, cost(takes=1.0))
    sides(costs, {**costs, tests[0]: "hang"})
    found = gate(tmp_path, tests, most_seconds=HANG + 40.0)
    assert found.tests[0].status == "hung on head"
    assert {test.verdict for test in found.tests[1:]} == {Verdict.PASS}


def test_a_run_without_a_limit_makes_all_rounds(sides, tmp_path, clock):
    costs = {A: cost(takes=1e6), B: cost(takes=1e6)}
    sides(costs, costs)
    assert {test.verdict for test in gate(tmp_path).tests} == {Verdict.PASS}


@pytest.mark.parametrize(
    ("base", "head", "status"),
    [
        ("skip", cost(), "missing on base"),
        ("fail", cost(), "crashed on base"),
        ("lacks", cost(), "missing on base"),
        ("no fixture", cost(), "missing on base"),
        ("not imported", cost(), "missing on base"),
        ("broken", cost(), "crashed on base"),
        ("hang", cost(), "hung on base"),
        (cost(stray="/x.py", own=False), cost(), "set-up error"),
        (cost(), cost(stray="/x.py", own=False), "set-up error"),
        (cost(), cost(stray="/x.py", own=False, fails=True), "set-up error"),
        (cost(), "fail", "crashed on head"),
        (cost(), "hang", "hung on head"),
        (cost(), "pass", "not measured"),
        ("pass", cost(), "not measured"),
        ("pass", "pass", "unused"),
        (cost(), "not imported", "crashed on head"),
        ("fail", "fail", "set-up error"),
        ("skip", "skip", "skipped"),
        (cost(), "skip", "skipped on head"),
        ("fail", "skip", "skipped"),
    ],
)
def test_what_is_said_of_a_test_that_is_not_measured(base, head, status, sides, tmp_path):
    sides({A: base}, {A: head})
    found = gate(tmp_path, (A,))
    assert found.tests[0].status == status
    assert not found.tests[0].trials


def test_metrics_that_are_not_judged(sides, tmp_path):
    sides({A: cost(), B: cost()}, {A: cost(memory=9000.0), B: cost()})
    only_time, neither = Limits(memory=None), Limits(time=None, memory=None)
    found = gate(tmp_path, limits={A: only_time, B: neither})
    assert set(found.tests[0].trials) == {"time"}
    assert found.tests[1].status == "skipped"


def test_round_that_exceeds_the_time_ends_before_its_last_test(sides, tmp_path, clock):
    """A suite whose second round becomes ten times as slow: a limit of 60 s ends within 66 s."""
    tests = many(12)
    costs = dict.fromkeys(tests, lambda number: cost(takes=10.0 if number else 1.0))
    sides(costs, costs)
    seen = []
    found = gate(tmp_path, tests, most_seconds=60.0, on_progress=seen.append)
    assert found.seconds <= 66.0
    assert [each.passed for each in seen if each.round == 2] == [2, 4, None]


def test_a_floor_is_of_what_the_base_costs(sides, tmp_path):
    sides({A: cost(0.0001)}, {A: cost(0.00011)})
    found = gate(tmp_path, (A,), limits={A: Limits(time=Limit(floor=50e-6))})
    assert found.tests[0].trials["time"].decision.verdict == Verdict.PASS
    assert found.tests[0].trials["time"].tolerance == pytest.approx(0.5)


@pytest.mark.parametrize(("broken", "status"), [("base", "crashed on base"), ("head", "crashed on head")])
def test_a_process_that_ends_at_its_start(broken, status, sides, tmp_path, monkeypatch):
    sides({A: cost()}, {A: cost()})
    whole = session.SideProcess

    def start(role, arguments, **given):
        made = whole(role, arguments, **given)
        if role == broken:
            made.receive = lambda: (_ for _ in ()).throw(SideFailedError("crashed", "unknown option"))
        return made

    monkeypatch.setattr(session, "SideProcess", start)
    found = gate(tmp_path, (A,))
    assert found.tests[0].status == status
    assert found.tests[0].detail == "at its start: unknown option"


def test_decided_metric_stands_if_the_test_is_skipped_later(sides, tmp_path):
    jitter = random.Random(0)
    seen = []

    def base(number):
        seen.append(number)
        return "skip" if number > 20 else cost(0.1 * math.exp(jitter.gauss(0, 0.1)), 1e9)

    sides({A: base}, {A: cost(0.1, 2e9)})
    found = gate(tmp_path, (A,)).tests[0]
    assert max(seen) == 21
    assert found.status == "measured"
    assert found.trials["memory"].decision.verdict == Verdict.REGRESSED
    assert found.trials["time"].decision.verdict == Verdict.INCONCLUSIVE
    assert "missing on base in round 22" in found.trials["time"].decision.reason


def test_a_head_that_breaks_later_is_broken(sides, tmp_path):
    jitter = random.Random(0)
    sides(
        {A: lambda _: cost(0.1 * math.exp(jitter.gauss(0, 0.1)))},
        {A: lambda number: "crash" if number == 7 else cost()},
    )
    assert gate(tmp_path, (A,)).tests[0].status == "crashed on head"


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        ({"stray": "/x.py"}, "head imported /x.py, so the gate would measure"),
        ({"files": {"foreign": ["/root/x.so"]}}, "head used /root/x.so, which belongs to the working tree"),
    ],
    ids=["module", "file"],
)
def test_a_side_that_used_what_is_not_its_own_is_inconclusive(used, reason, sides, tmp_path):
    rounds = sides({A: cost(), B: cost()}, {A: cost(), B: cost(0.2, **used)})
    found = gate(tmp_path)
    one, other = found.tests
    assert one.verdict == Verdict.PASS
    assert {trial.decision.verdict for trial in other.trials.values()} == {Verdict.INCONCLUSIVE}
    assert other.trials["time"].decision.reason.startswith(reason)
    assert other.trials["time"].levels is None  # they are of neither side
    assert found.exit_code == 7
    assert [note for note in found.notes if note.startswith(reason)]
    assert B not in rounds[1]["head"].collected


def test_a_round_that_was_slowed_by_watching_is_not_used(sides, tmp_path):
    # What the hook costs is on one side, whose call has more of the events that it hears.
    def head(number):
        return cost(0.9, disturbed=True) if number == 0 else cost()

    rounds = sides({A: cost(), B: cost()}, {A: head, B: cost()})
    found = gate(tmp_path)
    assert found.verdict == Verdict.PASS
    assert [len(test.trials["time"].differences) for test in found.tests] == [4, 4]
    assert [each["head"].watched for each in rounds] == [True, False, False, False, False]


def test_a_test_that_was_only_watched_is_not_begun(sides, tmp_path):
    sides({A: cost()}, {A: cost(disturbed=True)})
    found = gate(tmp_path, (A,), most_seconds=1e-9)
    assert (found.tests[0].status, found.exit_code) == ("not begun", 5)


def test_foreign_import_of_a_failed_test_is_reported(sides, tmp_path):
    sides({A: cost()}, {A: cost(fails=True, stray="/x.py")})
    found = gate(tmp_path, (A,))
    assert found.tests[0].status == "crashed on head"
    assert "E  Oops; head imported /x.py" in found.tests[0].detail


def test_files_written_by_both_sides_are_noted(sides, tmp_path):
    used = {"files": {"written": ["/var/tmp/log"]}}
    sides({A: cost(**used)}, {A: cost(**used)})
    found = gate(tmp_path, (A,))
    assert found.verdict == Verdict.PASS
    assert "both sides write /var/tmp/log: derive its name from STACKWISE_SIDE" in found.notes


def test_what_is_installed_is_not_compared_with_itself(sides, tmp_path, monkeypatch):
    sides({A: cost()}, {A: cost()})
    whole = session.SideProcess

    def start(role, arguments, **given):
        made = whole(role, arguments, **given)
        made.own = role == "base"
        return made

    monkeypatch.setattr(session, "SideProcess", start)
    with pytest.raises(GateError, match="installed code was compared with itself"):
        gate(tmp_path, (A,))


def test_one_side_a_thousand_times_as_slow():
    _, log = play({A: cost(1e-6)}, {A: cost(1e-1)}, tests=(A,))
    assert {calls for *_, calls in log} == {3}  # no longer than a quarter of the time there is


def test_what_surrounds_a_call_counts_for_the_plan():
    _, log = play({A: cost(1e-5, period=0.1)}, {A: cost(1e-5, period=0.1)}, tests=(A,))
    assert sum(calls for *_, calls in log) * 0.1 <= 2 * 4 * SHORT.seconds * 1.01


def test_a_call_that_is_made_once():
    once = cost(0.1, only_once=True)
    found, log = play({A: once}, {A: once}, tests=(A,))
    assert [calls for *_, calls in log] == [1, 1]
    assert set(found[A].differences) == {"time"}


def test_metrics_that_one_side_has_no_time_of():
    found, _ = play({A: cost(0.1, ttft=0.05, tpot=0.0)}, {A: cost(0.1, ttft=0.05, tpot=0.01)}, tests=(A,))
    assert set(found[A].differences) == {"time", "ttft", "memory"}
    assert found[A].lacking == {"tpot": "base"}


def test_texts_that_end_at_their_first_token_on_both_sides():
    short = cost(0.1, ttft=0.05, tpot=0.0)
    found, _ = play({A: short}, {A: short}, tests=(A,))
    assert set(found[A].differences) == {"time", "ttft", "memory"} and not found[A].lacking

    class Sometimes(dict):
        ends = itertools.cycle([0.01, 0.0, 0.01])

        def __getitem__(self, key):
            return next(self.ends) if key == "tpot" else super().__getitem__(key)

    found, _ = play({A: Sometimes(short)}, {A: Sometimes(short)}, tests=(A,))
    assert found[A].lacking == {"tpot": "base and head"}


@pytest.mark.parametrize("role", ["base", "head"])
def test_a_side_that_hands_over_no_tokens(role):
    sides = {"base": {A: cost(ttft=0.05, tpot=0.01)}, "head": {A: cost(ttft=0.05, tpot=0.01)}}
    sides[role] = {A: cost()}
    found, _ = play(**sides, tests=(A,))
    assert set(found[A].differences) == {"time", "memory"}
    assert found[A].lacking == {"ttft": role, "tpot": role}


@pytest.mark.parametrize("role", ["base", "head"])
def test_a_call_that_takes_no_time_costs_its_test_and_no_other(role):
    sides = {"base": {A: cost(only_once=True), B: cost()}, "head": {A: cost(only_once=True), B: cost()}}
    sides[role][A] = cost(0.0, only_once=True)
    found, _ = play(**sides)
    assert found[A] == Ended({role: "crashed"}, {role: "a call took no time at all"})
    assert isinstance(found[B], Paired)


def test_metric_missing_on_head_is_inconclusive(sides, tmp_path):
    """That its text ends at its first token is why it takes less time."""
    sides({A: cost(ttft=0.05, tpot=0.01)}, {A: cost(0.01, ttft=0.05, tpot=0.0)})
    result = gate(tmp_path, (A,))
    [found] = result.tests
    lost = found.trials["tpot"]
    assert found.trials["time"].decision.verdict == Verdict.IMPROVED
    assert lost.decision.verdict == found.verdict == result.verdict == Verdict.INCONCLUSIVE
    assert lost.decision.reason == "round 1 had no tpot on head"
    assert (lost.differences, lost.base, lost.head) == ((), (), ())
    assert (lost.tolerance, lost.minimum_effect) == pytest.approx((0.02, 0.01))
    assert GateResult.from_dict(json.loads(json.dumps(result.to_dict()))).verdict == Verdict.INCONCLUSIVE


def test_requested_metric_without_measurements_is_inconclusive(sides, tmp_path):
    once = cost(only_once=True)
    sides({A: once, B: once, C: once}, {A: once, B: once, C: once})
    memory, time = Limits(time=None), Limits(memory=None)
    found = gate(
        tmp_path,
        (A, B, C),
        limits={A: memory, B: time, C: memory},
        asked={A: ("memory", "ttft"), B: ("time", "memory")},
    )
    one, other, nothing = found.tests
    assert {metric: trial.decision.reason for metric, trial in one.trials.items()} == {
        "memory": "round 1 had no memory, which is not read of a single call",
        "ttft": "round 1 had no ttft",
    }
    assert one.verdict == Verdict.INCONCLUSIVE
    assert set(other.trials) == {"time"} and other.verdict == Verdict.PASS
    assert (nothing.status, nothing.detail) == (
        "skipped",
        "its limits leave nothing to be judged of what was measured",
    )


def test_metric_missing_in_a_later_round_is_inconclusive(sides, tmp_path):
    jitter = random.Random(0)

    def text(number):
        return cost(0.1 * math.exp(jitter.gauss(0, 0.002)), ttft=0.05, tpot=0.0 if number == 2 else 0.01)

    sides({A: text}, {A: text})
    [found] = gate(tmp_path, (A,)).tests
    tpot = found.trials["tpot"]
    assert tpot.decision.verdict == found.verdict == Verdict.INCONCLUSIVE
    assert tpot.decision.reason == "2 rounds are too few for a decision; round 3 had no tpot"
    assert len(tpot.head) == 2  # the rounds from the first on, as whatever is kept of each round
    assert found.trials["time"].decision.verdict == Verdict.PASS


def test_a_metric_that_the_first_round_lacks_is_not_judged(sides, tmp_path):
    def text(number):
        return cost(ttft=0.05, tpot=0.01 if number else 0.0)

    sides({A: text}, {A: text})
    [found] = gate(tmp_path, (A,)).tests
    assert set(found.trials) == {"time", "ttft", "memory"}


def test_confirmation_strictness_depends_on_number_of_judged_metrics(sides, tmp_path):
    seen = []

    class Seen(Rule):
        def confirmation(self, n_tests):
            seen.append(n_tests)
            return super().confirmation(n_tests)

    sides({A: cost(), B: cost(ttft=0.01)}, {A: cost(), B: cost(ttft=0.01)})
    gate(tmp_path, rule=Seen(), limits={A: Limits(memory=None)})
    # Of A its time; of B time, memory and ttft.
    assert seen[-1] == 4


def test_places_are_those_of_the_tree(tmp_path):
    moved = session._moved
    root, tree = Path("/app"), Path("/t/head")
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    assert moved(f"--data={tmp_path}/link/x", (tmp_path / "root").resolve(), tree) == "--data=/t/head/x"
    for given, expected in {
        "/app": "/t/head",
        "--rootdir=/app/x": "--rootdir=/t/head/x",
        "--data=/home/app/x": "--data=/home/app/x",
        "/app-old/x": "/app-old/x",
        "a:/app/x,/app/y": "a:/t/head/x,/t/head/y",
    }.items():
        assert moved(given, root, tree) == expected


@pytest.mark.parametrize("role", ["base", "head"])
def test_side_that_the_system_kills_is_no_regression(role, sides, tmp_path):
    """Memory is short: that says nothing about one of the revisions."""
    tests = {"base": cost(), "head": cost()} | {role: "kill"}
    sides({A: tests["base"]}, {A: tests["head"]})
    (found,) = gate(tmp_path, (A,)).tests
    assert (found.status, found.outcome("warn")) == ("not measured", "inconclusive")
    assert found.detail == f"{role}: the system killed it (SIGKILL)"


@pytest.mark.parametrize("given", [{"tests": ()}, {"most_seconds": 0.0}])
def test_refused(given, tmp_path):
    with pytest.raises(ValueError, match=next(iter(given))):
        gate(tmp_path, **given)


@pytest.mark.parametrize(
    "given", [{"seconds": 0.0}, {"pairs": 0}, {"order": "random"}, {"slice_seconds": -1.0}]
)
def test_sampling_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        Sampling(**given)


def test_head_that_hangs_in_every_test_stops_at_the_time_limit(sides, tmp_path):
    sides({A: cost(), B: cost(), C: cost()}, {A: "hang", B: "hang", C: "hang"})
    found = gate(tmp_path, (A, B, C), most_seconds=1e-9)
    assert [test.status for test in found.tests] == ["hung on head", "not begun", "not begun"]


def test_an_interruption_leaves_what_was_decided(sides, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    jitter = random.Random(0)

    def until_stopped(number):
        if number == 6:
            raise KeyboardInterrupt
        return cost(0.1 * math.exp(jitter.gauss(0, 0.1)))

    rounds = sides({A: cost(), B: until_stopped, C: "skip"}, {A: cost(), B: cost(), C: "skip"})
    with pytest.raises(GateInterruptedError) as stopped:
        gate(tmp_path, (A, B, C))
    found = stopped.value.result
    decided, still_open, skipped = found.tests
    assert decided.verdict == Verdict.PASS
    assert still_open.trials["time"].decision.verdict == Verdict.INCONCLUSIVE
    assert still_open.trials["time"].decision.reason.endswith("; interrupted")
    assert len(still_open.trials["time"].differences) == 6
    assert skipped.status == "skipped"
    assert found.notes == ("the run was interrupted: tests that were not decided are INCONCLUSIVE",)
    assert not any(process.alive for pair in rounds for process in pair.values())
    assert not list(tmp_path.iterdir())


def test_an_interruption_before_anything_was_measured(sides, tmp_path):
    def stopped_at_once(_):
        raise KeyboardInterrupt

    sides({A: cost()}, {A: stopped_at_once})
    with pytest.raises(KeyboardInterrupt) as stopped:
        gate(tmp_path, (A,))
    [found] = stopped.value.result.tests
    assert (found.status, found.detail) == ("not begun", "interrupted")


def test_occasionally_slower_calls_are_noted(sides, tmp_path):
    """Their median is as it was, and PASS."""

    class Fifth(dict):
        times = itertools.cycle([3.0, 1.0, 1.0, 1.0, 1.0])

        def __getitem__(self, key):
            return super().__getitem__(key) * (next(self.times) if key == "time" else 1.0)

    steady = cost(0.01)
    sides({A: steady, B: steady}, {A: Fifth(steady), B: steady})
    found = gate(tmp_path)
    assert {test.verdict for test in found.tests} == {Verdict.PASS}
    mean = 3**0.2 - 1
    assert found.notes == (
        f"{A}: its median call is within the tolerance, the mean of its calls is not ({mean:+.1%})",
    )
    # Where it is not judged, or what is slower is the median, nobody is told a second time.
    sides({A: steady, B: steady}, {A: Fifth(steady), B: cost(0.02)})
    found = gate(tmp_path, limits={A: Limits(time=None)})
    assert found.tests[1].verdict == Verdict.REGRESSED and not found.notes


def test_tokens_of_a_call_are_those_of_its_side(sides, tmp_path):
    sides({A: cost(tokens=512), B: cost(tokens=512)}, {A: cost(tokens=512), B: cost(tokens=256)})
    found = gate(tmp_path)
    assert [test.tokens for test in found.tests] == [(512, 512), (512, 256)]
    assert found.tests[0].tokens_per_second == pytest.approx((5120.0, 5120.0))
    assert found.notes == (
        f"{B}: a call handles 512 tokens on the base, 256 on the head: the sides do different work",
    )


FILE_TESTS = {"file_tests": {A: [C, A, B], B: [C, A, B]}}


def played(base, head, tests=(A, B), **given):
    """What a round of these tests finds, and what each pair of processes was started for."""
    asked = []

    def start(names):
        asked.append(names)

        def process(role, _):
            given = base if role == "base" else head
            return Script(role, {test: given[test] for test in names}, [])

        return process

    return dict(run_round(tests, start, SHORT, random.Random(0), **given)), asked


@pytest.mark.parametrize("earlier", [A, C], ids=["decided test", "test without a benchmark"])
def test_dependent_test_is_measured_again_after_its_whole_file(earlier):
    costs = {A: cost(), B: cost(needs=earlier), C: "pass"}
    found, asked = played(costs, costs, tests=(B,), **FILE_TESTS)
    assert asked == [(B,), (C, A, B)]
    assert isinstance(found[B], Paired) and found[B].whole_file


def test_dependent_test_runs_after_its_whole_file_from_the_start_if_told():
    costs = {A: cost(), B: cost(needs=C), C: "pass"}
    found, asked = played(costs, costs, **FILE_TESTS, whole_file={B})
    assert asked == [(A, C, B)]
    assert list(found) == [A, B]
    assert all(isinstance(each, Paired) for each in found.values())


@pytest.mark.parametrize(
    ("base", "head", "tests", "again"),
    [
        ("fail", "fail", (A, B), True),
        (cost(), "fail", (A, B), True),
        ("fail", cost(), (A, B), False),
        ("skip", "skip", (A, B), False),
        ("plugin skips", "plugin skips", (A, B), True),
        ("skip", "skip", (B,), True),
        (cost(), "crash", (B,), True),
        (cost(), "hang", (B,), False),
    ],
)
def test_result_decides_if_a_test_is_measured_again_after_its_file(base, head, tests, again):
    """In the first round all measured tests of a file run, and what they depend on may be another test."""
    others = {A: cost(), C: "pass"}
    found, asked = played(others | {B: base}, others | {B: head}, tests, **FILE_TESTS)
    assert ((C, A, B) in asked) is again
    assert isinstance(found[B], Ended)


def test_test_that_fails_after_its_whole_file_too_has_the_second_failure():
    costs = {A: "crash", B: "fail", C: "pass"}
    found, asked = played(costs, costs, **FILE_TESTS)
    assert found[A].how == {"base": "crashed"}
    assert found[B].how == {"base": "failed", "head": "failed"}
    assert asked == [(A, B), (B,), (C, A, B), (B,)]


def test_test_that_depends_on_a_decided_one_is_decided(sides, tmp_path):
    jitter = random.Random(0)
    noisy = lambda _: cost(0.1 * math.exp(jitter.gauss(0, 0.01)), needs=A)  # noqa: E731
    rounds = sides({A: cost(), B: noisy, C: "pass"}, {A: cost(), B: noisy, C: "pass"})
    files = dict.fromkeys((C, A, B), Path("bench/test_it.py"))
    launch = Launch(("-q",), tmp_path, files, **FILE_TESTS)
    trees = Tree(tmp_path / "base", "old"), Tree(tmp_path / "head", "new")
    found = run_gate(*trees, (A, B), launch, sampling=SHORT)
    assert [test.verdict for test in found.tests] == [Verdict.PASS, Verdict.PASS]
    assert found.notes[-1] == f"{B}: measured after the earlier tests of its file, which it needs"
    started = [pair["head"].collected for pair in rounds]
    assert started[3:7] == [[A, B], [B], [C, A, B], [C, A, B]]


def test_failure_on_both_sides_after_measured_rounds_is_inconclusive(sides, tmp_path):
    """As of a test that depends on a decided test of another file."""
    jitter = random.Random(0)
    fails = lambda number: "fail" if number == 7 else cost(0.1 * math.exp(jitter.gauss(0, 0.1)))  # noqa: E731
    sides({A: fails}, {A: fails})
    found = gate(tmp_path, (A,), limits={A: Limits(memory=None)}).tests[0]
    assert found.verdict == Verdict.INCONCLUSIVE
    assert found.trials["time"].decision.reason.endswith("it was failed on both sides in round 8: E  Oops")


@pytest.mark.parametrize("role", ["base", "head"])
def test_side_that_runs_a_test_twice_starts_the_next_one_anew(role):
    sides = {"base": {A: cost(), B: cost(), C: cost()}, "head": {A: cost(), B: cost(), C: cost()}}
    sides[role][A] = cost(twice=True)
    found, asked = played(**sides, tests=(A, B, C))
    assert asked == [(A, B, C), (B, C)]
    assert all(isinstance(each, Paired) for each in found.values())


def test_test_that_no_side_comes_to_is_not_measured(sides, tmp_path, monkeypatch):
    sides({A: cost(), B: cost()}, {A: cost(), B: cost()})
    make = session.SideProcess

    def start(role, arguments, **given):
        made = make(role, arguments, **given)
        made.tests[A] = cost(twice=True)
        collect = made.collect
        # In this order on the head, whatever it is asked for.
        made.collect = lambda asked: collect([A, *asked] if role == "head" and asked == [B] else asked)
        return made

    monkeypatch.setattr(session, "SideProcess", start)
    found = gate(tmp_path, limits=dict.fromkeys((A, B), Limits(memory=None)))
    assert [test.status for test in found.tests] == ["measured", "not measured"]
    assert found.tests[1].detail == f"head: it ran {A} when {B} was next: a plugin may run tests again"
    assert found.exit_code == 7


def test_warnings_of_the_sides_are_notes(sides, tmp_path):
    """One note for each text and its sides, whatever the number of tests and rounds."""
    both, one = "RuntimeWarning: never awaited (a.py:1)", "RuntimeWarning: overflow (a.py:2)"
    base = {A: cost(warnings=[both]), B: cost(warnings=[both]), C: "fail"}
    head = {A: cost(warnings=[both, one]), B: cost(warnings=[both]), C: "fail"}
    sides(base, head)
    found = gate(tmp_path, (A, B, C))
    assert found.notes == (f"{A} and 1 more: {both} on base and head", f"{A}: {one} on head")


def test_no_time_is_spent_on_the_whole_file_when_the_time_is_up():
    costs = {A: cost(), B: cost(needs=C), C: "pass"}
    found, asked = played(costs, costs, **FILE_TESTS, in_time=lambda: False)
    assert asked == [(A, B), (C, A, B)]
    assert list(found) == [A]
