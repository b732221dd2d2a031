"""Jailed: handle of a process in a jail."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from stackwise.quality.sandbox.limits import SandboxLimits

__all__ = ["Jailed", "SandboxError", "interpreter"]

_HERE = Path(__file__).parent
# Timeouts in seconds for the creation of a jail, on a busy machine, and for its end.
_UNTIL_MADE, _UNTIL_GONE = 60.0, 10.0
# Folders in which the loader searches. On most systems, some of them are symbolic links.
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
# Script that loads all extension modules of the standard library (except tkinter, which would load a
# desktop), and the library that the C library loads when a thread ends. It prints the mapped files.
_TELL = """
import ctypes, glob, json, os, sysconfig
libraries = sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
names = [name for folder in libraries for name in glob.glob(folder + "/lib-dynload/*.so")]
for name in [name for name in names if "_tkinter" not in name] + ["libgcc_s.so.1"]:
    try:
        ctypes.CDLL(name)
    except OSError:
        pass
with open("/proc/self/maps") as file:
    mapped = sorted({line.split(maxsplit=5)[5].strip() for line in file if "/" in line})
print(json.dumps({"libraries": libraries, "mapped": mapped}))
"""
_FIRST_USER, _USERS = 2**30, 2**29  # user ids without an account, because a process limit is per user


class SandboxError(RuntimeError):
    """Error for a jail that could not be created. No code was run."""


class Jailed:
    """Interpreter in a jail that runs a file after `start`.

    Args:
        main: name of the file to run.
        files: texts of additional files in its folder, by name.
        descriptors: file descriptors of the interpreter, from number 3 on.
        folder: an empty folder for this jail.
        limits: resource limits.
        isolated: False: no jail, only the limits.
    """

    def __init__(
        self,
        main: str,
        files: Mapping[str, str],
        descriptors: Sequence[int],
        *,
        folder: Path,
        limits: SandboxLimits,
        isolated: bool,
    ) -> None:
        box = Path("/box") if isolated else folder
        names = ("plain.py", main)
        texts = {name: (_HERE / name).read_text(encoding="utf-8") for name in names} | dict(files)
        if not isolated:
            for name, text in texts.items():
                (folder / name).write_text(text, encoding="utf-8")
            (folder / "scratch").mkdir()
        python, shown, hidden = interpreter()
        said, control = os.pipe()
        ready, go = os.pipe()
        task = {
            "isolated": isolated,
            "root": str(folder),
            "place": str(folder / "scratch"),
            "python": python,
            "shown": shown,
            "hidden": hidden,
            "files": texts if isolated else {},
            "main": str(box / main),
            "descriptors": list(descriptors),
            "limits": limits.rlimits(isolated=isolated),
            "scratch_bytes": limits.scratch_bytes,
            "seconds": int(limits.seconds) + 5,
            "user": _FIRST_USER + random.randrange(_USERS),  # noqa: S311
            "control": control,
            "go": ready,
        }
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-S", str(_HERE / "jail.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={},
                cwd="/",
                pass_fds=[control, ready, *descriptors],
                start_new_session=True,
            )
        finally:
            os.close(control)
            os.close(ready)
        self._said, self._isolated = os.fdopen(said, "rb"), isolated
        self._go = os.fdopen(go, "wb", buffering=0)
        self._handle: int | None = None
        self._pid: int | None = None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(task).encode())
            self._process.stdin.close()

    def start(self) -> None:
        """Start the program.

        Raises:
            SandboxError: the jail could not be created.
        """
        self._pid = self._heard()["pid"]
        if hasattr(os, "pidfd_open"):
            self._handle = os.pidfd_open(self._pid)
        with self._go:
            self._go.write(b"!")

    @property
    def output(self) -> int:
        """Descriptor from which the output is read."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def end(self) -> None:
        """Kill all processes of the jail."""
        with contextlib.suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self._pid is not None:
                os.kill(self._pid, signal.SIGKILL)
        if self._pid is not None and not self._isolated and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_UNTIL_GONE if self._pid is not None else 0.1)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said, self._go):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def problem(self) -> str | None:
        """Return the reason of an error that occurred after the first process was started.

        Return None if there is none.
        """
        os.set_blocking(self._said.fileno(), False)
        for line in self._said.readlines():
            message = json.loads(line)
            if "error" in message:
                return str(message["error"])
        return None

    def _heard(self) -> dict[str, Any]:
        ready, _, _ = select.select([self._said], [], [], _UNTIL_MADE)
        if not ready:
            raise SandboxError(f"a jail was not made within {_UNTIL_MADE:g} s: the machine is too busy")
        line = self._said.readline()
        message: dict[str, Any] = json.loads(line) if line else {"error": "it ended at its start"}
        if "error" in message:
            raise SandboxError(f"no jail can be made here: {message['error']}")
        return message


@cache
def interpreter() -> tuple[str, list[str], list[str]]:
    """Return the interpreter and the files that a jail shows: standard library and shared objects.

    The shared objects are found in a process that has loaded every extension module of the library.

    Returns:
        path of the interpreter; paths of files, symbolic links and folders to show; folders of these to hide.

    Raises:
        SandboxError: the interpreter cannot be started, or does not print its mapped files.
    """
    python = os.path.realpath(sys.executable)
    done = subprocess.run(  # noqa: S603
        [python, "-I", "-S", "-c", _TELL], env={}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = " ".join(done.stderr.split())[-200:]
        raise SandboxError(f"no jail can be made here: {python} does not tell what it loads: {reason}")
    told = json.loads(done.stdout)
    libraries, mapped = set(told["libraries"]), [Path(path) for path in told["mapped"]]
    objects = {str(path) for path in mapped if ".so" in path.name or "gconv" in path.parts}
    # The folder of a locale has one file per category.
    folders = libraries | {str(path.parent) for path in mapped if "locale" in path.parts}
    links = {name for name in _LIBRARIES if Path(name).is_symlink()}
    for folder in {*(path.parent for path in mapped), *(Path(name) for name in _LIBRARIES)}:
        links |= _links_to(folder, objects)
    wanted = [*sorted(links), "/etc/ld.so.cache", *sorted(folders), *sorted(objects), python]
    inside = tuple(f"{folder}/" for folder in folders)
    shown = [path for path in wanted if os.path.lexists(path) and not path.startswith(inside)]
    hidden = [f"{library}/{name}" for library in libraries for name in ("site-packages", "dist-packages")]
    return python, list(dict.fromkeys(shown)), hidden


def _links_to(folder: Path, files: set[str]) -> set[str]:
    """Return the other names of files that the loader looks for: symbolic links in a folder."""
    if folder.is_symlink() or not folder.is_dir():
        return set()
    links = [entry.path for entry in os.scandir(folder) if entry.is_symlink()]
    return {link for link in links if os.path.realpath(link) in files}
