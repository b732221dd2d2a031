"""Alone: whether nothing of this process computes but its main thread."""

from __future__ import annotations

import os
import threading

from .clock import real_time

try:
    import resource
except ImportError:  # pragma: no cover - Windows has none
    resource = None  # type: ignore[assignment]

__all__ = ["Alone"]

_SHARE = 0.02  # of the time of the main thread: what others may compute beside it
_CLOCKS = 0.002  # seconds that two clocks, read one after the other, may differ by


class Alone:
    """What other threads and processes compute, from now on. To be made and asked in the main thread."""

    def __init__(self) -> None:
        self._own, self._others = real_time.thread_time(), _of_others()

    def holds(self) -> bool:
        """Whether the main thread alone has computed, and no process waits that this one has started."""
        if threading.current_thread() is not threading.main_thread():
            return False
        own = real_time.thread_time() - self._own
        return _of_others() - self._others <= _CLOCKS + _SHARE * own and not _children()


def _of_others() -> float:
    """Seconds of processors: of other threads, those that have ended too, and of children that have ended."""
    ended = 0.0
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = usage.ru_utime + usage.ru_stime
    return real_time.process_time() - real_time.thread_time() + ended


def _children() -> bool:
    """Whether any process is there that this one has started."""
    if not hasattr(os, "waitid"):  # pragma: no cover - Windows
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
