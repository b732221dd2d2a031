"""Interrupts: Ctrl-C that is not lost, even if it occurs in a finalizer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["kept_interrupts"]


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `KeyboardInterrupt` if an earlier one was lost.

    Python raises it in the code that is running. If that is a finalizer, of which a step of torch has many,
    Python prints the error and continues. In a thread, or if the caller has a user-defined handler, that
    handler is used, and the yielded function does nothing.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    came = False

    def note(*_: Any) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def raise_lost() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield raise_lost
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
