"""Checks that the values of a space can be trained, before the first trial of a search."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.data.create import create_data
from stackwise.model.build import create_rack_from_config
from stackwise.prototype.search.space import Space
from stackwise.training.objective import Objective
from stackwise.training.optimizer import create_optimizer
from stackwise.training.precision import check_precision

__all__ = ["check_space", "check_trains"]

Problem = Callable[[Mapping[str, Any]], str | None]
_DRAWS = 32  # random combinations of end values to find one that can be trained
# Keys that a run replaces or does not use. A section includes all its keys.
_UNREAD = {
    "training.seed": "it is that of `seeds`",
    "training.max_steps": "it is `steps`",
    "training.log_interval": "nothing is logged",
    "training.telemetry": "nothing is logged",
    "training.guard": "it would hide what is looked for",
    "training.checkpoint_dir": "no checkpoint is made",
    "training.checkpoint": "no checkpoint is made",
    "training.save_interval": "no checkpoint is made",
    "training.resume": "no checkpoint is made",
}


def check_space(
    space: Space, stand_in: Callable[[StackWiseConfig], StackWiseConfig], device: str | None
) -> None:
    """Raise an error for a space with values that `PrototypeEvaluation` cannot train or does not use.

    Args:
        space: search space.
        stand_in: function from a configuration to the one that is trained instead.
        device: device of the training. None: the configured one.

    Raises:
        ConfigError: the message names each key and value.
        OSError: the data cannot be read.
        ImportError: a precision or a tokenizer requires a library that is not installed.
    """
    unread = [*_unread_keys(space.dimensions, device)]
    if unread:
        raise ConfigError(unread, space.source)
    data_problems: dict[str, str | None] = {}  # by settings, because creating data may take long

    def problem_of(values: Mapping[str, Any]) -> str | None:
        try:
            config = stand_in(space.config(values))
            check_trains(config, device)
        except ValueError as error:
            return _text(error)
        training = config.training
        sizes = (config.model.vocab_size, training.batch_size, training.seq_len, training.objective)
        data = repr((config.data, sizes))
        if data not in data_problems:
            data_problems[data] = _data_problem(config)
        return data_problems[data]

    problems = [*_untrained_ends(space, problem_of, _trained_ends(space, problem_of))]
    if problems:
        raise ConfigError(problems, space.source)


def check_trains(config: StackWiseConfig, device: str | None) -> None:
    """Raise ValueError for a configuration that `PrototypeEvaluation` cannot set up. Create no weights.

    Raises:
        ValueError: the message names the key or the argument.
        ImportError: a precision requires a library that is not installed.
    """
    from stackwise.prototype.prototype import ArchitecturePrototype

    prototype, settings = ArchitecturePrototype(config, device=device), config.training
    check_precision(settings.precision, prototype.device)
    changed = config.to_dict()
    changed["model"]["architecture"]["blocks_per_stack"] = 1  # all Blocks have the same type
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        rack = create_rack_from_config(changed)
    Objective(settings.objective, config.model.vocab_size).check(rack)
    create_optimizer(rack, settings.optimizer, masters=settings.precision == "bf16_weights")


def _data_problem(config: StackWiseConfig) -> str | None:
    """Return the reason why the data of a configuration cannot be created. None: it can, and was."""
    try:
        with torch.random.fork_rng(devices=[]):
            create_data(config)
    except ValueError as error:
        return _text(error)
    return None


def _trained_ends(space: Space, problem_of: Problem) -> dict[str, Any]:
    """Return end values of all keys that can be trained together: the first ones, otherwise random ones.

    Raises:
        ConfigError: none were found.
    """
    ends = {key: dimension.ends for key, dimension in space.dimensions.items()}
    first, source = {key: each[0] for key, each in ends.items()}, random.Random(0)  # noqa: S311
    problem = problem_of(first)
    if problem is None:
        return first
    for _ in range(_DRAWS):
        drawn = {key: source.choice(each) for key, each in ends.items()}
        if problem_of(drawn) is None:
            return drawn
    told = ", ".join(f"{key}={value!r}" for key, value in first.items())
    raise ConfigError([f"space: got {told}; {problem}"], space.source)


def _untrained_ends(space: Space, problem_of: Problem, trained: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each end value that cannot be trained with any end value of another key."""
    ends = [(key, end) for key, dimension in space.dimensions.items() for end in dimension.ends]
    for key, value in ends:
        problem = problem_of({**trained, key: value})
        others = ({**trained, other: end, key: value} for other, end in ends if other != key)
        if problem is not None and all(problem_of(each) is not None for each in others):
            yield f"space.{key}: got {value!r}; {problem}"


def _unread_keys(keys: Iterable[str], device: str | None) -> Iterator[str]:
    """Yield a sentence for each of `keys` that has no effect in a run of `PrototypeEvaluation`.

    Args:
        keys: keys of a space.
        device: as in `PrototypeEvaluation`.
    """
    unread = _UNREAD | ({} if device is None else {"training.device": f"it is device={device!r}"})
    for key in keys:
        for name, why in unread.items():
            if key == name or key.startswith(f"{name}."):
                yield f"space.{key}: no trial reads it: {why}; allowed: keys that trials differ by"


def _text(error: ValueError) -> str:
    return error.problems[0] if isinstance(error, ConfigError) else str(error)
