"""TwinSupply: the twins of one round after the other."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path

from stackwise.gate.process import SideProcess
from stackwise.gate.side.channel import ChannelClosedError
from stackwise.gate.twins import Twins

__all__ = ["TwinSupply"]

_MOST = 4  # pairs at once: each holds what it has imported


class TwinSupply:
    """Twins, several pairs at once where there is much to import.

    Nothing is computed while a round measures. So pairs are made between rounds, one on each processor, and
    those that have imported what both sides of an earlier round had wait for theirs. Where a side forbids it,
    what waits is ended: it is of rounds that had not come to the test for which nothing may be imported.

    Args:
        folder: for what they print.

    Attributes:
        sides: the processes that were started last, by role; whoever starts one puts it here.
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
        """A pair that nobody has had.

        Args:
            seed: of what is by chance in it.
            purpose: what it is for; imports are those of earlier pairs for the same.
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
        # What others were for says nothing of what this needs.
        self._learns_for = purpose if purpose == self._waiting_for else None
        return self._waiting.pop(0)

    def end(self) -> None:
        """End those that nobody has had."""
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
        except ChannelClosedError:  # sides import for themselves what this one could not
            self._failed = True  # they would again, and may take a minute to
            self.end()
            return [self._new(seed)]
        return self._waiting

    def _new(self, seed: int, imports: Sequence[str] = ()) -> Twins:
        self._made += 1
        return Twins(seed, self._folder / f"twins-{self._made}.log", imports)


def _of_both(sides: Sequence[SideProcess]) -> list[str] | None:
    """What all have imported, in the order of the first; None: one forbids it."""
    told = [side.early for side in sides if side.early is not None]
    if len(told) < len(sides):
        return None
    if not told:
        return []
    others = [set(each) for each in told[1:]]
    return [name for name in told[0] if all(name in other for other in others)]
