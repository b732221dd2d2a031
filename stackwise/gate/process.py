"""SideProcess: fresh process of one side, with its messages and its exit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stackwise.gate.side.channel import (
    DESCRIPTOR,
    FOREIGN,
    OWN,
    ROLE,
    SEED,
    TESTS,
    TREE,
    WATCH,
    Channel,
    ChannelClosedError,
)
from stackwise.gate.side.clock import real_time
from stackwise.gate.twins import Twin, Twins, start_python

__all__ = ["SideFailedError", "SideProcess", "awaited_lock"]

_PATIENCE = 5.0  # seconds for a process to exit by itself
_LOOK = 1.0  # seconds between inspections of a silent process
_TAIL = 3000  # characters of its output in a message
_KILLED = (
    "the system killed it (SIGKILL), probably because the machine is short of memory: "
    "both sides run at the same time"
)
_SHARED_FILE = "derive its name from STACKWISE_SIDE"


class SideFailedError(RuntimeError):
    """A process crashed, hung, or sent an unexpected message.

    Attributes:
        how: "crashed", "killed" (by the system, not by its own code), "hung" or "out of order".
    """

    def __init__(self, how: str, detail: str) -> None:
        super().__init__(detail)
        self.how = how


class SideProcess:
    """Process of a side that runs pytest on a list of tests.

    The random properties of a process are random here too: hash seed, size of the environment and memory
    layout. Twins share them. The process leads a session of its own. `kill` therefore includes all its
    descendants, except processes that start a session themselves.

    Args:
        role: "base" or "head".
        arguments: arguments of pytest.
        folder: working directory.
        import_path: folders for PYTHONPATH, in order.
        tree: folder of the files of this side; None: both sides use the same files.
        tests: files and folders of the tests in the tree, relative to it.
        foreign: folders with files that the process must neither import nor use.
        own: folders outside of the tree with files that belong to this side.
        watch: True to report each file that the process opens, see `stackwise.gate.side.used_files`.
        log: file for the output of the process.
        seconds: maximum time between two messages of the process.
        seed: seed of the random properties.
        environment: variables in addition to the environment of the current process.
        twins: twins from which the process is taken, seeded already; None: a new interpreter is started.
    """

    def __init__(
        self,
        role: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        import_path: Sequence[Path],
        tree: Path | None,
        tests: Sequence[Path],
        foreign: Sequence[Path],
        log: Path,
        seconds: float,
        seed: int,
        own: Sequence[Path] = (),
        watch: bool = False,
        environment: Mapping[str, str] = {},
        twins: Twins | None = None,
    ) -> None:
        self.role, self._seconds, self._log = role, seconds, log
        inherited = os.environ.get("PYTHONPATH")
        variables = {
            **environment,
            "PYTHONPATH": os.pathsep.join([*map(str, import_path), *([inherited] if inherited else [])]),
            ROLE: role,
            TREE: "" if tree is None else str(tree),
            TESTS: os.pathsep.join(map(str, tests)),
            FOREIGN: os.pathsep.join(map(str, foreign)),
            OWN: os.pathsep.join(map(str, own)),
            WATCH: "1" if watch else "",
            SEED: str(seed),
        }
        self._process: subprocess.Popen[bytes] | Twin
        if twins is not None:
            log.write_bytes(b"")
            try:
                self._process, self._channel = twins.become(
                    "pytest",
                    arguments,
                    folder=folder,
                    import_path=import_path,
                    environment=variables,
                    log=log,
                )
            except ChannelClosedError as error:
                twins.end()
                printed = twins.log.read_text(errors="replace").strip()[-_TAIL:]
                raise SideFailedError("crashed", f"no process could be started: {error}; {printed}") from None
            return
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        descriptor = theirs.fileno()
        try:
            self._process = start_python(
                ["-m", "pytest", *arguments],
                [descriptor],
                seed,
                log,
                folder=folder,
                environment={**variables, DESCRIPTOR: str(descriptor)},
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()

    def send(self, **message: Any) -> None:
        """Send a message.

        Raises:
            SideFailedError: the process is dead, or does not read the message.
        """
        try:
            self._channel.send(message, self._seconds)
        except TimeoutError:
            raise self._hung("it did not listen") from None
        except ChannelClosedError:
            raise self._gone() from None

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            SideFailedError: the process is dead, or is silent for too long.
        """
        deadline = real_time.monotonic() + self._seconds
        while (left := deadline - real_time.monotonic()) > 0:
            # Surviving children may hold its end of the channel open.
            ended = self._process.poll() is not None
            try:
                message = self._channel.receive(min(left, 0.0 if ended else _LOOK))
            except ChannelClosedError:
                raise self._gone() from None
            if message is not None:
                return message
            if ended:
                raise self._gone()
        raise self._hung("nothing was heard of it")

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises:
            SideFailedError: as for `send` and `receive`.
        """
        self.send(**message)
        return self.receive()

    def keep_on(self, processor: int | None) -> None:
        """Restrict the main thread to this processor; None: to the processors of the current process.

        If the system does not support this or does not allow it, the call has no effect.
        """
        if not hasattr(os, "sched_setaffinity"):  # pragma: no cover - macOS
            return
        # The process ID is the ID of the main thread. Other threads are unaffected.
        with contextlib.suppress(OSError):  # the process is dead, or the system does not allow it
            os.sched_setaffinity(
                self._process.pid, os.sched_getaffinity(0) if processor is None else {processor}
            )

    def printed(self) -> str:
        """Return the end of the output of the process, as part of a sentence."""
        logs = (self._log, self._process.log) if isinstance(self._process, Twin) else (self._log,)
        text = "\n".join(log.read_text(errors="replace").strip() for log in logs).strip()
        return f"it printed at the end: {text[-_TAIL:]}" if text else "it printed nothing"

    def kill(self) -> None:
        """Kill the process and its descendants at once.

        After the last test the process has no work left, since its fixtures are torn down. A regular exit of
        the interpreter takes longer than a test in a round.
        """
        self._channel.close()
        if isinstance(self._process, Twin):
            self._process.end()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _hung(self, how: str) -> SideFailedError:
        file = awaited_lock(self._process.pid)
        if file:
            how = f"it waits for the lock of {file}, which the other side may hold ({_SHARED_FILE}): {how}"
        return SideFailedError("hung", f"{how} for {self._seconds:g} s; {self.printed()}")

    def _gone(self) -> SideFailedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        code = self._process.poll()
        if code is not None and code < 0:
            if code == -signal.SIGKILL:
                return SideFailedError("killed", f"{_KILLED}; {self.printed()}")
            with contextlib.suppress(ValueError):
                return SideFailedError(
                    "crashed", f"it was ended by {signal.Signals(-code).name}; {self.printed()}"
                )
        return SideFailedError("crashed", f"it ended with code {code}; {self.printed()}")


def awaited_lock(session: int) -> str:
    """Return the path of the file whose lock (flock, lockf) a process of a session waits for.

    Args:
        session: process ID of the session leader.

    Returns:
        the path; "a file" if the path is unknown; "" if no process waits, or the system is not Linux.
    """
    for pid, inode in _waiting():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == session:
                return _open_file(pid, inode) or "a file"
    return ""


def _waiting() -> Iterator[tuple[int, int]]:
    """Yield the process ID and the inode of each blocked request for a lock."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # As in "1: -> FLOCK  ADVISORY  WRITE 4711 08:01:123 0 EOF".
            words = line.split()
            if words[1:2] == ["->"]:
                yield int(words[5]), int(words[6].rpartition(":")[2])


def _open_file(pid: int, inode: int) -> str:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if descriptor.stat().st_ino == inode:
                return str(descriptor.readlink())
    return ""
