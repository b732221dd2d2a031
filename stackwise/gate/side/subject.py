"""Subject: callable of a benchmark, timed on request."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import tracemalloc
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any, Protocol

from .clock import real_time

__all__ = [
    "Alone",
    "RefusedError",
    "Repeated",
    "Streamed",
    "Subject",
    "UnstartedError",
    "active_tracer",
    "peak_memory",
    "refuse_unstarted",
    "settle",
    "warm_up",
]

_LEAST_CALLS = 2
_NANOSECOND = 1e-9
_SHARE = 0.02  # maximum time of other threads and processes, as a share of the main thread's time
_CLOCKS = 0.002  # maximum difference in seconds between two clocks that are read in succession
_TOOLS = 6  # number of tool identifiers in sys.monitoring


class RefusedError(RuntimeError):
    """The gate cannot measure a test. The message has the necessary change of the test."""


class UnstartedError(RefusedError, TypeError):
    """A call returned a generator or an awaitable. Its body has not run."""


class Subject(Protocol):
    """Callable that can be timed.

    Attributes:
        only_once: True if it may be called only once.
    """

    only_once: bool

    def seconds(self, calls: int) -> dict[str, float]:
        """Return the seconds of one call by metric, as the mean of `calls` calls."""

    def once(self, looked_at: Callable[[Callable[[], object]], int]) -> int:
        """Return the result of `looked_at` for a call that is ready to run."""


class Repeated:
    """Call that can be repeated.

    Args:
        call: does the work once.
        prepare: called before each call, outside of the timed part; None: no preparation.
        after: called after each call, outside of the timed part, or None.
        only_once: True if the call may run only once.
    """

    def __init__(
        self,
        call: Callable[[], object],
        prepare: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        *,
        only_once: bool = False,
    ) -> None:
        self.call, self.prepare, self.after, self.only_once = call, prepare, after, only_once
        self._first = _FirstResult(call)

    def seconds(self, calls: int) -> dict[str, float]:
        """Return the seconds of one call, without `prepare` and `after`.

        Raises:
            UnstartedError: the first call returned a generator or an awaitable, which has not run.
        """
        total = self._nanoseconds(self._first.timed, calls)
        self._first.check()
        return {"time": total * _NANOSECOND / calls}

    def _nanoseconds(self, call: Callable[[], object], calls: int) -> int:
        prepare, after, now = self.prepare, self.after, real_time.perf_counter_ns
        synchronize = _synchronize()
        if prepare is None and after is None:
            several = range(calls)
            synchronize()
            start = now()
            for _ in several:
                call()
            synchronize()
            return now() - start
        total = 0
        for _ in range(calls):
            if prepare is not None:
                prepare()
            synchronize()
            start = now()
            call()
            synchronize()
            total += now() - start
            if after is not None:
                after()
        return total

    def once(self, looked_at: Callable[[Callable[[], object]], int]) -> int:
        """Return the result of `looked_at` for the prepared call."""
        if self.prepare is not None:
            self.prepare()
        found = looked_at(self.call)
        if self.after is not None:
            self.after()
        return found


class Streamed:
    """Call that reports each of its tokens, so that the first token has its own time (TTFT).

    Args:
        each_token: the call. It calls its argument with each column of tokens.
    """

    only_once = False

    def __init__(self, each_token: Callable[[Callable[[Any], object]], object]) -> None:
        self.each_token = each_token
        self._first = _FirstResult(each_token)

    def seconds(self, calls: int) -> dict[str, float]:
        """Return the seconds of one text, to its first token (TTFT), and per later token (TPOT).

        A metric is 0 if one of the texts lacks it: TTFT without a first token, TPOT without a later one.

        Raises:
            UnstartedError: the first call returned a generator or an awaitable, which has not run.
        """
        each_token, now = self._first.timed, real_time.perf_counter_ns
        synchronize = _synchronize()
        at: list[int] = []

        def on_token(_: Any) -> None:
            synchronize()
            at.append(now())

        whole = to_first = later = 0
        fewest = sys.maxsize
        for _ in range(calls):
            at.clear()
            synchronize()
            start = now()
            each_token(on_token)
            synchronize()
            whole += now() - start
            fewest = min(fewest, len(at))
            to_first += at[0] - start if at else 0
            later += (at[-1] - at[0]) // max(1, len(at) - 1) if at else 0
        self._first.check()
        # A mean over only some of the texts would not be comparable.
        found = {"time": whole, "ttft": to_first if fewest > 0 else 0, "tpot": later if fewest > 1 else 0}
        return {metric: value * _NANOSECOND / calls for metric, value in found.items()}

    def once(self, looked_at: Callable[[Callable[[], object]], int]) -> int:
        """Return the result of `looked_at` for one text."""
        return looked_at(lambda: self.each_token(lambda _: None))


class _FirstResult:
    """Check of the first result of a call, after the call was timed.

    Args:
        call: timed call.

    Attributes:
        timed: function that stores the result until it was checked; `call` itself afterwards.
    """

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call
        self._result: object = None
        self.timed: Callable[..., object] = self._stored

    def _stored(self, *args: object) -> None:
        self._result = self._call(*args)

    def check(self) -> None:
        """Raise UnstartedError if the first result is a generator or an awaitable. Ignore later results."""
        if self.timed is not self._call:
            result, self._result, self.timed = self._result, None, self._call
            refuse_unstarted(result)


def refuse_unstarted(result: object) -> None:
    """Raise UnstartedError if a call returned a generator or an awaitable: no part of its body has run yet.

    The message is the same as in `stackwise.benchmark.plain_call`, which a side does not import.
    """
    match result:
        case Generator():
            wanted = "one that goes through it, such as lambda: list(...)"
        case Awaitable():
            if isinstance(result, Coroutine):
                result.close()  # otherwise Python warns that it was never awaited
            wanted = "one that waits for it, such as lambda: asyncio.run(...)"
        case AsyncGenerator():
            wanted = "one that goes through it, in a coroutine that asyncio.run(...) waits for"
        case _:
            return
    got = f"a function that returns a {type(result).__name__}, which has not run"
    raise UnstartedError(f"call: got {got}; wanted {wanted}")


def warm_up(subject: Subject, seconds: float) -> dict[str, float]:
    """Repeat the call for `seconds`, at least twice.

    Returns:
        seconds of the fastest call ("call"); seconds from one call to the next, with the work around them
        ("period"); 1 if only this thread has computed, otherwise 0 ("alone").
    """
    end = real_time.perf_counter() + seconds
    fastest = shortest = float("inf")
    made, calls = 0, 1
    alone = Alone()
    while made < _LEAST_CALLS or real_time.perf_counter() < end:
        # The first turn has one call, since it may compile or take most of the time.
        began = real_time.perf_counter()
        fastest = min(fastest, subject.seconds(calls)["time"])
        period = (real_time.perf_counter() - began) / calls
        if not made:  # exclude one-time initialization
            alone = Alone()
        shortest, made = min(shortest, period), made + 1
        calls = max(1, min(1000, int(1e-3 / max(period, 1e-9))))
    return {"call": max(fastest, 1e-9), "period": max(shortest, 1e-9), "alone": float(alone.holds())}


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
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return real_time.process_time() - real_time.thread_time() + ended.ru_utime + ended.ru_stime


def _children() -> bool:
    """Return True if this process has child processes."""
    if not hasattr(os, "waitid"):  # pragma: no cover - macOS
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


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


def settle() -> None:
    """Exclude existing objects from garbage collection, so that its cost is due to the calls only."""
    gc.collect()
    gc.freeze()


def peak_memory(subject: Subject) -> dict[str, float]:
    """Return the peak of the bytes that one call holds in addition to existing memory, by metric.

    The bytes are exactly reproducible. They are the sum of the peak of Python's allocations, including
    NumPy, and of the peaks of tensors if torch is loaded. On CUDA the allocator of torch measures the
    tensors, on the CPU its profiler, which records each allocation. The peaks are added even if they occur at
    different times, so that a side without torch is measured like the other side.
    """
    torch = sys.modules.get("torch")
    held = subject.once(_traced)
    if torch is not None:
        held += subject.once(partial(_of_tensors, torch))
        if torch.cuda.is_initialized():
            held += subject.once(partial(_of_cuda, torch))
    return {"memory": float(held)}


def _traced(call: Callable[[], object]) -> int:
    if tracemalloc.is_tracing():
        raise RuntimeError("tracemalloc traces already: the memory of a call cannot be told")
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _of_cuda(torch: Any, call: Callable[[], object]) -> int:
    devices = range(torch.cuda.device_count())
    torch.cuda.synchronize()
    before = [torch.cuda.memory_allocated(device) for device in devices]
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize()
    return sum(
        torch.cuda.max_memory_allocated(device) - held for device, held in zip(devices, before, strict=True)
    )


def _of_tensors(torch: Any, call: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the profiler; warnings of tests are not collected here
        # Not torch.profiler, which imports 800 modules at its start: 0.8 s in each process.
        with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
            call()
    held = highest = 0
    # The profiler reports all devices. The peak of CUDA is read from its allocator.
    host = {torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.MKLDNN, torch.autograd.DeviceType.IDEEP}
    told = profile.kineto_results.events()
    events = [e for e in told if e.name() == "[memory]" and e.device_type() in host]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def _synchronize() -> Callable[[], object]:
    """Return the function that waits for the active accelerator."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _nothing
    found: Callable[[], object] = _nothing
    if torch.cuda.is_initialized():
        found = torch.cuda.synchronize
    elif torch.xpu.is_initialized():
        found = torch.xpu.synchronize
    elif torch.backends.mps.is_available():
        found = torch.mps.synchronize
    return found


def _nothing() -> None:
    pass
