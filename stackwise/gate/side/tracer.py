"""Tracer: tool that runs its own code in this process and would be timed as well."""

from __future__ import annotations

import sys
import threading
import tracemalloc

__all__ = ["active_tracer"]

_TOOLS = 6  # number of tool identifiers in sys.monitoring


def active_tracer() -> str:
    """Return the name of an active tracer and how it was installed, or an empty string."""
    functions = {
        "sys.settrace": sys.gettrace(),
        "sys.setprofile": sys.getprofile(),
        "threading.settrace": threading.gettrace(),
        "threading.setprofile": threading.getprofile(),  # the only visible trace of memray
    }
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    if monitoring is not None:
        functions["sys.monitoring"] = next(filter(None, map(monitoring.get_tool, range(_TOOLS))), None)
    for how, tracer in functions.items():
        if tracer is not None:
            return f"{_name(tracer)} ({how})"
    return "tracemalloc" if tracemalloc.is_tracing() else ""


def _name(tracer: object) -> str:
    if isinstance(tracer, str):
        return tracer
    named = tracer if hasattr(tracer, "__qualname__") else type(tracer)
    return f"{getattr(named, '__module__', None)}.{getattr(named, '__qualname__', None)}"
