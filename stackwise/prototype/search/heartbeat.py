"""Heartbeat: signs of life of the process that runs a trial, and its end where it is left alone."""

from __future__ import annotations

import multiprocessing
import os
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from stackwise.prototype.search.claims import BEAT
from stackwise.prototype.search.optuna_import import import_optuna

if TYPE_CHECKING:
    from optuna import Trial

__all__ = ["Heartbeat"]

_LOOK = 2.0  # seconds between two looks at whether the process that started this one is there


class Heartbeat:
    """While it is open, the trial's sign of life changes every `interval` seconds.

    A worker whose search was killed ends: nobody would see what it does.
    """

    def __init__(self, trial: Trial, interval: float) -> None:
        self._trial, self._interval = trial, interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        parent, since, beats = multiprocessing.parent_process(), 0.0, 0
        wait = min(_LOOK, self._interval)
        optuna = import_optuna()
        while not self._ended.wait(wait):
            if parent is not None and not parent.is_alive():
                os._exit(1)
            since += wait
            if since >= self._interval:
                since, beats = 0.0, beats + 1
                try:
                    self._trial.set_user_attr(BEAT, beats)
                except Exception as error:
                    if isinstance(error, optuna.exceptions.UpdateFinishedTrialError):
                        return  # others gave up on it; that is noticed when it is finished
                    # A storage that is busy or away may be there again at the next beat.
