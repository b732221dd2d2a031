"""Device: choice of the device, threads, memory allocator, and a description of the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["fingerprint", "keep_freed_memory", "release_freed_memory", "resolve_device", "threads_for"]

_TINY = 1_000_000  # parameters
_DRIVER = Path("/proc/driver/nvidia/version")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def resolve_device(name: str) -> torch.device:
    """Return the device with a name.

    Args:
        name: "auto" (CUDA if available, otherwise the CPU), "cpu", "cuda" or "cuda:N".

    Raises:
        ValueError: another name, or a CUDA device that this machine lacks.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {name!r}; allowed: auto, cpu, cuda, cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        allowed = f"cuda:0 to cuda:{count - 1}" if count else "cpu, because this machine has no CUDA device"
        raise ValueError(f"device: got {name!r}; allowed: {allowed}")
    return device


@contextmanager
def threads_for(n_parameters: int) -> Iterator[None]:
    """Use one thread in the block if a model is tiny, otherwise the current number.

    Below a million parameters, waking a second thread takes longer than its share of the work.

    Args:
        n_parameters: number of parameters of the model.
    """
    before = torch.get_num_threads()
    if n_parameters < _TINY:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory(keep: bool = True) -> bool:
    """Set whether glibc keeps freed memory or returns it to the system at once.

    A training step on the CPU frees its gradients and activations and allocates them again. If the memory
    was returned, the system clears the pages each time, which takes up to a tenth of a step. If it is kept,
    the process holds its peak memory until it ends. In layer-wise training with many Blocks, much of the kept
    memory stays unused, because the sizes of freed tensors differ.

    The setting is global to the process, so no part of the library calls this function. `stackwise train`
    does: it keeps memory, except with Blocks on disk.

    Args:
        keep: True: keep freed memory. False: return every freed block of at least 1 MiB.

    Returns:
        True if the allocator is glibc and accepted the setting.
    """
    mapped, trimmed = (1 << 30, (1 << 31) - 1) if keep else (1 << 20, 1 << 17)
    # glibc stops adjusting both thresholds when either is set, so set both.
    return all(_glibc("mallopt", *each) for each in ((_MMAP_THRESHOLD, mapped), (_TRIM_THRESHOLD, trimmed)))


def release_freed_memory() -> bool:
    """Return freed memory that glibc still holds to the system.

    Returns:
        True if any memory was returned.
    """
    return _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> bool:
    """Return True if this process uses glibc and its function returns a nonzero number."""
    return platform.libc_ver()[0] == "glibc" and bool(getattr(ctypes.CDLL(None), function)(*arguments))


def fingerprint(device: torch.device | str | None = None) -> dict[str, Any]:
    """Return the fixed properties of the machine: processor, cores, threads, versions and GPU.

    Clock rates, temperatures and load are excluded, so that two runs on one machine have equal fingerprints.

    Args:
        device: the device of the measurement, which selects the GPU. None or the CPU: the current GPU.
    """
    return {
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "gpu": _gpu(device),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _gpu(device: torch.device | str | None) -> dict[str, Any] | None:
    """Return name, memory, capability and driver of a GPU."""
    if not torch.cuda.is_available():
        return None
    device = None if device is None else torch.device(device)
    if device is None or device.type != "cuda" or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if it is unknown."""
    try:
        found = re.search(r"\s(\d+\.\d[\d.]*)\s", _DRIVER.read_text())
    except OSError:
        return _driver_by_nvml()
    return None if found is None else found[1]


def _driver_by_nvml() -> str | None:
    """Return the driver version from NVML, which works in containers that lack the file in /proc."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))):
            return None
    except (AttributeError, OSError):
        return None
    return text.value.decode() or None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
