"""Processes: workers of a search on this machine."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from stackwise.prototype.search.evaluation import leaves_unusable
from stackwise.prototype.search.record import finished_trials
from stackwise.prototype.search.worker import OnTrial, Task, Worker, report_trial

if TYPE_CHECKING:
    from optuna import Study

__all__ = ["work_in_processes"]

_POLL = 0.3  # seconds between two polls of the workers and their results
_INTERRUPTS = 4  # Python ignores an interrupt in a callback of the garbage collector
_PATIENCE = 3.0  # seconds after an interrupt that workers have to requeue their trials
_DEATHS = 3  # per worker, without a result in between; three deaths of a configuration are an error
_DEVICE_LOST = 75  # exit code of a worker whose device is unusable


def work_in_processes(task: Task, study: Study, jobs: int, on_trial: OnTrial | None) -> None:
    """Run a task in several processes with one thread each, and replace workers that are killed.

    Raises:
        ValueError: the task cannot be pickled.
        RuntimeError: a worker failed outside of a trial, exited before it started, or died repeatedly.
    """
    try:
        pickled = pickle.dumps(task)
    except Exception as error:
        raise ValueError(
            f"jobs: got {jobs}; allowed: 1 with what cannot be pickled, or functions of importable modules"
            f" ({type(error).__name__}: {error})"
        ) from None
    known = {each.number for each in finished_trials(study)}
    deaths = 0
    workers = [_start(pickled) for _ in range(jobs)]
    try:
        while workers:
            time.sleep(_POLL)
            for frozen in finished_trials(study):
                if frozen.number not in known:
                    known.add(frozen.number)
                    deaths = 0
                    report_trial(frozen, on_trial)
            for worker in list(workers):
                if (is_alive := _is_alive(worker)) is False:
                    workers.remove(worker)
                elif is_alive is None:
                    # Its trial is repeated, but not indefinitely. Each worker may have another configuration
                    # that kills it.
                    deaths += 1
                    if deaths > _DEATHS * jobs:
                        raise RuntimeError(f"{deaths} workers were killed without a result in between")
                    workers[workers.index(worker)] = _start(pickled)
    finally:
        _stop(workers)


def _start(pickled: bytes) -> ProcessContext:
    context: ProcessContext = start_processes(  # type: ignore[no-untyped-call]
        _work_apart, (pickled,), join=False, daemon=True, start_method="spawn"
    )
    return context


def _is_alive(worker: ProcessContext) -> bool | None:
    """Return True for a running worker, False for a finished one, None for one that was killed.

    Raises:
        RuntimeError: the worker failed.
    """
    try:
        return not worker.join(timeout=0)
    except ProcessRaisedException as error:
        raise RuntimeError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from error
    except ProcessExitedException as error:
        if error.signal_name is None and error.exit_code != _DEVICE_LOST:
            raise RuntimeError(
                f"a worker ended with exit code {error.exit_code}; a script that searches with jobs > 1 "
                'does so under `if __name__ == "__main__":`'
            ) from error
        return None


def _work_apart(_index: int, pickled: bytes) -> None:
    """Run trials in a separate process with one thread.

    Args:
        _index: index of the process.
        pickled: a `Task`. An error while it is unpickled is reported like any other.
    """
    torch.set_num_threads(1)
    task: Task = pickle.loads(pickled)  # noqa: S301  from the process that started this one
    try:
        with task.open_study() as study:
            Worker(task, study).run()
    except Exception as error:
        if leaves_unusable(error):
            sys.exit(_DEVICE_LOST)
        raise


def _stop(workers: list[ProcessContext]) -> None:
    """Make workers requeue their trials and exit. Kill workers that do not."""
    processes = [process for worker in workers for process in worker.processes]
    for _ in range(_INTERRUPTS):
        for process in processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGINT)
        limit = time.monotonic() + _PATIENCE
        for process in processes:
            process.join(max(0.0, limit - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
