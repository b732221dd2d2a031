"""The device: tests that lack it are skipped with a reason, or the run stops; one measures at a time."""

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
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of the driver's API: nobody has called cuInit
_LONGEST_WAIT, _PAUSE = 600.0, 0.02  # seconds
_PINNED = pytest.StashKey[bool]()


def require_what_was_asked(config: pytest.Config) -> None:
    """Stop the run where a device was asked for that this machine does not have.

    Raises:
        pytest.UsageError: naming it. torch is imported only where CUDA was asked for.
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
    """Skip, with the reason, what is marked gpu where no GPU was asked for."""
    if options.gpu_requested(config):
        return
    skip = pytest.mark.skip(reason="needs a GPU: run with --gpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def take_a_device(config: pytest.Config) -> None:
    """Leave one CUDA device visible to this worker of xdist: the one at the place of its number.

    The list is that of CUDA_VISIBLE_DEVICES, else all of the machine. Nothing is changed where CUDA was not
    asked for, or where a device was named by its number. CUDA reads the variable once, at its first call in a
    process, which may be no more than the question whether there is a device: where that has been, it is too
    late, and a warning says so. Such workers share devices, and `lock` keeps their measurements apart.
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
    """Whether CUDA was asked for, and no device by its number. Not by asking torch, which begins CUDA."""
    named = config.getoption("stackwise_device", None) or options.ini(config, "stackwise_device")
    return named in ("cuda", "auto") if named else options.gpu_requested(config)


def _cuda_has_begun() -> bool:
    """Whether CUDA was called in this process, so that it has read which devices it may see."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        count, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
        return int(driver.cuDeviceGetCount(ctypes.byref(count))) != _NOT_INITIALIZED
    except (AttributeError, OSError):  # no driver: there is nothing that could have begun
        return False


def _visible() -> list[str]:
    """How CUDA names the devices that this process may use, in their order."""
    listed = os.environ.get(_VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]  # asks NVML, where it is


@contextmanager
def lock(device: str, *, seconds: float = _LONGEST_WAIT) -> Iterator[None]:
    """Hold the lock of a device, so that no other process of this user measures on it.

    Two workers that measure on one GPU, or on the cores of one machine, disturb each other. The process that
    holds the lock may enter it again.

    Args:
        device: "cpu", "cuda" or "cuda:N", by the numbers of this process.
        seconds: time for which any one other process may hold the lock while this one waits.

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
    """Return the number of the process that acquired a lock last, and the time at which it did."""
    return (path.read_text() or "?", path.stat().st_mtime_ns) if path.exists() else ("?", 0)


def same_device(one: str, other: str) -> bool:
    """Whether two names mean one device, which one lock is for."""
    return _lock_file(one) == _lock_file(other)


def _lock_file(device: str) -> Path:
    """One file for each device of the machine, whatever number this process knows it by."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        kind = f"cuda-{_uuid(int(number) if number else None) or _named_by_user(int(number or 0))}"
    name = re.sub(r"[^\w-]", "_", kind)
    return Path(tempfile.gettempdir()) / f"stackwise-{os.getuid()}-{name}.lock"


def _uuid(index: int | None) -> str | None:
    """What names a CUDA device in every process; None where torch does not tell."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    found = getattr(properties, "uuid", None)
    return None if found is None else str(found)


def _named_by_user(index: int) -> str:
    """The device at this place of CUDA_VISIBLE_DEVICES, else its number."""
    listed = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    return listed[index] if index < len(listed) else str(index)
