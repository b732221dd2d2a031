"""Children: run a function in new processes, in which faults may end, delay or break its work."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import distributed

from stackwise.stability.faults.fault import Fault
from stackwise.stability.faults.injection import Injection, broken
from stackwise.support.arguments import check_number, check_sizes, require
from stackwise.support.files import replacing

__all__ = ["Child", "Inject", "run_children"]


@dataclass(frozen=True)
class Child:
    """Result of a child process.

    Attributes:
        rank: number of the process, from 0.
        exit_code: 0 if the function returned, 1 if it raised an error, -N if signal N ended the process.
        value: return value of the function. None if it did not return.
        error: description of the error that the function raised. "" if there was none.
        fired: steps at which a fault acted in this process.
        acted: indices of the faults that acted, in the list of faults.
        timed_out: True if the process was killed after the timeout.
    """

    rank: int
    exit_code: int
    value: Any = None
    error: str = ""
    fired: tuple[int, ...] = ()
    acted: tuple[int, ...] = ()
    timed_out: bool = False


@dataclass(frozen=True)
class Inject:
    """Callable like `broken`, with the faults and the journal of a child process.

    Usage: `with inject((model, optimizer)) as injection:`.

    Attributes:
        faults: faults to inject.
        journal: file to which each action is written before the fault continues.
    """

    faults: tuple[Fault, ...]
    journal: Path

    def __call__(self, subject: Any) -> AbstractContextManager[Injection]:
        """Return `stackwise.stability.broken(subject, faults)` with the journal."""
        return broken(subject, self.faults, journal=self.journal)


def run_children(
    function: Callable[..., Any],
    *arguments: Any,
    faults: Sequence[Fault] = (),
    n: int = 1,
    timeout: float = 120.0,
) -> list[Child]:
    """Call `function(inject, *arguments)` in `n` new processes at the same time, and wait for them.

    If there are several processes, they are the ranks of a gloo group. The group is initialised before the
    function is called, with RANK, LOCAL_RANK and WORLD_SIZE set.

    Args:
        function: function at the top level of an importable module, so that it can be pickled.
        *arguments: arguments of `function`. They and its return value must be picklable.
        faults: faults that `inject` injects into a training.
        n: number of processes.
        timeout: seconds after which all processes are killed.

    Returns:
        The results in the order of the ranks.

    Raises:
        ValueError: the function or an argument cannot be pickled, or a number is out of range.
    """
    check_sizes(n=n)
    check_number("timeout", timeout, "seconds, above 0", lambda seconds: seconds > 0)
    try:
        request = pickle.dumps((function, arguments, tuple(faults)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        allowed = f"a function at the top of a module, and arguments that can be pickled ({error})"
        require(False, "function", getattr(function, "__name__", function), allowed)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes: list[BaseProcess] = [
            context.Process(target=_work, args=(request, rank, n, timeout, folder)) for rank in range(n)
        ]
        for process in processes:
            process.start()
        late = _wait(processes, timeout)
        return [_child(folder, rank, process, rank in late) for rank, process in enumerate(processes)]


def _wait(processes: Sequence[BaseProcess], timeout: float) -> set[int]:
    """Wait until all processes have ended. Return the ranks that had to be killed."""
    end = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        late = {rank for rank, process in enumerate(processes) if process.is_alive()}
        for rank in late:
            processes[rank].kill()
        for process in processes:
            process.join()
    return late


def _child(folder: Path, rank: int, process: BaseProcess, timed_out: bool) -> Child:
    exit_code = process.exitcode
    process.close()
    assert exit_code is not None
    journal = folder / f"journal-{rank}"
    actions = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    fired, acted = (tuple(sorted({action[key] for action in actions})) for key in ("step", "number"))
    value, error = None, ""
    answer = folder / f"answer-{rank}"
    if answer.exists():
        value, error = pickle.loads(answer.read_bytes())  # noqa: S301  our own bytes
    return Child(rank, exit_code, value, error, fired, acted, timed_out)


def _told(raised: BaseException) -> str:
    """Return a description of an error, with the location at which it was raised."""
    place = traceback.extract_tb(raised.__traceback__)[-1]
    text = "".join(traceback.format_exception_only(raised)).strip()
    return f"{text} ({place.filename}:{place.lineno} in {place.name})"


def _work(request: bytes, rank: int, n: int, timeout: float, folder: Path) -> None:
    """Run the function in a child process, and write its result to a file."""
    if n > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
        meeting = f"file://{folder}/meeting"
        seconds = timedelta(seconds=timeout)
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n, timeout=seconds)
    value, error = None, ""
    try:
        function, arguments, faults = pickle.loads(request)  # noqa: S301  our own bytes
        value = function(Inject(faults, folder / f"journal-{rank}"), *arguments)
        pickle.dumps(value)
    except BaseException as raised:
        value, error = None, _told(raised)
    with replacing(folder / f"answer-{rank}") as scratch:
        scratch.write_bytes(pickle.dumps((value, error)))
    if n > 1 and not error:
        distributed.destroy_process_group()
    if error:
        sys.stdout.flush()
        os._exit(1)  # does not wait for ranks that are gone
