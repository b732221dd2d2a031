"""Isolated: what a function yields, from a process of its own that may neither grow nor stay for ever."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stackwise.benchmark.memory.peak import process_status

__all__ = ["Ended", "all_isolated", "isolated"]

# A process started in between would hold the pipe of another open.
_STARTING = threading.Lock()


@dataclass(frozen=True)
class Ended:
    """How a function's process ended.

    Attributes:
        values: what it yielded until then.
        error: why it did not get to its end; None: it did.
        seconds: from its start.
    """

    values: list[Any]
    error: str | None
    seconds: float


def isolated(
    function: Callable[[], Iterator[Any]], *, seconds: float = 120.0, gigabytes: float = 2.0
) -> Ended:
    """Call `function` in a fork of this process and collect what it yields, which has to be picklable.

    What it prints is thrown away. This process should not have computed anything with several threads.

    Args:
        function: a generator function without arguments.
        seconds: after which its process is ended.
        gigabytes: that it may hold beyond what this process holds now, where the system says what that is.
    """
    context = multiprocessing.get_context("fork")
    with _STARTING:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(function, sender, gigabytes), daemon=False)
        process.start()
        sender.close()
    start, values, error = time.monotonic(), [], None
    try:
        while True:
            if not receiver.poll(max(0.0, start + seconds - time.monotonic())):
                error = f"took longer than {seconds:.0f} s"
                break
            kind, value = receiver.recv()
            if kind == "value":
                values.append(value)
            else:
                error = value
                break
    except EOFError:
        process.join()
        error = f"its process ended with {process.exitcode}"
    finally:
        _end(process)
        receiver.close()
    return Ended(values, error, time.monotonic() - start)


def all_isolated(
    functions: Mapping[str, Callable[[], Iterator[Any]]], *, jobs: int, seconds: float = 120.0
) -> Iterator[tuple[str, Ended]]:
    """`isolated` of each, `jobs` at a time: (name, how it ended) as each ends."""
    with ThreadPoolExecutor(jobs) as pool:
        names = {pool.submit(isolated, each, seconds=seconds): name for name, each in functions.items()}
        for future in as_completed(names):
            yield names[future], future.result()


def _serve(function: Callable[[], Iterator[Any]], sender: Connection, gigabytes: float) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  to the end of the process
    held = process_status("VmData")  # private memory that can be written to
    if held is not None:
        limit = held + int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    warnings.simplefilter("ignore")
    try:
        for value in function():
            sender.send(("value", value))
        sender.send(("end", None))
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        sender.send(("end", f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"))
    finally:
        sender.close()
        os._exit(0)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End the process and whatever it started."""
    assert process.pid is not None
    process.join(1.0)
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its own group, of which it is the leader
    except ProcessLookupError:
        if process.is_alive():
            process.kill()
    process.join()
