"""Jail: script that isolates its own process, and then executes the interpreter.

It is started with the interpreter only, and reads its task as JSON from standard input. It creates new
namespaces (namespaces(7)) of processes, mounts, network, IPC and host name, and of users if it is not root.
Its root is in memory, with the interpreter and its library read-only. It sets resource limits (setrlimit(2)),
permanently gives up all privileges (PR_SET_NO_NEW_PRIVS), and starts the interpreter with an empty
environment. The first process of the jail waits for the interpreter. When the first process ends, the kernel
ends all processes of the jail.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from system_calls import forbid, is_known_machine, require_known_machine  # type: ignore[import-not-found]

NEW_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # mounts, PIDs, net, IPC, UTS
NEW_USERS = 0x10000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
DETACH = 2
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
INSIDE = 1000  # user id in the user namespace
INODES = 4096  # maximum number of files and folders in memory, because the size limit excludes their metadata
DEVICES = ("null", "zero", "full", "random", "urandom")

LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raise OSError if it fails."""
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", repr(arguments[:2]))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system, or bind-mount a folder."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call("mount", *texts, ctypes.c_ulong(flags), options.encode() or None)


def write(path: str, text: str) -> None:
    """Write a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def say(descriptor: int, **message: Any) -> None:
    """Send a message to the process that has started the jail."""
    os.write(descriptor, json.dumps(message).encode() + b"\n")


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def build(task: dict[str, Any]) -> None:
    """Build the root folder of the jail, and change into it."""
    new = task["root"]
    mount(None, "/", None, RECURSIVE | PRIVATE)
    held = f"size={task['scratch_bytes']},nr_inodes={INODES}"
    mount("tmpfs", new, "tmpfs", NO_SUID | NO_DEVICES, f"{held},mode=755")
    # Before other mounts, because they may be below /tmp, for example the interpreter.
    os.makedirs(new + "/tmp")
    mount("tmpfs", new + "/tmp", "tmpfs", NO_SUID | NO_DEVICES, f"{held},mode=1777")
    for path in task["shown"]:
        show(path, new + path)
    for path in task["hidden"]:
        if os.path.isdir(new + path):
            mount("tmpfs", new + path, "tmpfs", READ_ONLY | NO_SUID | NO_DEVICES, "size=4k,mode=755")
    os.makedirs(new + "/dev")
    for name in DEVICES:
        write(f"{new}/dev/{name}", "")
        mount(f"/dev/{name}", f"{new}/dev/{name}", None, BIND)
    os.makedirs(new + "/box")
    for name, text in task["files"].items():
        write(f"{new}/box/{name}", text)
    os.makedirs(new + "/proc")
    # Forbidden if parts of /proc are covered, as in a container. /proc is optional.
    with contextlib.suppress(OSError):
        mount("proc", new + "/proc", "proc", NO_SUID | NO_DEVICES | NO_EXEC)
    mount(None, new, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
    os.chdir(new)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/tmp")


def show(path: str, target: str) -> None:
    """Show `path` read-only at `target`."""
    if os.path.islink(path):
        if not os.path.lexists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        write(target, "")
    mount(path, target, None, BIND)
    kept = os.statvfs(path).f_flag & (NO_SUID | NO_DEVICES | NO_EXEC)  # these flags must not be removed
    mount(None, target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | kept)


def give_up(task: dict[str, Any], as_root: bool) -> None:
    """Set the limits, and give up all privileges."""
    for name, value in task["limits"].items():
        limit = getattr(resource, name)
        _, most = resource.getrlimit(limit)
        least = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (least, least))
    if as_root:
        os.setgroups([])
        os.setresgid(task["user"], task["user"], task["user"])
        os.setresuid(task["user"], task["user"], task["user"])
    if task["isolated"]:
        # As nobody in an inner user namespace, the process has no rights over the outer ones.
        call("unshare", NEW_USERS)
        # Fails without /proc. The limits also apply in namespaces that are created inside.
        with contextlib.suppress(OSError):
            write("/proc/sys/user/max_user_namespaces", "0")
    if sys.platform == "linux":
        call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def first(task: dict[str, Any], as_root: bool) -> None:
    """Run the first process of the jail.

    It starts the program, waits for it, and ends with all other processes.
    """
    end_with_parent()
    if os.read(task["go"], 1) != b"!":  # the parent has ended
        os._exit(1)
    os.setsid()
    # In case that no process is left to end it. The first process of a namespace ignores signals without a
    # handler.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(task["seconds"])
    if task["isolated"]:
        build(task)
    else:
        os.chdir(task["place"])
    give_up(task, as_root)
    end_with_parent()  # the kernel resets this when the user changes
    child = os.fork()
    if child == 0:
        become(task)
    os.waitpid(child, 0)
    os._exit(0)


def become(task: dict[str, Any]) -> None:
    """Execute the interpreter, with only the requested descriptors, from number 3 on."""
    signal.alarm(0)
    given, end = task["descriptors"], 3 + len(task["descriptors"])
    # Move all descriptors out of the target range first, because they may overlap.
    away = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, end + 1) for each in (task["control"], *given)]
    control, *moved = away
    for place, each in enumerate(moved):
        os.dup2(each, 3 + place, inheritable=True)
    os.dup2(control, end, inheritable=False)  # closed by the kernel when the interpreter starts
    os.closerange(end + 1, 2**16)
    try:
        start(task)
    except OSError as error:
        say(end, error=f"{type(error).__name__}: {error}")
        os._exit(1)


def start(task: dict[str, Any]) -> None:
    """Forbid system calls, and execute the interpreter."""
    # Without isolation, the filter is optional, and only set on supported machines.
    if task["isolated"] or is_known_machine():
        forbid()
    os.execve(task["python"], [task["python"], "-I", "-S", "-B", "-u", task["main"]], {})  # noqa: S606


def main() -> None:
    """Create the jail, and wait for it outside."""
    task = json.loads(sys.stdin.read())
    os.umask(0o022)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    as_root = os.geteuid() == 0
    control = task["control"]
    try:
        end_with_parent()
        if task["isolated"]:
            require_known_machine()
            user, group = os.geteuid(), os.getegid()
            call("unshare", NEW_NAMESPACES | (0 if as_root else NEW_USERS))
            if not as_root:
                write("/proc/self/setgroups", "deny")
                write("/proc/self/uid_map", f"{INSIDE} {user} 1")
                write("/proc/self/gid_map", f"{INSIDE} {group} 1")
        child = os.fork()
        if child == 0:
            try:
                first(task, as_root and task["isolated"])
            except BaseException as error:
                say(control, error=f"{type(error).__name__}: {error}")
                os._exit(1)
        say(control, pid=child)
        os.close(task["go"])
        for descriptor in task["descriptors"]:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        say(control, status=status)
    except Exception as error:
        say(control, error=f"{type(error).__name__}: {error}")
        os._exit(1)


main()
