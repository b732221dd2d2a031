"""Candidate: the process in which untrusted code is, and which calls its functions for the checks.

It runs alone in a jail: whatever the code does to this process, it can only answer wrongly, or not at all.
"""

from __future__ import annotations

import os
import sys
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)

from plain import NotPlainError, decode, encode, pack, unpack  # type: ignore[import-not-found]  # noqa: E402

CHANNEL = 3
_TEXT = 500  # characters of an error


def main() -> None:
    """Answer calls until there are no more."""
    with open(f"{FOLDER}/program.py", encoding="utf-8") as file:
        source = file.read()
    namespace: dict[str, Any] = {"__name__": "candidate"}
    loaded = False
    while (request := unpack(lambda size: os.read(CHANNEL, size))) is not None:
        try:
            if not loaded:
                exec(compile(source, "program.py", "exec"), namespace)  # noqa: S102
                loaded = True
            args, kwargs = decode(request["args"]), decode(request["kwargs"])
            value = namespace[request["name"]](*args, **kwargs)
            reply = pack({"value": encode(value), "args": encode(args)})
        except NotPlainError as error:
            reply = pack({"raised": "NotPlainError", "text": str(error)})
        except BaseException as error:
            reply = pack({"raised": type(error).__name__, "text": _text(error)})
        while reply:
            reply = reply[os.write(CHANNEL, reply) :]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT]
    except BaseException:
        return "an error that cannot be printed"


main()
