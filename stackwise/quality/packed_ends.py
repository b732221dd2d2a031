"""Packed ends: what follows one beginning in several ways, in one row behind it.

Shapes: B rows, T positions of a row, S of what is before them and of themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["PackedEnds", "Stem"]

_PADDING, _TRUNK = -1, 0


@dataclass(frozen=True)
class Stem:
    """What follows one beginning.

    Attributes:
        trunk: ids that all ends follow; there may be none.
        ends: ids, each behind the trunk as if the others were not there.
    """

    trunk: np.ndarray
    ends: Sequence[np.ndarray]

    @property
    def length(self) -> int:
        """How many ids it has in all."""
        return len(self.trunk) + sum(map(len, self.ends))


@dataclass(frozen=True)
class PackedEnds:
    """Stems as rows that one pass reads behind a cache of their beginnings.

    Attributes:
        ids_BT: int64; 0 behind what is shorter.
        position_BT: int64, of each id in its own sequence.
        visible_BTS: bool, what each id may see: all that is in the cache, the trunk, and its own end, as far
            as they are before it or itself.
        columns: of each stem in which column each of its ends begins.
    """

    ids_BT: np.ndarray
    position_BT: np.ndarray
    visible_BTS: np.ndarray
    columns: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, stems: Sequence[Stem], before: int) -> PackedEnds:
        """Lay them out.

        Args:
            stems: one for each row.
            before: how many positions all rows have before them.
        """
        shape = len(stems), max(stem.length for stem in stems)
        ids_BT, part_BT = np.zeros(shape, np.int64), np.full(shape, _PADDING)
        position_BT = np.full(shape, before)
        columns = []
        for row, stem in enumerate(stems):
            begins, end = [], 0
            for part, ids in enumerate((stem.trunk, *stem.ends), _TRUNK):
                begin, end = end, end + len(ids)
                ids_BT[row, begin:end], part_BT[row, begin:end] = ids, part
                first = before if part == _TRUNK else before + len(stem.trunk)
                position_BT[row, begin:end] = first + np.arange(len(ids))
                begins.append(begin)
            columns.append(tuple(begins[1:]))
        own_BTT = (part_BT[:, :, None] == part_BT[:, None]) | (part_BT[:, None] == _TRUNK)
        own_BTT &= np.tri(shape[1], dtype=bool)
        past_BTS = np.ones((*shape, before), bool)
        return cls(ids_BT, position_BT, np.concatenate((past_BTS, own_BTT), axis=2), tuple(columns))
