"""Checker: process that runs the checks in its own jail, and calls the candidate through a channel.

The nonce, which proves that all checks have passed, exists only in this process. The untrusted code has no
access.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
from functools import partial
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)

from plain import (  # type: ignore[import-not-found]  # noqa: E402
    NotPlainError,
    Shared,
    decode,
    encode,
    pack,
    unpack,
)

CHANNEL, RESULT = 3, 4
_TEXT = 2000  # maximum number of characters of an error
# Modules with errors that are recognised by name. An error of unittest means that a check is skipped.
_STANDARD = sys.stdlib_module_names - {"unittest"}


class CandidateError(Exception):
    """Error of a program that cannot be loaded, or that raised an unknown error."""


class ChannelError(Exception):
    """Error for a value that is not plain, or a candidate that has ended or returned an invalid answer."""


class Channel:
    """Connection to the candidate.

    Attributes:
        broken: first error of the connection, or None. With an error, the checks have not passed, even if
            they catch it as an error of the function.
    """

    def __init__(self) -> None:
        self.broken: ChannelError | None = None

    def load(self, names: list[str]) -> None:
        """Make the candidate load its program.

        Raises:
            CandidateError: the program raises an error, or does not define one of the functions.
            ChannelError: an error of `ask`.
        """
        reply = self.ask({"load": names})
        if "raised" in reply:
            raise CandidateError(f"the program cannot be loaded: {_said(reply)}")
        if reply.get("missing"):
            raise CandidateError(f"the program defines no function {reply['missing']!r:.100}")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and return the candidate's answer.

        Raises:
            ChannelError: the candidate has ended, or its answer is invalid.
        """
        try:
            message = pack(request)
            while message:
                message = message[os.write(CHANNEL, message) :]
            reply: dict[str, Any] | None = unpack(lambda size: os.read(CHANNEL, size))
        except OSError:
            reply = None
        except NotPlainError as error:
            raise self.failed(str(error)) from None
        if reply is None:
            raise self.failed("the process of the candidate ended before it answered")
        if "not plain" in reply:
            raise self.failed(str(reply["not plain"])[:_TEXT])
        return reply

    def failed(self, reason: str) -> ChannelError:
        """Record an error of the connection, and return it."""
        error = ChannelError(reason)
        self.broken = self.broken or error
        return error


class Candidate:
    """Function of the candidate.

    Changes that the function makes to a list, dict, set or bytearray in its arguments, at any depth, are
    applied in this process when it returns.

    Args:
        name: name of the function.
        channel: connection to the candidate.
        own: classes that the problem itself defines, such as errors, by name.
    """

    def __init__(self, name: str, channel: Channel, own: dict[str, Any]) -> None:
        self.__name__ = name
        self._channel, self._own = channel, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in the candidate's process."""
        shared = Shared()
        try:
            parts = {"args": encode(args, shared), "kwargs": encode(kwargs, shared)}
            given = list(shared.objects)
            reply = self._channel.ask({"name": self.__name__, **parts})
            raised = _error(reply, self._own) if "raised" in reply else None
            value, after = decode(reply.get("value"), shared), decode(reply.get("after"), shared)
        except NotPlainError as error:
            raise self._channel.failed(str(error)) from None
        if raised is not None:
            raise raised
        if not isinstance(after, list) or len(after) != len(given):
            raise self._channel.failed("it does not say what has become of its arguments")
        for mine, theirs in zip(given, after, strict=True):
            _update(mine, theirs)
        return value


def _said(reply: dict[str, Any]) -> str:
    return f"{str(reply['raised'])[:100]}: {str(reply.get('text'))[:_TEXT]}"


def _error(reply: dict[str, Any], own: dict[str, Any]) -> Exception:
    """Return the error of the candidate, as the nearest class that is known here, with its original name."""
    name, text = str(reply["raised"])[:100], str(reply.get("text"))[:_TEXT]
    args, state = decode(reply.get("args")), decode(reply.get("state"))
    args, state = args if isinstance(args, tuple) else (), state if isinstance(state, dict) else {}
    for module, place in reply.get("kinds") or ():
        kind = _known(module, place, own)
        if kind is None:
            continue
        # These two would silently end loops of the checks.
        if issubclass(kind, StopIteration | StopAsyncIteration):
            break
        if name != kind.__name__ and name.isidentifier():
            kind = type(name, (kind,), {})
        made = _made(kind, args, state, text)
        if made is not None:
            return made
    return CandidateError(_said(reply))


def _known(module: object, name: object, own: dict[str, Any]) -> Any:
    """Return an error class of the problem or of an imported standard module.

    Return None for any other class.

    No module is imported, because the checks cannot compare with a class that is not imported. A class that
    signals a skipped check is not an error.
    """
    held = own
    if module != "candidate":
        standard = isinstance(module, str) and module.partition(".")[0] in _STANDARD
        found = sys.modules.get(str(module)) if standard else None
        held = vars(found) if isinstance(found, types.ModuleType) else {}
    kind = held.get(str(name))
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    return None if issubclass(kind, getattr(sys.modules.get("unittest"), "SkipTest", ())) else kind


def _made(kind: Any, args: tuple[Any, ...], state: dict[Any, Any], text: str) -> Exception | None:
    """Return an error of this class with the same text. Return None if none can be created."""
    # Try without the constructor, if its arguments differ from those of its base class. Try with the text, if
    # the arguments are not plain.
    bare = partial(kind.__new__, kind)
    for make, given in ((kind, args), (bare, args), (kind, (text,)), (bare, (text,))):
        try:
            made: Exception = make(*given)
            vars(made).update(state)
            if str(made).startswith(text):
                return made
        except Exception:  # noqa: S112  # such as UnicodeDecodeError, which wants more than a text
            continue
    return None


def _update(mine: Any, theirs: Any) -> None:
    if isinstance(mine, list | bytearray):
        mine[:] = theirs
    else:
        mine.clear()
        mine.update(theirs)


def main() -> None:
    """Run the checks, and report the result."""
    with open(f"{FOLDER}/task.json", encoding="utf-8") as file:
        task = json.load(file)
    module = sys.modules["check"] = types.ModuleType("check")
    namespace, channel = vars(module), Channel()
    try:
        channel.load(task["names"])
        # `dont_inherit`: without the `__future__` imports of this file.
        exec(compile(task["setup"], "setup.py", "exec", dont_inherit=True), namespace)  # noqa: S102
        # Classes defined by the setup itself, without imported ones.
        own = {
            name: kind
            for name, kind in namespace.items()
            if isinstance(kind, type) and kind.__module__ == module.__name__
        }
        namespace |= {name: Candidate(name, channel, own) for name in task["names"]}
        exec(compile(task["test"], "test.py", "exec", dont_inherit=True), namespace)  # noqa: S102
        if channel.broken is not None:
            raise channel.broken
        said = {"nonce": task["nonce"]}
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "test.py"]
        where = [f"line {frame.lineno}" for frame in frames[:1]]
        said = {"failed": f"{type(error).__name__}: {error}"[:_TEXT], "where": ", ".join(where)}
    message = pack(said)
    while message:
        message = message[os.write(RESULT, message) :]


main()
