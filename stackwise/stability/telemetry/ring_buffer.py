"""RingBuffer: rows written on the device, which the host reads once they have arrived.

Shapes: C rows of W numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from stackwise.support.arguments import check_sizes

__all__ = ["RingBuffer"]

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class _Copy:
    """`count` rows on their way to the host."""

    count: int
    arrived: torch.cuda.Event


class RingBuffer(Generic[Tag]):
    """`capacity` float32 rows on the device, each with a tag that the host knows.

    On CUDA rows are copied to pinned memory on a stream of their own, and read once the copy's event has
    come to pass; only `drain` and `previous` wait. A row's place is free again once the row was handed out,
    therefore after it was copied.

    Args:
        capacity: how many rows may be written and not yet handed out.
        width: numbers in a row.
        device: where they are computed.

    Raises:
        ValueError: a size that is no positive integer.
    """

    def __init__(self, capacity: int, width: int, device: torch.device) -> None:
        check_sizes(capacity=capacity, width=width)
        self.capacity = capacity
        self._rows_CW = torch.zeros(capacity, width, device=device)
        self._host_CW = self._rows_CW
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._host_CW = torch.empty(capacity, width, pin_memory=True)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._rows_CW.record_stream(self._stream)
        # Oldest first: rows being copied, then rows of which no copy has begun.
        self._tags: deque[Tag] = deque()
        self._copies: deque[_Copy] = deque()
        self._first = 0  # place of the oldest row
        self._copying = 0  # rows in `_copies`

    def __len__(self) -> int:
        """Rows that were not handed out."""
        return len(self._tags)

    @property
    def full(self) -> bool:
        """Whether no row can be written before one is handed out."""
        return len(self) == self.capacity

    @torch.no_grad()
    def write(self, tag: Tag, scalars: Sequence[Tensor], vector_N: Tensor | None = None) -> None:
        """Queue one row: `scalars`, then `vector_N`, then whatever was there. The host does not wait.

        Args:
            tag: comes back with the row.
            scalars: tensors of no dimension.
            vector_N: further numbers, at most as many as the row has left.
        """
        assert not self.full, "drain() first"
        row_W = self._rows_CW[(self._first + len(self)) % self.capacity]
        n = len(scalars)
        if n:
            torch.stack([scalar.detach().float() for scalar in scalars], out=row_W[:n])
        if vector_N is not None:
            row_W[n : n + len(vector_N)].copy_(vector_N, non_blocking=True)
        if self._stream is not None:
            # Of the stream this row is written on, whichever is current when the copy begins.
            self._stream.wait_stream(torch.cuda.current_stream(self._rows_CW.device))
        self._tags.append(tag)

    def poll(self) -> list[tuple[Tag, list[float]]]:
        """Rows that have arrived, oldest first, and begin to copy the others. The host does not wait."""
        if self._stream is None:
            return self._hand_out(len(self))
        arrived = []
        while self._copies and self._copies[0].arrived.query():  # type: ignore[no-untyped-call]
            arrived += self._hand_out_copy()
        self._begin_copy()
        return arrived

    def drain(self, count: int | None = None) -> list[tuple[Tag, list[float]]]:
        """Rows that were not handed out, oldest first, and begin to copy the others.

        Args:
            count: of rows that are waited for, with those that are copied with them; None: all.
        """
        if self._stream is None:
            return self._hand_out(len(self))
        self._begin_copy()
        rows: list[tuple[Tag, list[float]]] = []
        while self._copies and (count is None or len(rows) < count):
            self._copies[0].arrived.synchronize()
            rows += self._hand_out_copy()
        return rows

    @property
    def is_ahead(self) -> bool:
        """Whether what `previous` gives next was there before: on the CPU never. The host does not wait."""
        arrived = (copy.arrived.query() for copy in self._copies)  # type: ignore[no-untyped-call]
        return self._stream is not None and all(arrived)

    def previous(self) -> list[tuple[Tag, list[float]]]:
        """Rows of which an earlier call has begun the copy, oldest first, and begin to copy the others.

        Waits for these copies, which is seldom a wait where steps lie between two calls. Which rows they are
        does not depend on how fast the device is: several processes have the same. On the CPU it is all.
        """
        return self.drain(self._copying)

    def _begin_copy(self) -> None:
        count = len(self) - self._copying
        if not count:
            return
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            for start, stop in self._places(self._first + self._copying, count):
                self._host_CW[start:stop].copy_(self._rows_CW[start:stop], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copies.append(_Copy(count, event))
        self._copying += count

    def _hand_out_copy(self) -> list[tuple[Tag, list[float]]]:
        count = self._copies.popleft().count
        self._copying -= count
        return self._hand_out(count)

    def _hand_out(self, count: int) -> list[tuple[Tag, list[float]]]:
        rows = [
            row
            for start, stop in self._places(self._first, count)
            for row in self._host_CW[start:stop].tolist()
        ]
        self._first = (self._first + count) % self.capacity
        return [(self._tags.popleft(), row) for row in rows]

    def _places(self, first: int, count: int) -> list[tuple[int, int]]:
        """Where `count` rows from place `first` on are: one range, or two around the end."""
        first %= self.capacity
        stop = first + count
        if stop <= self.capacity:
            return [(first, stop)] if count else []
        return [(first, self.capacity), (0, stop - self.capacity)]
