"""Peak rates of a device, published by its manufacturer or measured on this machine.

Utilization is a fraction of the peak. If no rate is published, none is assumed: the rate of another device
would give a misleading utilization.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = ["PeakRate", "multiplies_in_tf32", "peak_flops", "published_peak", "rate_name"]


@dataclass(frozen=True)
class PeakRate:
    """Peak rates of one device.

    Attributes:
        device: name of the device.
        source: "published" by the manufacturer, or "measured".
        flops: operations per second of dense products by name of the dtype, such as "bfloat16". "float32" is
            without tensor cores, and "tf32" with tensor cores that round the factors.
        bandwidth: bytes per second to and from the device memory. None: unknown.
        conditions: conditions of a measurement, such as threads and sizes.
    """

    device: str
    source: Literal["published", "measured"]
    flops: dict[str, float]
    bandwidth: float | None
    conditions: dict[str, Any]

    def flops_of(self, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
        """Return the operations per second in `dtype`. None: unknown.

        Args:
            dtype: dtype of the factors.
            tf32: True if float32 is rounded to TF32, as `torch.set_float32_matmul_precision("high")` allows.
        """
        name = rate_name(dtype, tf32=tf32)
        return None if name is None else self.flops.get(name)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "device": self.device,
            "source": self.source,
            "flops": dict(self.flops),
            "bandwidth": self.bandwidth,
            "conditions": dict(self.conditions),
        }


_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
}


def rate_name(dtype: torch.dtype, *, tf32: bool = False) -> str | None:
    """Return the key of `dtype` in `PeakRate.flops`. None: it has no key. Arguments as in `flops_of`."""
    return "tf32" if tf32 and dtype == torch.float32 else _NAMES.get(dtype)


def _rates(
    half: float | None,
    bandwidth: float | None,
    *,
    float8: float | None = None,
    tf32: float | None = None,
    float32: float | None = None,
    float16: float | None = None,
) -> tuple[dict[str, float], float | None]:
    """Return rates in units of 1 from 10^12 operations and 10^9 bytes per second.

    `half` is the rate of bfloat16 and float16.
    """
    given = {
        "bfloat16": half,
        "float16": half if float16 is None else float16,
        "float8": float8,
        "tf32": tf32,
        "float32": float32,
    }
    flops = {name: rate * 1e12 for name, rate in given.items() if rate is not None}
    return flops, None if bandwidth is None else bandwidth * 1e9


# Dense products with float32 accumulation, and memory bandwidth. The sources are data sheets and architecture
# papers of NVIDIA, which state twice the operations for sparse matrices, and AMD. The first match is used.
# Rates that are missing or contradictory in the sources are omitted.
_PUBLISHED: tuple[tuple[str, tuple[dict[str, float], float | None]], ...] = (
    (r"\bB200\b", _rates(2250.0, 8000.0, float8=4500.0)),
    (r"\bH200 NVL\b", _rates(835.5, 4800.0, float8=1671.0)),
    (r"\bH200\b", _rates(989.5, 4800.0, float8=1979.0, tf32=494.7, float32=66.9)),
    (r"\bGH200 480GB\b", _rates(989.5, 4000.0, float8=1979.0, tf32=494.7, float32=66.9)),
    (r"\bGH200\b", _rates(989.5, None, float8=1979.0, tf32=494.7, float32=66.9)),
    (r"\bH100 PCIe\b", _rates(756.5, 2000.0, float8=1513.0, tf32=378.0, float32=51.2)),
    (r"\bH100 NVL\b", _rates(835.5, 3900.0, float8=1671.0)),
    (r"\bH100\b.*\bHBM3\b", _rates(989.5, 3350.0, float8=1979.0, tf32=494.7, float32=66.9)),
    (r"\bA100\b.*\b40GB\b", _rates(312.0, 1555.0, tf32=156.0, float32=19.5)),
    (r"\bA100 80GB PCIe\b", _rates(312.0, 1935.0, tf32=156.0, float32=19.5)),
    (r"\bA100\b.*\b80GB\b", _rates(312.0, 2039.0, tf32=156.0, float32=19.5)),
    (r"\bA100\b", _rates(312.0, None, tf32=156.0, float32=19.5)),
    (r"\bA40\b", _rates(149.7, 696.0, tf32=74.8, float32=37.4)),
    (r"\bA30\b", _rates(165.0, 933.0, tf32=82.0, float32=10.3)),
    (r"\bA10\b", _rates(125.0, 600.0, tf32=62.5, float32=31.2)),
    (r"\bL40S\b", _rates(362.0, 864.0, float8=733.0, tf32=183.0, float32=91.6)),
    (r"\bL40\b", _rates(181.0, 864.0, float8=362.0, tf32=90.5, float32=90.5)),
    (r"\bL4\b", _rates(121.0, 300.0, float8=242.5, tf32=60.0, float32=30.3)),
    (r"\bRTX 4090$", _rates(165.2, 1008.0, float8=330.3, tf32=82.6, float32=82.6)),
    (r"\bV100-SXM2\b", _rates(None, 900.0, float16=125.0, float32=15.7)),
    (r"\bMI300X\b", _rates(1307.4, 5300.0, float8=2614.9)),
)


def published_peak(device: torch.device | str) -> PeakRate | None:
    """Return the published peak rates of a GPU. None: a CPU, or a GPU that is not in the table.

    `measured_peak` is the alternative.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if " MIG " in f"{name} ":  # a partition of the device, with a part of its rates
        return None
    found = next((rates for pattern, rates in _PUBLISHED if re.search(pattern, name)), None)
    return None if found is None else PeakRate(name, "published", *found, {})


def multiplies_in_tf32(device: torch.device) -> bool:
    """Return True if torch currently rounds float32 to TF32 in products on this device, for `flops_of`."""
    # The value of `set_float32_matmul_precision` cannot be read after `fp32_precision` was set, so only the
    # latter is read.
    if device.type != "cuda" or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def peak_flops(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, *, tf32: bool = False
) -> float | None:
    """Return the published dense operations per second of a GPU. None: unknown, as for a CPU."""
    peak = published_peak(device)
    return None if peak is None else peak.flops_of(dtype, tf32=tf32)
