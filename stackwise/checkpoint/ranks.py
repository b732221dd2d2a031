"""Ranks: processes that write and read one checkpoint together, with common decisions and errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import distributed

from stackwise.checkpoint.folder import DamagedCheckpointError

__all__ = ["REFUSALS", "Ranks"]

T = TypeVar("T")
# Errors of a disk, from the system or from the library of safetensors.
REFUSALS = (OSError, SafetensorError)


# Groups by their members. They exist until torch.distributed is destroyed, not until their creator is: the
# name of a destroyed group would be reused, together with the old entries of its rendezvous in the store.
_shared: dict[tuple[int, ...], weakref.ref[Any]] = {}
_idle: dict[tuple[int, ...], list[weakref.ref[Any]]] = {}


class Ranks:
    """Processes of a group, or the only process. They communicate by gloo, separately from the training.

    A gloo group is created at the first communication and reused by all later users. Each process has one
    such group, and one more for each user that communicates in a thread at the same time.

    Args:
        group: group of torch.distributed; None: all processes, or only this process without a group. Every
            process of the group has to create its Ranks and to call the methods in the same order.
        in_thread: True if the methods are called in a thread while other users communicate. The Ranks then
            have their own group until `close`.
    """

    def __init__(self, group: Any = None, *, in_thread: bool = False) -> None:
        self.rank, self.size = 0, 1
        self._in_thread = in_thread
        self._own: Any = None
        if distributed.is_available() and distributed.is_initialized():
            members = distributed.get_process_group_ranks(group or distributed.group.WORLD)
            self.rank, self.size = members.index(distributed.get_rank()), len(members)
            self._members = tuple(members)

    def close(self) -> None:
        """Release the group for other users. A later communication gets a group on its own."""
        if self._own is not None:
            _idle.setdefault(self._members, []).append(weakref.ref(self._own))
            self._own = None

    @property
    def is_main(self) -> bool:
        """True for the process that decides and publishes."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, the same list in each. Every process has to call."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self._group())
        return values

    def maximum(self, value: int) -> int:
        """Return the largest value of all processes. Every process has to call."""
        if self.size == 1:
            return value
        largest = torch.tensor(value)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self._group())
        return int(largest)

    def agree(self, call: Callable[[], T]) -> T:
        """Return the result of `call` after it has returned in all processes. Every process has to call.

        Raises:
            Exception: error of the first process in which `call` raised. This process raises the original
                error. All other processes raise a similar one: OSError, DamagedCheckpointError, ValueError or
                RuntimeError.
        """
        value, error = None, None
        try:
            value = call()
        except Exception as caught:
            error = caught
        for rank, told in enumerate(self.gather(None if error is None else _told(error))):
            if told is not None:
                raise error if error is not None and rank == self.rank else _heard(rank, *told)
        return value  # type: ignore[return-value]

    def _group(self) -> Any:
        if not self._in_thread:
            held = _shared.get(self._members)
            if held is None or (group := held()) is None:
                group = _new_group(self._members)
                _shared[self._members] = weakref.ref(group)
            return group
        idle = _idle.get(self._members, [])
        while self._own is None and idle:
            self._own = idle.pop(0)()
        if self._own is None:
            self._own = _new_group(self._members)
        return self._own


def _new_group(members: tuple[int, ...]) -> Any:
    if len(members) == distributed.get_world_size():
        return distributed.new_group(backend="gloo")
    # Processes outside of the group do not take part in its creation.
    return distributed.new_group(list(members), backend="gloo", use_local_synchronization=True)


def _told(error: Exception) -> tuple[str, tuple[Any, ...]]:
    """Return an error as plain values, since not every error can be sent."""
    if isinstance(error, DamagedCheckpointError):
        return "damaged", (error.folder, error.file, error.reason)
    if isinstance(error, OSError):
        return "refused", (error.errno, error.strerror or str(error), error.filename)
    if isinstance(error, SafetensorError):
        return "refused", (None, str(error), None)
    return "value" if isinstance(error, ValueError) else "other", (f"{type(error).__name__}: {error}",)


def _heard(rank: int, kind: str, told: tuple[Any, ...]) -> Exception:
    if kind == "damaged":
        return DamagedCheckpointError(*told)
    if kind == "refused":
        number, text, path = told
        return OSError(number or 0, f"rank {rank}: {text}", path)
    return (ValueError if kind == "value" else RuntimeError)(f"rank {rank}: {told[0]}")
