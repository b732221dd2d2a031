"""Clock: functions of the system's clocks that tests cannot freeze or replace."""

from __future__ import annotations

import time

__all__ = ["real_time"]


class _RealTime:
    """Original functions of `time`: this file is imported before any conftest or test.

    Tests replace attributes of `time`, and freezegun replaces attributes of all loaded modules. Neither
    changes a class.
    """

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    perf_counter_ns = staticmethod(time.perf_counter_ns)
    process_time = staticmethod(time.process_time)
    thread_time = staticmethod(time.thread_time)
    time = staticmethod(time.time)  # last: it hides the module from the lines below


real_time = _RealTime()
