"""Throughput: tokens per second, model FLOPs utilisation, peak memory, and time waiting for data."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

from stackwise.benchmark.memory.peak import high_water_mark
from stackwise.support.arguments import check_sizes, require

__all__ = ["Throughput", "ThroughputMeter", "peak_memory_so_far"]

Item = TypeVar("Item")


@dataclass(frozen=True)
class Throughput:
    """Throughput of a run at one moment.

    Attributes:
        total_tokens: number of tokens since the start.
        seconds: time since the start.
        tokens_per_second: recent rate, over the last readings.
        mean_tokens_per_second: rate since the start.
        mfu: model FLOPs of `tokens_per_second` divided by the peak rate; None: either is unknown.
        data_wait_share: fraction of the time since the start that was spent waiting for data.
        peak_memory_bytes: see `peak_memory_so_far`.
    """

    total_tokens: int
    seconds: float
    tokens_per_second: float
    mean_tokens_per_second: float
    mfu: float | None
    data_wait_share: float
    peak_memory_bytes: int

    def to_dict(self) -> dict[str, int | float]:
        """Return the known fields as plain values, for JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class ThroughputMeter:
    """Counter of tokens and seconds. It starts when it is created, or at `start`.

    The host may be steps ahead of a GPU. Count the tokens of steps whose records have arrived, so that the
    rate is that of the device.

    Args:
        device: device whose memory is read.
        flops_per_token: FLOPs per token of the model, see `stackwise.benchmark.flops.closed_form`; None: no
            utilisation.
        peak_flops: FLOPs per second of all devices that share the tokens; None: no utilisation.
        window: number of readings in the recent rate.
        clock: returns the time in seconds.

    Raises:
        ValueError: a window below 1.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        window: int = 10,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_sizes(window=window)
        self._device, self._clock = device, clock
        self._utilisation: float | None = None
        if flops_per_token is not None and peak_flops is not None:
            self._utilisation = flops_per_token / peak_flops
        self._recent: deque[tuple[float, int]] = deque(maxlen=window + 1)
        self.start()

    def start(self) -> None:
        """Restart the counters, to exclude the time of compilation and loading."""
        self._start = self._clock()
        self._tokens, self._waited = 0, 0.0
        self._recent.clear()
        self._recent.append((self._start, 0))

    def state_dict(self) -> dict[str, float]:
        """Return the tokens, the seconds, and the seconds spent waiting for data, since the start."""
        return {"tokens": self._tokens, "seconds": self._clock() - self._start, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state. The recent rate starts at this moment."""
        self.start()
        self._tokens, self._waited = int(state["tokens"]), state["waited"]
        self._recent.clear()
        self._recent.append((self._start, self._tokens))
        self._start -= state["seconds"]

    def count(self, tokens: int) -> None:
        """Add a number of trained tokens."""
        self._tokens += tokens

    def waiting(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of `batches`, and add the time until each arrives to the time waiting for data."""
        iterator = iter(batches)
        while True:
            before = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited += self._clock() - before
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context from the measurement."""
        before = self._clock()
        try:
            yield
        finally:
            away = self._clock() - before
            self._start += away
            for place, (then, tokens) in enumerate(self._recent):
                self._recent[place] = (then + away, tokens)

    def now(self) -> float:
        """Return the time of the meter's clock, in seconds."""
        return self._clock()

    def read(self, now: float | None = None) -> Throughput:
        """Return the current throughput, without host synchronisation.

        Args:
            now: time at which the counted tokens were complete; None: the current time.
        """
        seconds = self._clock() - self._start
        now = self._start + seconds if now is None else now
        self._recent.append((now, self._tokens))
        then, tokens_then = self._recent[0]
        recent = _rate(self._tokens - tokens_then, now - then)
        return Throughput(
            total_tokens=self._tokens,
            seconds=seconds,
            tokens_per_second=recent,
            mean_tokens_per_second=_rate(self._tokens, now - self._start),
            mfu=None if self._utilisation is None else recent * self._utilisation,
            data_wait_share=_rate(self._waited, seconds),
            peak_memory_bytes=peak_memory_so_far(self._device),
        )


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def peak_memory_so_far(device: torch.device) -> int:
    """Return the peak memory in bytes since the process started (CUDA: since the last reset).

    On CUDA this is the memory of tensors, on the CPU the resident memory of the process.

    Raises:
        ValueError: another kind of device.
    """
    require(device.type in ("cpu", "cuda"), "device", str(device), "cpu, cuda")
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is the last choice: a process inherits the value of its parent.
    mark = high_water_mark()
    if mark is not None:
        return mark
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
