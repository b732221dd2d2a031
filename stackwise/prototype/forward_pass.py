"""ForwardPass: time and memory of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stackwise.benchmark.timing.measurement import Measurement
from stackwise.support.units import byte_text

__all__ = ["ForwardPass"]


@dataclass(frozen=True)
class ForwardPass:
    """Measured forward pass in eval mode without gradients.

    Attributes:
        name: name of the model.
        batch_size: number of rows.
        seq_len: number of positions per row.
        measurement: raw samples and their conditions.
        parameters: number of parameters of the model. A tied weight counts once.
    """

    name: str
    batch_size: int
    seq_len: int
    measurement: Measurement
    parameters: int

    @property
    def seconds(self) -> float:
        """Median seconds of a pass."""
        return self.measurement.median

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """95 % confidence interval of the median seconds. None: too few samples for that end."""
        return self.measurement.p50.low, self.measurement.p50.high

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a pass divided by its median seconds."""
        return self.batch_size * self.seq_len / self.seconds

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory during a pass: tensors on CUDA, the entire process on the CPU."""
        return self.measurement.peak_memory_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the reader about the samples."""
        return tuple(self.measurement.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        low, high = self.interval
        return {
            "name": self.name,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "parameters": self.parameters,
            "seconds": self.seconds,
            "low": low,
            "high": high,
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes": self.peak_bytes,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        low, high = self.interval
        within = "" if low is None or high is None else f" ({low * 1e3:.3g} to {high * 1e3:.3g})"
        memory = "" if self.peak_bytes is None else f", peak {byte_text(self.peak_bytes)}"
        return (
            f"{self.name}: {self.batch_size} x {self.seq_len} tokens forward in {self.seconds * 1e3:.3g} ms"
            f"{within}, {self.tokens_per_second:,.0f} tokens/s{memory}"
        )
