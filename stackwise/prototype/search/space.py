"""Space: configurations of a search, all valid and within their budget by construction."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, get_args

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.config.section import Section
from stackwise.config.yaml import read_yaml
from stackwise.prototype.search.dimension import Choices, Dimension, read_dimension
from stackwise.prototype.search.parameter_budget import ParameterBudget, nearest_within
from stackwise.prototype.search.parameter_count import count_of
from stackwise.prototype.search.shape import DEPENDENT_KEYS, DERIVED_KEYS, base_sizes, shaped, shaped_model

__all__ = ["Space", "config_digest"]

_BUDGET_KEYS = ("min_parameters", "max_parameters", "parameters", "tolerance", "solve")
_KEYS = ("base", "space", *_BUDGET_KEYS)
# Sizes of a model. Their values are changed step by step to meet a budget.
_SIZE_KEYS = (
    "n_layers",
    "model.architecture.n_stacks",
    "model.architecture.blocks_per_stack",
    "model.n_heads",
    "model.head_dim",
    "d_ff_ratio",
    "model.d_ff",
    "model.vocab_size",
)
_TOGETHER = (
    ("n_layers", "model.architecture.blocks_per_stack"),
    ("d_ff_ratio", "model.d_ff"),
)
# Keys with a common rule: the size of a head must be even if it is rotated.
_RELATED = (("model.head_dim", "model.use_rope", "model.attention_type"),)
# Types and allowed values of keys that are numbers.
_NUMBERS = {
    **dict.fromkeys(("n_layers", "gqa_ratio", "model.n_heads", "model.head_dim"), (int, "integers >= 1")),
    "d_ff_ratio": (int | float, "numbers above 0"),
}
_CHECKED = 512  # maximum number of combinations of other keys for which a budget is checked


@dataclass(frozen=True)
class Space:
    """Base configuration, with the allowed values of some of its keys.

    Keys are the dotted keys of a configuration, and three keys that determine other keys: `n_layers`,
    `gqa_ratio` and `d_ff_ratio`. Every sample is a valid configuration: constrained values are computed from
    sampled ones, and a sample outside a parameter budget is moved to the nearest sizes inside. A space in
    which this is impossible is refused when it is created.

    Attributes:
        base: configuration of the other keys.
        dimensions: allowed values by key.
        budget: budget of parameters. None: no bounds.
        source: origin of the space, for messages.
    """

    base: StackWiseConfig
    dimensions: dict[str, Dimension]
    budget: ParameterBudget | None = None
    source: str = "space"

    def __post_init__(self) -> None:
        problems = [*self._wrong_keys()]
        if not problems:
            problems = [*self._wrong_values()]
        if not problems and self.budget is not None:
            problems = [*self._outside_budget()]
        if problems:
            raise ConfigError(problems, self.source)

    @classmethod
    def of(cls, space: Space | Mapping[str, Any] | str | Path) -> Space:
        """Return a space from a `Space` (unchanged), a mapping or a YAML file."""
        if isinstance(space, Space):
            return space
        return cls.from_dict(space) if isinstance(space, Mapping) else cls.from_yaml(space)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Return the space of a YAML file. `base` may be the path of another file, relative to its folder.

        Raises:
            ConfigError: the message names every key that is refused.
            OSError: the file cannot be read.
        """
        path = Path(path)
        try:
            content = read_yaml(path)
        except ValueError as error:
            raise ConfigError([str(error)], str(path)) from None
        if isinstance(content, Mapping) and isinstance(content.get("base"), str):
            content = {**content, "base": StackWiseConfig.from_yaml(path.parent / content["base"])}
        return cls.from_dict({} if content is None else content, source=str(path))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], *, source: str = "space") -> Self:
        """Return a space from `base`, `space`, and the bounds on parameters.

        Args:
            mapping: `base` is a configuration or a mapping of its sections, also from JSON. `space` has, by
                key, a list of choices, or `low`, `high`, and `step` or `log`. The bounds are `min_parameters`
                and `max_parameters`, or `parameters` with `tolerance` (0.02) and `solve` ("n_layers",
                "model.n_heads" or "model.d_ff"): all configurations have that number of parameters, for which
                the key `solve` is computed.
            source: origin of the space, for messages.

        Raises:
            ConfigError: the message names every key that is refused.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError([f"got {mapping!r}; allowed: a mapping of {', '.join(_KEYS)}"], source)
        problems = [f"{key}: unknown key; allowed: {', '.join(_KEYS)}" for key in mapping if key not in _KEYS]
        base, given, dimensions, budget = mapping.get("base", {}), mapping.get("space"), {}, None
        if not isinstance(base, StackWiseConfig):
            try:
                base = StackWiseConfig.from_json({} if base is None else base, source=source)
            except ConfigError as error:
                problems += [f"base.{problem}" for problem in error.problems]
        if not isinstance(given, Mapping) or not given:
            problems.append(f"space: got {given!r}; allowed: keys with their choices or ranges")
            given = {}
        for key, value in given.items():
            try:
                dimensions[str(key)] = read_dimension(value)
            except ValueError as error:
                problems.append(f"space.{key}: {error}")
        try:
            budget = ParameterBudget.of(*(mapping.get(key) for key in _BUDGET_KEYS))
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError(problems, source)
        return cls(base, dimensions, budget, source)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that describe the space, for `from_dict`."""
        plain: dict[str, Any] = {"base": self.base.to_dict()}
        plain["space"] = {key: dimension.to_plain() for key, dimension in self.dimensions.items()}
        if self.budget is not None and self.budget.target is not None:
            low, target = self.budget.low, self.budget.target
            high = self.budget.high or target
            plain |= {"parameters": target, "tolerance": max(target - low, high - target) / target}
            plain["solve"] = self.budget.solve
        elif self.budget is not None:
            plain |= {"min_parameters": self.budget.low, "max_parameters": self.budget.high}
        return plain

    @cached_property
    def size(self) -> int | None:
        """Number of different samples, some of which may result in the same configuration.

        None: uncountable.
        """
        product = 1
        for dimension in self.dimensions.values():
            if dimension.count is None:
                return None
            product *= dimension.count
        return product

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield all samples of a space with a `size`, in a fixed order."""
        lattices = []
        for dimension in self.dimensions.values():
            whole = dimension.values if isinstance(dimension, Choices) else dimension.points()
            lattices.append(list(whole))
        for values in itertools.product(*lattices):
            yield dict(zip(self.dimensions, values, strict=True))

    def sample(self, source: random.Random) -> dict[str, Any]:
        """Return a sample, with independent keys. `config` converts it to a configuration."""
        return {key: dimension.draw(source) for key, dimension in self.dimensions.items()}

    def config(self, values: Mapping[str, Any]) -> StackWiseConfig:
        """Return the configuration of a sample: valid, and within the budget.

        Args:
            values: one allowed value for each key of the space.

        Raises:
            ValueError: a key that is missing or not part of this space.
            ConfigError: a rule of the configuration is broken that relates more keys than the checks at
                creation covered.
        """
        return self.build(self.settled(values))

    def settled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample with sizes within the budget, and with the solved key.

        Raises:
            ValueError: a key that is missing or not part of this space.
        """
        if values.keys() != self.dimensions.keys():
            raise ValueError(f"values: got the keys {sorted(values)}; allowed: {sorted(self.dimensions)}")
        settled = dict(values) if self.budget is None else self._nearest(values)
        if settled is None:
            raise ConfigError([self._no_size(values)], self.source)
        return settled

    def build(self, settled: Mapping[str, Any]) -> StackWiseConfig:
        """Return the configuration that settled values describe.

        Raises:
            ConfigError: as in `config`.
        """
        return StackWiseConfig.from_dict(shaped(self.base, settled), source=self.source)

    def _nearest(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        budget = self.budget
        assert budget is not None
        settled = budget.settle(values, self._model)
        if settled is not None:
            return settled
        lattices, start = {}, {}
        for key in _SIZE_KEYS:
            if key in self.dimensions:
                lattice = self.dimensions[key].lattice()
                near = min(range(len(lattice)), key=lambda index: abs(lattice[index] - values[key]))
                lattices[key], start[key] = lattice, near
        return nearest_within(start, lattices, lambda sizes: budget.settle({**values, **sizes}, self._model))

    def _model(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return shaped_model(self._base_model, self._base_sizes, values)

    @cached_property
    def _base_model(self) -> dict[str, Any]:
        return self.base.model.to_dict()

    @cached_property
    def _base_sizes(self) -> dict[str, Any]:
        return base_sizes(self.base)

    def _wrong_keys(self) -> Iterator[str]:
        known = [*DEPENDENT_KEYS, *_leaves(StackWiseConfig)]
        all_keys = f"the keys of a configuration, {', '.join(DEPENDENT_KEYS)}"
        for key in self.dimensions:
            if key in DERIVED_KEYS:
                yield f"space.{key}: {DERIVED_KEYS[key]}"
            elif key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                near = near or [each for each in known if each.endswith(f".{key}")][:1]
                hint = f"did you mean {near[0]!r}? " if near else ""
                yield f"space.{key}: unknown key; {hint}allowed: {all_keys}"
        for one, other in _TOGETHER:
            if one in self.dimensions and other in self.dimensions:
                yield f"space.{one}: is given beside {other}, which it decides; allowed: one of them"
        yield from self._solved_keys()
        yield from self._wrong_ratio()
        for key, (kind, allowed) in _NUMBERS.items():
            for value in self._ends(key):
                if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
                    yield f"space.{key}: got {value!r}; allowed: {allowed}"

    def _solved_keys(self) -> Iterator[str]:
        """Yield an error for each key that the solved key determines."""
        solve = self._solve
        if solve in self.dimensions:
            yield f"space.{solve}: is what is solved for; allowed: another key, or another solve"
        decided = (key for pair in _TOGETHER if solve in pair for key in pair if key != solve)
        for key in decided:
            if key in self.dimensions:
                yield f"space.{key}: is decided by solve={solve}; allowed: none"

    def _wrong_ratio(self) -> Iterator[str]:
        """Yield an error if `gqa_ratio` has no effect, or is missing."""
        kinds = self._ends("model.attention_type") or (self.base.model.attention_type,)
        if "gqa_ratio" in self.dimensions:
            if not {"gqa", "kernel"} & set(kinds):
                yield f"space.gqa_ratio: is for attention_type 'gqa' or 'kernel', and it is {kinds[0]!r}"
        elif "gqa" in kinds and self._base_sizes["gqa_ratio"] is None:
            yield "space.gqa_ratio: got nothing; attention_type 'gqa' needs it, and the base has none"

    def _wrong_values(self) -> Iterator[str]:
        """Yield values that are refused by themselves, or together with a value of another key.

        A rule of a configuration relates at most two keys that are not computed here, or the keys of
        `_RELATED`. It is monotone in numbers, or refuses odd ones. If all pairs of end values and the
        combinations of `_RELATED` are allowed, the space therefore contains no refused value.
        """
        first = {key: dimension.ends[0] for key, dimension in self.dimensions.items()}
        if self._solve is not None:
            first |= {self._solve: 8}
        refused: set[tuple[str, str]] = set()
        for key, dimension in self.dimensions.items():
            for value in dimension.ends:
                alone = self._problem(first | {key: value})
                # An error caused by the first values of other keys is reported for these keys.
                if alone is not None and self._alone(first, key, value):
                    refused.add((key, repr(value)))
                    yield f"space.{key}: got {value!r}; {alone}"
        related = (keys for keys in _RELATED if self.dimensions.keys() >= set(keys))
        for keys in (*itertools.combinations(self.dimensions, 2), *related):
            for values in itertools.product(*map(self._ends, keys)):
                drawn = dict(zip(keys, values, strict=True))
                shown = {(key, repr(value)) for key, value in drawn.items()}
                problem = None if refused & shown else self._problem(drawn, rest=first)
                if problem is None:
                    continue
                if len(keys) == 2:  # all refused combinations of related keys are reported
                    refused |= shown
                key, *others = keys
                beside = " and ".join(f"{other}={drawn[other]!r}" for other in others)
                yield f"space.{key}: got {drawn[key]!r} beside {beside}; {problem}"

    def _alone(self, first: Mapping[str, Any], key: str, value: Any) -> bool:
        """Return True if `value` is refused with all values of the other keys."""
        others = [
            (other, each)
            for other, dimension in self.dimensions.items()
            for each in dimension.ends
            if other != key
        ]
        return all(self._problem({**first, other: each, key: value}) is not None for other, each in others)

    def _problem(self, values: Mapping[str, Any], rest: Mapping[str, Any] | None = None) -> str | None:
        try:
            StackWiseConfig.from_dict(shaped(self.base, {**(rest or {}), **values}))
        except ConfigError as error:
            return error.problems[0]
        return None

    def _outside_budget(self) -> Iterator[str]:
        """Yield an error if a combination of the keys that are not sizes has no size within the budget."""
        others = {
            key: dimension.ends
            for key, dimension in self.dimensions.items()
            if key not in _SIZE_KEYS and (key.startswith("model.") or key in DEPENDENT_KEYS)
        }
        sizes = {key: self.dimensions[key].ends[0] for key in self.dimensions if key not in others}
        products = list(itertools.islice(itertools.product(*others.values()), 64 * _CHECKED))
        if len(products) > _CHECKED:
            products = random.Random(0).sample(products, _CHECKED)  # noqa: S311
        for product in products:
            values = sizes | dict(zip(others, product, strict=True))
            # The starting point only affects the duration of the search.
            if self._nearest(values | self._sizes_near(values)) is None:
                yield self._no_size(values)
                return

    def _sizes_near(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first sizes with enough parameters, if all grow together from smallest to largest."""
        assert self.budget is not None
        lattices = {key: self.dimensions[key].lattice() for key in _SIZE_KEYS if key in self.dimensions}
        steps = max([len(lattice) - 1 for lattice in lattices.values()], default=0)

        def at(step: int) -> dict[str, Any]:
            return {
                key: each[round(step * (len(each) - 1) / max(1, steps))] for key, each in lattices.items()
            }

        def counted(step: int) -> int:
            return count_of(self._model({**values, **at(step)}))

        return at(bisect_left(range(steps), self.budget.low, key=counted))

    def _no_size(self, values: Mapping[str, Any]) -> str:
        """Return the reason why no size is within the budget with these values of the other keys."""
        budget = self.budget
        assert budget is not None
        sizes = {key: self.dimensions[key].lattice() for key in _SIZE_KEYS if key in self.dimensions}
        beside = {
            key: value for key, value in values.items() if key not in sizes and key.startswith("model.")
        }
        told = f" beside {', '.join(f'{key}={value!r}' for key, value in beside.items())}" if beside else ""
        if budget.target is not None:
            return (
                f"parameters: got {budget.target}; allowed: a number that {budget.solve} comes within "
                f"{budget.low} to {budget.high} of{told}, or a larger tolerance"
            )
        smallest = count_of(self._model({**values, **{key: each[0] for key, each in sizes.items()}}))
        largest = count_of(self._model({**values, **{key: each[-1] for key, each in sizes.items()}}))
        if budget.high is not None and smallest > budget.high:
            return f"max_parameters: got {budget.high}; allowed: {smallest} or more, the smallest{told}"
        if largest < budget.low:
            return f"min_parameters: got {budget.low}; allowed: {largest} or fewer, the largest{told}"
        return (
            f"max_parameters: got {budget.low} to {budget.high}; allowed: bounds that hold a size of this"
            f" space{told}; its sizes go from {smallest} to {largest} in steps that miss them"
        )

    def _ends(self, key: str) -> tuple[Any, ...]:
        return self.dimensions[key].ends if key in self.dimensions else ()

    @property
    def _solve(self) -> str | None:
        return None if self.budget is None else self.budget.solve


def config_digest(config: StackWiseConfig) -> str:
    """Return a text that is equal only for equal configurations."""
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _leaves(section: type[Section], path: str = "") -> Iterator[str]:
    """Yield dotted keys that do not contain other keys."""
    for name, field in section.model_fields.items():
        kinds: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        here = f"{path}.{name}".lstrip(".")
        if inner is None:
            yield here
        elif dict not in kinds and field.annotation not in kinds[1:]:
            yield from _leaves(inner, here)
