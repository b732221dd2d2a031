"""Candidate: the process in which untrusted code is, and which calls its functions for the checks.

It runs alone in a jail: whatever the code does to this process, it can only answer wrongly, or not at all.
"""

from __future__ import annotations

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
    """Load the program when the checks are about to begin, and answer calls until there are no more."""
    with open(f"{FOLDER}/program.py", encoding="utf-8") as file:
        source = file.read()
    # A module like any other: pickle and dataclasses look for one by the name that a class says.
    module = sys.modules["candidate"] = types.ModuleType("candidate")
    namespace, loaded = vars(module), False
    while (request := unpack(lambda size: os.read(CHANNEL, size))) is not None:
        try:
            reply = _answer(request, namespace) if loaded else _load(request, source, namespace)
            loaded = True
        except NotPlainError as error:
            reply = pack({"not plain": str(error)})
        except BaseException as error:
            reply = _raised(error)
        while reply:
            reply = reply[os.write(CHANNEL, reply) :]
        if not loaded:
            return


def _load(request: dict[str, Any], source: str, namespace: dict[str, Any]) -> bytes:
    """Which of the functions that are asked for the program does not define."""
    # Without what this file imports from __future__.
    exec(compile(source, "program.py", "exec", dont_inherit=True), namespace)  # noqa: S102
    missing = [name for name in request["load"] if not callable(namespace.get(name))]
    return bytes(pack({"missing": missing}))


def _answer(request: dict[str, Any], namespace: dict[str, Any]) -> bytes:
    """What a function returns, and what has become of the objects that it was given."""
    shared = Shared()
    args, kwargs = decode(request["args"], shared), decode(request["kwargs"], shared)
    given = list(shared.objects)
    value = encode(namespace[request["name"]](*args, **kwargs), shared)
    # Copies, since what has a number already is only named.
    return bytes(pack({"value": value, "after": encode([type(each)(each) for each in given], shared)}))


def _raised(error: BaseException) -> bytes:
    """Its name, where it and all that it is one of are defined, what it was made of, and what it holds."""
    kinds = [[str(each.__module__), each.__qualname__] for each in type(error).__mro__]
    said = {"raised": type(error).__name__, "kinds": kinds, "text": _text(error)}
    try:
        # As for pickle: what it is made again of, which for OSError is more than its `args`.
        return bytes(pack(said | {"args": encode(error.__reduce__()[1]), "state": encode(vars(error))}))
    except BaseException:  # not plain, or whatever the code has made of it
        return bytes(pack(said))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT]
    except BaseException:
        return "an error that cannot be printed"


main()
