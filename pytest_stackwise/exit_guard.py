"""Exit guard: a run of the gate that ends before its verdict does not exit with code 0."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

__all__ = ["guard_exit", "no_success"]

_ADVICE = "the gate has no verdict: let this code run when the program is started, not when it is imported"


def guard_exit(config: pytest.Config) -> None:
    """Replace `os._exit` until the end of the session. Exit code 0 becomes 4, and a message names the caller.

    Processes that multiprocessing has forked from this process are not affected.
    """
    exit_now = os._exit
    owner = os.getpid()

    def guarded(status: int) -> NoReturn:
        if status == 0 and os.getpid() == owner:
            capture = config.pluginmanager.getplugin("capturemanager")
            if capture is not None:
                capture.suspend_global_capture(in_=False)  # otherwise the message is lost
            caller = traceback.extract_stack(limit=2)[0]
            where = f"{caller.filename}:{caller.lineno}"
            print(f"ERROR: --stackwise-against: {where} called os._exit(0): {_ADVICE}", file=sys.stderr)
            sys.stderr.flush()
            status = int(pytest.ExitCode.USAGE_ERROR)
        exit_now(status)

    os._exit = guarded

    def restore() -> None:
        if os._exit is guarded:
            os._exit = exit_now

    config.add_cleanup(restore)


@contextmanager
def no_success() -> Iterator[None]:
    """Turn `sys.exit(0)` in the body of the `with` statement into a usage error.

    Raises:
        pytest.UsageError: the body called `sys.exit` with success.
    """
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        raise pytest.UsageError(f"--stackwise-against: a conftest called sys.exit(0): {_ADVICE}") from None
