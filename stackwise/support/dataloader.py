"""Data loader: epochs with the order of an uninterrupted run, also after a resume within an epoch.

A resume restores the random states at the start of the epoch, then skips the batches already used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stackwise.support.arguments import require
from stackwise.support.random_state import random_states, set_random_states

__all__ = [
    "all_parts",
    "epoch_start",
    "generator_states",
    "iterate_epoch",
    "own_generators",
    "resume_epoch",
    "set_generators",
    "set_loader_epoch",
    "warn_if_not_resumable",
]


def set_loader_epoch(loader: Iterable[Any], number: int) -> None:
    """Call `set_epoch` of all parts of a loader that define it."""
    for part in _parts(loader):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(number)


def iterate_epoch(loader: Iterable[Any], number: int, set_epoch: Callable[[int], None]) -> Iterator[Any]:
    """Return an iterator over epoch `number` of a loader.

    The order of an epoch may depend on random numbers that earlier epochs drew. To reproduce this, the
    function starts each earlier epoch and reads its first batch.

    Args:
        loader: starts an epoch each time it is iterated.
        number: number of the epoch, from 0.
        set_epoch: function that passes the number of the epoch to the samplers.
    """
    for earlier in range(number):
        set_epoch(earlier)
        next(iter(loader), None)
    set_epoch(number)
    return iter(loader)


def all_parts(loader: object) -> list[object]:
    """Return the loader, its dataset and its samplers, also those of a loader that it wraps."""
    return _parts(loader) + _parts(getattr(loader, "loader", None))


def own_generators(loader: object) -> list[torch.Generator]:
    """Return the own generators of a loader and its parts, each once.

    A sampler may create its generator when it is first iterated.
    """
    drawn_from = (getattr(part, "generator", None) for part in all_parts(loader))
    return list(dict.fromkeys(each for each in drawn_from if isinstance(each, torch.Generator)))


def generator_states(loader: object) -> list[Tensor]:
    """Return the states of the own generators of a loader."""
    return [generator.get_state() for generator in own_generators(loader)]


def set_generators(loader: object, states: Sequence[Tensor] | None, *, complete: bool = True) -> None:
    """Restore the own generators of a loader.

    Args:
        loader: the loader.
        states: result of `generator_states`. None: the states were not saved.
        complete: False: allow fewer generators than states, because a sampler may create its generator later.

    Raises:
        ValueError: the number of generators differs from the number of states.

    Warns:
        UserWarning: the loader has generators and `states` is None.
    """
    generators = own_generators(loader)
    if states is None:
        if generators:
            text = "dataloader: its generators were not saved, so its batches may differ from an unbroken run"
            warnings.warn(text, stacklevel=3)
        return
    count, saved = len(generators), len(states)
    fits = count == saved or not complete
    require(fits, "generators of the dataloader", count, f"{saved} (the number in the saved state)")
    for generator, state in zip(generators, states, strict=complete):
        generator.set_state(state)


def epoch_start(loader: object) -> dict[str, Any]:
    """Return the random states at the start of an epoch, with those of the loader's own generators."""
    return random_states() | {"generators": generator_states(loader)}


def resume_epoch(loader: Iterable[Any], start: Mapping[str, Any], count: int, epoch: int) -> Iterator[Any]:
    """Return an iterator over the rest of an epoch. The random states advance as in an unbroken epoch.

    Args:
        loader: the loader.
        start: result of `epoch_start` at the start of the epoch.
        count: number of batches to skip.
        epoch: number of the epoch, for the error.

    Raises:
        ValueError: the epoch has fewer than `count` batches.
    """
    set_generators(loader, start.get("generators", []), complete=False)
    set_random_states(start)
    batches = iter(loader)
    skipped = sum(1 for _ in islice(batches, count))
    allowed = f"{count} or more in epoch {epoch}, as when the state was saved"
    require(skipped == count, "batches of the dataloader", skipped, allowed)
    return batches


def warn_if_not_resumable(loader: object) -> None:
    """Warn if an epoch cannot be started again with the same order.

    Warns:
        UserWarning: the loader has persistent workers.
    """
    if getattr(loader, "persistent_workers", False):
        text = "dataloader: persistent_workers draw their seeds once for all epochs, so batches may differ "
        text += "from an unbroken run; use a loader with a state_dict"
        warnings.warn(text, stacklevel=3)


def _parts(loader: object) -> list[object]:
    """Return the objects that can determine the order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inside = (getattr(loader, "dataset", None), getattr(loader, "sampler", None))
    parts = (loader, *inside, batch_sampler, getattr(batch_sampler, "sampler", None))
    return [part for part in parts if part is not None]
