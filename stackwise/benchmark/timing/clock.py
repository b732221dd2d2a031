"""Clocks: how long calls take for the host, and how long their work takes the device.

Two clocks for one call. The host clock starts at an idle device and stops at an idle device, so that
launches, Python and everything else that a user waits for are part of it. The device clock reads a pair of
events on the stream, so that only the work is, and not the gaps in which the device waits for launches. On
the CPU there is only the host's.
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
# Seconds. An event is exact to about 0.5 us, a reading of the host's clock to about 0.1 us: of what is
# shorter than this, several calls are timed together, and either stays within 1 % of a sample.
SHORTEST_SAMPLE = 50e-6
# Seconds. The device is kept busy for at most this long while the host launches what is to be timed.
_LONGEST_FILL = 0.1
# Seconds of work after the last event that are more than a synchronisation takes by itself.
_LATE = 1e-3
_SLEEP_CYCLES = 20_000_000
_GAPS = "gaps between launches are part of the time"

Call = Callable[[], object]


class Clock(Protocol):
    """What takes samples of a call."""

    @property
    def name(self) -> str:
        """In results: "host", "device" or a name of one's own."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about the samples taken so far."""

    def learn(self, call: Call, before: Call | None = None) -> int:
        """Find out what the clock must know of a warm call; returns how often it was called for that."""

    def sample(self, call: Call, count: int, *, repeats: int = 1, before: Call | None = None) -> list[float]:
        """Seconds of one call, `count` samples in their order.

        Args:
            call: what is timed.
            count: samples.
            repeats: calls in one sample, which is their mean.
            before: called before each sample, and no part of it.
        """


class HostClock:
    """Time on the host, from an idle device to an idle device again.

    Without the two synchronisations a call on CUDA is timed at its launch, not at its work.

    Args:
        device: where the calls do their work.
    """

    name = "host"
    notes: tuple[str, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def learn(self, call: Call, before: Call | None = None) -> int:  # noqa: ARG002
        """Nothing: this clock is the same for every call."""
        return 0

    def sample(self, call: Call, count: int, *, repeats: int = 1, before: Call | None = None) -> list[float]:
        """Seconds of one call, as wall time; see `Clock.sample`."""
        now, waits, device = time.perf_counter_ns, self.device.type == "cuda", self.device
        again, several = range(1, repeats), repeats > 1
        seconds = []
        for _ in range(count):
            if before is not None:
                before()
            if waits:
                torch.cuda.synchronize(device)
            # Behind a long call all of this is out of the processor's caches: each operation here costs more
            # than the clock itself, so that there are no more of them than there must be.
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
    """Time on a CUDA device, between two events on its current stream.

    Events are made beforehand and read after one synchronisation at the end. Before each sample the device
    is kept busy until the host has launched all of it, so that the device never waits for a launch inside.
    That is left out, with a note, where it cannot work: where the call itself waits for the device, and
    where launching it takes the host more than 0.05 s. An event orders only its own stream: work on other
    streams must be joined before the call returns, and a note says where some was not.

    Args:
        device: a CUDA device.
        capacity: pairs of events, and so samples between two synchronisations.

    Raises:
        ValueError: another device, which has no events; a capacity that is no positive integer.
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
            # An event comes to be when it is recorded first.
            for pair in self._pairs:
                for event in pair:
                    event.record()
            torch.cuda.synchronize(device)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about the samples taken so far."""
        return tuple(self._notes)

    def learn(self, call: Call, before: Call | None = None) -> int:
        """Find out how long the call takes to launch, and whether it lets the host run ahead."""
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
        """Seconds of one call, as the device's time; see `Clock.sample`."""
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
        """How long the device is kept busy ahead of one sample; 0: it is not."""
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
        """Seconds that the host needs to launch a call, behind `busy` seconds of other work."""
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
        """Wait for the last event, then for the device, which has no more to do but on other streams."""
        last.synchronize()
        start = time.perf_counter_ns()
        torch.cuda.synchronize(self.device)
        if (time.perf_counter_ns() - start) * 1e-9 > _LATE:
            self._notes[
                "the device worked on after the last event: work on other streams is no part of the time, "
                "unless it is joined before the call returns"
            ] = None


def create_clock(clock: str | Clock, device: torch.device) -> Clock:
    """The clock of that name on a device, or the given one.

    Raises:
        ValueError: another name, or "device" where the device is no CUDA device.
    """
    if not isinstance(clock, str):
        return clock
    check_choice("clock", clock, CLOCKS)
    return HostClock(device) if clock == "host" else DeviceClock(device)


def time_call(call: Call, device: torch.device) -> float:
    """Seconds of one call on the host clock, from an idle device to an idle device again."""
    return HostClock(device).sample(call, 1)[0]


def timing_event() -> torch.cuda.Event:
    """An event that tells the time at which a stream came by it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _keep_busy(cycles: int) -> None:
    """Launch a kernel that spins for so many of the device's cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
