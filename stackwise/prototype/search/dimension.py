"""Dimension: allowed values of one key of a search space, as choices or as a range."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna import Trial

__all__ = ["Choices", "Dimension", "Range", "read_dimension"]

_POINTS = 17  # of a continuous range, if it is enumerated


@dataclass(frozen=True)
class Choices:
    """Set of values without an order.

    Attributes:
        values: plain values. No two are equal.
    """

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that must be checked to know that the entire dimension is valid."""
        return self.values

    @property
    def count(self) -> int | None:
        """Number of values. None: uncountable."""
        return len(self.values)

    def lattice(self) -> list[Any]:
        """Return the values. Numbers are sorted."""
        return sorted(self.values) if all(map(_is_number, self.values)) else list(self.values)

    def draw(self, source: random.Random) -> Any:
        """Return one of the values, with equal probability."""
        return source.choice(self.values)

    def suggest(self, trial: Trial, key: str) -> Any:
        """Return the value that the sampler of the trial's study suggests."""
        # A storage accepts only scalars, so other values are stored as JSON.
        labels = {_label(value): value for value in self.values}
        return labels[trial.suggest_categorical(key, list(labels))]

    def stored(self, value: Any) -> Any:
        """Return `value` in the format of the storage."""
        return _label(value)

    def to_plain(self) -> Any:
        """Return plain values in the format of YAML."""
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """Number between two bounds, both included. It is an integer if both bounds are integers.

    Attributes:
        low: minimum.
        high: maximum.
        step: difference between adjacent values. None: 1 for integers, continuous otherwise.
        log: True if equal ratios are equally likely. False: equal differences are.
    """

    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def is_integer(self) -> bool:
        """True if the values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that must be checked, because rules forbid an end of the range or odd numbers."""
        if self.low == self.high:
            return (self.low,)
        second = self.low + (self.step or 1)
        odd = self.is_integer and second % 2 == 1 and second < self.high
        return (self.low, *([second] if odd else []), self.high)

    @property
    def count(self) -> int | None:
        """Number of values. None: uncountable."""
        step = self.step or (1 if self.is_integer else None)
        if step is None:
            return 1 if self.low == self.high else None
        return round((self.high - self.low) / step) + 1

    def points(self) -> list[Any]:
        """Return every value of a countable range."""
        assert self.count is not None
        return [self._on(self.low + number * (self.step or 1)) for number in range(self.count)]

    def lattice(self) -> list[Any]:
        """Return all values if there are few, otherwise some from the minimum to the maximum."""
        if self.count is not None and self.count <= 4 * _POINTS:
            return self.points()
        parts = [number / (_POINTS - 1) for number in range(_POINTS)]
        if self.log:
            found = [self.low * (self.high / self.low) ** part for part in parts]
        else:
            found = [self.low + (self.high - self.low) * part for part in parts]
        return list(dict.fromkeys(self._on(value) for value in found))

    def draw(self, source: random.Random) -> Any:
        """Return a random value. With `log`, it is uniform in the logarithm."""
        count = self.count
        if self.log:
            # Like Optuna, give each integer the share of the numbers that are rounded to it.
            half = 0.5 if self.is_integer else 0.0
            low, high = math.log(self.low - half), math.log(self.high + half)
            return self._on(math.exp(source.uniform(low, high)))
        if count is not None:
            return self._on(self.low + source.randrange(count) * (self.step or 1))
        return self._on(source.uniform(self.low, self.high))

    def suggest(self, trial: Trial, key: str) -> Any:
        """Return the value that the sampler of the trial's study suggests."""
        if self.is_integer:
            step = 1 if self.step is None else int(self.step)
            return trial.suggest_int(key, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(key, self.low, self.high, step=self.step, log=self.log)

    def stored(self, value: Any) -> Any:
        """Return `value` in the format of the storage."""
        return value

    def to_plain(self) -> Any:
        """Return plain values in the format of YAML."""
        plain: dict[str, Any] = {"low": self.low, "high": self.high}
        if self.step is not None:
            plain["step"] = self.step
        return plain | ({"log": True} if self.log else {})

    def _on(self, value: float) -> Any:
        """Return the nearest value of this range."""
        value = min(max(value, self.low), self.high)
        if self.step is not None:
            # Rounding errors may leave the range.
            value = self.low + round((value - self.low) / self.step) * self.step
            value = min(max(value, self.low), self.high)
        return round(value) if self.is_integer else float(value)


Dimension = Choices | Range


def read_dimension(given: Any) -> Dimension:
    """Return a dimension from a list of choices, or from a mapping of `low`, `high`, and `step` or `log`.

    Raises:
        ValueError: another type or an invalid value. The message does not contain the key.
    """
    if isinstance(given, Choices | Range):
        return given
    if isinstance(given, Mapping):
        return _read_range(given)
    if not isinstance(given, list | tuple):
        raise ValueError(f"got {given!r}; allowed: a list of choices, or {{low, high, step or log}}")
    if not given:
        raise ValueError("got []; allowed: at least one choice")
    for value in given:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"got {value!r} among its choices; allowed: plain values") from None
    for one, other in itertools.combinations(given, 2):
        # A study compares values like Python, and stores lists as text.
        if one == other or _label(one) == _label(other):
            raise ValueError(f"got the choices {one!r} and {other!r}, which are equal; allowed: each once")
    return Choices(tuple(given))


def _read_range(given: Mapping[Any, Any]) -> Range:
    for key in given:
        if key not in ("low", "high", "step", "log"):
            raise ValueError(f"got the key {key!r}; allowed: low, high, step, log")
    for key in ("low", "high"):
        if not _is_number(given.get(key)):
            raise ValueError(f"got {given.get(key)!r} for {key}; allowed: a finite number")
    low, high, step, log = given["low"], given["high"], given.get("step"), given.get("log", False)
    if low > high:
        raise ValueError(f"got low={low!r} and high={high!r}; allowed: low <= high")
    if not isinstance(log, bool):
        raise ValueError(f"got {log!r} for log; allowed: true, false")
    integers = isinstance(low, int) and isinstance(high, int)
    if not integers:
        low, high = float(low), float(high)
    if log and step is not None:
        raise ValueError(f"got step={step!r} beside log=true; allowed: one of them")
    if log and low <= 0:
        raise ValueError(f"got low={low!r} beside log=true; allowed: a number above 0")
    if step is not None:
        _check_step(step, high - low, integers)
        step = step if integers else float(step)
    return Range(low, high, step, log)


def _check_step(step: Any, length: float, integers: bool) -> None:
    if not _is_number(step) or step <= 0 or (integers and not isinstance(step, int)):
        raise ValueError(f"got {step!r} for step; allowed: a number above 0, an integer for integers")
    steps = length / step
    if abs(steps - round(steps)) > 1e-9 * max(1.0, steps):
        raise ValueError(f"got step={step!r}; allowed: a part of high - low = {length!r}")


def _label(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
