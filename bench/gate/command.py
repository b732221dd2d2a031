"""Command: a command line that has a time to end in, and codes that it may end with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

__all__ = ["ENVIRONMENT", "CommandFailedError", "run", "tail"]

# Of all that is measured alike.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_SETTINGS = ("PYTEST_", "GIT_")  # of who runs the bench, and none of it
_TAIL = 2000
_PATIENCE = 20.0  # seconds that a command has to end, once it is told to


class CommandFailedError(RuntimeError):
    """A command line ended with none of the codes that it may end with, or not at all."""


def run(
    command: Sequence[str],
    folder: Path,
    *,
    seconds: float | None = None,
    codes: Collection[int] = (0,),
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a command prints, both ways.

    Args:
        command: the program and its arguments.
        folder: in which it runs.
        seconds: after which it is ended with all that it started; None: it may take as long as it does.
        codes: that it may end with.
        environment: variables beside those of this process, of which the settings of pytest and git are
            left out.

    Raises:
        CommandFailedError: it ended with another code, or took too long.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_SETTINGS)}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**inherited, **ENVIRONMENT, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise CommandFailedError(f"{' '.join(command)}: took longer than {seconds:.0f} s") from None
        raise
    if process.returncode not in codes:
        text = f"{' '.join(command)}: ended with {process.returncode}: {tail(printed)}"
        raise CommandFailedError(text)
    return printed


def tail(printed: str) -> str:
    """The end of what a command printed, for an error."""
    return printed.strip()[-_TAIL:]


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and what it started; the gate has processes and trees to take away first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_PATIENCE)
            return
