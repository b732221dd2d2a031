"""Plain calls: what may be measured as a call, and whether it has done its work when it returns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator

import torch
from torch import nn

__all__ = ["checked_call", "is_plain_call", "kind_of", "refuse_unstarted"]


def is_plain_call(value: object) -> bool:
    """Whether this may be meant as a call without arguments.

    A model is none: it wants a batch. Nor is a class of models, which can be called, but only makes one.
    """
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    return callable(value) and not is_class and not isinstance(value, nn.Module)


def kind_of(value: object) -> str:
    """What was given instead, for the reader of an error: "Tiny, a class of nn.Module"."""
    if isinstance(value, type):
        return f"{value.__name__}, a class of nn.Module" if issubclass(value, nn.Module) else value.__name__
    name = type(value).__name__
    return f"{name}(), an nn.Module" if isinstance(value, nn.Module) else name


def refuse_unstarted(result: object, key: str = "call") -> None:
    """Raise TypeError if a call returned a generator or an awaitable: nothing of its body has run yet.

    Args:
        result: of the call.
        key: for the error.

    Raises:
        TypeError: it is one.
    """
    match result:
        case Generator():
            wanted = "one that goes through it, such as lambda: list(...)"
        case Awaitable():
            if isinstance(result, Coroutine):
                result.close()  # or Python warns that nobody awaited it
            wanted = "one that waits for it, such as lambda: asyncio.run(...)"
        case AsyncGenerator():
            wanted = "one that goes through it, in a coroutine that asyncio.run(...) waits for"
        case _:
            return
    got = f"a function that returns a {kind_of(result)}, which has not run"
    raise TypeError(f"{key}: got {got}; wanted {wanted}")


def checked_call(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`call`, refused where its work is not done when it returns and the device is idle.

    Of work on a GPU that no clock waits for, only that is seen which goes on when the call returns.

    Args:
        call: what is to be timed.
        device: that the clock waits for.

    Raises:
        TypeError: from the call: it returned a generator or a coroutine.
        ValueError: from the call: the device is the CPU, and work on a GPU goes on.
    """

    def checked() -> None:
        if _has_gpu_beside(device):
            torch.cuda.synchronize()  # what others have launched
        refuse_unstarted(call())
        if _has_gpu_beside(device) and not torch.cuda.current_stream().query():
            raise ValueError(
                f"device: got {str(device)!r}, but the call leaves work on a GPU that is not waited for; "
                "allowed: 'cuda' or 'cuda:N', where it works"
            )

    return checked


def _has_gpu_beside(device: torch.device) -> bool:
    return device.type == "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
