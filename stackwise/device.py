"""The device: what hardware this is, and which of it to use."""

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

__all__ = ["fingerprint", "keep_freed_memory", "resolve_device", "threads_for"]

_TINY = 1_000_000  # parameters
_DRIVER = Path("/proc/driver/nvidia/version")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def resolve_device(name: str) -> torch.device:
    """The device that `name` asks for.

    Args:
        name: "auto" (CUDA where there is one, else the CPU), "cpu", "cuda" or "cuda:N".

    Raises:
        ValueError: a CUDA device that this machine does not have, or another name.
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
        raise ValueError(f"device: got {name!r}; this machine has {count} CUDA devices")
    return device


@contextmanager
def threads_for(n_parameters: int) -> Iterator[None]:
    """Compute with one thread inside the block if a model is tiny, and with the current number otherwise.

    Below a million parameters, waking a second thread takes longer than the work that it is given.

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
    """Have this process keep what it frees, or give it back to the system at once, where glibc is.

    A training step on the CPU frees its gradients and activations and asks for them again; each time the
    system clears their pages anew, measured at up to a tenth of a step. A process that keeps them keeps the
    most memory that it ever used. Training unit by unit frees weights and moments that come again in other
    sizes: by itself glibc then holds up to a tenth more than tensors take, the more the deeper the Rack is,
    and a process that keeps all holds more yet. A setting of the whole process, therefore for the program
    that owns it: no part of the library calls this by itself. `stackwise train` does, and keeps unless
    Blocks are on disk.

    Args:
        keep: False: each block of memory of a MiB or more goes back as it is freed.

    Returns:
        whether the allocator took it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    mapped, trimmed = (1 << 30, (1 << 31) - 1) if keep else (1 << 20, 1 << 17)
    # One may not be left alone: setting either ends glibc's own adjustment of both.
    return bool(libc.mallopt(_MMAP_THRESHOLD, mapped) and libc.mallopt(_TRIM_THRESHOLD, trimmed))


def release_freed_memory() -> bool:
    """Give back to the system what this process has freed and still holds, where glibc is.

    Weights that came and went leave gaps that the system counts as used.

    Returns:
        whether anything was given back.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).malloc_trim(0))


def fingerprint(device: torch.device | str | None = None) -> dict[str, Any]:
    """What a measurement depends on: processor, cores, threads, versions, GPU.

    Never a clock, a temperature or a load, so that two runs on one machine compare equal.

    Args:
        device: that was measured on, so that of several GPUs that one is told; None, or the CPU: the
            current GPU.
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
    """What is fixed of a GPU: name, memory, capability, driver."""
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
    """The version of NVIDIA's driver as its module tells it; None where nothing does."""
    try:
        found = re.search(r"\s(\d+\.\d[\d.]*)\s", _DRIVER.read_text())
    except OSError:
        return _driver_by_nvml()
    return None if found is None else found[1]


def _driver_by_nvml() -> str | None:
    """The same of NVIDIA's management library, which a container has where it lacks the module's file."""
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
