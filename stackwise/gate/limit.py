"""Limit and Limits: allowed cost increase from base to head, per metric."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from stackwise.support.arguments import check_choice, check_number, require
from stackwise.support.units import parse_bytes, parse_seconds

__all__ = ["METRICS", "Limit", "Limits", "parse_limits", "parse_share"]

_SHARE = re.compile(r"(?P<number>\d{1,30}(?:\.\d{1,30})?) ?%", re.ASCII)


def parse_share(key: str, value: Any) -> float:
    """Parse a share of the base's cost: "2%" is 0.02.

    Raises:
        ValueError: the value is not a percentage; the message has `key`, the value and the allowed form. A
            number without "%" is refused: 2 may mean 2 % or a factor of 2.
    """
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    share = float(Fraction(match["number"]) / 100) if match else 0.0
    require(0 < share <= 10, key, value, "a string such as '2%', above 0% and at most 1000%")
    return share


def parse_limits(text: str) -> dict[str, str | None]:
    """Parse "time=2%,memory=none,floor=50us" into arguments of `Limits.changed`. The value "none" is None.

    Raises:
        ValueError: a part without "=", or a repeated key.
    """
    found: dict[str, str | None] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        require(
            bool(equals and key) and key not in found, "limits", text, "KEY=VALUE, by commas, each key once"
        )
        found[key] = None if value == "none" else value
    return found


# Bytes: size of Python's own objects in a call.
_MEMORY_FLOOR = 65536.0


@dataclass(frozen=True)
class Limit:
    """Allowed cost increase from base to head.

    Attributes:
        tolerance: share of the base's cost. A change that is significantly smaller passes. A change of this
            size has to be found.
        minimum_effect: share of the base's cost. A smaller estimate is never a regression, even if it is
            significant. None: half of the tolerance.
        floor: lower bound of the tolerance in the metric's unit (seconds or bytes), for costs so small that a
            share of them does not matter.
    """

    tolerance: float = 0.02
    minimum_effect: float | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance, "a share above 0", lambda value: value > 0)
        check_number("floor", self.floor, "a number >= 0, in the metric's unit", lambda value: value >= 0)
        if self.minimum_effect is not None:
            allowed = f"a share from 0 to the tolerance, {self.tolerance}"
            check_number("minimum_effect", self.minimum_effect, allowed, lambda v: 0 <= v <= self.tolerance)

    def at(self, base_level: float | None) -> tuple[float, float]:
        """Return tolerance and minimum effect as log(head / base), for a base cost of `base_level`.

        A floor above the tolerance replaces the tolerance, and the minimum effect grows in proportion. If the
        level is unknown (None), the floor is not used.
        """
        tolerance = self.tolerance
        if base_level is not None:
            check_number("base_level", base_level, "a number above 0, in the metric's unit", lambda v: v > 0)
            tolerance = max(tolerance, self.floor / base_level)
        least = self.tolerance / 2 if self.minimum_effect is None else self.minimum_effect
        return math.log1p(tolerance), math.log1p(least * tolerance / self.tolerance)


@dataclass(frozen=True)
class Limits:
    """Limit of each metric of a test. If a limit is None, the metric is not judged.

    Attributes:
        time: seconds of a call.
        memory: peak of the bytes that a call holds.
        ttft: seconds to the first token of a generated text.
        tpot: seconds per later token.
    """

    time: Limit | None = field(default_factory=Limit)
    memory: Limit | None = field(default_factory=lambda: Limit(0.01, floor=_MEMORY_FLOOR))
    ttft: Limit | None = field(default_factory=lambda: Limit(0.05))
    tpot: Limit | None = field(default_factory=Limit)

    @property
    def all(self) -> tuple[Limit | None, ...]:
        """Limits of all metrics, in the order of `METRICS`."""
        return tuple(getattr(self, metric) for metric in METRICS)

    def of(self, metric: str) -> Limit | None:
        """Return the limit of a metric.

        Raises:
            ValueError: an unknown metric.
        """
        check_choice("metric", metric, METRICS)
        limit: Limit | None = getattr(self, metric)
        return limit

    def changed(self, **given: Any) -> Limits:
        """Return a copy with the values of a marker or an option.

        Args:
            given: for each metric a share such as "2%", or None to not judge the metric. `floor`: a time such
                as "50us", for all metrics in seconds. `memory_floor`: "64 KiB", or a number of bytes. A floor
                of None has no effect.

        Raises:
            ValueError: an unknown key or an invalid value; the message has both.
        """
        allowed = (*METRICS, "floor", "memory_floor")
        for key in given:
            require(key in allowed, "gate", key, ", ".join(allowed))
        limits: dict[str, Limit | None] = {metric: self.of(metric) for metric in METRICS}
        defaults = Limits()
        for metric in METRICS:
            if metric in given:
                asked = given[metric]
                kept = limits[metric] or defaults.of(metric) or Limit()
                limits[metric] = (
                    None if asked is None else Limit(parse_share(metric, asked), None, kept.floor)
                )
        floors: dict[str, float] = {}
        if given.get("memory_floor") is not None:
            floors["memory"] = parse_bytes("memory_floor", given["memory_floor"], least=0)
        if given.get("floor") is not None:
            floors |= dict.fromkeys(("time", "ttft", "tpot"), parse_seconds("floor", given["floor"]))
        for metric, floor in floors.items():
            limit = limits[metric]
            if limit is not None:
                limits[metric] = replace(limit, floor=floor)
        return Limits(**limits)


METRICS = tuple(each.name for each in fields(Limits))
