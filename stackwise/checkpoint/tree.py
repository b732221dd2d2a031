"""Tree: bit-exact encoding of a state as plain JSON and named tensors, without pickle.

Text, booleans, integers, finite numbers, None, lists, and mappings with text as keys are encoded as in JSON.
Any other value is an object with one key that names its type: `$tensor`, `$array`, `$scalar`, `$tuple`,
`$namedtuple` (its name and pairs), `$dict` (pairs, for keys that are not text or start with a dollar sign),
`$state_dict` (pairs and the versions of modules), `$counter`, `$defaultdict` (its factory, and pairs),
`$set`, `$frozenset`, `$bytes`, `$bytearray`, `$path`, `$number` (inf, nan), `$complex`, `$dtype`.

Types are preserved. A value of a subclass is decoded as the type named here.
"""

from __future__ import annotations

import base64
import binascii
import math
import pathlib
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
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
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# Factories of a defaultdict. Any other function would have to be imported.
_FACTORIES: dict[str, Any] = {"None": None} | {
    each.__name__: each for each in (bool, int, float, complex, str, bytes, list, tuple, set, dict, Counter)
}
_COUNTS = (int, float, complex, np.generic, Tensor)
_ALLOWED = (
    "tensors, numpy arrays of numbers, None, bool, int, float, complex, str, bytes, paths, lists, tuples, "
    "sets, mappings; a Counter of numbers, a defaultdict of None or a builtin type"
)
_INTEGER_DIGITS = 4000  # below the limit of integers that Python reads from text
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
        if kind in (int, float, complex):
            return _number(tree, path)
        if kind in (NoneType, bool, str):
            return tree
        match tree:
            case Tensor():
                return {"$tensor": [self._named(tree, path), list(tree.shape)]}
            case np.generic():
                return {"$scalar": [_code(tree, path), _text(tree.tobytes())]}
            case np.ndarray():
                return self._array(tree, path)
            case bytes():
                return {"$bytes": _text(tree)}
            case bytearray():
                return {"$bytearray": _text(tree)}
            case pathlib.Path():
                return {"$path": str(tree)}
            case torch.dtype():
                return {"$dtype": str(tree)}
            case list():
                return self._list(tree, path)
            case tuple():
                return self._tuple(tree, path)
            case set() | frozenset():
                return self._set(tree, path)
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

    def _list(self, items: Iterable[Any], path: Path) -> list[Any]:
        if len(path) > LEVELS:
            raise too_deep(path)
        return [self.plain(value, (*path, i)) for i, value in enumerate(items)]

    def _tuple(self, tree: tuple[Any, ...], path: Path) -> Any:
        values = self._list(tree, path)  # paths have positions, as in `leaves`
        fields = getattr(tree, "_fields", None)
        if fields is not None and hasattr(tree, "_make") and _are_fields(fields):
            return {"$namedtuple": [type(tree).__name__, list(map(list, zip(fields, values, strict=True)))]}
        return {"$tuple": values}

    def _set(self, tree: set[Any] | frozenset[Any], path: Path) -> Any:
        items = self._list(sorted(tree, key=repr), path)
        for item in items:
            _check_hashed(item, path, "a set with")
        return {"$set" if isinstance(tree, set) else "$frozenset": items}

    def _mapping(self, tree: Mapping[Any, Any], path: Path) -> Any:
        if len(path) > LEVELS:
            raise too_deep(path)
        for key in tree:
            if not isinstance(key, str | int | float | bool | tuple | np.generic | None):
                raise _refused(path, f"a mapping with the key {key!r}")
        pairs = [[_key(key, path), self.plain(value, (*path, key))] for key, value in tree.items()]
        if isinstance(tree, Counter):
            if not _are_counts(tree.values()):
                raise _refused(path, "a Counter of other values than numbers")
            return {"$counter": pairs}
        if isinstance(tree, defaultdict):
            makes = tree.default_factory
            name = next((name for name, each in _FACTORIES.items() if each is makes), None)
            if name is None:
                raise _refused(path, f"a defaultdict of {makes!r}")
            return {"$defaultdict": [name, pairs]}
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
        if not wanted.isascii() and wanted.encode("utf-8", "replace").decode() != wanted:
            raise _refused(path, "a key that UTF-8 cannot encode")
        number = 1
        while name in self._tensors:
            number += 1
            name = f"{wanted}#{number}"
        self._tensors[name] = tensor
        self._names[identity] = name
        return name


def _number(number: Any, path: Path) -> Any:
    if isinstance(number, float):
        return number if math.isfinite(number) else {"$number": str(number)}
    if isinstance(number, complex):
        return {"$complex": [_number(number.real, path), _number(number.imag, path)]}
    if number.bit_length() > 3 * _INTEGER_DIGITS:
        most = f"at most {3 * _INTEGER_DIGITS:,} bits"
        raise _refused(path, f"an integer of {number.bit_length():,} bits, of which {most} are allowed")
    return number


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


def _text(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode("ascii")


def _key(key: Any, path: Path) -> Any:
    """Encode a key. Refuse a key that contains tensors."""
    held: dict[str, Tensor] = {}
    plain = _Encoder(held).plain(key, (*path, "key"))
    if held:
        raise _refused(path, f"a mapping with the key {key!r}")
    _check_hashed(plain, path, "a mapping with the key")
    return plain


def _check_hashed(plain: Any, path: Path, holder: str) -> None:
    """Refuse a value that is decoded to one without a hash, such as a list with a user-defined hash."""
    if not isinstance(plain, dict | list):
        return
    try:
        hash(_decode(plain, lambda *_: torch.empty(0), path))
    except TypeError:
        raise _refused(path, f"{holder} {plain!r:.80}") from None


def _are_counts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, _COUNTS) for value in values)


def _refused(path: Path, what: str) -> ValueError:
    return ValueError(f"{shown_path(path)}: got {what}; allowed in a checkpoint: {_ALLOWED}")


def _decode(plain: Any, fetch: Fetch, path: Path) -> Any:
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    if isinstance(plain, list):
        return list(_items(plain, fetch, path))
    if not isinstance(plain, dict):
        raise _malformed(path, plain)
    kind = next((key for key in plain if key.startswith("$")), None)
    if kind is None:
        return {key: _decode(value, fetch, (*path, key)) for key, value in plain.items()}
    if len(plain) == 1 and isinstance(plain[kind], str):
        return _decode_text(kind, plain[kind], path)
    if len(plain) == 1 and isinstance(plain[kind], list):
        return _decode_list(kind, plain[kind], fetch, path)
    raise _malformed(path, plain)


def _decode_text(kind: str, text: str, path: Path) -> Any:
    match kind:
        case "$number" if text in ("inf", "-inf", "nan"):
            return float(text)
        case "$dtype" if text in _DTYPES:
            return _DTYPES[text]
        case "$path":
            return pathlib.Path(text)
        case "$bytes":
            return _bytes(text, path)
        case "$bytearray":
            return bytearray(_bytes(text, path))
    raise _malformed(path, {kind: text})


def _decode_list(kind: str, content: list[Any], fetch: Fetch, path: Path) -> Any:
    match kind, content:
        case "$tensor", [str(name), list(shape)] if _is_shape(shape):
            return fetch(name, tuple(shape), path)
        case "$array", _:
            return _decode_array(content, fetch, path)
        case "$scalar", [str(code), str(text)]:
            return _decode_scalar(code, text, path)
        case "$scalar", [str(), str(), []]:  # encoded as an array in earlier versions
            return _decode_array(content, fetch, path)[()]
        case "$tuple", _:
            return tuple(_items(content, fetch, path))
        case "$namedtuple", [str(name), list(items)]:
            return _decode_namedtuple(name, items, fetch, path)
        case "$set" | "$frozenset", _:
            makes = set if kind == "$set" else frozenset
            return _hashed(lambda: makes(_items(content, fetch, path)), path)
        case "$complex", _:
            match list(_items(content, fetch, path)):
                case [float(real), float(imaginary)]:
                    return complex(real, imaginary)
        case "$state_dict", [list(items), metadata]:
            return _decode_state_dict(items, metadata, fetch, path)
        case "$counter", _ if _are_counts((counts := _pairs(content, fetch, path)).values()):
            return Counter(counts)
        case "$defaultdict", [str(name), list(items)] if name in _FACTORIES:
            return defaultdict(_FACTORIES[name], _pairs(items, fetch, path))
        case "$dict", _:
            return _pairs(content, fetch, path)
    raise _malformed(path, {kind: content})


def _decode_namedtuple(name: str, items: list[Any], fetch: Fetch, path: Path) -> Any:
    if all(_is_pair(pair) and isinstance(pair[0], str) for pair in items):
        fields = tuple(field for field, _ in items)
        if name.isidentifier() and _are_fields(fields):
            return _named_tuple(name, fields)._make(_items((value for _, value in items), fetch, path))
    raise _malformed(path, {"$namedtuple": [name, items]})


def _decode_state_dict(items: list[Any], metadata: Any, fetch: Fetch, path: Path) -> OrderedDict[Any, Any]:
    state = OrderedDict(_pairs(items, fetch, path))
    if metadata is not None:
        state._metadata = _decode(metadata, fetch, (*path, "_metadata"))  # type: ignore[attr-defined]
    return state


def _items(content: Iterable[Any], fetch: Fetch, path: Path) -> Iterator[Any]:
    return (_decode(value, fetch, (*path, i)) for i, value in enumerate(content))


def _pairs(content: list[Any], fetch: Fetch, path: Path) -> dict[Any, Any]:
    if not all(map(_is_pair, content)):
        raise _malformed(path, content)
    result: dict[Any, Any] = {}
    for key, value in content:
        # Keys have no tensors, so none is fetched for them.
        found = _decode(key, no_tensor, path)
        _hashed(lambda found=found: {found}, path)  # type: ignore[misc]
        result[found] = _decode(value, fetch, (*path, found))
    return result


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2


def _are_fields(fields: Sequence[str]) -> bool:
    """Return True for the fields of a namedtuple. A field without a name is called by its position: `_1`."""
    return len(set(fields)) == len(fields) and all(
        field == f"_{i}" or (field.isidentifier() and not field.startswith("_"))
        for i, field in enumerate(fields)
    )


@lru_cache(maxsize=64)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return a class with these fields, the same each time. The original class would have to be imported.

    `collections.namedtuple` is not used, since it compiles a text to create a class.
    """
    members: dict[str, Any] = {field: property(itemgetter(i)) for i, field in enumerate(fields)}
    members |= {
        "__slots__": (),
        "__new__": lambda cls, *values: tuple.__new__(cls, values),
        "__getnewargs__": lambda self: tuple(self),  # arguments of a copy
        "_fields": fields,
        "_make": classmethod(tuple.__new__),
        "_asdict": lambda self: dict(zip(fields, self, strict=True)),
        "_replace": lambda self, **changed: self._make((self._asdict() | changed).values()),
    }
    return type(name, (tuple,), members)


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


def _decode_array(content: list[Any], fetch: Fetch, path: Path) -> Any:
    match content:
        case [str(name), str(code), list(shape)] if _is_shape(shape):
            dtype = _dtype(code, path)
            n_bytes = math.prod(shape) * dtype.itemsize
            held = fetch(name, (n_bytes,), path)
            if held.dtype == torch.uint8 and held.shape == (n_bytes,):
                return np.frombuffer(held.numpy().tobytes(), dtype).reshape(shape).copy()
    raise _malformed(path, content)


def _decode_scalar(code: str, text: str, path: Path) -> Any:
    dtype, held = _dtype(code, path), _bytes(text, path)
    if len(held) != dtype.itemsize:
        raise _malformed(path, [code, text])
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
