"""Candidate: the process in which untrusted code is, and which calls its functions for the checks.

It runs alone in a jail: whatever the code does to this process, it can only answer wrongly, or not at all.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
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

CHANNEL = 3
_TEXT = 500  # characters of an error


def main() -> None:
    """Answer calls until there are no more."""
    with open(f"{FOLDER}/program.py", encoding="utf-8") as file:
        source = file.read()
    # A module like any other: pickle and dataclasses look for one by the name that a class says.
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    namespace, loaded = vars(module), False
    while (request := unpack(lambda size: os.read(CHANNEL, size))) is not None:
        try:
            if not loaded:
                # Without what this file imports from __future__.
                exec(compile(source, "program.py", "exec", dont_inherit=True), namespace)  # noqa: S102
                loaded = True
            reply = _answer(request, namespace)
        except NotPlainError as error:
            reply = pack({"raised": "NotPlainError", "text": str(error)})
        except BaseException as error:
            reply = _raised(error)
        while reply:
            reply = reply[os.write(CHANNEL, reply) :]


def _answer(request: dict[str, Any], namespace: dict[str, Any]) -> bytes:
    """What a function returns, and what has become of the objects that it was given."""
    shared = Shared()
    args, kwargs = decode(request["args"], shared), decode(request["kwargs"], shared)
    given = list(shared.objects)
    value = encode(namespace[request["name"]](*args, **kwargs), shared)
    # Copies, since what has a number already is only named.
    return bytes(pack({"value": value, "after": encode([type(each)(each) for each in given], shared)}))


def _raised(error: BaseException) -> bytes:
    """Its name, the names of those of Python's own errors that it is one of, and what it was made of."""
    kinds = [each.__name__ for each in type(error).__mro__ if vars(builtins).get(each.__name__) is each]
    said = {"raised": type(error).__name__, "kinds": kinds, "text": _text(error)}
    try:
        # As for pickle: what it is made again of, which for OSError is more than its `args`.
        return bytes(pack(said | {"args": encode(error.__reduce__()[1])}))
    except BaseException:  # not plain, or whatever the code has made of it
        return bytes(pack(said))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT]
    except BaseException:
        return "an error that cannot be printed"


main()
