"""HiddenOutput: collects the output of models and libraries, and does not show it on the terminal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TextIO

__all__ = ["HiddenOutput", "hidden_output"]


@dataclass
class HiddenOutput:
    """Output that was collected and not shown.

    Attributes:
        terminal: the original standard error, for the command's own lines.
        text: everything that was written to standard output and standard error in the block.
    """

    terminal: TextIO
    text: str = ""

    @property
    def n_lines(self) -> int:
        """Number of lines that are not empty."""
        return sum(1 for line in self.text.splitlines() if line.strip())


@contextlib.contextmanager
def hidden_output() -> Iterator[HiddenOutput]:
    """Collect the output of Python code, C++ libraries and child processes in the block.

    If the block raises, the output is shown on standard error, because it may explain the error. An error of
    the user (ValueError, OSError, ImportError) explains itself. If the process crashes, Python's traceback is
    shown.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with (
        _terminal() as terminal,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", buffering=1) as file,
    ):
        hidden = HiddenOutput(terminal)
        try:
            with (
                _crash_report(terminal),
                _redirected(1, file),
                _redirected(2, file),
                contextlib.redirect_stdout(file),
                contextlib.redirect_stderr(file),
            ):
                yield hidden
        except (ValueError, OSError, ImportError):
            hidden.text = _content(file)
            raise
        except Exception:
            terminal.write(_content(file))
            raise
        hidden.text = _content(file)


@contextlib.contextmanager
def _terminal() -> Iterator[TextIO]:
    """Yield a copy of standard error that stays valid when file descriptor 2 is redirected."""
    original = sys.__stderr__
    if original is None or sys.stderr is not original:
        yield sys.stderr  # replaced by the caller, for example by a test
        return
    with os.fdopen(os.dup(2), "w", encoding=original.encoding, errors="replace") as stream:
        yield stream


@contextlib.contextmanager
def _crash_report(terminal: TextIO) -> Iterator[None]:
    """Let Python print its traceback to the terminal if the process crashes in the block."""
    try:
        terminal.fileno()
    except (OSError, ValueError):  # the stream of a test
        yield
        return
    was_enabled = faulthandler.is_enabled()
    faulthandler.enable(terminal)
    try:
        yield
    finally:
        faulthandler.disable()
        if was_enabled:
            faulthandler.enable()


@contextlib.contextmanager
def _redirected(descriptor: int, file: IO[str]) -> Iterator[None]:
    """Redirect a file descriptor to the file in the block."""
    saved = os.dup(descriptor)
    try:
        os.dup2(file.fileno(), descriptor)
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)


def _content(file: IO[str]) -> str:
    """Return everything that was written to the file."""
    file.flush()
    file.seek(0)
    return file.read()
