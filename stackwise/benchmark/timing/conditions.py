"""Conditions: how samples were taken, and on what machine; the same for every kind of measurement."""

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
    """What a measurement says beside its samples.

    Attributes:
        warmup: the calls before the first sample.
        peak_memory_bytes: of one call in a pass of its own; None where it cannot be read, and of workloads
            that were interleaved, which are in one memory.
        execution: how the work was done, as far as the workload says: which attention kernel ran, say.
        clock: that took the samples: "host" from idle device to idle device, "device" between two events.
        host: the host before the first sample.
        gpu: the GPU before the first slice of samples and after each; none where it cannot be read.
        notes: what a reader must know.
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
        """Calls before the first sample."""
        return self.warmup.calls

    @property
    def steady(self) -> bool:
        """Whether the warm-up ended because the time had settled, not because its own had run out."""
        return self.warmup.steady

    @property
    def throttled(self) -> bool:
        """Whether the GPU's clocks were held down at any of its readings."""
        return any(state.throttled for state in self.gpu)

    def conditions(self) -> dict[str, Any]:
        """Plain values, for JSON."""
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
    """What a reader must know of the machine, then the other notes."""
    return tuple(note for note in (sensor.note, host.note, *notes) if note is not None)
