"""A fresh process: the peak memory of a call where nothing else has ever been in memory."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stackwise.benchmark.memory.peak import PeakMemory, high_water_mark, watch_peak
from stackwise.benchmark.plain_call import is_plain_call, kind_of, refuse_unstarted
from stackwise.subject.factory import load_factory
from stackwise.support.arguments import check_number, require
from stackwise.support.files import replacing

__all__ = ["FreshPeak", "FreshProcessError", "fresh_peak_memory"]

_FACTORY = "a function at the top of a module, or 'MODULE:FACTORY' or 'path/to/file.py:FACTORY'"
_LAST_LINES = 5
_is_importing = False  # in the process that answers: it has not got what it is to call yet


class FreshProcessError(RuntimeError):
    """The process did not come to the end of the call: what it raised, or how it ended."""


@dataclass(frozen=True)
class FreshPeak:
    """Peak memory of a call in a process of its own.

    Attributes:
        peak: of the call; `peak.before` is what the process held once the call was set up.
        lifetime: the most bytes that were ever resident in the process, with its imports and what set the
            call up; None where nobody says.
    """

    peak: PeakMemory
    lifetime: int | None


@dataclass(frozen=True)
class _Request:
    """What the process is to do."""

    module: str
    file: str | None
    name: str
    arguments: tuple[Any, ...]
    device: str
    n_threads: int


def fresh_peak_memory(
    factory: Callable[..., Callable[[], object]] | str,
    *arguments: Any,
    device: torch.device | str = "cpu",
    seconds: float = 120.0,
) -> FreshPeak:
    """Call `factory(*arguments)()` in a new interpreter, and take the peak memory of the call itself.

    Only so does the peak of a call on the CPU depend on nothing but the call: a process that has done other
    things keeps memory, and finds room in it. The interpreter is a new one, not a fork: it imports the
    module of `factory` anew, under the environment and the import path of this process, with as many
    threads. What it prints is shown only with an error.

    Args:
        factory: sets up what is measured, and returns it as a function without arguments.
        *arguments: of `factory`; what pickle takes.
        device: whose memory is looked at.
        seconds: after which the process, and what it started, is killed.

    Raises:
        ValueError: another process could not find `factory`, or pickle does not take an argument.
        FreshProcessError: the process raised, ended by itself, or took too long; or this is that process,
            which still imports the module: each would start another.
    """
    if _is_importing:
        raise FreshProcessError(
            "fresh_peak_memory: called at the top of the module that its own process imports; allowed: in a "
            "function, or under if __name__ == '__main__':"
        )
    check_number("seconds", seconds, "a finite number > 0", lambda value: value > 0)
    module, file, name = _place_of(factory)
    request = _Request(module, file, name, arguments, str(torch.device(device)), torch.get_num_threads())
    try:
        pickled = pickle.dumps(request)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"arguments: got {arguments!r}; allowed: what pickle takes ({error})") from error
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "request").write_bytes(pickled)
        status = _run(folder, seconds)
        answer = folder / "answer"
        if answer.exists():
            result, error_text = pickle.loads(answer.read_bytes())  # noqa: S301  our own bytes
            if error_text:
                raise FreshProcessError(f"{name}: {error_text}")
            assert isinstance(result, FreshPeak)
            return result
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
    if status is None:
        reason = f"did not finish in {seconds:g} s"
    elif status < 0:
        reason = f"was ended by {signal.Signals(-status).name}"
    else:
        reason = f"ended with status {status}"
    raise FreshProcessError("\n".join([f"{name}: its process {reason}", *lines]))


def _place_of(factory: Callable[..., Any] | str) -> tuple[str, str | None, str]:
    """Module, file and name under which another process finds `factory`."""
    if isinstance(factory, str):
        module, separator, name = factory.rpartition(":")
        require(bool(separator and module and name), "factory", factory, _FACTORY)
        return ("", str(Path(module).resolve()), name) if module.endswith(".py") else (module, None, name)
    name = getattr(factory, "__qualname__", "<")
    module = getattr(factory, "__module__", None) or ""
    require(bool(module) and "<" not in name, "factory", factory, _FACTORY)
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__":
        require(file is not None, "factory", factory, f"{_FACTORY}; this one is in no file")
    return module, None if file is None else str(Path(file).resolve()), name


def _run(folder: Path, seconds: float) -> int | None:
    """The status of a process that answers the request in `folder`; None: it had to be killed."""
    paths = [path or str(Path.cwd()) for path in sys.path]
    command = "import sys; from stackwise.benchmark.memory.fresh_process import main; main(sys.argv[1])"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  our own interpreter and our own command
            [sys.executable, "-c", command, str(folder)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own group, with all that it started
            process.wait()


def main(folder: str) -> None:
    """What the other process does."""
    global _is_importing
    _is_importing = True
    request = pickle.loads((Path(folder) / "request").read_bytes())  # noqa: S301  our own bytes
    torch.set_num_threads(request.n_threads)
    result, error_text = None, ""
    try:
        result = _measured(request)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        error_text = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    with replacing(Path(folder) / "answer") as scratch:
        scratch.write_bytes(pickle.dumps((result, error_text)))


def _measured(request: _Request) -> FreshPeak:
    global _is_importing
    factory = _found(request)
    _is_importing = False
    call = factory(*request.arguments)
    if not is_plain_call(call):
        raise TypeError(f"returned {kind_of(call)}; wanted what is measured, a function")
    before = high_water_mark()
    with watch_peak(request.device) as watch:
        refuse_unstarted(call())
    marks = [mark for mark in (before, watch.peak.resident) if mark is not None]
    return FreshPeak(watch.peak, max(marks, default=None))


def _found(request: _Request) -> Any:
    """The factory, by its module, else from the file: scripts, and tests, have modules of another name."""
    if request.module not in ("", "__main__"):
        try:
            module = importlib.import_module(request.module)
        except ImportError:
            if request.file is None:
                raise
        else:
            if request.file in (None, str(Path(module.__file__ or "").resolve())):
                return load_factory(f"{request.module}:{request.name}")
    return load_factory(f"{request.file}:{request.name}")
