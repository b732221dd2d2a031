"""Peak memory of a call in a fresh process, in which no other work has used memory."""

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
_is_importing = False  # true in the new process until the call has been created


class FreshProcessError(RuntimeError):
    """Error of the new process: its exception, its exit status, or a time-out."""


@dataclass(frozen=True)
class FreshPeak:
    """Peak memory of a call in a separate process.

    Attributes:
        peak: peak memory of the call. `peak.before` is the memory of the process when the call had been set
            up.
        lifetime: maximum resident bytes over the life of the process, including imports and setup. None: not
            reported.
    """

    peak: PeakMemory
    lifetime: int | None


@dataclass(frozen=True)
class _Request:
    """Request to the new process."""

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
    """Call `factory(*arguments)()` in a new interpreter and return the peak memory of the call.

    On the CPU, only a fresh process makes the peak independent of earlier work, which leaves free memory in
    the process. The interpreter is new, not a fork. It imports the module of `factory` with the environment,
    the import path and the number of threads of this process. Its output is shown only in an error.

    Args:
        factory: function that sets up the measured work and returns it as a function without arguments.
        *arguments: arguments of `factory`. They must be picklable.
        device: device for the peak memory.
        seconds: time limit, after which the process and its child processes are killed.

    Raises:
        ValueError: another process cannot find `factory`, or an argument is not picklable.
        FreshProcessError: the process raised, exited or exceeded the time limit. Also raised in the new
            process while it imports the module, because each process would start another.
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
    """Return the module, file and name by which another process finds `factory`."""
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
    """Return the exit status of a process that handles the request in `folder`. None: it was killed."""
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
            os.killpg(process.pid, signal.SIGKILL)  # its process group, with all child processes
            process.wait()


def main(folder: str) -> None:
    """Handle the request in `folder`. This is the entry point of the new process."""
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
    """Return the factory from its module, or from its file if the module has another name.

    Scripts and tests have another module name in the new process.
    """
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
