"""UpdateClock: duration of each update of a run, without waiting for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stackwise.benchmark.timing.clock import timing_event

__all__ = ["UpdateClock"]


class UpdateClock:
    """Clock for consecutive updates: between events on the stream on CUDA, on the host otherwise.

    Args:
        device: device of the updates.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    @contextmanager
    def update(self) -> Iterator[None]:
        """Time one update, which is the body of the context."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - start)
            return
        with torch.cuda.device(self._device):
            begin, end = timing_event(), timing_event()
            begin.record()
            yield
            end.record()
        self._events.append((begin, end))

    def count(self, tokens: int) -> None:
        """Record the number of tokens of the update."""
        self._tokens.append(tokens)

    def seconds(self) -> list[float]:
        """Return the seconds of each update. Wait for the device."""
        if self._events:
            torch.cuda.synchronize(self._device)
        return self._seconds + [begin.elapsed_time(end) * 1e-3 for begin, end in self._events]

    def tokens_per_second(self) -> float:
        """Return the median over updates, without the first one if possible. 0 without updates."""
        rates = [
            tokens / seconds
            for tokens, seconds in zip(self._tokens, self.seconds(), strict=True)
            if seconds > 0
        ]
        return statistics.median(rates[1:] or rates) if rates else 0.0
