"""TwinSupply: twins for one round after another."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path

from stackwise.gate.process import SideProcess
from stackwise.gate.side.channel import ChannelClosedError
from stackwise.gate.twins import Twins

__all__ = ["TwinSupply"]

_MOST = 4  # maximum number of waiting pairs: each holds its imports in memory


class TwinSupply:
    """Source of twins, which prepares several pairs at once if they have slow imports.

    While a round measures, no other process may compute. So pairs are prepared between rounds, one on each
    processor. They import the modules that both sides of an earlier round have imported, and wait for their
    round. If a side forbids early imports, the waiting pairs are killed. They were prepared before the rounds
    reached the test that forbids early imports.

    Args:
        folder: folder for their logs.

    Attributes:
        sides: last started process of each role. The caller that starts a process stores it here.
    """

    def __init__(self, folder: Path) -> None:
        self.sides: dict[str, SideProcess] = {}
        self._folder = folder
        self._waiting: list[Twins] = []
        self._waiting_for: Hashable = None
        self._imports: dict[Hashable, list[str]] = {}
        self._learns_for: Hashable = None
        self._failed = False
        self._made = 0

    def next(self, seed: int, purpose: Hashable) -> Twins:
        """Return an unused pair.

        Args:
            seed: seed of the random properties of the pair.
            purpose: key of the imports. A pair imports the modules of earlier pairs with the same purpose.
        """
        found = _of_both(list(self.sides.values()))
        if found is None:
            self._imports.clear()
            self.end()
        elif self._learns_for is not None:
            self._imports[self._learns_for] = found
        imports = self._imports.get(purpose, [])
        if not self._waiting:
            self._waiting, self._waiting_for = self._ahead(seed, imports), purpose
        # The imports of a pair for another purpose are not valid for this purpose.
        self._learns_for = purpose if purpose == self._waiting_for else None
        return self._waiting.pop(0)

    def end(self) -> None:
        """Kill the unused pairs."""
        while self._waiting:
            self._waiting.pop().end()

    def _ahead(self, seed: int, imports: list[str]) -> list[Twins]:
        if not imports or self._failed:
            return [self._new(seed)]
        try:
            for number in range(min(_MOST, len(os.sched_getaffinity(0)))):
                self._waiting.append(self._new(seed + number, imports))
            for twins in self._waiting:
                twins.pid(0)
        except ChannelClosedError:  # the sides then import the modules themselves
            self._failed = True  # a second attempt would fail too, and may take a minute
            self.end()
            return [self._new(seed)]
        return self._waiting

    def _new(self, seed: int, imports: Sequence[str] = ()) -> Twins:
        self._made += 1
        return Twins(seed, self._folder / f"twins-{self._made}.log", imports)


def _of_both(sides: Sequence[SideProcess]) -> list[str] | None:
    """Return the modules that all sides have imported, in the order of the first; None: a side forbids it."""
    told = [side.early for side in sides if side.early is not None]
    if len(told) < len(sides):
        return None
    if not told:
        return []
    others = [set(each) for each in told[1:]]
    return [name for name in told[0] if all(name in other for other in others)]
