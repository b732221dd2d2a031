"""Twins: pair of processes, one per side, that are forks of the same process."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stackwise.gate.side import twin as program
from stackwise.gate.side.channel import DESCRIPTOR, Channel, ChannelClosedError
from stackwise.gate.side.clock import real_time

__all__ = ["Twin", "Twins", "interpreter", "start_python"]

_PADDING = 4096  # maximum length of the padding of the environment
_COUNT = 2
_PATIENCE = 60.0  # seconds for the start of an interpreter
# Options of the interpreter that are passed on as flags. Without -E and -I, since the environment configures
# a side.
_OPTIONS = {
    "optimize": "O",
    "bytes_warning": "b",
    "dont_write_bytecode": "B",
    "no_site": "S",
    "no_user_site": "s",
    "safe_path": "P",
}
# Prefixes of variables that let coverage, Python itself, hunter and line_profiler instrument a process.
_TRACERS = (
    "COVERAGE_PROCESS_",
    "COV_CORE_",
    "PYTHONTRACEMALLOC",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONPERFSUPPORT",
    "PYTHON_PERF_JIT_SUPPORT",
    "PYTHONHUNTER",
    "LINE_PROFILE",
)
_TRACER_OPTIONS = frozenset({"tracemalloc", "importtime", "perf", "perf_jit"})  # of -X


def start_python(
    arguments: Sequence[str],
    descriptors: Sequence[int],
    seed: int,
    log: Path,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] = {},
) -> subprocess.Popen[bytes]:
    """Start this Python in a session of its own. Random properties of the process are drawn from the seed.

    Args:
        arguments: arguments of the interpreter.
        descriptors: descriptors that the process inherits.
        seed: seed of the hash seed, and of a padding of the environment, which moves the stack.
        log: file for the output.
        folder: working directory; None: the current one.
        environment: variables in addition to those of this process, of which those of tracers are removed.
    """
    chance = random.Random(seed)  # noqa: S311
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(_TRACERS)},
        **environment,
        "PYTHONHASHSEED": str(chance.randrange(2**32)),
        "STACKWISE_GATE_PADDING": "x" * chance.randrange(_PADDING),
    }
    with log.open("wb") as output:
        return subprocess.Popen(  # noqa: S603
            [*interpreter(), *arguments],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            start_new_session=True,
        )


def interpreter() -> list[str]:
    """Return the command of this Python, with the options that affect the execution, without tracers."""
    options = {key: value for key, value in sys._xoptions.items() if key not in _TRACER_OPTIONS}
    flags = [letter * int(getattr(sys.flags, name)) for name, letter in _OPTIONS.items()]
    return [
        sys.executable,
        *(f"-{letters}" for letters in flags if letters),
        *(f"-W{option}" for option in sys.warnoptions),
        *(f"-X{key}" if value is True else f"-X{key}={value}" for key, value in options.items()),
    ]


class Twins:
    """Two processes that are forks of one idle process: see `stackwise.gate.side.twin`.

    If one twin is killed, both are. Both are killed when the current process exits.

    Args:
        seed: seed of the random properties.
        log: file for the output before a twin has a task.

    Attributes:
        left: number of unused twins.
        log: file with the output before the twins had a task.
    """

    def __init__(self, seed: int, log: Path) -> None:
        self.log = log
        pairs = [socket.socketpair() for _ in range(1 + _COUNT)]
        self._channels = [Channel(own) for own, _ in pairs]
        self._parent = self._channels.pop(0)
        self._descriptors = [theirs.fileno() for _, theirs in pairs[1:]]
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}
        self._ended = False
        try:
            ends = [theirs.fileno() for _, theirs in pairs]
            self._process = start_python([program.__file__, *map(str, ends)], ends, seed, log)
        except BaseException:
            for channel in (self._parent, *self._channels):
                channel.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()

    @property
    def left(self) -> int:  # noqa: D102
        return len(self._channels)

    def become(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        import_path: Sequence[Path],
        environment: Mapping[str, str],
        log: Path,
    ) -> tuple[Twin, Channel]:
        """Turn the next twin into the process of `python -m MODULE`.

        Args:
            module: name of the module.
            arguments: arguments of the module.
            folder: working directory.
            import_path: first entries of `sys.path`, after the working directory.
            environment: variables in addition to the environment of the twin.
            log: file for the output of the module.

        Raises:
            ChannelClosedError: the twin is dead.
        """
        number = _COUNT - len(self._channels)
        channel = self._channels.pop(0)
        try:
            channel.send(
                {
                    "module": module,
                    "arguments": list(arguments),
                    "folder": str(folder),
                    "import_path": list(map(str, import_path)),
                    "environment": {**environment, DESCRIPTOR: str(self._descriptors[number])},
                    "log": str(log),
                }
            )
        except BaseException:
            channel.close()
            raise
        return Twin(self, number), channel

    def pid(self, number: int) -> int:
        """Return the process ID of a twin.

        Raises:
            ChannelClosedError: the twin was never started.
        """
        while not self._pids:
            if not self._hear(_PATIENCE):
                raise ChannelClosedError(f"no process was there after {_PATIENCE:g} s")
        return self._pids[number]

    def code(self, number: int, seconds: float = 0.0) -> int | None:
        """Return the exit code of a twin, below 0 the signal; None: it is still running after `seconds`."""
        deadline = real_time.monotonic() + seconds
        try:
            while not self._ended and number not in self._codes:
                if not self._hear(max(0.0, deadline - real_time.monotonic())):
                    break
        except ChannelClosedError:  # the parent of the twins is dead
            return self._codes.get(number, self._process.wait())
        return self._codes.get(number)

    def end(self) -> None:
        """Kill both twins and all their descendants at once."""
        if self._ended:
            return
        self.code(0)  # receive the waiting messages
        self._ended = True
        for channel in (self._parent, *self._channels):
            channel.close()
        self._channels = []
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:  # the parent was killed before it could kill the twins
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        self._codes = dict.fromkeys(range(_COUNT), -signal.SIGKILL) | self._codes

    def _hear(self, seconds: float) -> bool:
        message = self._parent.receive(seconds)
        if message is None:
            return False
        self._pids = message.get("pids", self._pids)
        if "twin" in message:
            self._codes[message["twin"]] = message["code"]
        return True


class Twin:
    """One of two twins, with the interface of `subprocess.Popen`."""

    def __init__(self, twins: Twins, number: int) -> None:
        self._twins, self._number = twins, number

    @property
    def log(self) -> Path:
        """File with the output before the twin had a task."""
        return self._twins.log

    @property
    def pid(self) -> int:
        """Process ID, which is also the session ID."""
        return self._twins.pid(self._number)

    def poll(self) -> int | None:
        """Return the exit code, below 0 the signal; None: the twin is still running."""
        return self._twins.code(self._number)

    def wait(self, timeout: float) -> int:
        """Wait for the exit and return the exit code, below 0 the signal.

        Raises:
            subprocess.TimeoutExpired: the twin is still running after `timeout` seconds.
        """
        code = self._twins.code(self._number, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a side of the gate", timeout)
        return code

    def end(self) -> None:
        """Kill both twins and all their descendants."""
        self._twins.end()
