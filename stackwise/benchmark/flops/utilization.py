"""Utilization of a device by a call: MFU, HFU and MBU. None: unknown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from stackwise.benchmark.flops.closed_form import FlopCount, Pairs, Recompute, model_flops
from stackwise.benchmark.flops.decode_bytes import DecodeBytes, decode_bytes
from stackwise.benchmark.flops.peak_rate import PeakRate
from stackwise.benchmark.flops.shape_reader import read_shape
from stackwise.benchmark.flops.transformer_shape import TransformerShape
from stackwise.support.arguments import check_number, check_sizes

__all__ = ["Utilization", "hfu", "mbu", "mfu", "utilization"]


@dataclass(frozen=True)
class Utilization:
    """Fractions of a peak rate.

    A value above 1 is not limited to 1. It means that the peak rate belongs to another device or dtype.

    Attributes:
        mfu: model FLOPs with all pairs of attention, as in published figures.
        mfu_visible: model FLOPs without the pairs that causality hides.
        hfu: FLOPs including recomputation.
        mbu: moved bytes, for decoding only.
        notes: reasons for values of None.
    """

    mfu: float | None
    mfu_visible: float | None
    hfu: float | None
    mbu: float | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"notes": list(self.notes)}


def utilization(
    model: nn.Module | TransformerShape,
    *,
    mode: str,
    batch_size: int,
    seq_len: int,
    seconds: float,
    peak: PeakRate | None,
    dtype: torch.dtype,
    tf32: bool = False,
    logits: Literal["all", "last"] | None = None,
    recompute: Recompute = "none",
    n_devices: int = 1,
) -> Utilization:
    """Return the utilization of one call.

    Args:
        model: as in `model_flops`.
        mode: as in `model_flops`.
        batch_size: as in `model_flops`.
        seq_len: as in `model_flops`.
        seconds: duration of the call.
        peak: peak rates of one device, published or measured.
        dtype: dtype of the computation.
        tf32: True if float32 was rounded to TF32.
        logits: as in `model_flops`.
        recompute: as in `model_flops`.
        n_devices: number of devices that shared the work.

    Raises:
        ValueError: as in `model_flops`, or seconds that are not positive.
    """
    count = model_flops(
        model, batch_size=batch_size, seq_len=seq_len, mode=mode, logits=logits, recompute=recompute
    )
    notes = []
    reading = read_shape(model)
    if reading.reason is not None:
        notes.append(reading.reason)
    elif count is None:
        notes.append("frozen weights: how much of the backward pass they save is not known")
    rate = None if peak is None else peak.flops_of(dtype, tf32=tf32)
    if rate is None:
        name = "TF32" if tf32 and dtype == torch.float32 else str(dtype).removeprefix("torch.")
        notes.append(f"the peak rate in {name} is not known")
    moved, bandwidth = None, None if peak is None else peak.bandwidth
    if mode == "decode":
        moved = decode_bytes(model, batch_size=batch_size, seq_len=seq_len, dtype=dtype)
        if moved is None and reading.reason is None:
            notes.append("which experts several rows go through is not known")
        if bandwidth is None:
            notes.append("the peak bandwidth is not known")
    return Utilization(
        mfu(count, seconds, rate, n_devices=n_devices),
        mfu(count, seconds, rate, pairs="visible", n_devices=n_devices),
        hfu(count, seconds, rate, n_devices=n_devices),
        mbu(moved, seconds, bandwidth, n_devices=n_devices),
        tuple(notes),
    )


def mfu(
    flops: FlopCount | None, seconds: float, peak: float | None, *, pairs: Pairs = "all", n_devices: int = 1
) -> float | None:
    """Return the model FLOPs utilization. None: unknown FLOPs or peak rate.

    Args:
        flops: operations of a call.
        seconds: duration of the call.
        peak: operations per second of one device.
        pairs: "all", as in published figures, or "visible", without the pairs that causality hides.
        n_devices: number of devices that shared the call.

    Raises:
        ValueError: seconds or peak rate not above 0.
    """
    return _share(None if flops is None else flops.model(pairs), seconds, peak, n_devices)


def hfu(flops: FlopCount | None, seconds: float, peak: float | None, *, n_devices: int = 1) -> float | None:
    """Return the hardware FLOPs utilization: as `mfu`, but including recomputation."""
    return _share(None if flops is None else flops.hardware(), seconds, peak, n_devices)


def mbu(
    moved: DecodeBytes | int | None, seconds: float, bandwidth: float | None, *, n_devices: int = 1
) -> float | None:
    """Return the memory bandwidth utilization: required bytes as a share of the possible bytes.

    Other arguments and errors are as in `mfu`.
    """
    amount = moved.total if isinstance(moved, DecodeBytes) else moved
    return _share(amount, seconds, bandwidth, n_devices)


def _share(amount: int | None, seconds: float, peak: float | None, n_devices: int) -> float | None:
    check_sizes(n_devices=n_devices)
    check_number("seconds", seconds, "a number above 0", lambda value: value > 0)
    if peak is not None:
        check_number("peak", peak, "a number above 0, or None", lambda value: value > 0)
    return None if amount is None or peak is None else amount / seconds / (peak * n_devices)
