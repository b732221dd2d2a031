"""Children: a function in new processes, in which faults may end, slow down or break what it does."""

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
    """What came of a process.

    Attributes:
        rank: its number, from 0.
        exit_code: 0, where the function returned; 1, where it raised; -N, where signal N ended it.
        value: that the function returned; None where it did not.
        error: what it raised; "": nothing.
        fired: the steps at which a fault did act in it.
        acted: the numbers of the faults that did, in the order in which they were given.
        timed_out: whether it was ended since it took too long.
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
    """`broken`, with the faults and the journal of a child: `with inject((model, optimizer)) as injection:`.

    Attributes:
        faults: what is broken.
        journal: where each action is written down before the fault goes on.
    """

    faults: tuple[Fault, ...]
    journal: Path

    def __call__(self, subject: Any) -> AbstractContextManager[Injection]:
        """As `stackwise.stability.broken(subject, faults)`."""
        return broken(subject, self.faults, journal=self.journal)


def run_children(
    function: Callable[..., Any],
    *arguments: Any,
    faults: Sequence[Fault] = (),
    n: int = 1,
    timeout: float = 120.0,
) -> list[Child]:
    """Call `function(inject, *arguments)` in `n` new processes at the same time, and wait for them.

    Several are the ranks of a gloo group that is there when the function begins, with RANK, LOCAL_RANK and
    WORLD_SIZE set.

    Args:
        function: what pickle takes: one at the top of a module that can be imported.
        *arguments: what pickle takes; so has to be what the function returns.
        faults: that `inject` puts into a training.
        n: processes.
        timeout: seconds after which all are killed.

    Raises:
        ValueError: something that pickle does not take, or a number out of range.
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
    """Until all have ended; those that had to be killed."""
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
    """What was raised, and where."""
    place = traceback.extract_tb(raised.__traceback__)[-1]
    text = "".join(traceback.format_exception_only(raised)).strip()
    return f"{text} ({place.filename}:{place.lineno} in {place.name})"


def _work(request: bytes, rank: int, n: int, timeout: float, folder: Path) -> None:
    """What each process does."""
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
        os._exit(1)  # without waiting for ranks that are gone
