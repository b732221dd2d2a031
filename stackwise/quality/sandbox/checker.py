"""Checker: the process that runs the checks, in a jail of its own; it calls the candidate through a channel.

The nonce, which says that all checks are through, is only here, where the untrusted code is not.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import traceback
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)

from plain import decode, encode, pack, unpack  # type: ignore[import-not-found]  # noqa: E402

CHANNEL, RESULT = 3, 4
_TEXT = 2000  # characters of an error


class CandidateError(Exception):
    """The candidate raised what is no error of Python's own, or ended, or answered with nonsense."""


class Candidate:
    """A function of the candidate. What it does to a list, dict or set that it is given happens here too.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it there."""
        request = pack({"name": self.__name__, "args": encode(args), "kwargs": encode(kwargs)})
        try:
            while request:
                request = request[os.write(CHANNEL, request) :]
            reply = unpack(lambda size: os.read(CHANNEL, size))
        except OSError:
            reply = None
        if reply is None:
            raise CandidateError("the process of the candidate ended before it answered")
        if "raised" in reply:
            kind, text = getattr(builtins, str(reply["raised"]), None), str(reply.get("text"))[:_TEXT]
            # The two that end loops would end those of the checks, without a word.
            ends = kind in (StopIteration, StopAsyncIteration)
            if isinstance(kind, type) and issubclass(kind, Exception) and not ends:
                raise _made(kind, text)
            raise CandidateError(f"{str(reply['raised'])[:100]}: {text}")
        value, after = decode(reply.get("value")), decode(reply.get("args"))
        if isinstance(after, tuple) and len(after) == len(args):
            for mine, theirs in zip(args, after, strict=True):
                _update(mine, theirs)
        return value


def _made(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # such as UnicodeDecodeError, which wants more
        return CandidateError(f"{kind.__name__}: {text}")


def _update(mine: Any, theirs: Any) -> None:
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, list | bytearray):
        mine[:] = theirs
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)


def main() -> None:
    """Run the checks, and say how they ended."""
    with open(f"{FOLDER}/task.json", encoding="utf-8") as file:
        task = json.load(file)
    namespace: dict[str, Any] = {"__name__": "check"}
    try:
        exec(compile(task["setup"], "setup.py", "exec"), namespace)  # noqa: S102
        namespace |= {name: Candidate(name) for name in task["names"]}
        exec(compile(task["test"], "test.py", "exec"), namespace)  # noqa: S102
        said = {"nonce": task["nonce"]}
    except BaseException as error:
        where = [f"line {frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[1:][:1]]
        said = {"failed": f"{type(error).__name__}: {error}"[:_TEXT], "where": ", ".join(where)}
    message = pack(said)
    while message:
        message = message[os.write(RESULT, message) :]


main()
