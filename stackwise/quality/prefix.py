"""Prefixes: what several sequences begin with, found so that it is read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

__all__ = ["Family", "Group", "group_by_prefix"]

# What a pass of its own costs, in tokens that it has to save.
_PASS_TOKENS = 256
_ID = np.dtype(">u4")  # bytes of such ids are in the order of the ids


@dataclass(frozen=True)
class Family:
    """Sequences that are the same up to where the first of them is asked about.

    Attributes:
        shared: how many tokens they begin with alike.
        members: which sequences.
    """

    shared: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Families that begin alike.

    Attributes:
        shared: how many tokens all of them begin with; 0: nothing is read for all of them.
        families: at least one.
    """

    shared: int
    families: tuple[Family, ...]


def group_by_prefix(sequences: Sequence[Sequence[int] | np.ndarray], asked: Sequence[int]) -> list[Group]:
    """Which sequences to read together, and what once for all of them.

    Two levels: sequences alike up to what is asked about are a family, as the choices of a question; families
    with a long common beginning are a group, as questions after the same examples. The groups are those that
    save the most tokens.

    Args:
        sequences: token ids.
        asked: of each, its first position whose output is asked for; what is before it can be read ahead.

    Returns:
        Groups that each sequence is in exactly one of; those that share nothing are in the first one.
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
    """How many ids the two begin with alike."""
    n = min(len(one), len(two)) // _ID.itemsize
    differ = np.frombuffer(one, _ID, n) != np.frombuffer(two, _ID, n)
    return int(differ.argmax()) if differ.any() else n


@dataclass
class _Node:
    """Neighbours that share `height` ids; `best` is the most that can be saved in them, by `ranges`."""

    height: int
    start: int
    best: int = 0
    ranges: tuple[tuple[int, int, int], ...] = ()


def _best_ranges(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """(shared, start, end) of the ranges of sorted keys that save the most when their beginning is read once.

    Args:
        common: how many ids each key has in common with the one after it.
    """
    open_nodes = [_Node(0, 0)]
    for i, height in enumerate([*common, 0]):
        start, best = i, 0
        ranges: tuple[tuple[int, int, int], ...] = ()
        while open_nodes[-1].height > height:
            node = open_nodes.pop()
            start, best, ranges = node.start, node.best + best, node.ranges + ranges
            own = node.height * (i - node.start) - _PASS_TOKENS  # i - start + 1 keys; one is read
            if own > best:
                best, ranges = own, ((node.height, node.start, i + 1),)
        if open_nodes[-1].height < height:
            open_nodes.append(_Node(height, start))
        open_nodes[-1].best += best
        open_nodes[-1].ranges += ranges
    return list(open_nodes[0].ranges)
