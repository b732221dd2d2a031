"""The epoch of a loader: its batches, in the order that they would have at that place of a training.

An epoch that a run was within is begun again with the random states that it began with, and read over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stackwise.argument import require
from stackwise.random_states import random_states, set_random_states

__all__ = [
    "all_parts_of",
    "begun_again",
    "check_draws_each_epoch",
    "epoch_of",
    "generator_states",
    "generators_of",
    "parts_of",
    "set_generators",
    "start_of",
    "tell_epoch",
]


def parts_of(loader: object) -> list[object]:
    """What the order of a loader may come from: itself, its dataset, its samplers and what these wrap."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inside = (getattr(loader, "dataset", None), getattr(loader, "sampler", None))
    parts = (loader, *inside, batch_sampler, getattr(batch_sampler, "sampler", None))
    return [part for part in parts if part is not None]


def all_parts_of(loader: object) -> list[object]:
    """Those of a loader, and of the one that it reads ahead, as `Prefetched` does."""
    return parts_of(loader) + parts_of(getattr(loader, "loader", None))


def tell_epoch(loader: Iterable[Any], number: int) -> None:
    """Call `set_epoch` of all parts of a loader that have it."""
    for part in parts_of(loader):
        if callable(told := getattr(part, "set_epoch", None)):
            told(number)


def epoch_of(loader: Iterable[Any], number: int, set_epoch: Callable[[int], None]) -> Iterator[Any]:
    """The batches of epoch `number`, counted from 0, of one and the same loader.

    An order that is drawn from a global generator depends on what earlier epochs drew: each is begun, and its
    first batch read, so that the orders of two epochs that start from one seed are not the same by accident.

    Args:
        loader: begins an epoch each time it is iterated.
        number: of the epoch.
        set_epoch: tells what shuffles the number of the epoch that begins.
    """
    for earlier in range(number):
        set_epoch(earlier)
        next(iter(loader), None)
    set_epoch(number)
    return iter(loader)


def generators_of(loader: object) -> list[torch.Generator]:
    """What a loader and its parts draw from, where that is not the random state of all; each once.

    A sampler may have none until it is gone through.
    """
    drawn_from = (getattr(part, "generator", None) for part in all_parts_of(loader))
    return list(dict.fromkeys(each for each in drawn_from if isinstance(each, torch.Generator)))


def generator_states(loader: object) -> list[Tensor]:
    """Of its generators, as they are now."""
    return [generator.get_state() for generator in generators_of(loader)]


def set_generators(loader: object, states: Sequence[Tensor] | None, *, all_are_there: bool = True) -> None:
    """Have the generators of a loader go on from `states`; None: they were not saved.

    Args:
        loader: whose they are.
        states: of `generator_states`.
        all_are_there: without, a sampler may still have to make its own when it is gone through.

    Raises:
        ValueError: there are more or fewer of them.

    Warns:
        UserWarning: there are some, and they were not saved.
    """
    generators = generators_of(loader)
    if states is None:
        if generators:
            told = "dataloader: its generators were not saved, so its batches may be others"
            warnings.warn(f"{told} than without a break", stacklevel=3)
        return
    count, saved = len(generators), len(states)
    fits = count == saved or not all_are_there
    require(fits, "generators of the dataloader", count, f"{saved}, as many as were saved")
    for generator, state in zip(generators, states, strict=all_are_there):
        generator.set_state(state)


def start_of(loader: object) -> dict[str, Any]:
    """The random states with which an epoch begins that is begun now, those of its generators too."""
    return random_states() | {"generators": generator_states(loader)}


def begun_again(loader: Iterable[Any], start: Mapping[str, Any], count: int, epoch: int) -> Iterator[Any]:
    """An epoch of `loader` behind its first `count` batches; random states are as they then come to be.

    Args:
        loader: of which as many batches are taken again.
        start: of `start_of`, when it began.
        count: of batches that are left out.
        epoch: its number.

    Raises:
        ValueError: it has fewer batches.
    """
    set_generators(loader, start.get("generators", []), all_are_there=False)
    set_random_states(start)
    batches = iter(loader)
    left_out = sum(1 for _ in islice(batches, count))
    fewer = f"{count} or more in pass {epoch}, as when the state was saved"
    require(left_out == count, "batches of the dataloader", left_out, fewer)
    return batches


def check_draws_each_epoch(loader: object) -> None:
    """Say it where an epoch cannot be begun again.

    Warns:
        UserWarning: of workers that stay.
    """
    if getattr(loader, "persistent_workers", False):
        told = "dataloader: its persistent_workers draw once for all passes, so its batches may be others"
        warnings.warn(f"{told} than without a break; a loader with a state_dict goes on", stacklevel=3)
