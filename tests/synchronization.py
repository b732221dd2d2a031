"""Synchronization: code on a GPU in which the host must not wait for the device."""

import contextlib
import warnings

import torch


@contextlib.contextmanager
def synchronization_fails():
    """Raise RuntimeError if code inside the block makes the host wait for the GPU."""
    _set("error")
    try:
        yield
    finally:
        _set("default")


@contextlib.contextmanager
def synchronization_allowed():
    """Allow waiting inside a block of `synchronization_fails`."""
    _set("default")
    try:
        yield
    finally:
        _set("error")


def _set(mode):
    with warnings.catch_warnings():
        # torch warns once that the mode does not detect every operation that synchronizes.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
