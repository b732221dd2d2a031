"""Global settings of torch: read, restore, and find changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["kept_settings", "restore_settings", "settings_now"]

_CUDA = torch.backends.cuda
# Name, function that returns the value, function that sets it.
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    ("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    ("deterministic mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    ("number of threads", torch.get_num_threads, torch.set_num_threads),
    ("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        "TF32 mode of cuDNN",
        lambda: torch.backends.cudnn.allow_tf32,
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
    ),
    ("switch for flash attention", _CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    ("switch for math attention", _CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    ("switch for efficient attention", _CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    ("switch for cuDNN attention", _CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
)


def settings_now() -> list[Any]:
    """Return the values of all global settings."""
    return [get() for _, get, _ in _SETTINGS]


def restore_settings(values: list[Any]) -> list[tuple[str, Any, Any]]:
    """Set all global settings to values of `settings_now`. Return name, value and replaced value of each."""
    changes = []
    for (name, get, restore), value in zip(_SETTINGS, values, strict=True):
        if (now := get()) != value:
            changes.append((name, value, now))
            restore(value)
    return changes


@contextmanager
def kept_settings() -> Iterator[None]:
    """Restore the global settings after a block."""
    values = settings_now()
    try:
        yield
    finally:
        restore_settings(values)
