"""Progress: a live line on a terminal, otherwise a line at intervals."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stackwise.stability.guard import Alarm
from stackwise.stability.telemetry import StepRecord
from stackwise.support.progress import duration_text

__all__ = ["TrainingProgress"]


class TrainingProgress:
    """Display of the newest step's loss, gradient norm and tokens per second.

    Args:
        total_steps: length of the run in steps.
        console: output console; default: standard error.
        quiet_seconds: minimum time between two lines without a terminal, in seconds.
    """

    def __init__(
        self, total_steps: int, *, console: Console | None = None, quiet_seconds: float = 10.0
    ) -> None:
        self._console = console or Console(stderr=True)
        self._total, self._quiet_seconds = total_steps, quiet_seconds
        self._bar: Progress | None = None
        self._validation = ""
        self._alarms = 0
        self._first: tuple[int, float] | None = None  # step and time
        if self._console.is_terminal:
            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=total_steps)

    def __enter__(self) -> Self:
        self._start = self._last_line = time.perf_counter()
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def write(
        self,
        records: Sequence[StepRecord],
        figures: Mapping[str, float] | None = None,
        alarms: Sequence[Alarm] = (),
    ) -> None:
        """Show the last of `records` as the newest step, with its rate if `figures` has one.

        `figures` come from `Throughput.to_dict`. Tokens per second, utilisation, the fraction of time spent
        waiting for data, the last validation loss and the total number of alarms are shown.
        """
        self._alarms += len(alarms)
        if records:
            figures = figures or {}
            if "validation_loss" in figures:
                self._validation = f"validation {figures['validation_loss']:.3f}  "
            rate = figures.get("tokens_per_second")
            parts = [] if rate is None else [f"{rate:,.0f} tokens/s"]
            if self._alarms:
                parts.append(f"{self._alarms} alarm" + "s" * (self._alarms > 1))
            for key, name in (("mfu", "MFU"), ("data_wait_share", "data wait")):
                if key in figures:
                    parts.append(f"{name} {figures[key]:.0%}")
            self._show(records[-1], "  ".join(parts))

    def _show(self, record: StepRecord, rate: str) -> None:
        now = time.perf_counter()
        done = record.step + 1
        self._first = self._first or (done, now)
        text = f"loss {record.loss:.3f}  {self._validation}grad norm {record.grad_norm:.2f}  {rate}".rstrip()
        if self._bar:
            self._bar.update(self._task, completed=done, description=text)
        elif done == self._total or now - self._last_line >= self._quiet_seconds:
            self._last_line = now
            line = f"training {done}/{self._total}  {text}{self._left(done, now)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _left(self, done: int, now: float) -> str:
        """Return the remaining time, at the speed since the first shown step: a resumed run begins later."""
        assert self._first is not None
        first, start = self._first
        if done == first or now - start < 1:
            return ""
        seconds = (now - start) / (done - first) * (self._total - done)
        return f"  about {duration_text(seconds)} left" if done < self._total else ""
