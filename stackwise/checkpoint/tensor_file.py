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
from itertools import chain
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
    "write_parts",
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
                    piece = piece[os.write(descriptor, piece) :]
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
    return FileEntry(size, digest.hexdigest())


def write_parts(path: Path, parts: Mapping[str, Part]) -> FileEntry:
    """Write a safetensors file of parts of tensors, with the offsets of each part.

    Raises:
        ValueError: a dtype that safetensors does not have.
        OSError: the write failed.
    """
    offsets = {name: {"saved_offsets": list(parts[name].offsets)} for name in sorted(parts)}
    tensors = {name: part.tensor for name, part in parts.items()}
    return write_tensors(path, tensors, metadata={_OFFSETS: json.dumps(offsets)})


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> FileEntry:
    """Write a safetensors file. Tensors on another device are fetched one at a time.

    Args:
        path: path of the new file.
        tensors: tensors by name.
        metadata: additional metadata of the header.
        read: returns the content of a tensor when it is written; None: `tensors` have it. Otherwise only
            their shapes and dtypes are used.

    Raises:
        ValueError: a dtype that safetensors does not have.
        OSError: the write failed.
    """
    check_dtypes(tensors.items())
    # The order of the library: wide numbers first, so that all tensors are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
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
    content = (_bytes_of((read or tensors.__getitem__)(name)) for name in names)
    return write_bytes(path, chain([len(text).to_bytes(8, "little"), text], content))


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
            path.open("rb").close()  # safe_open would report any file that it cannot open as missing
            try:
                self._add(path)
            except (SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
                raise MalformedFileError(
                    f"{path.name}: no tensors as they are written here: {error}"
                ) from None

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
        dtype = self.dtype(name)
        if any(len(begin) != len(shape) for _, _, begin, _ in self._parts[name]):
            raise MalformedFileError(f"{name}: of other dimensions than {list(shape)}")
        regions = [_overlap(offsets, shape, begin, size) for _, _, begin, size in self._parts[name]]
        filled = sum(math.prod(high - low for low, high in region) for region in regions)
        # Before the allocation: a forged shape may have any size.
        if filled != math.prod(shape):
            raise MalformedFileError(f"{name}: the files have {filled} of its {math.prod(shape)} numbers")
        result = torch.empty(shape, dtype=dtype)
        for region, (file, path, begin, _) in zip(regions, self._parts[name], strict=True):
            if all(low < high for low, high in region):
                source = tuple(slice(low - b, high - b) for (low, high), b in zip(region, begin, strict=True))
                target = tuple(
                    slice(low - o, high - o) for (low, high), o in zip(region, offsets, strict=True)
                )
                try:
                    result[target] = file.get_slice(name)[source] if source else file.get_tensor(name)
                except SafetensorError as error:
                    raise MalformedFileError(f"{path.name}: {name}: {error}") from None
        return result

    def _add(self, path: Path) -> None:
        file: Any = safe_open(path, framework="pt", device="cpu")
        offsets = json.loads((file.metadata() or {}).get(_OFFSETS, "{}"))
        for name in file.keys():  # noqa: SIM118  no mapping
            part = file.get_slice(name)
            size = tuple(part.get_shape())
            begin = tuple(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(size)
            dtype = _DTYPES[part.get_dtype()]
            if len(begin) != len(size) or self._dtypes.setdefault(name, dtype) != dtype:
                raise MalformedFileError(f"{name} begins at {begin} and is of {dtype}")
            self._parts.setdefault(name, []).append((file, path, begin, size))


def _overlap(
    offsets: tuple[int, ...], shape: tuple[int, ...], begin: tuple[int, ...], size: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Return the range that two regions have in common, for each dimension."""
    edges = zip(offsets, shape, begin, size, strict=True)
    return [(low := max(o, b), max(low, min(o + n, b + m))) for o, n, b, m in edges]
