"""Clocks: the duration of calls on the host, and the duration of their work on the device.

The host clock starts and stops at an idle device, so it includes launches, Python and any other delay for a
user. The device clock reads a pair of events on the stream, so it includes only the work, without the gaps in
which the device waits for launches. On the CPU, only the host clock exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from stackwise.support.arguments import check_choice, check_sizes, require

__all__ = [
    "CLOCKS",
    "SHORTEST_SAMPLE",
    "Clock",
    "DeviceClock",
    "HostClock",
    "create_clock",
    "time_call",
    "timing_event",
]

CLOCKS = ("host", "device")
# Seconds. An event is precise to about 0.5 us, a reading of the host clock to about 0.1 us. Shorter calls are
# timed in groups, so that the error of both clocks stays within 1 % of a sample.
SHORTEST_SAMPLE = 50e-6
# Maximum seconds for which the device is kept busy while the host launches the timed work.
_LONGEST_FILL = 0.1
# Seconds of work after the last event that exceed the duration of a synchronisation.
_LATE = 1e-3
_SLEEP_CYCLES = 20_000_000
_GAPS = "gaps between launches are part of the time"

Call = Callable[[], object]


class Clock(Protocol):
    """Protocol of a clock that takes samples of a call."""

    @property
    def name(self) -> str:
        """Name in results: "host", "device" or a user-defined name."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the reader about the previous samples."""

    def learn(self, call: Call, before: Call | None = None) -> int:
        """Measure properties of a warm call that the clock needs. Return the number of calls."""

    def sample(self, call: Call, count: int, *, repeats: int = 1, before: Call | None = None) -> list[float]:
        """Return the seconds per call of `count` samples, in order.

        Args:
            call: function to be timed.
            count: number of samples.
            repeats: number of calls per sample. A sample is their mean.
            before: function that is called before each sample, outside of the measured time.
        """


class HostClock:
    """Clock on the host, from an idle device to an idle device.

    Without the two synchronisations, the time of a call on CUDA would be that of its launch, not of its work.

    Args:
        device: device that the calls run on.
    """

    name = "host"
    notes: tuple[str, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def learn(self, call: Call, before: Call | None = None) -> int:  # noqa: ARG002
        """Do nothing: this clock is the same for every call. Return 0."""
        return 0

    def sample(self, call: Call, count: int, *, repeats: int = 1, before: Call | None = None) -> list[float]:
        """Return the seconds per call as wall time; see `Clock.sample`."""
        now, waits, device = time.perf_counter_ns, self.device.type == "cuda", self.device
        again, several = range(1, repeats), repeats > 1
        seconds = []
        for _ in range(count):
            if before is not None:
                before()
            if waits:
                torch.cuda.synchronize(device)
            # After a long call, this code is not in the processor's caches. Each operation here costs more
            # than the clock itself, so their number is minimal.
            start = now()
            call()
            if several:
                for _ in again:
                    call()
            if waits:
                torch.cuda.synchronize(device)
            end = now()
            seconds.append((end - start) * 1e-9 / repeats)
        return seconds


class DeviceClock:
    """Clock on a CUDA device, between two events on its current stream.

    Events are created in advance and read after one synchronisation at the end. Before each sample, the
    device is kept busy until the host has launched the sample, so that it never waits for a launch within a
    sample. This is skipped, with a note, if it cannot work: if the call itself waits for the device, or if
    its launch takes the host more than 0.05 s. An event orders only its own stream. Work on other streams
    must be joined before the call returns; otherwise a note reports it.

    Args:
        device: a CUDA device.
        capacity: number of event pairs, the maximum number of samples between two synchronisations.

    Raises:
        ValueError: another device, which has no events; a capacity that is not a positive integer.
    """

    name = "device"

    def __init__(self, device: torch.device, *, capacity: int = 256) -> None:
        require(device.type == "cuda", "clock", "device", f"'host' on {device}, which has no events to read")
        check_sizes(capacity=capacity)
        self.device = device
        self._launch_seconds: float | None = None
        self._cycles_per_second = 0.0
        self._notes: dict[str, None] = {}
        with torch.cuda.device(device):
            self._pairs = [(timing_event(), timing_event()) for _ in range(capacity)]
            # An event is created when it is first recorded.
            for pair in self._pairs:
                for event in pair:
                    event.record()
            torch.cuda.synchronize(device)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the reader about the previous samples."""
        return tuple(self._notes)

    def learn(self, call: Call, before: Call | None = None) -> int:
        """Measure the launch time of the call, and check that the host can run ahead of the device.

        Return the number of calls.
        """
        self._launch_seconds = None
        if not hasattr(torch.cuda, "_sleep"):
            self._notes[f"this torch cannot keep the device busy: {_GAPS}"] = None
            return 0
        with torch.cuda.device(self.device):
            launch = min(self._launch(call, before) for _ in range(3))
            if 2 * launch > _LONGEST_FILL:
                self._notes[f"one call takes the host {launch:.3f} s to launch: {_GAPS}"] = None
                return 3
            self._cycles_per_second = self._measured_cycles_per_second()
            busy = max(4 * launch, 2e-3)
            if min(self._launch(call, before, busy) for _ in range(3)) >= busy / 2:
                self._notes[
                    f"the call waits for the device, or launches more than its queue takes: {_GAPS}"
                ] = None
                return 6
        self._launch_seconds = launch
        return 6

    def sample(self, call: Call, count: int, *, repeats: int = 1, before: Call | None = None) -> list[float]:
        """Return the seconds per call as device time; see `Clock.sample`."""
        seconds: list[float] = []
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            cycles = self._fill_cycles(repeats)
            while len(seconds) < count:
                pairs = self._pairs[: count - len(seconds)]
                torch.cuda.synchronize(self.device)
                for start, end in pairs:
                    if before is not None:
                        before()
                    if cycles:
                        _keep_busy(cycles)
                    start.record(stream)
                    for _ in range(repeats):
                        call()
                    end.record(stream)
                self._wait_for(pairs[-1][1])
                seconds += [start.elapsed_time(end) * 1e-3 / repeats for start, end in pairs]
        return seconds

    def _fill_cycles(self, repeats: int) -> int:
        """Return the number of cycles for which the device is kept busy before a sample. 0: not at all."""
        if self._launch_seconds is None:
            return 0
        seconds = 2 * self._launch_seconds * repeats + 50e-6
        if seconds > _LONGEST_FILL:
            launching = self._launch_seconds * repeats
            self._notes[
                f"a sample of {repeats} calls takes the host {launching:.3f} s to launch, and the device is "
                f"kept busy for no more than {_LONGEST_FILL:g} s: {_GAPS}"
            ] = None
            seconds = _LONGEST_FILL
        return int(seconds * self._cycles_per_second)

    def _launch(self, call: Call, before: Call | None, busy: float = 0.0) -> float:
        """Return the host's seconds for the launch of a call after `busy` seconds of other device work."""
        if before is not None:
            before()
        torch.cuda.synchronize(self.device)
        if busy:
            _keep_busy(int(busy * self._cycles_per_second))
        start = time.perf_counter_ns()
        call()
        seconds = (time.perf_counter_ns() - start) * 1e-9
        torch.cuda.synchronize(self.device)
        return seconds

    def _measured_cycles_per_second(self) -> float:
        start, end = self._pairs[0]
        _keep_busy(_SLEEP_CYCLES)
        start.record()
        _keep_busy(_SLEEP_CYCLES)
        end.record()
        torch.cuda.synchronize(self.device)
        return float(_SLEEP_CYCLES / (start.elapsed_time(end) * 1e-3))

    def _wait_for(self, last: torch.cuda.Event) -> None:
        """Wait for the last event, then for the device. Add a note if other streams were still working."""
        last.synchronize()
        start = time.perf_counter_ns()
        torch.cuda.synchronize(self.device)
        if (time.perf_counter_ns() - start) * 1e-9 > _LATE:
            self._notes[
                "the device worked on after the last event: work on other streams is no part of the time, "
                "unless it is joined before the call returns"
            ] = None


def create_clock(clock: str | Clock, device: torch.device) -> Clock:
    """Return the clock of that name for a device. A `Clock` is returned unchanged.

    Raises:
        ValueError: unknown name, or "device" for a device that is not a CUDA device.
    """
    if not isinstance(clock, str):
        return clock
    check_choice("clock", clock, CLOCKS)
    return HostClock(device) if clock == "host" else DeviceClock(device)


def time_call(call: Call, device: torch.device) -> float:
    """Return the seconds of one call on the host clock, from an idle device to an idle device."""
    return HostClock(device).sample(call, 1)[0]


def timing_event() -> torch.cuda.Event:
    """Return an event that records the time at which a stream reaches it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _keep_busy(cycles: int) -> None:
    """Launch a kernel that spins for this number of device cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
