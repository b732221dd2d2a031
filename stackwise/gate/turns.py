"""Turns: order of base and head in the pairs of a round.

The first call of a pair was measured up to 12 % faster than the second. With a fixed order, identical code
would look like a regression. So pairs alternate (ABBA) from a random start, and over two pairs both sides are
first equally often.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ORDERS", "OrderCheck", "check_order", "difference", "standard_error", "turns"]

ORDERS = ("abba", "fixed")
# Standard error of a median divided by the standard error of the mean, for normal values.
_OF_A_MEDIAN = math.sqrt(math.pi / 2)
# Standard deviation divided by the median absolute deviation, for normal values.
_OF_A_DEVIATION = 1.4826


def turns(pairs: int, rng: random.Random, order: str = "abba") -> list[bool]:
    """Return for each pair True if the head is first.

    Args:
        pairs: number of pairs.
        rng: source of the random start.
        order: "abba", or "fixed": the base is always first. "fixed" is biased and serves to demonstrate the
            bias.
    """
    if order == "fixed":
        return [False] * pairs
    start = rng.random() < 0.5
    return [start ^ bool(number % 2) for number in range(pairs)]


def difference(logs: Sequence[float], head_first: Sequence[bool]) -> float:
    """Return the difference of a round: the mean of the medians of both orders.

    Being second has the same cost on either side, so the pairs form two clusters, one per order. The median
    of all pairs would lie between the clusters, with much noise: rounds of a step of 1 ms differed by 1.9 %
    (standard deviation), and differ by 1.0 % with the present mean.

    Args:
        logs: log(head / base) of each pair.
        head_first: for each pair, True if the head was first.
    """
    return statistics.fmean(map(statistics.median, _orders(logs, head_first)))


def standard_error(logs: Sequence[float], head_first: Sequence[bool]) -> float:
    """Return the approximate standard error of `difference`.

    It is based on the median absolute deviations of both orders, so single pairs have no influence.

    Args:
        logs: log(head / base) of each pair.
        head_first: for each pair, True if the head was first.
    """
    orders = _orders(logs, head_first)
    squares = 0.0
    for each in orders:
        middle = statistics.median(each)
        deviation = _OF_A_DEVIATION * statistics.median(abs(log - middle) for log in each)
        squares += (_OF_A_MEDIAN * deviation) ** 2 / len(each)
    return math.sqrt(squares) / len(orders)


def _orders(logs: Sequence[float], head_first: Sequence[bool]) -> list[list[float]]:
    """Return the values of pairs with the head first and of pairs with the base first. Omit empty lists."""
    both = ([log for log, first in zip(logs, head_first, strict=True) if first is o] for o in (True, False))
    return [each for each in both if each]


@dataclass(frozen=True)
class OrderCheck:
    """Effect of the order on all pairs of a run.

    Attributes:
        balance: share of the pairs with the base first; None: there are no pairs.
        bias: half of the difference in log(head / base) between pairs with the base first and pairs with the
            head first. 0.01 means that the first side was measured 1 % faster. None: one side was always
            first.
        balanced: True if both sides were first equally often in each round, up to one pair.
    """

    balance: float | None
    bias: float | None
    balanced: bool


def check_order(rounds: Sequence[tuple[Sequence[bool], Sequence[float]]]) -> OrderCheck:
    """Return the effect of the order on all pairs.

    Args:
        rounds: for each round of each test, the order of its pairs (True: head first) and their log(head /
            base).
    """
    head_first = [first for order, _ in rounds for first in order]
    orders = _orders([log for _, logs in rounds for log in logs], head_first)
    bias = None
    if len(orders) == 2:
        of_head_first, of_base_first = map(statistics.median, orders)
        bias = (of_base_first - of_head_first) / 2
    balance = 1 - statistics.fmean(head_first) if head_first else None
    balanced = all(abs(2 * sum(order) - len(order)) <= 1 for order, _ in rounds)
    return OrderCheck(balance, bias, balanced)
