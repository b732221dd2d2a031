"""Devices: skip tests without a GPU, stop the run if a requested device is missing, and lock devices."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_stackwise import options

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = ["lock", "require_what_was_asked", "same_device", "skip_without_gpu", "take_a_device"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of the driver API: cuInit was not called
_LONGEST_WAIT, _PAUSE = 600.0, 0.02  # seconds
_PINNED = pytest.StashKey[bool]()


def require_what_was_asked(config: pytest.Config) -> None:
    """Stop the run if this machine does not have the requested device.

    torch is imported only if a device other than the CPU is requested.

    Raises:
        pytest.UsageError: the device is missing. The message names it.
    """
    name = options.device_name(config)
    if options.gpu_requested(config):
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu: this machine has no CUDA device that torch can use")
    if name != "cpu":
        from stackwise.support.device import resolve_device

        try:
            resolve_device(name)
        except ValueError as error:
            raise pytest.UsageError(f"--stackwise-device: {error}") from None


def skip_without_gpu(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Skip tests with the marker `gpu`, with the reason, if no GPU is requested."""
    if options.gpu_requested(config):
        return
    skip = pytest.mark.skip(reason="needs a GPU: run with --gpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def take_a_device(config: pytest.Config) -> None:
    """Leave one CUDA device visible to this xdist worker, by the number of the worker.

    The device is taken from CUDA_VISIBLE_DEVICES, or from all devices of the machine if it is not set.
    Nothing is changed if CUDA is not requested, or if a device is requested by its number.

    CUDA reads CUDA_VISIBLE_DEVICES once, at its first call in a process. Even a query for available devices
    is such a call. If CUDA was called before, a warning is issued and the workers share devices. `lock` then
    prevents measurements at the same time.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker or not _wants_any_cuda_device(config) or config.stash.get(_PINNED, False):
        return
    visible = _visible()
    if not visible:
        return
    if _cuda_has_begun():
        text = (
            f"{worker} shares its CUDA device with other workers: CUDA was in use before the plugin could "
            f"leave it one of {', '.join(visible)}. Set CUDA_VISIBLE_DEVICES for each worker, or ask "
            "torch.cuda for nothing while conftests are imported"
        )
        config.issue_config_time_warning(pytest.PytestConfigWarning(text), stacklevel=2)
        return
    os.environ[_VISIBLE] = visible[int(re.sub(r"\D", "", worker) or 0) % len(visible)]
    config.stash[_PINNED] = True


def _wants_any_cuda_device(config: pytest.Config) -> bool:
    """Return True if CUDA is requested without a device number. torch is not called, as that starts CUDA."""
    named = config.getoption("stackwise_device", None) or options.ini(config, "stackwise_device")
    return named in ("cuda", "auto") if named else options.gpu_requested(config)


def _cuda_has_begun() -> bool:
    """Return True if CUDA was called in this process, and so has read CUDA_VISIBLE_DEVICES."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        count, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
        return int(driver.cuDeviceGetCount(ctypes.byref(count))) != _NOT_INITIALIZED
    except (AttributeError, OSError):  # no driver
        return False


def _visible() -> list[str]:
    """Return CUDA's names of the devices that this process may use, in CUDA's order."""
    listed = os.environ.get(_VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]  # uses NVML if it is available


@contextmanager
def lock(device: str, *, seconds: float = _LONGEST_WAIT) -> Iterator[None]:
    """Hold the lock of a device, so that no other process of this user measures on it.

    Two workers that measure on one GPU, or on the cores of one machine, disturb each other. The process that
    holds the lock may enter it again.

    Args:
        device: "cpu", "cuda" or "cuda:N", numbered as in this process.
        seconds: longest time for which one other process may hold the lock while this process waits.

    Raises:
        TimeoutError: another process held it for longer. The message names that process and the file.
    """
    path = _lock_file(device)
    while True:
        holder = _holder(path)
        try:
            held = _lock(path).acquire(timeout=seconds, poll_interval=_PAUSE)
            break
        except TimeoutError as error:
            if _holder(path) == holder:
                raise TimeoutError(
                    f"{device}: process {holder[0]} has been measuring there for more than {seconds:g} s; "
                    f"lock file: {path}"
                ) from error
    with held:
        path.write_text(str(os.getpid()))
        yield


@cache
def _lock(path: Path) -> FileLock:
    from stackwise.support.lock import file_lock

    return file_lock(path)


def _holder(path: Path) -> tuple[str, int]:
    """Return the id of the process that last acquired a lock, and the time of the acquisition in ns."""
    return (path.read_text() or "?", path.stat().st_mtime_ns) if path.exists() else ("?", 0)


def same_device(one: str, other: str) -> bool:
    """Return True if two names are names of the same device, which has one lock."""
    return _lock_file(one) == _lock_file(other)


def _lock_file(device: str) -> Path:
    """Return the lock file of a device. It is the same if another process numbers the device differently."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        kind = f"cuda-{_uuid(int(number) if number else None) or _named_by_user(int(number or 0))}"
    name = re.sub(r"[^\w-]", "_", kind)
    return Path(tempfile.gettempdir()) / f"stackwise-{os.getuid()}-{name}.lock"


def _uuid(index: int | None) -> str | None:
    """Return the UUID of a CUDA device, which is the same in all processes, or None if torch has no UUID."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    found = getattr(properties, "uuid", None)
    return None if found is None else str(found)


def _named_by_user(index: int) -> str:
    """Return the entry of CUDA_VISIBLE_DEVICES at an index, or the index if there is no entry."""
    listed = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    return listed[index] if index < len(listed) else str(index)
