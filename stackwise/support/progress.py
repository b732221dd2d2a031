"""ProgressLine: progress of a long command on standard error, with the time left."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["ProgressLine", "duration_text"]

_FIRST = 5.0  # seconds before the first line: shorter commands show none
_PAUSE = {True: 0.2, False: 10.0}  # seconds between two lines, on a terminal and elsewhere


class ProgressLine:
    """Progress of a command that takes more than 5 seconds.

    On a terminal it is one line, which is overwritten and deleted at the end. Elsewhere, for example in the
    log of a CI job, it is a new line every 10 seconds. The remaining time is extrapolated from the share of
    the work that is done. Call `close` at the end, for example with `contextlib.closing`.

    Args:
        label: start of the line, such as "checking".
        stream: where to write. None: standard error at the time of the call.
        clock: returns seconds from any origin.
    """

    def __init__(
        self, label: str, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label, self._clock = label, clock
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._began = clock()
        self._next = self._began + _FIRST
        self._is_visible = False

    def update(self, done: int, total: int, detail: str = "") -> None:
        """Show how much is done.

        Args:
            done: number of finished parts.
            total: number of all parts.
            detail: the current part, or a result.
        """
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _PAUSE[self._live]
        spent = now - self._began
        left = f", about {duration_text(spent / done * (total - done))} left" if 0 < done < total else ""
        line = f"{self._label}: {done} of {total}{left}{f', {detail}' if detail else ''}"
        if self._live:
            width = _width()
            self._stream.write(f"\r{line[:width]:{width}}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
        self._is_visible = self._live

    def close(self) -> None:
        """Delete the line from the terminal."""
        if self._is_visible:
            self._stream.write(f"\r{'':{_width()}}\r")
            self._stream.flush()
            self._is_visible = False


def _width() -> int:
    """Return the columns of a line that can be overwritten. A longer line would wrap."""
    return min(79, shutil.get_terminal_size().columns - 1)


def duration_text(seconds: float) -> str:
    """Return a rounded duration, such as "40 s", "3 min" or "2 h 5 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
