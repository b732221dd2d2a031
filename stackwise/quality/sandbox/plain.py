"""Plain values: data exchange between two processes that do not trust each other.

Values never contain code. A value arrives as an object of built-in types, even if its class overrides
comparison or printing. Only the standard library is used, because the jail has no other packages.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

__all__ = ["LARGEST", "NotPlainError", "Shared", "decode", "encode", "pack", "unpack"]

LARGEST = 2**24  # maximum size of a message in bytes
_DEEPEST = 100
_ITEMS = 100_000  # maximum number of items of an iterator


class NotPlainError(ValueError):
    """Error for a value that cannot be encoded or decoded."""


class Shared:
    """Mutable objects (lists, dicts, sets, bytearrays) of a conversation, at one of its ends.

    An object that is encoded a second time is encoded as its number, so that it arrives as the same object.
    Both ends use the same numbers: each object comes after the objects that it contains.

    Attributes:
        objects: objects in the order of their numbers.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def add(self, value: Any) -> None:
        """Assign the next number to an object."""
        self._numbers[id(value)] = len(self.objects)
        self.objects.append(value)

    def number(self, value: Any) -> int | None:
        """Return the number of an object. Return None if it has no number."""
        return self._numbers.get(id(value))


def encode(value: Any, shared: Shared | None = None, depth: int = 0) -> Any:
    """Return a value as data for JSON.

    Supported are numbers, texts, bytes, None, and lists, tuples, sets, dicts and views of dicts of them.
    Instances of subclasses are encoded as their base class. An iterator is consumed, and encoded as its
    items.

    Args:
        value: value to encode.
        shared: objects that were encoded earlier, which is updated. None: no objects.
        depth: nesting depth of the value.

    Raises:
        NotPlainError: the type is not supported, or the value is too large or too deep.
    """
    shared = Shared() if shared is None else shared
    changing = isinstance(value, _CHANGING)
    if changing and (number := shared.number(value)) is not None:
        return {"same": number}
    if depth > _DEEPEST:
        raise NotPlainError(f"values lie within each other more than {_DEEPEST} times")
    if value is None or value is True or value is False:
        return value
    write = next((write for kind, write in _WRITERS.items() if isinstance(value, kind)), None)
    if write is None:
        raise NotPlainError(f"a {type(value).__name__} cannot be handed over")
    written = write(value, lambda each: encode(each, shared, depth + 1))
    if changing:
        shared.add(value)
    return written


def decode(data: Any, shared: Shared | None = None, depth: int = 0) -> Any:
    """Return the value of encoded data, with built-in types.

    Args:
        data: result of `encode`.
        shared: objects that were decoded earlier, which is updated. None: no objects.
        depth: nesting depth of the value.

    Raises:
        NotPlainError: the data is not a result of `encode`.
    """
    shared = Shared() if shared is None else shared
    if depth > _DEEPEST + 1:
        raise NotPlainError("values lie within each other too deep")
    if data is None or isinstance(data, bool | str):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise NotPlainError("not what a value is written as")
    ((name, held),) = data.items()
    make = _MAKERS.get(name)
    if make is None:
        raise NotPlainError(f"there is no kind of value {name!r:.40}")
    try:
        made = make(held, shared, depth + 1)
    except NotPlainError:
        raise
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        raise NotPlainError(f"not what a value of kind {name!r} is written as: {error}") from None
    if name != "same" and isinstance(made, _CHANGING):
        shared.add(made)
    return made


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes, with its length at the start.

    Raises:
        NotPlainError: the message is too long.
    """
    body = json.dumps(message).encode()
    if len(body) > LARGEST:
        raise NotPlainError(f"{len(body)} bytes cannot be handed over; allowed: {LARGEST}")
    return struct.pack("!I", len(body)) + body


def unpack(read: Callable[[int], bytes]) -> dict[str, Any] | None:
    """Return the next message.

    Args:
        read: function that returns up to the given number of bytes, and no bytes at the end.

    Returns:
        The message. None: no more messages.

    Raises:
        NotPlainError: the data is not a message.
    """
    head = _exactly(read, 4)
    if head is None:
        return None
    (length,) = struct.unpack("!I", head)
    if length > LARGEST:
        raise NotPlainError(f"a message of {length} bytes; allowed: {LARGEST}")
    body = _exactly(read, length)
    if body is None:
        return None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NotPlainError(f"no message: {error}") from None
    if not isinstance(message, dict):
        raise NotPlainError("no message")
    return message


_CHANGING = (list, dict, set, bytearray)
_ITERABLES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_VIEWS: dict[str, Any] = {"keys": type({}.keys()), "values": type({}.values()), "items": type({}.items())}
_Inner = Callable[[Any], Any]


def _listed(name: str, items: Callable[[Any], Iterator[Any]]) -> Callable[[Any, _Inner], dict[str, Any]]:
    return lambda value, inner: {name: [inner(each) for each in items(value)]}


def _parts(value: complex, _: _Inner) -> dict[str, Any]:
    # Not `value.real`, because a subclass may override it. An addition would lose the sign of -0.0.
    parts = complex.real.__get__(value), complex.imag.__get__(value)
    return {"complex": [float.hex(part) for part in parts]}


def _iterator(value: Iterator[Any], inner: _Inner) -> dict[str, Any]:
    if isinstance(value, Mapping | Set):
        raise NotPlainError(f"a {type(value).__name__} cannot be handed over")
    items: list[Any] = []
    for item in value:
        if len(items) == _ITEMS:
            raise NotPlainError(f"an iterator has more than {_ITEMS} items")
        items.append(inner(item))
    return {"iterator": items}


# Functions that encode a value of a type. Their second argument encodes the values in it.
_WRITERS: dict[type, Callable[[Any, _Inner], Any]] = {
    str: lambda value, _: str.__str__(value),
    int: lambda value, _: {"int": format(int.__index__(value), "x")},
    float: lambda value, _: {"float": float.hex(value)},
    complex: _parts,
    bytes: lambda value, _: {"bytes": bytes(value).hex()},
    bytearray: lambda value, _: {"bytearray": bytes(value).hex()},
    **{kind: _listed(name, kind.__iter__) for name, kind in _ITERABLES.items()},
    dict: lambda value, inner: {"dict": [[inner(each) for each in pair] for pair in dict.items(value)]},
    range: lambda value, _: {"range": [value.start, value.stop, value.step]},
    **{kind: _listed(name, iter) for name, kind in _VIEWS.items()},
    Iterator: _iterator,
}


def _complex(real: str, imaginary: str) -> complex:
    return complex(float.fromhex(real), float.fromhex(imaginary))


def _many(kind: Callable[[list[Any]], Any]) -> Callable[[Any, Shared, int], Any]:
    def make(held: Any, shared: Shared, depth: int) -> Any:
        if not isinstance(held, list):
            raise TypeError("no list")
        return kind([decode(each, shared, depth) for each in held])

    return make


def _dict(held: Any, shared: Shared, depth: int) -> dict[Any, Any]:
    return {decode(key, shared, depth): decode(value, shared, depth) for key, value in held}


_MAKERS: dict[str, Callable[[Any, Shared, int], Any]] = {
    "same": lambda held, shared, _: shared.objects[operator.index(held)],
    "int": lambda held, *_: int(held, 16),
    "float": lambda held, *_: float.fromhex(held),
    "complex": lambda held, *_: _complex(*held),
    "bytes": lambda held, *_: bytes.fromhex(held),
    "bytearray": lambda held, *_: bytearray.fromhex(held),
    "range": lambda held, *_: range(*held),
    "dict": _dict,
    "iterator": _many(iter),
    "keys": _many(lambda held: dict.fromkeys(held).keys()),
    "values": _many(lambda held: dict(enumerate(held)).values()),
    "items": _many(lambda held: dict(held).items()),
    **{name: _many(kind) for name, kind in _ITERABLES.items()},
}


def _exactly(read: Callable[[int], bytes], size: int) -> bytes | None:
    parts = []
    while size:
        part = read(min(size, 2**16))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
