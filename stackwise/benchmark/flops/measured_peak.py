"""Measured peak rates: the fastest large products and memory streams observed on this device.

The rates of a CPU depend on its cores, its clock and other processes, so no table contains them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stackwise.benchmark.flops.peak_rate import PeakRate, multiplies_in_tf32, rate_name
from stackwise.benchmark.timing.cache_state import last_level_cache_bytes
from stackwise.benchmark.timing.clock import time_call
from stackwise.support.arguments import check_number, check_sizes, require
from stackwise.support.random_state import seeded

__all__ = ["measure_peak", "measured_peak", "product_rate", "stream_rate"]

# Sizes of the products that are always measured. If the rate still rises by more than _RISE, larger sizes
# follow, up to _LARGEST.
_SIZES = (512, 1024, 2048)
_LARGEST, _RISE = 65536, 0.01
# Dtypes in which `torch.mm` reaches the speed of the device. It does not for float8, if it supports it at
# all.
_MULTIPLIED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MEMORY = Path("/proc/meminfo")
_LEAST_STREAM = 1 << 27  # bytes, if the size of the last-level cache is unknown


def measured_peak(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> PeakRate:
    """Return the result of `measure_peak` for one dtype.

    It is measured once per process for each device, dtype, number of threads and TF32 setting.
    """
    device = torch.device(device)
    return _measured(str(device), dtype, torch.get_num_threads(), multiplies_in_tf32(device))


@lru_cache(maxsize=32)
def _measured(
    device: str,
    dtype: torch.dtype,
    threads: int,  # noqa: ARG001  # part of the key of the cache
    tf32: bool,  # noqa: ARG001
) -> PeakRate:
    return measure_peak(device, [dtype])


def measure_peak(
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    *,
    seconds: float = 0.5,
) -> PeakRate:
    """Return the best observed rates, as in STREAM and LINPACK, with torch's current number of threads.

    If other processes use the machine, the rates are lower. A utilization above 1 means that the machine was
    less busy when the model ran. Products are enlarged until the rate no longer rises, one product exceeds
    the time limit, or the memory is insufficient. `conditions` has the sizes, and in `still_rising` the
    dtypes whose rate was still rising. float32 is reported as "tf32" if torch currently rounds it to TF32.
    Only float64, float32, float16 and bfloat16 are measured. The rates of other dtypes stay unknown.

    Args:
        device: device to measure.
        dtypes: dtypes of the products.
        seconds: minimum time for each dtype and for the memory.

    Raises:
        ValueError: no dtype, or seconds that are not positive.
    """
    device = torch.device(device)
    require(len(dtypes) > 0, "dtypes", list(dtypes), "at least one torch.dtype")
    check_number("seconds", seconds, "a number above 0", lambda value: value > 0)
    flops, sizes, rising = {}, {}, []
    for dtype in dtypes:
        key = rate_name(dtype, tf32=multiplies_in_tf32(device))
        if dtype not in _MULTIPLIED or key is None:
            continue
        rates, still_rises = _product_rates(device, dtype, seconds)
        flops[key], sizes[key] = max(rates.values()), list(rates)
        rising += [key] if still_rises else []
    n_bytes = _stream_bytes(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    conditions: dict[str, Any] = {
        "products": sizes,
        "still_rising": rising,
        "stream_bytes": n_bytes,
        "seconds": seconds,
    }
    if device.type == "cpu":
        conditions["threads"] = torch.get_num_threads()
    bandwidth = stream_rate(device, n_bytes, seconds=seconds)
    return PeakRate(name, "measured", flops, bandwidth, conditions)


def _product_rates(device: torch.device, dtype: torch.dtype, seconds: float) -> tuple[dict[int, float], bool]:
    """Return the rates by size in the order of measurement, and True if the last rate was still rising."""
    rates: dict[int, float] = {}
    size = _SIZES[0]
    while True:
        best = max(rates.values(), default=0.0)
        rates[size] = product_rate(device, dtype, size, seconds=seconds / len(_SIZES))
        rises = rates[size] > (1 + _RISE) * best
        if size >= _SIZES[-1] and not rises:
            return rates, False
        size *= 2
        too_slow = 2 * size**3 / max(rates.values()) > seconds
        if size > _SIZES[-1] and (size > _LARGEST or too_slow or not _fits(device, dtype, size)):
            return rates, rises


def _fits(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Return True if a product fits into half of the free memory.

    It needs two factors, their product, and the float32 random numbers of the factors.
    """
    wanted = (3 * dtype.itemsize + 2 * torch.float32.itemsize) * size**2
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = _free_host_bytes()
    return wanted <= free / 2


def _free_host_bytes() -> int:
    """Return the available memory (MemAvailable of proc(5)). 0: not reported."""
    if not _MEMORY.exists():
        return 0
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _MEMORY.read_text(), re.MULTILINE)
    return 0 if found is None else 1024 * int(found[1])


def product_rate(device: torch.device, dtype: torch.dtype, size: int, *, seconds: float = 0.1) -> float:
    """Return the operations per second of the fastest product of two square matrices of random normals.

    Args:
        device: device to measure.
        dtype: dtype of the factors and of the result.
        size: number of rows and columns.
        seconds: minimum duration.
    """
    check_sizes(size=size)
    with seeded(0, device):
        one, two = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    into = torch.empty_like(one)
    with torch.no_grad():
        return 2 * size**3 / _fastest(lambda: torch.mm(one, two, out=into), device, seconds)


def stream_rate(device: torch.device, n_bytes: int, *, seconds: float = 0.1) -> float:
    """Return the bytes per second of the fastest of a read, a copy and a scaled sum of float32 vectors.

    As in STREAM (McCalpin 1995), a byte counts when it is read and when it is written. Bytes that a cache
    fetches before a write do not count.

    Args:
        device: device to measure.
        n_bytes: size of each vector, larger than any cache.
        seconds: minimum duration of the three together.
    """
    check_sizes(4, n_bytes=n_bytes)
    with seeded(0, device):
        one = torch.randn(n_bytes // 4, device=device)
    two, three = one.flip(0), torch.empty_like(one)
    calls: list[tuple[int, Callable[[], Tensor]]] = [
        (1, one.sum),
        (2, lambda: three.copy_(one)),
        (3, lambda: torch.add(one, two, alpha=0.5, out=three)),
    ]
    with torch.no_grad():
        return max(n * one.nbytes / _fastest(call, device, seconds / 3) for n, call in calls)


def _fastest(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of the fastest call, without the first one."""
    call()
    best, until = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < until:
        best = min(best, time_call(call, device))
    return best


def _stream_bytes(device: torch.device) -> int:
    """Return four times the size of the last-level cache, as STREAM requires."""
    if device.type == "cuda":
        return max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 1 << 28)
    return max(4 * (last_level_cache_bytes(device) or 0), _LEAST_STREAM)
