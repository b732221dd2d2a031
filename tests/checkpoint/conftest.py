"""A process that is killed before any one of its operations on files."""

import os
import signal
import warnings

import pytest

OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "rmdir", "unlink", "chmod")


@pytest.fixture
def killed_at():
    return _killed_at


def _killed_at(count, call):
    """Whether a child that does `call` was killed before its operation of that number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        seen = 0

        def deadly(function):
            def operation(*given, **options):
                nonlocal seen
                seen += 1
                if seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*given, **options)

            return operation

        for name in OPERATIONS:
            setattr(os, name, deadly(getattr(os, name)))
        try:
            call()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
