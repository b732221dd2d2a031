"""SideProcess: one fresh process of a side, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stackwise.gate.lock_wait import awaited_lock
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
from stackwise.gate.twins import Twin, Twins, by_chance, inherited_environment, interpreter

__all__ = ["SideFailedError", "SideProcess"]

_PATIENCE = 5.0  # seconds that a process has to end by itself
_LOOK = 1.0  # seconds after which it is looked whether a silent process is still there
_TAIL = 3000  # characters of what it printed
_KILLED = (
    "the system killed it (SIGKILL), probably because the machine is short of memory: "
    "both sides run at the same time"
)
_SHARED_FILE = "derive its name from STACKWISE_SIDE"


class SideFailedError(RuntimeError):
    """A process crashed, hung, or said what it should not have.

    Attributes:
        how: "crashed", "killed" (by the system, not by its own code), "hung" or "out of order".
    """

    def __init__(self, how: str, detail: str) -> None:
        super().__init__(detail)
        self.how = how


class SideProcess:
    """A process of a side, that runs pytest on the tests it is given.

    What is by chance in a process is by chance here: hash seed, size of the environment, and where things lie
    in memory, of which twins have the same. It is a session of its own, so that nothing that it starts
    outlives it, but for what begins a session itself.

    Args:
        role: "base" or "head".
        arguments: of pytest.
        folder: in which it is started.
        import_path: folders for PYTHONPATH, the first ones first.
        tree: the folder of its files; None: both sides are the same files.
        tests: what in the tree is of tests, relative to it.
        foreign: folders of which it may import and use nothing.
        own: folders beside the tree whose files are its own.
        watch: report each file outside of these folders that it opens, see `stackwise.gate.side.used_files`.
        log: the file for what it prints.
        seconds: the most time between two of its messages.
        seed: of what is by chance.
        environment: variables beyond those of this process.
        twins: of which it is to be one, that have the seed already; None: it is a process of its own.

    Attributes:
        early: names of installed modules that it has imported, and that twins of later rounds may import
            before they are forked; None: they may not.
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
        self.early: list[str] | None = []
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
        variables = {
            **inherited_environment(),
            **variables,
            **by_chance(seed),
            DESCRIPTOR: str(theirs.fileno()),
        }
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(  # noqa: S603
                    [*interpreter(), "-m", "pytest", *arguments],
                    cwd=folder,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()

    def send(self, **message: Any) -> None:
        """Tell it something.

        Raises:
            SideFailedError: it is gone, or does not listen.
        """
        try:
            self._channel.send(message, self._seconds)
        except TimeoutError:
            raise self._hung("it did not listen") from None
        except ChannelClosedError:
            raise self._gone() from None

    def receive(self) -> dict[str, Any]:
        """What it says next.

        Raises:
            SideFailedError: it is gone, or says nothing for too long.
        """
        deadline = real_time.monotonic() + self._seconds
        while (left := deadline - real_time.monotonic()) > 0:
            # Children that it has left behind may hold its end of the channel open.
            ended = self._process.poll() is not None
            try:
                message = self._channel.receive(min(left, 0.0 if ended else _LOOK))
            except ChannelClosedError:
                raise self._gone() from None
            if message is not None:
                self._note(message.pop("early", []))
                return message
            if ended:
                raise self._gone()
        raise self._hung("nothing was heard of it")

    def _note(self, early: list[str] | None) -> None:
        self.early = None if self.early is None or early is None else [*self.early, *early]

    def ask(self, **message: Any) -> dict[str, Any]:
        """Tell it something, and what it answers.

        Raises:
            SideFailedError: as for `send` and `receive`.
        """
        self.send(**message)
        return self.receive()

    def keep_on(self, processor: int | None) -> None:
        """Let its main thread run on this processor alone; None: on any that this process may use.

        Where the system knows of no such thing, or does not allow it, nothing is done.
        """
        if not hasattr(os, "sched_setaffinity"):  # pragma: no cover - macOS
            return
        # Of the main thread, whose number is that of the process; other threads stay where they are.
        with contextlib.suppress(OSError):  # it is gone, or the system allows nobody to do this
            os.sched_setaffinity(
                self._process.pid, os.sched_getaffinity(0) if processor is None else {processor}
            )

    def printed(self) -> str:
        """The end of what it printed."""
        logs = (self._log, self._process.log) if isinstance(self._process, Twin) else (self._log,)
        text = "\n".join(log.read_text(errors="replace").strip() for log in logs).strip()
        return f"it printed at the end: {text[-_TAIL:]}" if text else "it printed nothing"

    def kill(self) -> None:
        """End it and all that it has started, at once.

        After the last test there is nothing that it is to do: its fixtures are torn down by then, and to put
        an interpreter away takes longer than a round has for a test.
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
