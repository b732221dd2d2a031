"""The device: tests that need a GPU are skipped with a reason, or the run stops; never green."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_stackwise import options

__all__ = ["require_what_was_asked", "skip_without_gpu"]


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
