"""Alone: check that only the main thread of this process computes."""

from __future__ import annotations

import os
import threading

from .clock import real_time

try:
    import resource
except ImportError:  # pragma: no cover - Windows has none
    resource = None  # type: ignore[assignment]

__all__ = ["Alone"]

_SHARE = 0.02  # maximum time of other threads and processes, as a share of the main thread's time
_CLOCKS = 0.002  # maximum difference in seconds between two clocks that are read in succession


class Alone:
    """Processor time of other threads and processes since the creation. Use it in the main thread."""

    def __init__(self) -> None:
        self._own, self._others = real_time.thread_time(), _of_others()

    def holds(self) -> bool:
        """Return True if only the main thread has computed, and this process has no child processes."""
        if threading.current_thread() is not threading.main_thread():
            return False
        own = real_time.thread_time() - self._own
        return _of_others() - self._others <= _CLOCKS + _SHARE * own and not _children()


def _of_others() -> float:
    """Return the processor seconds of other threads, including finished ones, and of finished children."""
    ended = 0.0
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = usage.ru_utime + usage.ru_stime
    return real_time.process_time() - real_time.thread_time() + ended


def _children() -> bool:
    """Return True if this process has child processes."""
    if not hasattr(os, "waitid"):  # pragma: no cover - Windows
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
