"""ParameterBudget: bounds on the number of parameters. Samples are moved inside instead of being refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stackwise.prototype.search.parameter_count import count_of
from stackwise.prototype.search.shape import D_FF_MULTIPLE
from stackwise.support.arguments import check_choice, check_number, check_sizes, require

__all__ = ["SOLVED_KEYS", "ParameterBudget", "nearest_within"]

SOLVED_KEYS = ("n_layers", "model.n_heads", "model.d_ff")
_MOST_HEADS = 4096
_MOST_TRIM = 1.5  # factor by which d_ff may deviate from its ratio to correct integer Blocks or heads

Values = dict[str, Any]
MakeModel = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class ParameterBudget:
    """Bounds on the number of parameters, or one number for all configurations.

    Attributes:
        low: minimum, at least 1.
        high: maximum. None: no maximum.
        target: number of parameters of all configurations, with the bounds `low` and `high` around it. None:
            only bounds.
        solve: for a target, the key that is computed instead of sampled.
    """

    low: int = 1
    high: int | None = None
    target: int | None = None
    solve: str | None = None

    @classmethod
    def of(
        cls,
        minimum: int | None = None,
        maximum: int | None = None,
        target: int | None = None,
        tolerance: float | None = None,
        solve: str | None = None,
    ) -> ParameterBudget | None:
        """Return a budget from `min_parameters`, `max_parameters`, `parameters`, `tolerance` and `solve`.

        Raises:
            ValueError: the message names the key.
        """
        for key, value in (("min_parameters", minimum), ("max_parameters", maximum), ("parameters", target)):
            if value is not None:
                check_sizes(**{key: value})
        if target is None:
            require(tolerance is None, "tolerance", tolerance, "none without parameters")
            require(solve is None, "solve", solve, "none without parameters")
            if minimum is None and maximum is None:
                return None
            if minimum is not None and maximum is not None:
                require(minimum <= maximum, "min_parameters", minimum, f"at most max_parameters={maximum}")
            return cls(minimum or 1, maximum)
        for key, value in (("min_parameters", minimum), ("max_parameters", maximum)):
            require(value is None, key, value, "none beside parameters")
        tolerance = 0.02 if tolerance is None else tolerance
        check_number("tolerance", tolerance, "a number above 0 and below 1", lambda number: 0 < number < 1)
        solve = "n_layers" if solve is None else solve
        check_choice("solve", solve, SOLVED_KEYS)
        # A tolerance derived from an integer number of parameters must result in this number, in spite of
        # rounding.
        room = math.floor(target * tolerance * (1 + 1e-12))
        return cls(max(1, target - room), target + room, target, solve)

    def holds(self, count: int) -> bool:
        """Return True if the number of parameters is within the bounds."""
        return self.low <= count and (self.high is None or count <= self.high)

    def settle(self, values: Mapping[str, Any], make: MakeModel) -> Values | None:
        """Return the values with the solved keys. None: they are not within the budget.

        Args:
            values: values by key of the space.
            make: function from values to the section `model` as plain values.
        """
        settled = dict(values)
        if self.target is not None and self.solve is not None:
            settled[self.solve] = self._solved(settled, make)
        model = make(settled)
        if self.holds(count_of(model)):
            return settled
        if self.target is None:
            return None
        wanted = None if self.solve == "model.d_ff" else model["d_ff"]
        for multiple in (D_FF_MULTIPLE, 1):
            settled["model.d_ff"] = self._d_ff(settled, make, multiple)
            trimmed = settled["model.d_ff"] / (wanted or settled["model.d_ff"])
            if 1 / _MOST_TRIM <= trimmed <= _MOST_TRIM and self.holds(count_of(make(settled))):
                return settled
        return None

    def _solved(self, values: Values, make: MakeModel) -> int:
        assert self.target is not None and self.solve is not None
        if self.solve == "model.d_ff":
            return self._d_ff(values, make, D_FF_MULTIPLE)
        if self.solve == "n_layers":
            one, two = (count_of(make(values | {"n_layers": depth})) for depth in (1, 2))
            return max(1, 1 + round((self.target - one) / (two - one)))
        low, high = 1, _MOST_HEADS  # the number of parameters grows with that of heads
        while high - low > 1:
            middle = (low + high) // 2
            at_middle = count_of(make(values | {self.solve: middle}))
            low, high = (low, middle) if at_middle > self.target else (middle, high)
        near = {heads: count_of(make(values | {self.solve: heads})) for heads in (low, high)}
        return min(near, key=lambda heads: abs(near[heads] - self.target))  # type: ignore[operator]

    def _d_ff(self, values: Values, make: MakeModel, multiple: int) -> int:
        """Return the d_ff with the number of parameters closest to the target.

        The number is linear in d_ff.
        """
        assert self.target is not None
        one, two = (count_of(make(values | {"model.d_ff": width})) for width in (1, 2))
        return max(1, round((1 + (self.target - one) / (two - one)) / multiple)) * multiple


def nearest_within(
    start: Mapping[str, int],
    lattices: Mapping[str, list[Any]],
    settle: Callable[[Mapping[str, Any]], Values | None],
) -> Values | None:
    """Return the nearest point of a lattice that is within a budget, by the number of steps from `start`.

    Args:
        start: index in the lattice by key.
        lattices: sorted values of a size by key.
        settle: function that returns the values of a point within the budget, or None.

    Returns:
        Result of `settle`. None: no point is within the budget.
    """
    keys = list(lattices)
    layer, seen = [tuple(start[key] for key in keys)], {tuple(start[key] for key in keys)}
    while layer:
        following = []
        for point in layer:
            settled = settle({key: lattices[key][index] for key, index in zip(keys, point, strict=True)})
            if settled is not None:
                return settled
            for place, key in enumerate(keys):
                for index in (point[place] - 1, point[place] + 1):
                    other = (*point[:place], index, *point[place + 1 :])
                    if 0 <= index < len(lattices[key]) and other not in seen:
                        seen.add(other)
                        following.append(other)
        layer = following
    return None
