"""SearchProgress: progress of a search, as a live line on a terminal, otherwise as a line per trial."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TextIO

from stackwise.prototype.search.objective import read_objectives
from stackwise.prototype.search.trial import SearchTrial
from stackwise.support.progress import duration_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["SearchProgress"]

_SHORT = 5.0  # seconds of a search below which no remaining time is shown


class SearchProgress:
    """Report of each finished trial.

    Args:
        budget: number of trials of the study.
        objectives: names. The first one is reported.
        shown: True if progress is shown.
        out: output stream. None: standard error.
        clock: function that returns seconds.
    """

    def __init__(
        self,
        budget: int,
        objectives: Sequence[str],
        *,
        shown: bool = True,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._began = clock, clock()
        self._budget, self._objective = budget, read_objectives(objectives)[0]
        self._shown, self._out = shown, sys.stderr if out is None else out
        self._done = 0
        self._best_trial: SearchTrial | None = None
        self._bar: Progress | None = None
        self._line: TaskID | None = None

    def __enter__(self) -> Self:
        if self._shown and self._out.isatty():
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=Console(file=self._out, highlight=False),
            )
            self._line = self._bar.add_task(f"{self._of()}")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def tell(self, trial: SearchTrial) -> None:
        """Add a finished trial."""
        self._done += 1
        better = self._best_trial is None or self._objective.cost(trial) < self._objective.cost(
            self._best_trial
        )
        if trial.status == "success" and better:
            self._best_trial = trial
        best = "" if self._best_trial is None else f", best {self._told(self._best_trial)}"
        if self._bar is not None and self._line is not None:
            self._bar.update(self._line, description=f"{self._of()}{best}{self._left()}")
        elif self._shown:
            told = self._told(trial) if trial.status == "success" else f"{trial.status}: {trial.reason}"
            values = ", ".join(f"{key}={value}" for key, value in trial.values.items())
            print(f"trial {trial.number}: {told} ({values}){best}{self._left()}", file=self._out, flush=True)

    def end(self) -> None:
        """Stop the live line and leave it on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _of(self) -> str:
        return f"{self._done} trials done here, of {self._budget} in all"

    def _left(self) -> str:
        """Return the remaining time of a search that takes longer than 5 s, if this process does the rest."""
        spent, left = self._clock() - self._began, self._budget - self._done
        if spent < _SHORT or left <= 0:
            return ""
        return f", about {duration_text(spent / self._done * left)} left"

    def _told(self, trial: SearchTrial) -> str:
        value = self._objective.of(trial)
        number = "" if value is None else f" {value:.5g}"
        return f"{self._objective.name}{number}"
