"""UsedFiles: files that a side opens, maps or passes to a child process."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

from .clock import real_time
from .imports import is_installed

__all__ = ["UsedFiles"]

_PROCESSES = Path("/proc")
_EVENT_SECONDS = 5e-6  # upper bound of the time that the hook takes per audit event
_BEARABLE = 5e-4  # largest allowed share of the hook in a measured time
_SYSTEM = {("/", "dev"), ("/", "proc"), ("/", "sys")}
_METADATA = (".egg-info", ".dist-info")  # pytest reads the metadata of every distribution
_REST = r"(?:/[^\s'\";:,|&<>()]*)?(?![\w.-])"  # rest of a path after a folder, in a text


class UsedFiles:
    """Record of the files that this process and its children use.

    An audit hook records files, SQLite databases and libraries that Python opens, and the commands of child
    processes. The hook slows down every audit event, such as a call of `id`, by about a microsecond until the
    process ends. So the gate installs the hook in the first round of a test only, and discards times with
    many events. In every round, mapped files, open files and living children are read from /proc, if the
    system has it.

    Args:
        own: folders of this side: its tree and its temporary files, in this order if `has_tree` is True.
        foreign: folders whose files this side must not use: the tree of the other side, the working tree.
        hook: True to install the audit hook.
        has_tree: True if the first folder of `own` is the tree of this side, whose files are recorded too.

    Attributes:
        has_hook: True if the audit hook is installed.
    """

    def __init__(
        self, own: Sequence[str], foreign: Sequence[str], *, hook: bool = False, has_tree: bool = False
    ) -> None:
        self._own = [Path(folder).resolve() for folder in own]
        self._foreign = [Path(folder).resolve() for folder in foreign]
        self._patterns = [re.compile(re.escape(str(folder)) + _REST) for folder in self._foreign]
        self._tree = self._own[0] if has_tree else None
        self._read: set[str] = set()
        self._written: set[str] = set()
        self._named: set[str] = set()  # by a command: files and folders
        self._seen: set[str] = set()  # in /proc
        self._told: set[tuple[str, str]] = set()
        self._is_paused = self._is_timed = False
        self._timed_events = 0
        self._timed_seconds = 0.0
        self.has_hook = hook
        if hook:
            sys.addaudithook(self._hear)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in the body of the `with` statement."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def timed(self, *, noting: bool) -> Iterator[None]:
        """Count audit events while calls are timed in the body, and record files only if `noting` is True."""
        began = real_time.perf_counter()
        self._is_timed, self._is_paused = True, not noting
        try:
            yield
        finally:
            self._is_timed = self._is_paused = False
            self._timed_seconds += real_time.perf_counter() - began

    def disturbed(self) -> bool:
        """Return True if the hook may have changed the times since the last call by more than the noise."""
        events, seconds = self._timed_events, self._timed_seconds
        self._timed_events, self._timed_seconds = 0, 0.0
        return events * _EVENT_SECONDS > _BEARABLE * seconds

    def look(self) -> None:
        """Record the mapped and open files and the commands of living children."""
        with self.paused():
            for process in _with_children(_PROCESSES / "self"):
                found = {*_mapped(process), *_open(process)} - self._seen
                self._seen |= found
                self._read |= found
                if process.name != "self":
                    program = _link(process / "exe")
                    words = [*_arguments(process), *([program] if program else [])]
                    self._note_command(words, _link(process / "cwd"))

    def new(self) -> dict[str, list[str]]:
        """Return the paths that were recorded since the last call, under four keys.

        "tree": files of the tree that were read, run or named by a command, relative to it. All other paths
        are absolute. "foreign": files in one of the foreign folders that were read, run or named by a
        command. "read" and "written": other files that neither belong to this side nor are installed, and
        "written" files in the foreign folders.
        """
        # A word of a command may be too long for a path: `Path.exists` would raise OSError.
        noted = (
            *((path, "read") for path in self._read if not os.path.isdir(path)),  # noqa: PTH112
            *((path, "written") for path in self._written),
            *((path, "named") for path in self._named if os.path.exists(path)),  # noqa: PTH110
        )
        for paths in (self._read, self._written, self._named):
            paths.clear()
        found: dict[str, list[str]] = {"tree": [], "foreign": [], "read": [], "written": []}
        for name, how in noted:
            path = os.path.realpath(name)
            where = self._where(Path(path))
            what = how
            if where == "foreign" and how != "written":
                what, path = "foreign", _source(path)
            if self._tree is not None and how != "written" and Path(path).is_relative_to(self._tree):
                where, what, path = "tree", "tree", str(Path(_source(path)).relative_to(self._tree))
            if where and what in found and (what, path) not in self._told:
                self._told.add((what, path))
                found[what].append(path)
        return found

    def _where(self, path: Path) -> str:
        """Return "foreign" or "outside", or "" for a file of this side, of Python or of the system."""
        if any(path.is_relative_to(folder) for folder in self._own) or path.parts[:2] in _SYSTEM:
            return ""
        for folder in self._foreign:
            if path.is_relative_to(folder):
                parts = path.relative_to(folder).parts
                # Environments, repositories and caches, such as .venv and .git, have no code of the project.
                hidden = any(part.startswith(".") or part.endswith(_METADATA) for part in parts)
                return "" if hidden or is_installed(path, folder) else "foreign"
        return "" if is_installed(path) or "__pycache__" in path.parts else "outside"

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_timed:
            self._timed_events += 1
        if self._is_paused or event not in _EVENTS:
            return
        with suppress(Exception):  # otherwise the audited code would get the error
            _EVENTS[event](self, *arguments)

    def _note_open(self, path: Any, _: object, flags: int) -> None:
        if isinstance(path, int):
            return  # a descriptor of a file that was opened before
        mode = flags & os.O_ACCMODE
        self._note(path, read=mode != os.O_WRONLY, written=mode != os.O_RDONLY)

    def _note(self, path: Any, *, read: bool, written: bool) -> None:
        absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if read:
            self._read.add(absolute)
        if written:
            self._written.add(absolute)

    def _note_rename(self, _: object, target: Any, *__: object) -> None:
        self._note(target, read=False, written=True)

    def _note_database(self, path: Any) -> None:
        name = os.fsdecode(path).removeprefix("file:").partition("?")[0]
        if name and name != ":memory:":
            self._note(name, read=True, written=True)

    def _note_library(self, name: Any) -> None:
        if name and "/" in os.fsdecode(name):
            self._note(name, read=True, written=False)

    def _note_popen(self, program: Any, words: Any, folder: Any, environment: Any) -> None:
        words = [words] if isinstance(words, str | bytes | os.PathLike) else list(words)
        words = [os.fsdecode(word) for word in (*([program] if program else []), *words)]
        found = shutil.which(words[0], path=(os.environ if environment is None else environment).get("PATH"))
        self._note_command([*words, *([found] if found else [])], folder)

    def _note_program(self, program: Any, words: Any, environment: Any) -> None:
        self._note_popen(program, words, None, environment)

    def _note_shell(self, command: Any) -> None:
        self._note_command([os.fsdecode(command)], None)

    def _note_command(self, words: Iterable[str], folder: Any) -> None:
        place = os.fsdecode(folder or os.getcwd())  # noqa: PTH109
        self._named.add(place)
        for word in words:
            self._named.add(os.path.join(place, word))  # noqa: PTH118
            for pattern in self._patterns:
                self._named.update(pattern.findall(word))


_EVENTS: dict[str, Callable[..., None]] = {
    "open": UsedFiles._note_open,
    "os.rename": UsedFiles._note_rename,
    "sqlite3.connect": UsedFiles._note_database,
    "ctypes.dlopen": UsedFiles._note_library,
    "subprocess.Popen": UsedFiles._note_popen,
    "os.posix_spawn": UsedFiles._note_program,
    "os.exec": UsedFiles._note_program,
    "os.system": UsedFiles._note_shell,
}


def _source(path: str) -> str:
    """Return the source path of a bytecode file, or another path unchanged."""
    try:
        return source_from_cache(path)
    except ValueError:
        return path


def _with_children(process: Path) -> Iterator[Path]:
    """Yield the folders in /proc of a process and of all its descendants."""
    yield process
    with suppress(OSError):
        for thread in (process / "task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _with_children(_PROCESSES / child)


def _mapped(process: Path) -> Iterator[str]:
    with suppress(OSError):
        for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
            _, _, path = line.partition("/")
            if path:
                yield f"/{path}"


def _open(process: Path) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            path = _link(descriptor)
            if path is not None and path.startswith("/"):
                yield path


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115 - "socket:[1]" is no path
    except OSError:
        return None


def _arguments(process: Path) -> list[str]:
    try:
        return [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0") if word]
    except OSError:
        return []
