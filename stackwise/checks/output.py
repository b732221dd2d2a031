"""Output of the model under test: a line is shown once, however often the model is built and called."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["ShownLines", "shown_once"]

# What changes between two updates of a progress bar, or between two builds: numbers and blocks.
_VARIABLE = re.compile(r"[\d\s.,:#?█▉▊▋▌▍▎▏]+")


class ShownLines:
    """Record of the lines shown so far. The first build is one round, and each check is another.

    A line is a repeat if it was shown in this round, or if a line of an earlier round differs from it only in
    numbers. So a table of layers is shown once, and not again with other timings.

    Attributes:
        repeats: number of lines that were not shown.
    """

    def __init__(self) -> None:
        self.repeats = 0
        self._lines, self._kinds, self._earlier = set[str](), set[str](), set[str]()

    def next_round(self) -> None:
        """End the current round."""
        self._earlier |= self._kinds
        self._lines.clear()
        self._kinds.clear()

    def add(self, line: str) -> bool:
        """Return True if the line is to be shown: it is no repeat."""
        kind = _VARIABLE.sub("", line)
        is_progress = line.endswith("\r")
        if kind in self._earlier or line in self._lines or (is_progress and kind in self._kinds):
            self.repeats += 1
            return False
        self._lines.add(line)
        self._kinds.add(kind)
        return True


@contextmanager
def shown_once() -> Iterator[ShownLines]:
    """Show each line of standard output and standard error once, and at the end the number of repeats.

    Covers `print`, warnings, progress bars, and log handlers that write to one of the two streams. A line is
    shown as soon as it is complete, so that a crash loses none. If used inside itself, the outer one counts.
    """
    if isinstance(sys.stdout, _OnceStream):
        yield sys.stdout.shown
        return
    shown = ShownLines()
    out, err = _OnceStream(sys.stdout, shown), _OnceStream(sys.stderr, shown)
    sys.stdout, sys.stderr = out, err
    for handler in _stream_handlers():
        for stream in (out, err):
            if handler.stream is stream.behind:
                handler.setStream(stream)
    try:
        yield shown
    finally:
        sys.stdout, sys.stderr = out.behind, err.behind
        # A handler that was created inside holds one of the two as well.
        for handler in _stream_handlers():
            if isinstance(handler.stream, _OnceStream):
                handler.setStream(handler.stream.behind)
        out.finish()
        err.finish()
        if shown.repeats:
            print(f"(output of the model: {shown.repeats:,} repeated lines are not shown)", file=sys.stderr)


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    """Return the log handlers that hold a stream."""
    found: list[logging.StreamHandler[Any]] = []
    for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            found += [each for each in logger.handlers if isinstance(each, logging.StreamHandler)]
    return found


class _OnceStream:
    """Text stream that passes on the lines that are no repeats.

    Attributes:
        behind: the stream that they are passed on to.
        shown: the lines so far, which the two streams of a process share.
    """

    def __init__(self, behind: TextIO, shown: ShownLines) -> None:
        self.behind, self.shown = behind, shown
        self._line = ""

    def write(self, text: str) -> int:
        """Pass on the lines that are complete. A carriage return ends a line too, as in progress bars."""
        *lines, self._line = re.split(r"(?<=[\n\r])", self._line + text)
        for line in lines:
            self._pass_on(line)
        return len(text)

    def finish(self) -> None:
        """Pass on the last line, which has no end."""
        self._pass_on(self._line)
        self._line = ""

    def _pass_on(self, line: str) -> None:
        if line.strip() and self.shown.add(line):
            self.behind.write(line.rstrip("\r\n") + "\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)
