"""Sandbox: runs untrusted code with checks whose result the code cannot forge.

The code and the checks run in two processes in two jails (see `jail.py`). The checks call functions of the
code through a channel, and receive plain values. The code therefore cannot manipulate the checks. Replaced
builtins, an object that equals everything, and frames of the interpreter exist only in the process of the
code. The proof that all checks have passed is a nonce that only the process of the checks knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stackwise.quality.sandbox.jailed import Jailed, SandboxError
from stackwise.quality.sandbox.limits import SandboxLimits
from stackwise.support.arguments import check_choice, require
from stackwise.support.temporary_folder import temporary_folder

__all__ = ["WITHOUT_ISOLATION", "Execution", "Sandbox", "Status", "isolation_problem"]

Status = Literal["passed", "failed", "timed out"]
WITHOUT_ISOLATION = "run code that nobody has read with all my rights"
_PREFIX = "stackwise-sandbox-"
_MOST_RESULT = 2**16
_LONGEST_REASON = 300
_was_made = False


@dataclass(frozen=True)
class Execution:
    """Result of a run.

    Attributes:
        status: "passed": all checks have passed. "failed": a check has failed, or the code ended early.
            "timed out".
        reason: reason in one or a few lines. "" if the run has passed.
        output: start of the output of code and checks.
        seconds: duration of the run.
    """

    status: Status
    reason: str
    output: str
    seconds: float

    @property
    def passed(self) -> bool:
        """True if all checks have passed."""
        return self.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


class Sandbox:
    """Sandbox that runs each program in new jails.

    A program sees an interpreter with its standard library, the shared objects of both, and a temporary
    folder in memory. It does not see other files, the network, the environment or other processes. This needs
    Linux on x86-64 or arm64, as root or with user namespaces. The two processes and their children may
    together use `processes` times `memory_bytes` each, and per process `open_files` times `file_bytes` of
    files in memory. Each run deletes the temporary folders of runs that were killed.

    Args:
        limits: limits of each run.
        without_isolation: the exact text `WITHOUT_ISOLATION`: if no jail can be created, run with the limits
            only. A program can then read, write and send everything that this user can. The result proves
            nothing, because the program can read the nonce of the checks and forge it.

    Raises:
        SandboxError: no jail can be created on this machine.
        ValueError: `without_isolation` is another text.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, without_isolation: str | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self.isolated = True
        if without_isolation is not None:
            check_choice("without_isolation", without_isolation, (WITHOUT_ISOLATION,))
        problem = isolation_problem()
        if problem is not None:
            if without_isolation is None:
                raise SandboxError(
                    f"{problem}; code that nobody has read is not run without. Allow user namespaces (sysctl "
                    "kernel.unprivileged_userns_clone=1, user.max_user_namespaces, "
                    "kernel.apparmor_restrict_unprivileged_userns=0), or say "
                    f"without_isolation={WITHOUT_ISOLATION!r}"
                )
            self.isolated = False

    def run(self, program: str, test: str, *, functions: Sequence[str], setup: str = "") -> Execution:
        """Run checks on a program.

        Args:
            program: code that defines the functions. It is loaded once, before the checks. If it cannot be
                loaded, or does not define the functions, the run fails.
            test: checks, which call the functions by name. An error in them is a failure.
            functions: names of the functions of `program` that `test` calls. Arguments and results must be
                plain: numbers, texts, bytes, None, and lists, tuples, sets, dicts and views of dicts of them.
                Iterators are passed as their items. With any other value, the run fails, even if the checks
                catch the error.
            setup: code that is run before `test` in the same process, such as definitions of the problem.

        Raises:
            SandboxError: no jail could be created, in two attempts.
            ValueError: no functions.
        """
        require(
            bool(functions) and all(name.isidentifier() for name in functions),
            "functions",
            tuple(functions),
            "one name or more",
        )
        for name, text in (("test", test), ("setup", setup)):
            require(_size(text) is not None, name, "a half of a character", "text that UTF-8 can write")
        size = _size(program)
        if size is None or size > self.limits.file_bytes:
            said = "it is no text that UTF-8 can write" if size is None else f"it has {size} bytes"
            return Execution("failed", f"the program cannot be run: {said}", "", 0.0)
        try:
            return _run(program, test, tuple(functions), setup, self.limits, self.isolated)
        except SandboxError:
            # No code was run, and a jail could be created earlier. The machine may be short of resources for
            # a moment, which should not end a long evaluation.
            return _run(program, test, tuple(functions), setup, self.limits, self.isolated)


def isolation_problem() -> str | None:
    """Return the reason why no jail can be created. Return None if a jail can be created.

    A jail is created for the test. A positive result is cached.
    """
    global _was_made
    if not hasattr(os, "fork"):
        return "no jail can be made here: the system has no fork"
    if _was_made:
        return None
    try:
        limits = SandboxLimits(seconds=30.0)
        done = _run("def one(): return 1", "assert one() == 1", ("one",), "", limits, True)
    except SandboxError as error:
        return str(error)
    _was_made = done.passed
    said = " ".join(f"{done.reason} {done.output}".split())
    return None if done.passed else f"no jail can be made here: {said[:_LONGEST_REASON]}"


def _size(text: str) -> int | None:
    """Return the size in UTF-8, in bytes. Return None if the text contains an unpaired surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _run(
    program: str, test: str, functions: tuple[str, ...], setup: str, limits: SandboxLimits, isolated: bool
) -> Execution:
    began = time.monotonic()
    nonce = secrets.token_hex(16)
    task = json.dumps({"setup": setup, "test": test, "names": functions, "nonce": nonce})
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(_PREFIX))
        ends = {}
        for name in ("candidate", "checker"):
            (folder / name).mkdir()
        ends["candidate"], ends["checker"] = socket.socketpair()
        result, told = os.pipe()
        stack.callback(os.close, result)
        given = {"candidate": [ends["candidate"].fileno()], "checker": [ends["checker"].fileno(), told]}
        texts = {"candidate": {"program.py": program}, "checker": {"task.json": task}}
        jailed = {}
        try:
            for name, descriptors in given.items():
                jailed[name] = Jailed(
                    f"{name}.py",
                    texts[name],
                    descriptors,
                    folder=folder / name,
                    limits=limits,
                    isolated=isolated,
                )
                stack.callback(jailed[name].end)
        finally:
            os.close(told)
            for end in ends.values():
                end.close()
        for each in jailed.values():
            each.start()
        started = time.monotonic()
        said, output = _heard(result, jailed, started + limits.seconds, limits.output_bytes)
        if said is None:
            status, reason = "timed out", f"it was not through after {limits.seconds:g} s"
        else:
            status, reason = _judged(said, nonce)
            if not said:
                problems = [problem for each in jailed.values() if (problem := each.problem()) is not None]
                if problems:
                    raise SandboxError(f"no jail can be made here: {problems[0]}")
    return Execution(status, reason, output, time.monotonic() - began)  # type: ignore[arg-type]


def _heard(result: int, jailed: dict[str, Jailed], deadline: float, most: int) -> tuple[bytes | None, str]:
    """Return the message of the checks, or None after the timeout, and the output."""
    said, printed = b"", b""
    over = False
    with selectors.DefaultSelector() as selector:
        for descriptor in (result, *(each.output for each in jailed.values())):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            # Output from before the end is already available.
            left = 0.0 if over else deadline - time.monotonic()
            ready = selector.select(max(0.0, left))
            if left <= 0 and (not over or not ready or len(printed) >= most):
                return said if over else None, printed.decode(errors="replace")
            for key, _ in ready:
                part = os.read(key.fd, 2**16)
                if not part:
                    selector.unregister(key.fd)
                if key.fd == result:
                    said += part
                    over = not part or len(said) > _MOST_RESULT
                else:
                    printed += part[: most - len(printed)]


def _judged(said: bytes, nonce: str) -> tuple[Status, str]:
    try:
        message = json.loads(said[4:]) if said else {}
    except ValueError:
        message = {}
    if not isinstance(message, dict):
        message = {}
    found = message.get("nonce")
    if isinstance(found, str) and secrets.compare_digest(found.encode(), nonce.encode()):
        return "passed", ""
    if "failed" in message:
        where = f" ({message['where']} of the test)" if message.get("where") else ""
        return "failed", f"{message['failed']}{where}"
    return "failed", "the checks ended before they were through"
