"""Ablation: what the differences of equal commits are like, where one part of the gate's design is left out.

All designs make as many calls. "in turns" is the gate's: fresh processes that begin as one, pairs in turns,
who is first alternates from a random start, and of each order a median; but no design keeps both sides on
one processor, or ends a round when its pairs are enough. "one median" is that of all pairs.
"own layouts" has processes that begin each by itself. "fixed order" has the base first in each pair. "one
after the other" has all calls of one side before all calls of the other. "one process" keeps its two
processes through all rounds of a series. The rule, the turns and the twins are the library's.
"""

from __future__ import annotations

import math
import os
import random
import socket
import subprocess
import sys
import tempfile
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
from stackwise.gate.round import Sampling
from stackwise.gate.sequential import Rule
from stackwise.gate.side.channel import DESCRIPTOR, Channel, ChannelClosedError
from stackwise.gate.trial import Trial
from stackwise.gate.turns import difference as of_both_orders
from stackwise.gate.turns import turns
from stackwise.gate.twins import Twins
from stackwise.gate.verdict import Verdict

__all__ = ["DESIGNS", "ROUNDS", "Differences", "judge", "series"]

IN_TURNS, ONE_MEDIAN, OWN_LAYOUTS = "in turns", "one median", "own layouts"
FIXED, APART, ONE_PROCESS = "fixed order", "one after the other", "one process"
DESIGNS = (IN_TURNS, ONE_MEDIAN, OWN_LAYOUTS, FIXED, APART, ONE_PROCESS)
_PAIRS = 96
_WORKER = "turns_worker"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_WARM_UP = 10  # calls of each side
# Of a series: as many as a trial takes at most, without its confirmation.
ROUNDS = Rule().looks[-1]

Differences = dict[str, list[float]]


class Side:
    """A process that makes calls of one tree when it is told to.

    Args:
        tree: of which.
        twins: of which it is one; None: it begins by itself.
    """

    def __init__(self, tree: Path, twins: Twins | None = None) -> None:
        self._twins, self._process = twins, None
        if twins is not None:
            _, self._channel = twins.become(
                _WORKER, [], folder=tree, import_path=[SUITE], environment=_ONE_THREAD, log=Path(os.devnull)
            )
            return
        own, theirs = socket.socketpair()
        with theirs:
            self._channel = Channel(own)
            given = {"PYTHONPATH": os.pathsep.join(map(str, (tree, SUITE))), DESCRIPTOR: str(theirs.fileno())}
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER],
                cwd=tree,
                env={**os.environ, **_ONE_THREAD, **given},
                pass_fds=[theirs.fileno()],
            )

    def seconds(self, name: str, calls: int) -> float:
        """Of one call.

        Raises:
            RuntimeError: the process is gone.
        """
        try:
            self._channel.send({"name": name, "calls": calls})
            answer = self._channel.receive()
        except ChannelClosedError as error:
            raise RuntimeError(f"the process of a side is gone: {error}") from None
        assert answer is not None
        return float(answer["seconds"])

    def close(self) -> None:
        """End it."""
        self._channel.close()
        if self._twins is not None:
            self._twins.end()
        if self._process is not None:
            self._process.wait()


@contextmanager
def both_sides(
    repository: Repository, by_chance: random.Random, *, twins: bool
) -> Iterator[tuple[Side, Side]]:
    """Fresh processes of base and head, of which the head adds nothing; which begins first is by chance."""
    with ExitStack() as stack:
        pair = None
        if twins:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
            pair = Twins(by_chance.randrange(2**31), log)
            stack.callback(pair.end)
        sides: dict[str, Side] = {}
        for branch in by_chance.sample((BASE, SAME), 2):
            sides[branch] = Side(repository.tree(branch), pair)
            stack.callback(sides[branch].close)
        yield sides[BASE], sides[SAME]


def difference(sides: tuple[Side, Side], name: str, design: str, rng: random.Random) -> float:
    """log(head / base) of one round: of its pairs, or of the medians where there are none."""
    taken = [min(side.seconds(name, 1) for _ in range(_WARM_UP)) for side in sides]
    calls = max(1, math.ceil(Sampling().slice_seconds / min(taken)))
    samples: tuple[list[float], list[float]] = ([], [])
    if design == APART:
        for which in rng.sample((0, 1), 2):
            samples[which].extend(sides[which].seconds(name, calls) for _ in range(_PAIRS))
        return math.log(median(samples[1]) / median(samples[0]))
    order = turns(_PAIRS, rng, "fixed" if design == FIXED else "abba")
    for head_first in order:
        for which in (1, 0) if head_first else (0, 1):
            samples[which].append(sides[which].seconds(name, calls))
    logs = [math.log(head / base) for base, head in zip(*samples, strict=True)]
    return median(logs) if design == ONE_MEDIAN else of_both_orders(logs, order)


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

    Designs other than "own layouts" and "one process" share the processes of a round, in random order.

    Args:
        repository: whose base and unchanged branch are compared.
        names: of the calls.
        condition: of the machine.
        number: of the series, from which all that is by chance is drawn.
    """
    found: dict[str, Differences] = {design: {name: [] for name in names} for design in DESIGNS}
    rng = random.Random(f"{condition} {number}")
    with noise(condition, number), both_sides(repository, rng, twins=True) as kept:
        for _ in range(ROUNDS):
            with (
                both_sides(repository, rng, twins=True) as twins,
                both_sides(repository, rng, twins=False) as own,
            ):
                others = {OWN_LAYOUTS: own, ONE_PROCESS: kept}
                for name in names:
                    for design in rng.sample(DESIGNS, len(DESIGNS)):
                        sides = others.get(design, twins)
                        found[design][name].append(difference(sides, name, design, rng))
    return found
