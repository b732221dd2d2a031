"""Checks for a plain call: a function without arguments that has completed its work when it returns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator

import torch
from torch import nn

__all__ = ["checked_call", "is_plain_call", "kind_of", "refuse_unstarted"]


def is_plain_call(value: object) -> bool:
    """Return True if the value can be a call without arguments.

    A model is not one, because it needs a batch. A class of models is not one, because a call only creates a
    model.
    """
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    return callable(value) and not is_class and not isinstance(value, nn.Module)


def kind_of(value: object) -> str:
    """Return a description of a value for an error message, such as "Tiny, a class of nn.Module"."""
    if isinstance(value, type):
        return f"{value.__name__}, a class of nn.Module" if issubclass(value, nn.Module) else value.__name__
    name = type(value).__name__
    return f"{name}(), an nn.Module" if isinstance(value, nn.Module) else name


def refuse_unstarted(result: object, key: str = "call") -> None:
    """Raise TypeError if a call returned a generator or an awaitable, because its body has not run yet.

    Args:
        result: value that the call returned.
        key: name of the argument in the error message.

    Raises:
        TypeError: the result is a generator or an awaitable.
    """
    match result:
        case Generator():
            wanted = "one that goes through it, such as lambda: list(...)"
        case Awaitable():
            if isinstance(result, Coroutine):
                result.close()  # otherwise Python warns that the coroutine was never awaited
            wanted = "one that waits for it, such as lambda: asyncio.run(...)"
        case AsyncGenerator():
            wanted = "one that goes through it, in a coroutine that asyncio.run(...) waits for"
        case _:
            return
    got = f"a function that returns a {kind_of(result)}, which has not run"
    raise TypeError(f"{key}: got {got}; wanted {wanted}")


def checked_call(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return `call` with a check that its work is complete when it returns and the device is idle.

    If no clock waits for the GPU, the check detects only work that still runs when the call returns.

    Args:
        call: function to be timed.
        device: device that the clock waits for.

    Raises:
        TypeError: raised by the returned call if `call` returned a generator or a coroutine.
        ValueError: raised by the returned call if the device is the CPU and work on a GPU is still running.
    """

    def checked() -> None:
        if _has_gpu_beside(device):
            torch.cuda.synchronize()  # wait for work that was launched before this call
        refuse_unstarted(call())
        if _has_gpu_beside(device) and not torch.cuda.current_stream().query():
            raise ValueError(
                f"device: got {str(device)!r}, but the call leaves work on a GPU that is not waited for; "
                "allowed: 'cuda' or 'cuda:N', where it works"
            )

    return checked


def _has_gpu_beside(device: torch.device) -> bool:
    return device.type == "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
