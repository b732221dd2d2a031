"""Ablation: what the differences of equal commits are like, where one part of the gate's design is left out.

All designs make as many calls. "in turns" is the gate's: fresh processes, pairs in turns, who is first
alternates from a random start. "fixed order" has the base first in each pair. "one after the other" has all
calls of one side before all calls of the other. "one process" keeps its two processes through all rounds of
a series. The rule and the turns are the library's.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from bench.gate.effects import SAME
from bench.gate.noise import noise
from bench.gate.rates import Rate
from bench.gate.repository import BASE, SUITE, Repository
from stackwise.gate.limit import Limit
from stackwise.gate.sequential import Rule
from stackwise.gate.trial import Trial
from stackwise.gate.turns import turns
from stackwise.gate.verdict import Verdict

__all__ = ["DESIGNS", "ROUNDS", "Differences", "judge", "series"]

IN_TURNS, FIXED, APART, ONE_PROCESS = "in turns", "fixed order", "one after the other", "one process"
DESIGNS = (IN_TURNS, FIXED, APART, ONE_PROCESS)
_PAIRS = 48
_SLICE_SECONDS = 0.002
_WARM_UP = 10  # calls of each side
# Of a series: as many as a trial takes at most, without its confirmation.
ROUNDS = Rule().looks[-1]

Differences = dict[str, list[float]]


class Side:
    """A process that makes calls of one tree when it is told to."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SUITE / "turns_worker.py")],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, name: str, calls: int) -> float:
        """Of one call.

        Raises:
            RuntimeError: the process is gone.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name} {calls}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of a side ended with {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


@contextmanager
def both_sides(repository: Repository) -> Iterator[tuple[Side, Side]]:
    """Fresh processes of base and head, of which the head adds nothing."""
    with ExitStack() as stack:
        base, head = (Side(repository.tree(branch)) for branch in (BASE, SAME))
        for side in (base, head):
            stack.callback(side.close)
        yield base, head


def difference(sides: tuple[Side, Side], name: str, design: str, rng: random.Random) -> float:
    """log(head / base) of one round: the median over its pairs, or of the medians where there are none."""
    taken = [min(side.seconds(name, 1) for _ in range(_WARM_UP)) for side in sides]
    calls = max(1, math.ceil(_SLICE_SECONDS / min(taken)))
    samples: tuple[list[float], list[float]] = ([], [])
    if design == APART:
        for which in rng.sample((0, 1), 2):
            samples[which].extend(sides[which].seconds(name, calls) for _ in range(_PAIRS))
        return math.log(median(samples[1]) / median(samples[0]))
    for head_first in turns(_PAIRS, rng, "fixed" if design == FIXED else "abba"):
        for which in (1, 0) if head_first else (0, 1):
            samples[which].append(sides[which].seconds(name, calls))
    return median(math.log(head / base) for base, head in zip(*samples, strict=True))


def judge(differences: Sequence[float]) -> dict[str, Any]:
    """What the gate's rule makes of a series of rounds without an effect, one trial after the other.

    Returns:
        `spread`: their standard deviation; `bias`: their mean; `flagged`, `regressed`, `inconclusive`: rates.
    """
    flagged = regressed = inconclusive = n = 0
    trial = Trial(Limit())
    for each in differences:
        trial.add(each, 1.0)
        if trial.decision is not None:
            n += 1
            flagged += trial.confirming
            regressed += trial.decision.verdict == Verdict.REGRESSED
            inconclusive += trial.decision.verdict == Verdict.INCONCLUSIVE
            trial = Trial(Limit())
    return {
        "rounds": len(differences),
        "spread": stdev(differences) if len(differences) > 1 else None,
        "bias": fmean(differences),
        "flagged": Rate.of(flagged, n).to_dict(),
        "regressed": Rate.of(regressed, n).to_dict(),
        "inconclusive": Rate.of(inconclusive, n).to_dict(),
    }


def series(
    repository: Repository, names: Sequence[str], condition: str, number: int
) -> dict[str, Differences]:
    """`ROUNDS` rounds under a condition: of each design the differences, by call.

    Designs other than "one process" share the processes of a round, in random order.

    Args:
        repository: whose base and unchanged branch are compared.
        names: of the calls.
        condition: of the machine.
        number: of the series, from which all that is by chance is drawn.
    """
    found: dict[str, Differences] = {design: {name: [] for name in names} for design in DESIGNS}
    fresh = [design for design in DESIGNS if design != ONE_PROCESS]
    rng = random.Random(f"{condition} {number}")
    with noise(condition, number), both_sides(repository) as kept:
        for _ in range(ROUNDS):
            with both_sides(repository) as sides:
                for name in names:
                    for design in rng.sample(fresh, len(fresh)):
                        found[design][name].append(difference(sides, name, design, rng))
                    found[ONE_PROCESS][name].append(difference(kept, name, ONE_PROCESS, rng))
    return found
