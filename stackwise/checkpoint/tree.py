"""Tree: bit-exact encoding of a state as plain JSON and named tensors, without pickle.

Text, booleans, integers, finite numbers, None, lists, and mappings with text as keys are encoded as in JSON.
Any other value is an object with one key that names its type: `$tensor`, `$array`, `$scalar` (of NumPy),
`$tuple`, `$set`, `$dict` (pairs, for keys that are not text or start with a dollar sign), `$state_dict`
(pairs and the versions of modules), `$counter` (pairs), `$bytes`, `$number` (inf, nan).

Types are preserved. A value of a subclass is decoded as the type named here.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stackwise.support.tensor_tree import LEVELS, Path, shown_path, too_deep

__all__ = ["MalformedTreeError", "Path", "decode", "encode", "is_sharded", "no_tensor"]

# Returns the tensor of a name and a shape, at a place in the tree.
Fetch = Callable[[str, tuple[int, ...], Path], Tensor]

_ARRAY = re.compile(r"[<>|][biufc][0-9]{1,2}")
_COUNTS = (int, float, np.generic)
_ALLOWED = (
    "tensors, numpy arrays of numbers, None, bool, int, float, str, bytes, lists, tuples, sets, mappings, "
    "a Counter of numbers"
)
_INTEGER_BITS = 12_000  # below the limit of integers that Python reads from text
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class MalformedTreeError(ValueError):
    """A value to be decoded is not a result of `encode`."""


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor: each process has a part of it, or a copy."""
    if type(tensor) in _PLAIN:
        return False
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def encode(tree: Any, path: Path, tensors: dict[str, Tensor]) -> Any:
    """Return plain JSON for `tree`. Add its tensors to `tensors`, each under a unique name.

    A tensor that occurs twice is stored once. Tensors are neither copied nor moved.

    Args:
        tree: the state.
        path: place of the tree in the checkpoint. The names of tensors begin with it.
        tensors: tensors that were encoded before.

    Raises:
        ValueError: a value of an unsupported type, or more than 64 levels of containers, as in a state that
            contains itself. Names the place.
    """
    try:
        return _Encoder(tensors).plain(tree, path)
    except RecursionError:
        raise too_deep(path) from None


def decode(plain: Any, fetch: Fetch, path: Path = ()) -> Any:
    """Return the tree that `encode` has encoded.

    Args:
        plain: result of `encode`.
        fetch: returns the tensor of a name and a shape, at a path of the tree.
        path: path of the root of the tree.

    Raises:
        MalformedTreeError: `plain` is not a result of `encode`.
    """
    try:
        return _decode(plain, fetch, path)
    except RecursionError:
        raise MalformedTreeError("nested too deeply") from None


def no_tensor(name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    """Refuse a tensor: `fetch` for values without tensors.

    Raises:
        MalformedTreeError: always.
    """
    raise _malformed(path, [name, *shape])


class _Encoder:
    """Encoder of one tree. It adds the tensors of the tree to `tensors`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._names = {_identity(tensor): name for name, tensor in tensors.items() if tensor.numel()}

    def plain(self, tree: Any, path: Path) -> Any:
        """Return plain JSON for `tree`."""
        kind = type(tree)
        if kind in (NoneType, bool, str):
            return tree
        if kind is int and tree.bit_length() <= _INTEGER_BITS:
            return tree
        if kind is float:
            return tree if math.isfinite(tree) else {"$number": str(tree)}
        match tree:
            case Tensor():
                return {"$tensor": [self._named(tree, path), list(tree.shape)]}
            case np.generic():
                return {"$scalar": [_code(tree, path), _text(tree.tobytes())]}
            case np.ndarray():
                return self._array(tree, path)
            case bytes():
                return {"$bytes": _text(tree)}
            case list():
                return self._items(tree, path)
            case tuple():
                return {"$tuple": self._items(tree, path)}
            case set():
                return {"$set": [_key(item, path) for item in sorted(tree, key=repr)]}
            case Mapping():
                return self._mapping(tree, path)
        raise _refused(path, f"{kind.__module__}.{kind.__qualname__}")

    def _array(self, tree: np.ndarray[Any, Any], path: Path) -> Any:
        if type(tree) not in (np.ndarray, np.memmap):  # a masked array is more than its numbers
            raise _refused(path, f"a numpy array of {type(tree).__name__}")
        code = _code(tree, path)
        empty = torch.empty(0, dtype=torch.uint8)
        content = torch.frombuffer(bytearray(tree.tobytes()), dtype=torch.uint8) if tree.size else empty
        return {"$array": [self._named(content, path), code, list(tree.shape)]}

    def _items(self, items: Iterable[Any], path: Path) -> list[Any]:
        if len(path) > LEVELS:
            raise too_deep(path)
        return [self.plain(value, (*path, i)) for i, value in enumerate(items)]

    def _mapping(self, tree: Mapping[Any, Any], path: Path) -> Any:
        if len(path) > LEVELS:
            raise too_deep(path)
        pairs = [[_key(key, path), self.plain(value, (*path, key))] for key, value in tree.items()]
        if isinstance(tree, Counter):  # the milestones of torch's MultiStepLR
            if not _are_counts(tree.values()):
                raise _refused(path, "a Counter of other values than numbers")
            return {"$counter": pairs}
        if isinstance(tree, OrderedDict):
            # Modules read the versions of their state from `_metadata`.
            versions = self.plain(getattr(tree, "_metadata", None), (*path, "_metadata"))
            return {"$state_dict": [pairs, versions]}
        if all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return dict(pairs)
        return {"$dict": pairs}

    def _named(self, tensor: Tensor, path: Path) -> str:
        """Return the name of a tensor. Add the tensor if it has none."""
        if not is_sharded(tensor):
            if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
                state = "quantized" if tensor.is_quantized else str(tensor.layout)
                raise _refused(path, f"a {'meta' if tensor.is_meta else state} tensor")
            if type(tensor) not in _PLAIN:
                raise _refused(path, f"a tensor of {type(tensor).__name__}")
        identity = _identity(tensor)
        if tensor.numel() and identity in self._names:
            return self._names[identity]
        name = wanted = ".".join(map(str, path))
        number = 1
        while name in self._tensors:
            number += 1
            name = f"{wanted}#{number}"
        self._tensors[name] = tensor
        self._names[identity] = name
        return name


def _identity(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors with the same memory and the same view of it."""
    sharded = is_sharded(tensor)
    local: Any = tensor.to_local() if sharded else tensor  # type: ignore[attr-defined]
    place = local.data_ptr()
    marks = local.is_conj(), local.is_neg(), local.device, sharded, tensor.dtype
    return place, local.stride(), marks, tensor.shape if place else id(tensor)


def _code(numbers: Any, path: Path) -> str:
    """Return the code of a dtype of numpy."""
    code: str = numbers.dtype.str
    if not _ARRAY.fullmatch(code):
        what = "array" if isinstance(numbers, np.ndarray) else "scalar"
        raise _refused(path, f"a numpy {what} of {numbers.dtype}")
    return code


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _key(key: Any, path: Path) -> Any:
    """Encode a key of a mapping or an item of a set: a plain value, or a tuple of plain values."""
    plain = _Encoder({}).plain(key, (*path, "key")) if _is_hashed(key) else None
    if plain is None and key is not None:
        raise _refused(path, f"a mapping or a set with {key!r:.80}")
    return plain


def _is_hashed(value: Any) -> bool:
    """Return True for a value that has a hash when it is decoded."""
    if isinstance(value, tuple):
        return all(map(_is_hashed, value))
    return isinstance(value, str | int | float | bytes | np.generic | NoneType)


def _are_counts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, _COUNTS) for value in values)


def _refused(path: Path, what: str) -> ValueError:
    return ValueError(f"{shown_path(path)}: got {what}; allowed in a checkpoint: {_ALLOWED}")


def _decode(plain: Any, fetch: Fetch, path: Path) -> Any:
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    if isinstance(plain, list):
        return list(_items(plain, fetch, path))
    kind = next((key for key in plain if key.startswith("$")), None)
    if kind is None:
        return {key: _decode(value, fetch, (*path, key)) for key, value in plain.items()}
    if len(plain) > 1:
        raise _malformed(path, plain)
    return _decode_kind(kind, plain[kind], fetch, path)


def _decode_kind(kind: str, content: Any, fetch: Fetch, path: Path) -> Any:
    match kind, content:
        case "$tensor", [str(name), list(shape)] if _is_shape(shape):
            return fetch(name, tuple(shape), path)
        case "$array", [str(name), str(code), list(shape)] if _is_shape(shape):
            return _decode_array(name, _dtype(code, path), shape, fetch, path)
        case "$scalar", [str(code), str(text)]:
            return _decode_scalar(_dtype(code, path), text, path)
        case "$tuple", list(items):
            return tuple(_items(items, fetch, path))
        case "$set", list(items):
            return _hashed(lambda: set(_items(items, no_tensor, path)), path)
        case "$state_dict", [list(items), versions]:
            state = OrderedDict(_pairs(items, fetch, path))
            if versions is not None:
                state._metadata = _decode(versions, fetch, (*path, "_metadata"))  # type: ignore[attr-defined]
            return state
        case "$counter", list(items) if _are_counts((counts := _pairs(items, fetch, path)).values()):
            return Counter(counts)
        case "$dict", list(items):
            return _pairs(items, fetch, path)
        case "$number", "inf" | "-inf" | "nan":
            return float(content)
        case "$bytes", str(text):
            return _bytes(text, path)
    raise _malformed(path, {kind: content})


def _items(content: Iterable[Any], fetch: Fetch, path: Path) -> Iterator[Any]:
    return (_decode(value, fetch, (*path, i)) for i, value in enumerate(content))


def _pairs(content: list[Any], fetch: Fetch, path: Path) -> dict[Any, Any]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        raise _malformed(path, content)
    keys = [_decode(key, no_tensor, path) for key, _ in content]
    _hashed(lambda: set(keys), path)
    return {key: _decode(value, fetch, (*path, key)) for key, (_, value) in zip(keys, content, strict=True)}


def _hashed(make: Callable[[], Any], path: Path) -> Any:
    try:
        return make()
    except TypeError:
        raise _malformed(path, "a key that is none") from None


def _bytes(text: str, path: Path) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _malformed(path, text) from None


def _decode_array(name: str, dtype: np.dtype[Any], shape: list[int], fetch: Fetch, path: Path) -> Any:
    n_bytes = math.prod(shape) * dtype.itemsize
    held = fetch(name, (n_bytes,), path)
    if held.dtype != torch.uint8 or held.shape != (n_bytes,):
        raise _malformed(path, [name, dtype.str, shape])
    return np.frombuffer(held.numpy().tobytes(), dtype).reshape(shape).copy()


def _decode_scalar(dtype: np.dtype[Any], text: str, path: Path) -> Any:
    held = _bytes(text, path)
    if len(held) != dtype.itemsize:
        raise _malformed(path, [dtype.str, text])
    return np.frombuffer(held, dtype)[0]


def _dtype(code: str, path: Path) -> np.dtype[Any]:
    try:
        if _ARRAY.fullmatch(code):
            return np.dtype(code)
    except TypeError:
        pass
    raise _malformed(path, code)


def _is_shape(shape: list[Any]) -> bool:
    """Return True if torch, which counts in 64 bits, can create a tensor of the shape, even an empty one."""
    sizes = all(type(n) is int and n >= 0 for n in shape)
    return sizes and len(shape) <= 64 and math.prod(max(n, 1) for n in shape) < 2**60


def _malformed(path: Path, what: Any) -> MalformedTreeError:
    shown = repr(what)
    return MalformedTreeError(f"{shown_path(path) or 'the state'}: not understood: {shown[:80]}")
