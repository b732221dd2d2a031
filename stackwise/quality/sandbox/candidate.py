"""Candidate: process that contains the untrusted code, and calls its functions on request of the checks.

It runs in its own jail. Whatever the code does to this process, it can only return wrong answers or none.
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
_TEXT = 500  # maximum number of characters of an error


def main() -> None:
    """Load the program on the first request, and answer calls until the channel is closed."""
    with open(f"{FOLDER}/program.py", encoding="utf-8") as file:
        source = file.read()
    # A regular module, because pickle and dataclasses look up a class in its module.
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
    """Load the program. Return the requested functions that it does not define."""
    # `dont_inherit`: without the `__future__` imports of this file.
    exec(compile(source, "program.py", "exec", dont_inherit=True), namespace)  # noqa: S102
    missing = [name for name in request["load"] if not callable(namespace.get(name))]
    return bytes(pack({"missing": missing}))


def _answer(request: dict[str, Any], namespace: dict[str, Any]) -> bytes:
    """Return the value of a function call, and the state of the objects in its arguments after the call."""
    shared = Shared()
    args, kwargs = decode(request["args"], shared), decode(request["kwargs"], shared)
    given = list(shared.objects)
    value = encode(namespace[request["name"]](*args, **kwargs), shared)
    # Copies, because objects that already have a number are encoded as references.
    return bytes(pack({"value": value, "after": encode([type(each)(each) for each in given], shared)}))


def _raised(error: BaseException) -> bytes:
    """Return an error: its name, its base classes with their modules, its arguments and its attributes."""
    kinds = [[str(each.__module__), each.__qualname__] for each in type(error).__mro__]
    said = {"raised": type(error).__name__, "kinds": kinds, "text": _text(error)}
    try:
        # The arguments that pickle uses. For OSError, they are more than `args`.
        return bytes(pack(said | {"args": encode(error.__reduce__()[1]), "state": encode(vars(error))}))
    except BaseException:  # not plain, or an error with invalid methods
        return bytes(pack(said))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT]
    except BaseException:
        return "an error that cannot be printed"


main()
