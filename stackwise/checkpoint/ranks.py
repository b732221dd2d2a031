"""Ranks: the processes that write and read one checkpoint together; one of them decides, all hear of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import distributed

from stackwise.checkpoint.folder import DamagedCheckpointError

__all__ = ["REFUSALS", "Ranks"]

T = TypeVar("T")
# How a disk says no: itself, or through the library of safetensors.
REFUSALS = (OSError, SafetensorError)


class Ranks:
    """The processes of a group, or the one that this is. They talk by gloo, beside what the training sends.

    Args:
        group: of torch.distributed; None: all processes, or this one alone where there is no group. Every
            process of it has to make its Ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self.rank, self.size, self._group = 0, 1, None
        if distributed.is_available() and distributed.is_initialized():
            members = distributed.get_process_group_ranks(group or distributed.group.WORLD)
            self.rank, self.size = members.index(distributed.get_rank()), len(members)
            if self.size > 1:
                self._group = distributed.new_group(members, backend="gloo", use_local_synchronization=True)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that decides and publishes."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What each has given, the same in all; every process has to call."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self._group)
        return values

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


def _told(error: Exception) -> tuple[str, tuple[Any, ...]]:
    """An error as plain values, since not every error can be sent."""
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
