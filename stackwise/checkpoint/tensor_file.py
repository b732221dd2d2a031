"""TensorFile: tensors in a safetensors file, hashed during the write and read by regions.

The layout is that of `torch.distributed.checkpoint`'s HuggingFaceStorageWriter: a file has parts of tensors,
and its metadata has the offsets of each part in the full tensor. So any tool that reads safetensors reads a
file, and HuggingFaceStorageReader joins the parts of all files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

__all__ = [
    "FileEntry",
    "MalformedFileError",
    "Part",
    "TensorIndex",
    "check_dtypes",
    "is_damage",
    "write_bytes",
    "write_read",
    "write_tensors",
]

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_OFFSETS = "DCP_SHARDING_INFO"
# Errors of a file that is missing or damaged on the disk. After any other error a later read may succeed.
_DAMAGE = {"ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "EIO", "EBADMSG", "EUCLEAN"}
_PIECE = 2**22  # bytes that are hashed and then written, while they are in the cache
_HEADER_BYTES = 100_000_000  # maximum that the readers of safetensors accept


def is_damage(error: OSError) -> bool:
    """Return True if an error means that a file is damaged; False if the file only cannot be read now.

    A missing permission, a stale handle of a network or too many open files are no evidence of the content.
    """
    return errno.errorcode.get(error.errno or 0) in _DAMAGE


class MalformedFileError(ValueError):
    """A file has no tensors, or not the expected ones."""


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 of a file when it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """Tensor, or part of a tensor with its `offsets` in the full tensor."""

    tensor: Tensor
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Part:
        """Return the part that is the full tensor."""
        return cls(tensor, (0,) * tensor.ndim)


def check_dtypes(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse a tensor of a dtype that safetensors does not have.

    Raises:
        ValueError: names the tensor and its dtype.
    """
    for name, tensor in tensors:
        if tensor.dtype not in _CODES:
            allowed = ", ".join(map(str, _CODES))
            raise ValueError(f"{name}: got {tensor.dtype}; allowed in a checkpoint: {allowed}")


def check_header(parts: Mapping[str, Part], *, in_parts: bool) -> None:
    """Refuse tensors whose safetensors header would be longer than a reader accepts.

    Raises:
        ValueError: there are too many tensors, or their names are too long.
    """
    # A fast upper limit: each name occurs twice, and JSON may need 13 bytes for each character.
    if sum(26 * len(name) + 64 * (4 + part.tensor.ndim) for name, part in parts.items()) > _HEADER_BYTES:
        _header_of(parts, in_parts=in_parts, metadata={})


def write_bytes(path: Path, content: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a new file and flush it to the disk. The hash is computed from `content`, not from the disk.

    Raises:
        OSError: the write failed.
    """
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for buffer in content:
            view = memoryview(buffer).cast("B")
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                digest.update(piece)
                size += len(piece)
                while piece:
                    written = os.write(descriptor, piece)
                    if written <= 0:
                        raise OSError(errno.EIO, "nothing was written", str(path))
                    piece = piece[written:]
        os.fsync(descriptor)
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        os.close(descriptor)
    return FileEntry(size, digest.hexdigest())


def write_tensors(
    path: Path,
    parts: Mapping[str, Part],
    *,
    in_parts: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Write a safetensors file. Tensors on another device are fetched one at a time.

    Args:
        path: path of the new file.
        parts: parts by the name of the tensor.
        in_parts: True to store the offsets of each part; False: all parts are full tensors.
        metadata: additional metadata of the header.

    Raises:
        ValueError: a dtype that safetensors does not have.
        OSError: the write failed.
    """
    names, header = _header_of(parts, in_parts=in_parts, metadata=metadata or {})
    return write_bytes(path, _after(header, (_bytes_of(parts[name].tensor) for name in names)))


def write_read(path: Path, likes: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> FileEntry:
    """Write a safetensors file of tensors that are read one at a time.

    Args:
        path: path of the new file.
        likes: tensors with the shape and the dtype of each, on any device, such as meta.
        read: returns the tensor of a name.

    Raises:
        ValueError: a dtype that safetensors does not have.
        OSError: the write failed.
    """
    names = _in_order(likes)
    content = (_bytes_of(read(name)) for name in names)
    return write_bytes(path, _after(_header(likes, names, {"format": "pt"}), content))


def _header_of(
    parts: Mapping[str, Part], *, in_parts: bool, metadata: Mapping[str, str]
) -> tuple[list[str], list[bytes]]:
    """Return the names of the tensors in the order of the file, and the bytes before the first tensor."""
    tensors = {name: part.tensor for name, part in parts.items()}
    names, entries = _in_order(tensors), {"format": "pt", **metadata}
    if in_parts:
        entries[_OFFSETS] = json.dumps({name: {"saved_offsets": list(parts[name].offsets)} for name in names})
    return names, _header(tensors, names, entries)


def _in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order of the library: wide numbers first, so that all tensors are aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _header(tensors: Mapping[str, Tensor], names: Iterable[str], metadata: dict[str, str]) -> list[bytes]:
    check_dtypes(tensors.items())
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for name in names:
        tensor = tensors[name]
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_BYTES:
        raise ValueError(
            f"objects: got {len(tensors)} tensors, whose names and shapes take {len(text)} bytes; allowed: "
            f"{_HEADER_BYTES} bytes, which safetensors reads. Keep single numbers as plain values, or join "
            "tensors"
        )
    return [len(text).to_bytes(8, "little"), text]


def _after(
    first: Iterable[bytes | memoryview], then: Iterable[bytes | memoryview]
) -> Iterable[bytes | memoryview]:
    yield from first
    yield from then


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


class TensorIndex:
    """Index of the tensors in several files. Files are memory-mapped: unread tensors take no memory.

    Args:
        paths: paths of safetensors files.

    Raises:
        MalformedFileError: a file is not a safetensors file of this layout; the message names it.
        OSError: a file cannot be read now.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._parts: dict[str, list[tuple[Any, Path, tuple[int, ...], tuple[int, ...]]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for path in paths:
            try:
                self._add(path)
            except (
                OSError,
                SafetensorError,
                KeyError,
                TypeError,
                ValueError,
                AttributeError,
                RecursionError,
            ) as error:
                if isinstance(error, OSError) and not is_damage(error):
                    raise
                raise MalformedFileError(
                    f"{path.name}: no tensors as they are written here: {error}"
                ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            MalformedFileError: the tensor is missing.
        """
        if name not in self._parts:
            raise MalformedFileError(f"{name}: missing")
        return self._dtypes[name]

    def read(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return the region of a tensor at `offsets`, in new memory on the CPU.

        Raises:
            MalformedFileError: the tensor, or a part of it, is missing.
        """
        if name not in self._parts:
            raise MalformedFileError(f"{name}: missing")
        n_dims = {len(begin) for _, _, begin, _ in self._parts[name]}
        if n_dims != {len(shape)}:
            raise MalformedFileError(f"{name}: of other dimensions than {list(shape)}")
        filled = sum(
            math.prod(high - low for low, high in _overlap(offsets, shape, begin, size))
            for _, _, begin, size in self._parts[name]
        )
        # Before the allocation: a forged shape may have any size.
        if filled != math.prod(shape):
            raise MalformedFileError(f"{name}: the files have {filled} of its {math.prod(shape)} numbers")
        result = torch.empty(shape, dtype=self._dtypes[name])
        for file, path, begin, size in self._parts[name]:
            common = _overlap(offsets, shape, begin, size)
            if all(low < high for low, high in common):
                target = tuple(
                    slice(low - o, high - o) for (low, high), o in zip(common, offsets, strict=True)
                )
                source = tuple(slice(low - b, high - b) for (low, high), b in zip(common, begin, strict=True))
                try:
                    found = file.get_slice(name)[source] if source else file.get_tensor(name)
                except SafetensorError as error:
                    raise MalformedFileError(f"{path.name}: {name}: {error}") from None
                result[target] = found
        return result

    def _add(self, path: Path) -> None:
        path.open("rb").close()  # safe_open would report any file that it cannot open as missing
        file: Any = safe_open(path, framework="pt", device="cpu")
        offsets = json.loads((file.metadata() or {}).get(_OFFSETS, "{}"))
        for name in file.keys():  # noqa: SIM118  no mapping
            part = file.get_slice(name)
            size = tuple(part.get_shape())
            begin = tuple(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(size)
            if len(begin) != len(size) or not all(type(n) is int and n >= 0 for n in begin):
                raise MalformedFileError(f"{name} begins at {begin}")
            dtype = _DTYPES[part.get_dtype()]
            if self._dtypes.setdefault(name, dtype) != dtype:
                raise MalformedFileError(f"{name} is of {dtype} here and of {self._dtypes[name]} elsewhere")
            self._parts.setdefault(name, []).append((file, path, begin, size))


def _overlap(
    offsets: tuple[int, ...], shape: tuple[int, ...], begin: tuple[int, ...], size: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Return the range that two regions have in common, for each dimension."""
    edges = zip(offsets, shape, begin, size, strict=True)
    return [(low := max(o, b), max(low, min(o + n, b + m))) for o, n, b, m in edges]
