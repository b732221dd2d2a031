"""Interrupts: a Ctrl-C that is not lost, whatever it comes upon."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["kept_interrupts"]


@contextmanager
def kept_interrupts() -> Iterator[Callable[[], None]]:
    """Give what raises `KeyboardInterrupt` where one has come before, and nothing came of it.

    Python raises it in whatever runs. Where that is a finalizer, of which there are many in a step of torch,
    it prints the error and goes on. In a thread, and where the caller has a handler of their own, theirs
    stays, and what is given does nothing.
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
