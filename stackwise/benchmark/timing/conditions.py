"""Conditions: circumstances of the samples and state of the machine, for every type of measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stackwise.benchmark.timing.gpu_state import GpuSensor, GpuState, gpu_range
from stackwise.benchmark.timing.host_state import HostState
from stackwise.benchmark.timing.warmup import COLD_START, WarmUp

__all__ = ["Conditions", "notes_of"]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions of a measurement, in addition to its samples.

    Attributes:
        warmup: calls before the first sample.
        peak_memory_bytes: peak memory of one call in a separate pass. None if it cannot be read, and for
            interleaved workloads, which share the memory.
        execution: description of the execution by the workload, such as the attention kernel.
        clock: clock of the samples: "host" from idle device to idle device, "device" between two events.
        host: state of the host before the first sample.
        gpu: states of the GPU before the first slice of samples and after each slice. Empty if they cannot be
            read.
        notes: notes for the reader.
    """

    warmup: WarmUp = COLD_START
    peak_memory_bytes: int | None = None
    execution: dict[str, str] = field(default_factory=dict)
    clock: str = "host"
    host: HostState | None = None
    gpu: tuple[GpuState, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def warmup_calls(self) -> int:
        """Number of calls before the first sample."""
        return self.warmup.calls

    @property
    def steady(self) -> bool:
        """True if the warm-up stopped because the time was steady, not because its time limit was reached."""
        return self.warmup.steady

    @property
    def throttled(self) -> bool:
        """True if the GPU's clocks were throttled at any reading."""
        return any(state.throttled for state in self.gpu)

    def conditions(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "peak_memory_bytes": self.peak_memory_bytes,
            "warmup_calls": self.warmup_calls,
            "steady": self.steady,
            "warmup": self.warmup.to_dict(),
            "clock": self.clock,
            "host": None if self.host is None else self.host.to_dict(),
            "gpu": gpu_range(self.gpu),
            "throttled": self.throttled,
            "execution": self.execution,
            "notes": list(self.notes),
        }


def notes_of(host: HostState, sensor: GpuSensor, notes: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the notes about the machine, followed by `notes`."""
    return tuple(note for note in (sensor.note, host.note, *notes) if note is not None)
