"""The device: tests that lack it are skipped with a reason, or the run stops; one measures at a time."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_stackwise import options, records

__all__ = ["lock", "require_what_was_asked", "skip_without_gpu", "take_a_device"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LONGEST_WAIT, _PAUSE = 600.0, 0.02  # seconds
_held: dict[Path, int] = {}


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
        from stackwise.device import resolve_device

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
    asked for, where a device was named by its number, or where a conftest has used CUDA already, since then
    it is too late: such workers share devices, and `lock` keeps their measurements apart.
    """
    if not records.is_worker(config) or options.device_name(config) != "cuda":
        return
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return
    visible = _visible()
    if visible:
        number = int(re.sub(r"\D", "", config.workerinput["workerid"]) or 0)  # type: ignore[attr-defined]
        os.environ[_VISIBLE] = visible[number % len(visible)]


def _visible() -> list[str]:
    """How CUDA names the devices that this process may use, in their order."""
    listed = os.environ.get(_VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def lock(config: pytest.Config, *, seconds: float = _LONGEST_WAIT) -> Iterator[None]:
    """Inside, no other process of this user that asks for this lock has the device that models run on.

    Two workers that measure on one GPU, or on the cores of one machine, measure each other. May be entered
    again by the process that has it.

    Args:
        config: says which device.
        seconds: how long to wait for the others.

    Raises:
        TimeoutError: another process had it for longer, naming that process and the file.
    """
    path = _lock_file(options.device_name(config))
    if path in _held:
        _held[path] += 1
        try:
            yield
        finally:
            _held[path] -= 1
        return
    import fcntl

    with path.open("a+") as file:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() >= end:
                    file.seek(0)
                    holder, name = file.read().strip() or "?", options.device_name(config)
                    raise TimeoutError(
                        f"{name}: process {holder} has been measuring there for more than {seconds:g} s; "
                        f"lock file: {path}"
                    ) from error
                time.sleep(_PAUSE)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        _held[path] = 1
        try:
            yield
        finally:
            del _held[path]
            # A process that was forked meanwhile has the file open too: closing it here would not be enough.
            fcntl.flock(file, fcntl.LOCK_UN)


def _lock_file(device: str) -> Path:
    """One file for each device of the machine, whatever number this process knows it by."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        listed = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
        index = int(number or 0)
        kind = f"cuda-{listed[index] if index < len(listed) else index}"
    name = re.sub(r"[^\w-]", "_", kind)
    return Path(tempfile.gettempdir()) / f"stackwise-{os.getuid()}-{name}.lock"
