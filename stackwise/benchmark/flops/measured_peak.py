"""Measured peak: the best rate of large products and of streams through memory that this device showed.

What a CPU can do depends on its cores, its clock and what else runs; no table has it.
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

# Rows of the products that are tried whatever their rate, and how far it goes on where it still rises by more
# than the least that counts.
_SIZES = (512, 1024, 2048)
_LARGEST, _RISE = 65536, 0.01
# In which `torch.mm` is as fast as the device: of float8 it is not, where it multiplies it at all.
_MULTIPLIED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MEMORY = Path("/proc/meminfo")
_LEAST_STREAM = 1 << 27  # bytes, where the size of the last cache is not told


def measured_peak(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> PeakRate:
    """`measure_peak` of one dtype; once in a process for each device, dtype and number of threads."""
    device = torch.device(device)
    return _measured(str(device), dtype, torch.get_num_threads(), multiplies_in_tf32(device))


@lru_cache(maxsize=32)
def _measured(
    device: str,
    dtype: torch.dtype,
    threads: int,  # noqa: ARG001  # part of the key
    tf32: bool,  # noqa: ARG001
) -> PeakRate:
    return measure_peak(device, [dtype])


def measure_peak(
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    *,
    seconds: float = 0.5,
) -> PeakRate:
    """The best rates that were seen, as STREAM and LINPACK report theirs, with the threads that torch has.

    Of a machine that others use at the same time they are what was left. A utilisation above 1 says that more
    was left when the model ran. Products are made larger until that makes them no faster, or until one takes
    longer than is allowed, or no longer fits: `conditions` says which sizes were tried, and in `still_rising`
    of which dtypes the rate still rose. float32 that torch rounds to TF32 now is told as "tf32". Other dtypes
    than float64, float32, float16 and bfloat16 are left out: their rate stays unknown.

    Args:
        device: where.
        dtypes: of the products.
        seconds: that each dtype and the memory are tried for, at least.

    Raises:
        ValueError: no dtype, no positive number of seconds.
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
    """Rates by size, in the order in which they were tried, and whether that of the last was still rising."""
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
    """Whether two factors, their product and what they are drawn as in float32 take half of what is free."""
    wanted = (3 * dtype.itemsize + 2 * torch.float32.itemsize) * size**2
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = _free_host_bytes()
    return wanted <= free / 2


def _free_host_bytes() -> int:
    """What the system can give (proc(5), MemAvailable); where it does not say, nothing."""
    if not _MEMORY.exists():
        return 0
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _MEMORY.read_text(), re.MULTILINE)
    return 0 if found is None else 1024 * int(found[1])


def product_rate(device: torch.device, dtype: torch.dtype, size: int, *, seconds: float = 0.1) -> float:
    """Operations per second of the fastest product of two square matrices of random normals.

    Args:
        device: where.
        dtype: of both and of the result.
        size: rows and columns.
        seconds: to go on for, at least.
    """
    check_sizes(size=size)
    with seeded(0, device):
        one, two = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    into = torch.empty_like(one)
    with torch.no_grad():
        return 2 * size**3 / _fastest(lambda: torch.mm(one, two, out=into), device, seconds)


def stream_rate(device: torch.device, n_bytes: int, *, seconds: float = 0.1) -> float:
    """Bytes per second of the fastest of a read, a copy and a scaled sum of float32 vectors of `n_bytes`.

    As in STREAM (McCalpin 1995) a byte counts where it is read and where it is written; what a cache fetches
    to write into it does not.

    Args:
        device: where.
        n_bytes: of each vector, more than any cache holds.
        seconds: to go on for, at least, each of the three.
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
    """Seconds of the fastest call, the first left out."""
    call()
    best, until = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < until:
        best = min(best, time_call(call, device))
    return best


def _stream_bytes(device: torch.device) -> int:
    """Four times the last cache, as STREAM asks for."""
    if device.type == "cuda":
        return max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 1 << 28)
    return max(4 * (last_level_cache_bytes(device) or 0), _LEAST_STREAM)
