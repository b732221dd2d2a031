"""Jail: a program that puts itself where it can reach nothing, and then becomes another one.

Started as a script with the interpreter alone; what it is to do comes as JSON on standard input. It makes
new namespaces (namespaces(7): of processes, mounts, network, IPC, host name, and of users, where it is not
root), a root in memory that holds the interpreter and its library read-only, limits on what may be used
(setrlimit(2)), gives up all privileges for good (PR_SET_NO_NEW_PRIVS), and starts the interpreter there with
an empty environment. The first process of the jail waits for it: when that ends, the kernel ends all others.
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
INSIDE = 1000  # who it is in a namespace of users
INODES = 4096  # files and folders in memory: each takes some that no size counts
DEVICES = ("null", "zero", "full", "random", "urandom")

LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """A function of the C library, which has to succeed."""
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", repr(arguments[:2]))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system, or a folder a second time."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call("mount", *texts, ctypes.c_ulong(flags), options.encode() or None)


def write(path: str, text: str) -> None:
    """A whole file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def say(descriptor: int, **message: Any) -> None:
    """Tell the one who has started this."""
    os.write(descriptor, json.dumps(message).encode() + b"\n")


def end_with_parent() -> None:
    """Be ended when the process that has started this one is."""
    if sys.platform == "linux":
        call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def build(task: dict[str, Any]) -> None:
    """The root of the jail, which becomes the root."""
    new = task["root"]
    mount(None, "/", None, RECURSIVE | PRIVATE)
    held = f"size={task['scratch_bytes']},nr_inodes={INODES}"
    mount("tmpfs", new, "tmpfs", NO_SUID | NO_DEVICES, f"{held},mode=755")
    # First, since the interpreter may be in it.
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
    # Not allowed where parts of /proc are covered, as in a container; nothing needs it.
    with contextlib.suppress(OSError):
        mount("proc", new + "/proc", "proc", NO_SUID | NO_DEVICES | NO_EXEC)
    mount(None, new, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)
    os.chdir(new)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/tmp")


def show(path: str, target: str) -> None:
    """Have what is at `path` at `target`, read-only."""
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
    kept = os.statvfs(path).f_flag & (NO_SUID | NO_DEVICES | NO_EXEC)  # may not be taken away
    mount(None, target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | kept)


def give_up(task: dict[str, Any], as_root: bool) -> None:
    """Limits, and no privileges any more."""
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
        # Whoever is nobody in the innermost one has no rights over what the others have made.
        call("unshare", NEW_USERS)
        # Where there is no /proc: the limits hold in namespaces that are made inside as well.
        with contextlib.suppress(OSError):
            write("/proc/sys/user/max_user_namespaces", "0")
    if sys.platform == "linux":
        call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def first(task: dict[str, Any], as_root: bool) -> None:
    """The first process of the jail: starts the program, waits for it, and takes all others along."""
    end_with_parent()
    if os.read(task["go"], 1) != b"!":  # nobody is there any more who would end it
        os._exit(1)
    os.setsid()
    # Should nobody be left to end it. The first process of a namespace takes no signal without a handler.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(task["seconds"])
    if task["isolated"]:
        build(task)
    else:
        os.chdir(task["place"])
    give_up(task, as_root)
    end_with_parent()  # forgotten by the kernel whenever the user changes
    child = os.fork()
    if child == 0:
        become(task)
    os.waitpid(child, 0)
    os._exit(0)


def become(task: dict[str, Any]) -> None:
    """Become the interpreter, with the requested descriptors from 3 on and no others."""
    signal.alarm(0)
    given, end = task["descriptors"], 3 + len(task["descriptors"])
    # Out of the way first: one may be where another is to be.
    away = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, end + 1) for each in (task["control"], *given)]
    control, *moved = away
    for place, each in enumerate(moved):
        os.dup2(each, 3 + place, inheritable=True)
    os.dup2(control, end, inheritable=False)  # the kernel closes it as the interpreter starts
    os.closerange(end + 1, 2**16)
    try:
        start(task)
    except OSError as error:
        say(end, error=f"{type(error).__name__}: {error}")
        os._exit(1)


def start(task: dict[str, Any]) -> None:
    """Forbid system calls and start the interpreter."""
    # Without isolation the filter is a bonus, on the machines that it is known for.
    if task["isolated"] or is_known_machine():
        forbid()
    os.execve(task["python"], [task["python"], "-I", "-S", "-B", "-u", task["main"]], {})  # noqa: S606


def main() -> None:
    """Make the jail, and stay outside as the one who waits for it."""
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
