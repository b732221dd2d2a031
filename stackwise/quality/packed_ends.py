"""PackedEnds: several continuations of one prefix, packed into one row after it.

Shapes: B rows, T positions of a row, S positions of the prefix and the row together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["PackedEnds", "Stem"]

_PADDING, _TRUNK = -1, 0


@dataclass(frozen=True)
class Stem:
    """Several continuations of one prefix.

    Attributes:
        trunk: ids before all ends. May be empty.
        ends: ids of each end. An end follows the trunk, independently of other ends.
    """

    trunk: np.ndarray
    ends: Sequence[np.ndarray]

    @property
    def length(self) -> int:
        """Total number of ids."""
        return len(self.trunk) + sum(map(len, self.ends))


@dataclass(frozen=True)
class PackedEnds:
    """Stems as rows of one forward pass that uses a cache of their prefixes.

    Attributes:
        ids_BT: int64 ids, padded with 0.
        position_BT: int64 position of each id in its own sequence.
        visible_BTS: bool mask of the visible positions of each id: the cache, the trunk and its own end, up
            to and including its own position.
        columns: for each stem, the column of the first id of each end.
    """

    ids_BT: np.ndarray
    position_BT: np.ndarray
    visible_BTS: np.ndarray
    columns: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, stems: Sequence[Stem], before: int) -> PackedEnds:
        """Return the packed rows of stems.

        Args:
            stems: one stem per row.
            before: number of positions before each row.
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
