"""Ranks: the processes that write and read one checkpoint together; one of them decides, all hear of it."""

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
# How a disk says no: itself, or through the library of safetensors.
REFUSALS = (OSError, SafetensorError)


# Groups by their members. They end with torch.distributed, not with who has made them: the name of one that
# was destroyed would be given again, with what its meeting has left in the store.
_shared: dict[tuple[int, ...], weakref.ref[Any]] = {}
_idle: dict[tuple[int, ...], list[weakref.ref[Any]]] = {}


class Ranks:
    """The processes of a group, or the one that this is. They talk by gloo, beside what the training sends.

    A group of gloo is made when they first talk, and kept for all who talk after them: one in each process,
    and one more for each who talks in a thread at the same time.

    Args:
        group: of torch.distributed; None: all processes, or this one alone where there is no group. Every
            process of it has to make its Ranks, and to call their methods as the others do.
        in_thread: they talk in a thread while others do, and have a group for themselves until `close`.
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
        """Leave the group to others; who talks again has one again."""
        if self._own is not None:
            _idle.setdefault(self._members, []).append(weakref.ref(self._own))
            self._own = None

    @property
    def is_main(self) -> bool:
        """Whether this is the process that decides and publishes."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What each has given, the same in all; every process has to call."""
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
        """What `call` returns here, when it has returned in all; every process has to come here.

        Raises:
            Exception: of the first process in which `call` raised: there as it was raised, in all others
                an error of the same meaning: OSError, DamagedCheckpointError, ValueError, or RuntimeError.
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
    # Processes that are not in it do not know of it.
    return distributed.new_group(list(members), backend="gloo", use_local_synchronization=True)


def _told(error: Exception) -> tuple[str, tuple[Any, ...]]:
    """An error as plain values, since not every error can be sent."""
    if isinstance(error, DamagedCheckpointError):
        return "damaged", (error.folder, error.file, error.reason, error.whole)
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
