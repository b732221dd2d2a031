"""RingBuffer: rows of numbers that are written on the device and read by the host after an asynchronous copy.

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

__all__ = ["RecordBuffer", "Recorder", "RingBuffer"]

Tag = TypeVar("Tag")
Record = TypeVar("Record")


@dataclass(frozen=True)
class _Copy:
    """Copy of `count` rows to the host, in progress."""

    count: int
    arrived: torch.cuda.Event


class RecordBuffer(Generic[Tag, Record]):
    """Ring buffer of float32 rows on the device. Each row has a tag, which is stored on the host.

    A subclass makes a record of each tag and row that have arrived.

    On CUDA, rows are copied to pinned memory on a separate stream, and returned after the event of the copy.
    Only `drain` and `previous` wait. A slot is reused after its row was returned, so it was copied before.

    Args:
        capacity: maximum number of rows that were written and not yet returned.
        width: number of values in a row.
        device: device that computes the values.

    Raises:
        ValueError: a size is not a positive integer.
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
        # Oldest first: rows that are being copied, then rows whose copy has not started.
        self._tags: deque[Tag] = deque()
        self._copies: deque[_Copy] = deque()
        self._first = 0  # slot of the oldest row
        self._copying = 0  # number of rows in `_copies`

    def __len__(self) -> int:
        """Return the number of rows that were not yet returned."""
        return len(self._tags)

    @property
    def full(self) -> bool:
        """True if a row must be returned before the next `write`."""
        return len(self) == self.capacity

    @torch.no_grad()
    def write(self, tag: Tag, scalars: Sequence[Tensor], vector_N: Tensor | None = None) -> None:
        """Queue one row: `scalars`, then `vector_N`.

        The rest of the slot keeps its old values. The host does not wait.

        Args:
            tag: returned together with the row.
            scalars: scalar tensors.
            vector_N: more values, at most as many as the row has left.
        """
        assert not self.full, "drain() first"
        row_W = self._rows_CW[(self._first + len(self)) % self.capacity]
        n = len(scalars)
        if n:
            torch.stack([scalar.detach().float() for scalar in scalars], out=row_W[:n])
        if vector_N is not None:
            row_W[n : n + len(vector_N)].copy_(vector_N, non_blocking=True)
        if self._stream is not None:
            # The stream that writes this row. Another one may be current when the copy starts.
            self._stream.wait_stream(torch.cuda.current_stream(self._rows_CW.device))
        self._tags.append(tag)

    def poll(self) -> list[Record]:
        """Return the rows that have arrived, oldest first, and start to copy the rest.

        The host does not wait.
        """
        if self._stream is None:
            return self._hand_out(len(self))
        arrived = []
        while self._copies and self._copies[0].arrived.query():  # type: ignore[no-untyped-call]
            arrived += self._hand_out_copy()
        self._begin_copy()
        return arrived

    def drain(self, count: int | None = None) -> list[Record]:
        """Wait for rows that were not yet returned, return them, oldest first, and start to copy the rest.

        Args:
            count: minimum number of rows to wait for. Rows of the same copy are returned, too. None: all
                rows.
        """
        if self._stream is None:
            return self._hand_out(len(self))
        self._begin_copy()
        rows: list[Record] = []
        while self._copies and (count is None or len(rows) < count):
            self._copies[0].arrived.synchronize()
            rows += self._hand_out_copy()
        return rows

    def make_room(self) -> list[Record]:
        """Return the arrived rows if the buffer is half full, so that a loop that never reads does not block.

        The buffer is full only if the device is `capacity` steps late. In this case the host waits.
        """
        rows = self.poll() if 2 * len(self) >= self.capacity else []
        return rows + (self.drain() if self.full else [])

    @property
    def is_ahead(self) -> bool:
        """True if the rows that `previous` returns next have already arrived. Always False on the CPU.

        Reading it does not wait.
        """
        arrived = (copy.arrived.query() for copy in self._copies)  # type: ignore[no-untyped-call]
        return self._stream is not None and all(arrived)

    def previous(self) -> list[Record]:
        """Return the rows whose copy an earlier call started, oldest first, and start to copy the rest.

        The host waits for these copies. If steps lie between two calls, the copies are usually finished. The
        returned rows do not depend on the speed of the device, so several processes return the same rows. On
        the CPU, all rows are returned.
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

    def _hand_out_copy(self) -> list[Record]:
        count = self._copies.popleft().count
        self._copying -= count
        return self._hand_out(count)

    def _hand_out(self, count: int) -> list[Record]:
        rows = [
            row
            for start, stop in self._places(self._first, count)
            for row in self._host_CW[start:stop].tolist()
        ]
        self._first = (self._first + count) % self.capacity
        return [self._record(self._tags.popleft(), row) for row in rows]

    def _record(self, tag: Tag, row: list[float]) -> Record:
        raise NotImplementedError

    def _places(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the slots of `count` rows from slot `first` on, as one range, or two at a wrap-around."""
        first %= self.capacity
        stop = first + count
        if stop <= self.capacity:
            return [(first, stop)] if count else []
        return [(first, self.capacity), (0, stop - self.capacity)]


class RingBuffer(RecordBuffer[Tag, tuple[Tag, list[float]]]):
    """`RecordBuffer` that returns tuples (tag, row)."""

    def _record(self, tag: Tag, row: list[float]) -> tuple[Tag, list[float]]:
        return tag, row


class Recorder(Generic[Tag, Record]):
    """Base class of observers of a training that write one row on the device at each step.

    Args:
        capacity: maximum number of steps that have not arrived at the host. Arrived records are stored until
            they are read.
        width: number of values in a row.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self._capacity, self._width = capacity, width
        self._rows: RingBuffer[Tag] | None = None
        self._unread: list[Record] = []
        self._next_step = 0

    def records(self) -> list[Record]:
        """Return the records that have arrived since the last call, oldest first. The host does not wait."""
        return self._read([] if self._rows is None else self._rows.poll())

    def drain(self) -> list[Record]:
        """Return every record since the last call. The host waits for the device."""
        return self._read([] if self._rows is None else self._rows.drain())

    def _record(self, tag: Tag, row: list[float]) -> Record:
        raise NotImplementedError

    def _number(self, step: int | None) -> int:
        """Return the number of a step. None: previous number plus one."""
        step = self._next_step if step is None else step
        self._next_step = step + 1
        return step

    def _write(self, tag: Tag, scalars: Sequence[Tensor], vector_N: Tensor | None = None) -> None:
        if self._rows is None:
            self._rows = RingBuffer(self._capacity, self._width, scalars[0].device)
        self._unread += [self._record(*each) for each in self._rows.make_room()]
        self._rows.write(tag, scalars, vector_N)

    def _read(self, rows: list[tuple[Tag, list[float]]]) -> list[Record]:
        records, self._unread = self._unread, []
        return records + [self._record(tag, row) for tag, row in rows]
