"""Filter of the output of the model under test: repeated lines are shown once."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["ShownLines", "shown_once"]

# Numbers and blocks, which change between two updates of a progress bar or between two builds.
_VARIABLE = re.compile(r"[\d\s.,:#?█▉▊▋▌▍▎▏]+")


class ShownLines:
    """Record of the shown lines. The first build is one round, and each check is another round.

    A line is a repeat if it was shown in this round, or if a line of an earlier round differs from it only in
    numbers. For example, a table of layers is shown once, although its timings change.

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
        """Record a line, and return True if it is not a repeat."""
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

    It applies to `print`, warnings, progress bars, and log handlers of the two streams. A line is shown as
    soon as it is complete, so that a crash loses no line. A nested call uses the outer record.
    """
    if isinstance(sys.stdout, _OnceStream):
        yield sys.stdout.shown
        return
    shown = ShownLines()
    out, err = _OnceStream(sys.stdout, shown), _OnceStream(sys.stderr, shown)
    sys.stdout, sys.stderr = out, err
    for handler in _stream_handlers():
        for stream in (out, err):
            if handler.stream is stream.target:
                handler.setStream(stream)
    try:
        yield shown
    finally:
        sys.stdout, sys.stderr = out.target, err.target
        # Handlers that were created inside hold one of the two streams.
        for handler in _stream_handlers():
            if isinstance(handler.stream, _OnceStream):
                handler.setStream(handler.stream.target)
        out.finish()
        err.finish()
        if shown.repeats:
            print(f"(output of the model: {shown.repeats:,} repeated lines are not shown)", file=sys.stderr)


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    """Return the log handlers that hold a stream."""
    loggers = (logging.getLogger(), *logging.Logger.manager.loggerDict.values())
    handlers = [each for logger in loggers if isinstance(logger, logging.Logger) for each in logger.handlers]
    return [each for each in handlers if isinstance(each, logging.StreamHandler)]


class _OnceStream:
    """Text stream that forwards the lines that are not repeats.

    Attributes:
        target: the stream that receives them.
        shown: record of the shown lines, shared by the two streams.
    """

    def __init__(self, target: TextIO, shown: ShownLines) -> None:
        self.target, self.shown = target, shown
        self._line = ""

    def write(self, text: str) -> int:
        """Forward the complete lines. A carriage return completes a line too, as in progress bars."""
        *lines, self._line = re.split(r"(?<=[\n\r])", self._line + text)
        for line in lines:
            self._forward(line)
        return len(text)

    def finish(self) -> None:
        """Forward the last line, which is incomplete."""
        self._forward(self._line)
        self._line = ""

    def _forward(self, line: str) -> None:
        if line.strip() and self.shown.add(line):
            self.target.write(line.rstrip("\r\n") + "\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)
