"""Prefixes: groups of sequences with common prefixes, so that each prefix is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

__all__ = ["Family", "Group", "group_by_prefix"]

# Cost of an extra forward pass, in tokens. A prefix must save more than this.
_PASS_TOKENS = 256
_ID = np.dtype(">u4")  # big-endian, so that bytes sort like ids


@dataclass(frozen=True)
class Family:
    """Sequences that are equal up to the first scored position.

    Attributes:
        shared: length of the common prefix.
        members: indices of the sequences.
    """

    shared: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Families with a common prefix.

    Attributes:
        shared: length of the common prefix. 0: no common pass.
        families: at least one family.
    """

    shared: int
    families: tuple[Family, ...]


def group_by_prefix(sequences: Sequence[Sequence[int] | np.ndarray], asked: Sequence[int]) -> list[Group]:
    """Group sequences by their common prefixes.

    There are two levels. Sequences that are equal up to the scored positions are a family, like the choices
    of a question. Families with a long common prefix are a group, like questions after the same examples. The
    groups are chosen to save the most tokens.

    Args:
        sequences: token ids.
        asked: for each sequence, the first position with a needed output. Earlier positions can be shared.

    Returns:
        Groups. Each sequence is in exactly one of them. Sequences without a shared prefix are in the first
        group.
    """
    members: dict[bytes, list[int]] = {}
    for i, (ids, first) in enumerate(zip(sequences, asked, strict=True)):
        members.setdefault(np.asarray(ids[:first], _ID).tobytes(), []).append(i)
    keys = sorted(members)
    families = [Family(len(key) // _ID.itemsize, tuple(members[key])) for key in keys]
    groups, left = [], []
    end = 0
    for shared, start, stop in _best_ranges([_common(a, b) for a, b in pairwise(keys)]):
        left.extend(families[end:start])
        groups.append(Group(shared, tuple(families[start:stop])))
        end = stop
    left.extend(families[end:])
    return [Group(0, tuple(left)), *groups] if left else groups


def _common(one: bytes, two: bytes) -> int:
    """Return the length of the common prefix, in ids."""
    n = min(len(one), len(two)) // _ID.itemsize
    differ = np.frombuffer(one, _ID, n) != np.frombuffer(two, _ID, n)
    return int(differ.argmax()) if differ.any() else n


@dataclass
class _Node:
    """Adjacent keys that share `height` ids. `best` is the maximum saving inside, achieved by `ranges`."""

    height: int
    start: int
    best: int = 0
    ranges: tuple[tuple[int, int, int], ...] = ()


def _best_ranges(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (shared, start, end) of the ranges of sorted keys whose shared prefixes save the most tokens.

    Args:
        common: number of ids that each key has in common with the next one.
    """
    open_nodes = [_Node(0, 0)]
    for i, height in enumerate([*common, 0]):
        start, best = i, 0
        ranges: tuple[tuple[int, int, int], ...] = ()
        while open_nodes[-1].height > height:
            node = open_nodes.pop()
            start, best, ranges = node.start, node.best + best, node.ranges + ranges
            own = node.height * (i - node.start) - _PASS_TOKENS  # of i - start + 1 keys, one is computed
            if own > best:
                best, ranges = own, ((node.height, node.start, i + 1),)
        if open_nodes[-1].height < height:
            open_nodes.append(_Node(height, start))
        open_nodes[-1].best += best
        open_nodes[-1].ranges += ranges
    return list(open_nodes[0].ranges)
