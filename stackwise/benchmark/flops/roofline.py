"""Roofline: minimum time of work from its operations and bytes (Williams et al. 2009)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from stackwise.benchmark.flops.closed_form import model_flops
from stackwise.benchmark.flops.decode_bytes import decode_bytes
from stackwise.benchmark.flops.peak_rate import PeakRate
from stackwise.benchmark.flops.transformer_shape import TransformerShape
from stackwise.support.arguments import check_number

__all__ = ["Roofline", "decode_floor", "roofline"]


@dataclass(frozen=True)
class Roofline:
    """Minimum time of a call.

    Attributes:
        flops: number of operations.
        moved: number of bytes.
        compute_seconds: time of the operations at the peak rate.
        memory_seconds: time of the bytes at the peak bandwidth.
    """

    flops: int
    moved: int
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """Maximum of both times. Computation and memory traffic may overlap, so it is a lower bound."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> Literal["compute", "memory"]:
        """Resource that limits the time."""
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.moved

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"seconds": self.seconds, "bound": self.bound, "intensity": self.intensity}


def roofline(flops: int, moved: int, *, peak: float, bandwidth: float) -> Roofline:
    """Return the roofline of any work.

    Args:
        flops: number of operations.
        moved: number of bytes.
        peak: operations per second.
        bandwidth: bytes per second.

    Raises:
        ValueError: a number that is not above 0.
    """
    for key, value in {"flops": flops, "moved": moved, "peak": peak, "bandwidth": bandwidth}.items():
        check_number(key, value, "a number above 0", lambda number: number > 0)
    return Roofline(flops, moved, flops / peak, moved / bandwidth)


def decode_floor(
    model: nn.Module | TransformerShape,
    *,
    batch_size: int,
    seq_len: int,
    peak: PeakRate | None,
    dtype: torch.dtype,
    tf32: bool = False,
) -> Roofline | None:
    """Return the minimum time of decoding one token per row. None: unknown sizes or rates.

    Args:
        model: as in `model_flops`.
        batch_size: B.
        seq_len: number of tokens in the cache.
        peak: peak rates of the device, published or measured.
        dtype: dtype of the computation and of the cache.
        tf32: True if float32 may be rounded to TF32.

    Raises:
        ValueError: sizes that are not positive integers.
    """
    flops = model_flops(model, batch_size=batch_size, seq_len=seq_len, mode="decode")
    moved = decode_bytes(model, batch_size=batch_size, seq_len=seq_len, dtype=dtype)
    rate = None if peak is None else peak.flops_of(dtype, tf32=tf32)
    if flops is None or moved is None or peak is None or rate is None or peak.bandwidth is None:
        return None
    return roofline(flops.model("visible"), moved.total, peak=rate, bandwidth=peak.bandwidth)
