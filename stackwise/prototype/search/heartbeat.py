"""Heartbeat: signs of life of the process that runs a trial, and its exit if its parent has died."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import TYPE_CHECKING, Self

from stackwise.prototype.search.claims import BEAT
from stackwise.prototype.search.optuna_import import import_optuna

if TYPE_CHECKING:
    from optuna import Trial

__all__ = ["Heartbeat"]

_LOOK = 2.0  # seconds between two checks that the parent process is alive


class Heartbeat:
    """Context in which the heartbeat of a trial changes every `interval` seconds.

    A worker exits if the process of its search was killed, because its results would be lost.
    """

    def __init__(self, trial: Trial, interval: float) -> None:
        self._trial, self._interval = trial, interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
                        return  # another process took the trial over; detected when it is finished
                    # A busy or unavailable storage may be available at the next heartbeat.
