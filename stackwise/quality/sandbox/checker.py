"""Checker: the process that runs the checks, in a jail of its own; it calls the candidate through a channel.

The nonce, which says that all checks are through, is only here, where the untrusted code is not.
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
_TEXT = 2000  # characters of an error
# Whose errors are known by their names. An error of unittest says that a check is skipped.
_STANDARD = sys.stdlib_module_names - {"unittest"}


class CandidateError(Exception):
    """The program cannot be loaded, or its function raised what cannot be raised here."""


class ChannelError(Exception):
    """A value cannot be handed over, or the candidate has ended, or answered with nonsense."""


class Channel:
    """The way to the candidate.

    Attributes:
        broken: what went wrong on it first: the checks are then not through, even where they take it for an
            error of the function; None: nothing did.
    """

    def __init__(self) -> None:
        self.broken: ChannelError | None = None

    def load(self, names: list[str]) -> None:
        """Have the program loaded.

        Raises:
            CandidateError: it raises an error, or does not define one of these functions.
            ChannelError: as `ask`.
        """
        reply = self.ask({"load": names})
        if "raised" in reply:
            raise CandidateError(f"the program cannot be loaded: {_said(reply)}")
        if reply.get("missing"):
            raise CandidateError(f"the program defines no function {reply['missing']!r:.100}")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The candidate's answer.

        Raises:
            ChannelError: it has ended, or gives none.
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
        """What is to be raised."""
        error = ChannelError(reason)
        self.broken = self.broken or error
        return error


class Candidate:
    """A function of the candidate.

    What it does to a list, dict, set or bytearray that it is given, wherever that lies in its arguments,
    happens here too where it returns.

    Args:
        name: of the function.
        channel: to where it is.
        own: by name, the classes that the problem itself defines, such as errors.
    """

    def __init__(self, name: str, channel: Channel, own: dict[str, Any]) -> None:
        self.__name__ = name
        self._channel, self._own = channel, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it there."""
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
    """What the candidate raised, as the nearest error that is known here, under its name."""
    name, text = str(reply["raised"])[:100], str(reply.get("text"))[:_TEXT]
    args, state = decode(reply.get("args")), decode(reply.get("state"))
    args, state = args if isinstance(args, tuple) else (), state if isinstance(state, dict) else {}
    for module, place in reply.get("kinds") or ():
        kind = _known(module, place, own)
        if kind is None:
            continue
        # The two that end loops would end those of the checks, without a word.
        if issubclass(kind, StopIteration | StopAsyncIteration):
            break
        if name != kind.__name__ and name.isidentifier():
            kind = type(name, (kind,), {})
        made = _made(kind, args, state, text)
        if made is not None:
            return made
    return CandidateError(_said(reply))


def _known(module: object, name: object, own: dict[str, Any]) -> Any:
    """A class of errors that the problem defines, or a standard module that is imported here; None: neither.

    No module is imported for it: of others the checks have no class to compare with. What says that a check
    is skipped is no error.
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
    """One of that kind which says the same; None: none can be made."""
    # Without its constructor for one whose own arguments are others than those of its base, of the text for
    # one whose arguments could not be handed over.
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
    """Run the checks, and say how they ended."""
    with open(f"{FOLDER}/task.json", encoding="utf-8") as file:
        task = json.load(file)
    module = sys.modules["check"] = types.ModuleType("check")
    namespace, channel = vars(module), Channel()
    try:
        channel.load(task["names"])
        # Without what this file imports from __future__.
        exec(compile(task["setup"], "setup.py", "exec", dont_inherit=True), namespace)  # noqa: S102
        # What it imports it does not define.
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
