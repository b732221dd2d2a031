"""Turns: who is measured first in each pair of a round.

The first of a pair was measured up to 12 % faster than the second, which, always the same, is a regression
that nobody made. Pairs alternate (ABBA), from a random start, so that over two pairs nobody is first more
often.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ORDERS", "OrderCheck", "check_order", "difference", "standard_error", "turns"]

ORDERS = ("abba", "fixed")
_OF_A_MEDIAN = math.sqrt(math.pi / 2)  # its standard error over that of the mean, of normal values
_OF_A_DEVIATION = 1.4826  # a standard deviation over the median deviation, of normal values


def turns(pairs: int, rng: random.Random, order: str = "abba") -> list[bool]:
    """For each pair whether the head is first.

    Args:
        pairs: how many.
        rng: chooses who starts.
        order: "abba", or "fixed": the base is always first, which is wrong and is there to show it.
    """
    if order == "fixed":
        return [False] * pairs
    start = rng.random() < 0.5
    return [start ^ bool(number % 2) for number in range(pairs)]


def difference(logs: Sequence[float], head_first: Sequence[bool]) -> float:
    """What the pairs of a round say: the mean of the medians of both orders.

    Being second costs what it costs on either side. The median of all pairs would lie between two heaps,
    where it says little: of a step of 1 ms rounds differed by 1.9 % (standard deviation), now by 1.0 %.

    Args:
        logs: log(head / base) of each pair.
        head_first: who was first in it.
    """
    return statistics.fmean(map(statistics.median, _orders(logs, head_first)))


def standard_error(logs: Sequence[float], head_first: Sequence[bool]) -> float:
    """Of `difference`, about: from the median deviations of both orders, so that single pairs do not count.

    Args:
        logs: log(head / base) of each pair.
        head_first: who was first in it.
    """
    orders = _orders(logs, head_first)
    squares = 0.0
    for each in orders:
        middle = statistics.median(each)
        deviation = _OF_A_DEVIATION * statistics.median(abs(log - middle) for log in each)
        squares += (_OF_A_MEDIAN * deviation) ** 2 / len(each)
    return math.sqrt(squares) / len(orders)


def _orders(logs: Sequence[float], head_first: Sequence[bool]) -> list[list[float]]:
    """What those pairs say in which the head was first, and the others; orders of which there are some."""
    both = ([log for log, first in zip(logs, head_first, strict=True) if first is o] for o in (True, False))
    return [each for each in both if each]


@dataclass(frozen=True)
class OrderCheck:
    """What being first was worth, over all pairs of a run.

    Attributes:
        pairs: that were looked at.
        head_first: in how many of them the head was first.
        bias: half of what log(head / base) differs by between pairs with the base first and pairs with the
            head first: 0.01 means that the first one was measured 1 % faster.
        balanced: whether each was first as often as the other, but for one pair of each round.
    """

    pairs: int
    head_first: int
    bias: float
    balanced: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def check_order(rounds: Sequence[tuple[Sequence[bool], Sequence[float]]]) -> OrderCheck:
    """Look at the order of all pairs.

    Args:
        rounds: of each round of each test who was first in its pairs (True: the head), and log(head / base)
            of these.
    """
    head_first = [value for order, logs in rounds for first, value in zip(order, logs, strict=True) if first]
    base_first = [
        value for order, logs in rounds for first, value in zip(order, logs, strict=True) if not first
    ]
    both = bool(head_first and base_first)
    bias = (statistics.median(base_first) - statistics.median(head_first)) / 2 if both else math.nan
    balanced = all(abs(2 * sum(order) - len(order)) <= 1 for order, _ in rounds)
    return OrderCheck(len(head_first) + len(base_first), len(head_first), bias, balanced)
