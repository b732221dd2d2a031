"""Checker: the process that runs the checks, in a jail of its own; it calls the candidate through a channel.

The nonce, which says that all checks are through, is only here, where the untrusted code is not.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import traceback
import types
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)

from plain import Shared, decode, encode, pack, unpack  # type: ignore[import-not-found]  # noqa: E402

CHANNEL, RESULT = 3, 4
_TEXT = 2000  # characters of an error


class CandidateError(Exception):
    """The candidate raised what cannot be raised here, or ended, or answered with nonsense."""


class Candidate:
    """A function of the candidate.

    What it does to a list, dict, set or bytearray that it is given, wherever that lies in its arguments,
    happens here too where it returns.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it there."""
        shared = Shared()
        parts = {"args": encode(args, shared), "kwargs": encode(kwargs, shared)}
        given = list(shared.objects)
        request = pack({"name": self.__name__, **parts})
        try:
            while request:
                request = request[os.write(CHANNEL, request) :]
            reply = unpack(lambda size: os.read(CHANNEL, size))
        except OSError:
            reply = None
        if reply is None:
            raise CandidateError("the process of the candidate ended before it answered")
        if "raised" in reply:
            raise _error(reply)
        value, after = decode(reply.get("value"), shared), decode(reply.get("after"), shared)
        if not isinstance(after, list) or len(after) != len(given):
            raise CandidateError("it does not say what has become of its arguments")
        for mine, theirs in zip(given, after, strict=True):
            _update(mine, theirs)
        return value


def _error(reply: dict[str, Any]) -> Exception:
    """What the candidate raised, as the nearest of Python's own errors, under its name."""
    name, text = str(reply["raised"])[:100], str(reply.get("text"))[:_TEXT]
    kinds = [vars(builtins).get(str(each)) for each in reply.get("kinds") or ()]
    errors = [each for each in kinds if isinstance(each, type) and issubclass(each, BaseException)]
    kind: Any = errors[0] if errors else None
    # The two that end loops would end those of the checks, without a word.
    if kind is None or not issubclass(kind, Exception) or kind in (StopIteration, StopAsyncIteration):
        return CandidateError(f"{name}: {text}")
    if name != kind.__name__ and name.isidentifier():
        kind = type(name, (kind,), {})
    args = decode(reply.get("args"))
    for some in (args if isinstance(args, tuple) else (), (text,)):
        try:
            made: Exception = kind(*some)
        except TypeError:  # such as UnicodeDecodeError, which wants more than a text
            continue
        if str(made).startswith(text):
            return made
    return CandidateError(f"{name}: {text}")


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
    namespace = vars(module)
    try:
        # Without what this file imports from __future__.
        exec(compile(task["setup"], "setup.py", "exec", dont_inherit=True), namespace)  # noqa: S102
        namespace |= {name: Candidate(name) for name in task["names"]}
        exec(compile(task["test"], "test.py", "exec", dont_inherit=True), namespace)  # noqa: S102
        said = {"nonce": task["nonce"]}
    except BaseException as error:
        where = [f"line {frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[1:][:1]]
        said = {"failed": f"{type(error).__name__}: {error}"[:_TEXT], "where": ", ".join(where)}
    message = pack(said)
    while message:
        message = message[os.write(RESULT, message) :]


main()
