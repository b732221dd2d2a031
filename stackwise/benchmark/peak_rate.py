"""The peak rate of a device, as its maker publishes it: what a utilisation is a fraction of."""

from __future__ import annotations

import re

import torch

__all__ = ["peak_flops"]

# Dense bfloat16 with float32 accumulation, in 1e12 operations per second, from NVIDIA's data sheets and
# architecture papers, which state twice that for sparse matrices. The first that matches is taken.
_PUBLISHED = (
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.5),
    (r"\b(H200|GH200)\b", 989.5),
    (r"\bH100 PCIe\b", 756.5),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100\b.*\bHBM3\b", 989.5),
    (r"\bA100\b", 312.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX 4090$", 165.2),
)


def peak_flops(device: torch.device) -> float | None:
    """Published dense bfloat16 operations per second of a GPU; None where none are known, as for a CPU."""
    return _published(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _published(name: str) -> float | None:
    return next((rate * 1e12 for pattern, rate in _PUBLISHED if re.search(pattern, name)), None)
