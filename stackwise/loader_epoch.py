"""The epoch of a loader: its batches, in the order that they would have at that place of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["epoch_of", "parts_of", "tell_epoch"]


def parts_of(loader: object) -> list[object]:
    """What the order of a loader may come from: itself, its dataset, its samplers and what these wrap."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inside = (getattr(loader, "dataset", None), getattr(loader, "sampler", None))
    parts = (loader, *inside, batch_sampler, getattr(batch_sampler, "sampler", None))
    return [part for part in parts if part is not None]


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
