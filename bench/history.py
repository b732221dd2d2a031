"""`python -m bench.history`: how long the usual questions take of a history with 100,000 results.

A store is filled with runs of 100 tests on two machines. Then every question is asked
once, so that Python has imported what it needs, and several times more, each in a store that is opened for
it, as a command does; the figure is the slowest of these. What commands take as processes of their own,
Python's start and imports included, are figures without a bar.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench.claim import Bar, Claim
from stackwise.gate.history.change_point import change_points
from stackwise.gate.history.judgement import WINDOW
from stackwise.gate.history.machine import Machine
from stackwise.gate.history.plot import series_svg
from stackwise.gate.history.point import Point, Result, Run
from stackwise.gate.history.record import judge_run
from stackwise.gate.history.reference import ReferenceTime
from stackwise.gate.history.store import Store
from stackwise.gate.limit import Limits
from stackwise.gate.verdict import Verdict

RUNS, QUICK_RUNS = 1000, 20
TESTS, SAMPLES = 100, 50
TIMES = 5
LIMIT = 1.0
MACHINES = [Machine.of({"cpu": "Some CPU", "torch": version}) for version in ("2.12.0", "2.13.0")]


def test_name(number: int) -> str:
    return f"bench/test_{number % 7}.py::test_step[{number}]"


def run_of(number: int, random: np.random.Generator) -> tuple[Run, list[Result]]:
    """Run `number`, with results around levels that shift every 150 runs."""
    created = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=30 * number)
    run = Run(MACHINES[number % 2], f"{number:08x}" * 5, "main", created, identity=f"run {number}")
    levels = np.exp(random.normal(-4 + 0.05 * (number // 150), 0.005, (TESTS, SAMPLES)))
    reference = ReferenceTime(*np.exp(random.normal(-6, 0.02, 2)).tolist())
    results = []
    for test, samples in enumerate(levels.tolist()):
        level = median(samples)
        verdict = Verdict.REGRESSED if (number + test) % 29 == 0 else Verdict.PASS
        ratio = float(np.log(level)) + 6
        results.append(Result(test_name(test), "time", level, ratio, reference, verdict))
    return run, results


def fill(place: str | Path, runs: int) -> float:
    """Store so many runs; returns the seconds of the slowest one, at the end as at the beginning."""
    random = np.random.default_rng(0)
    slowest = 0.0
    with Store(place) as store:
        for number in range(runs):
            run, results = run_of(number, random)
            start = time.perf_counter()
            store.add(run, results)
            slowest = max(slowest, time.perf_counter() - start)
    return slowest


def questions(place: str | Path, runs: int) -> dict[str, Callable[[], object]]:
    """What is asked, by name, of a store with so many runs."""
    machine, name = MACHINES[1], test_name(42)
    new = itertools.count(runs)
    random = np.random.default_rng(1)

    def points(store: Store) -> list[Point]:
        return store.points(machine, name, "time", branch="main", counted=True, last=WINDOW)

    def judged(store: Store) -> object:
        run, results = run_of(2 * next(new) + 1, random)
        return judge_run(store, run.machine, results[:10], Limits())

    asked: dict[str, Callable[[Store], object]] = {
        "list all tests": lambda store: store.series(),
        "list tests by name": lambda store: store.series(test="test_3.py", machine=machine.key),
        "all points of a test": lambda store: store.points(machine, name, "time"),
        "points that count": points,
        "change points of a test": lambda store: change_points([p.log_ratio for p in points(store)]),
        "plot a test": lambda store: series_svg(points(store), name),
        "how long the reference took": lambda store: store.references(machine),
        "judge ten tests": judged,
        "store a run of 100 tests": lambda store: store.add(*run_of(next(new), random)),
    }

    def opened(question: Callable[[Store], object]) -> Callable[[], object]:
        def ask() -> object:
            with Store(place, create=False) as store:
                return question(store)

        return ask

    return {what: opened(question) for what, question in asked.items()}


def commands(folder: str) -> dict[str, list[str]]:
    """What a person types."""
    test = [test_name(42), "--machine", MACHINES[1].key]
    return {
        "list": ["list"],
        "show": ["show", *test],
        "plot": ["plot", *test, "--output", f"{folder}/plot.svg"],
    }


def in_a_process(arguments: list[str], place: str) -> None:
    command = [sys.executable, "-m", "stackwise.cli", "history", *arguments, "--store", place]
    subprocess.run(command, check=True, capture_output=True)


def seconds_of(call: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.history", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2,000 results: proves nothing")
    parser.add_argument("--store", help="an empty store in place of an SQLite file in a temporary folder")
    options = parser.parse_args(arguments)
    claim = Claim("history", options.quick)
    runs = QUICK_RUNS if options.quick else RUNS
    with tempfile.TemporaryDirectory() as folder:
        place = options.store or str(Path(folder) / "history.db")
        slowest_write = fill(place, runs)
        found = {}
        for name, ask in questions(place, runs).items():
            ask()
            found[name] = seconds_of(ask, TIMES)
        processes = {
            name: seconds_of(partial(in_a_process, arguments, place), TIMES)
            for name, arguments in commands(folder).items()
        }
        claim.figures = {
            "results": runs * TESTS,
            "file_bytes": None if options.store else Path(place).stat().st_size,
            "slowest_write_while_filling": slowest_write,
            "processes": processes,
            "questions": found,
        }
    for name, taken in found.items():
        print(f"{name:<30} {median(taken) * 1e3:8.1f} ms, at most {max(taken) * 1e3:8.1f} ms")
    claim.bars = [
        Bar("results", float(runs * TESTS), 100_000.0, full_size=True),
        Bar("slowest question, s", max(map(max, found.values())), LIMIT, at_most=True),
    ]
    return claim.conclude()


if __name__ == "__main__":
    sys.exit(main())
