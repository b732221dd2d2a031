"""File operations: intercept what this process does to the files below a folder, before it is executed."""

from __future__ import annotations

import builtins
import fnmatch
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

__all__ = ["Operation", "intercepted"]

_WRITING = frozenset("wax+")
# Switches of `shutil` for copies by the kernel, which no Python function could intercept.
_KERNEL_COPIES = ("_USE_CP_SENDFILE", "_HAS_FCOPYFILE")
# Error message of the writer of `torch.save` if a small file does not fit. For a larger file, the writer
# reports an unexpected position itself.
_STREAM_ERROR = "basic_ios::clear: iostream error"


@dataclass(frozen=True)
class Operation:
    """Operation on a file or, for a rename, on a folder.

    Attributes:
        kind: "open" for writing, "write", "sync" or "rename".
        path: path of the file, before a rename, without symbolic links.
        size: number of bytes of a write.
    """

    kind: Literal["open", "write", "sync", "rename"]
    path: Path
    size: int = 0


# Returns the number of bytes of a write that reach the disk; ignored for other operations. May raise an
# error.
Decide = Callable[[Operation], int]


@contextmanager
def intercepted(
    folder: str | os.PathLike[str], pattern: str, decide: Decide, error: OSError | None
) -> Iterator[None]:
    """Call `decide` before each operation in the block on files below `folder`.

    Covered are `open`, `os.open` and `os.write`, copies by `shutil`, `torch.save` and safetensors'
    `save_file`, in every thread. Not covered are other functions of `os`, memory maps, libraries with their
    own write functions, and other processes.

    Args:
        folder: folder of the files. It may be created later.
        pattern: pattern of paths in the folder.
        decide: decides which part of an operation is executed.
        error: raised by an incomplete write, after its part was written. None: an incomplete write reports
            success.
    """
    files = _Files(folder, pattern, decide, error)
    functions: list[tuple[Any, str, Any]] = [
        *((os, name, getattr(files, f"around_{name}")) for name in ("open", "write", "fsync")),
        *((os, name, files.around_rename) for name in ("rename", "replace")),
        *((holder, "open", files.around_file) for holder in (builtins, io)),
        (torch.serialization, "_open_zipfile_writer_file", files.around_archive),
    ]
    if (module := sys.modules.get("safetensors.torch")) is not None:
        functions.append((module, "serialize_file", files.around_serialize))
    # First all wrappers, because `open` has two places.
    wrapped = [(holder, name, around(getattr(holder, name))) for holder, name, around in functions]
    with ExitStack() as stack:
        for holder, name, function in wrapped:
            stack.enter_context(patch.object(holder, name, function))
        for name in filter(lambda name: hasattr(shutil, name), _KERNEL_COPIES):
            stack.enter_context(patch.object(shutil, name, False))
        yield


class _Files:
    """Files below a folder, with wrappers of the functions that change them."""

    def __init__(
        self, folder: str | os.PathLike[str], pattern: str, decide: Decide, error: OSError | None
    ) -> None:
        self._folder = Path(os.path.realpath(folder))
        self._pattern, self._decide, self._error = pattern, decide, error
        self._paths: dict[int, str] = {}  # of the descriptors that `os.open` returned
        self._deciding: set[int] = set()  # threads inside `decide`

    def _path(self, path: Any) -> Path | None:
        """Return the path of a file, given by path or descriptor, if it is below the folder and matches."""
        if isinstance(path, int):
            path = _path_of(path) or self._paths.get(path)
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        found = Path(os.path.realpath(os.fsdecode(path)))
        if not found.is_relative_to(self._folder):
            return None
        return found if fnmatch.fnmatch(found.relative_to(self._folder).as_posix(), self._pattern) else None

    def passed(self, kind: Any, path: Any, size: int = 0) -> int:
        """Return how many of `size` bytes are to be written."""
        found, thread = self._path(path), threading.get_ident()
        if found is None or thread in self._deciding:  # writes of `decide` are excluded
            return size
        self._deciding.add(thread)
        try:
            return min(self._decide(Operation(kind, found, size)), size)
        finally:
            self._deciding.discard(thread)

    def raise_error(self) -> None:
        """Raise the error of an incomplete write, if there is one."""
        if self._error is not None:
            raise copy(self._error)  # a handler may write a file name into the error

    def around_open(self, original: Any) -> Any:
        @wraps(original)
        def opens(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                self.passed("open", path)
            descriptor: int = original(path, flags, *args, **kwargs)
            self._paths[descriptor] = os.path.realpath(os.fsdecode(path))
            return descriptor

        return opens

    def around_write(self, original: Any) -> Any:
        @wraps(original)
        def writes(descriptor: int, data: Any) -> int:
            raw = memoryview(data).cast("B")
            passed = self.passed("write", descriptor, len(raw))
            if passed:
                written = int(original(descriptor, raw[:passed]))
                # Like the system: after a partial write, the next one raises the error.
                return written if passed == len(raw) or self._error is not None else len(raw)
            if raw:
                self.raise_error()
            return len(raw)

        return writes

    def around_fsync(self, original: Any) -> Any:
        @wraps(original)
        def syncs(descriptor: Any) -> None:
            self.passed("sync", descriptor if isinstance(descriptor, int) else descriptor.fileno())
            original(descriptor)

        return syncs

    def around_rename(self, original: Any) -> Any:
        @wraps(original)
        def renames(source: Any, target: Any, **kwargs: Any) -> None:
            self.passed("rename", source)
            original(source, target, **kwargs)

        return renames

    def around_file(self, original: Any) -> Any:
        @wraps(original)
        def opens(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            path = self._path(file) if _WRITING & set(mode) else None
            if path is None:
                return original(file, mode, *args, **kwargs)
            self.passed("open", file)
            return _File(original(file, mode, *args, **kwargs), path, self)

        return opens

    def around_archive(self, original: Any) -> Any:
        """Wrap the function by which `torch.save` writes to a path: it writes to a Python file instead."""

        @wraps(original)
        def opens(name: str) -> Any:
            return original(name) if self._path(name) is None else _Archive(name)

        return opens

    def around_serialize(self, original: Any) -> Any:
        """Wrap safetensors' writer.

        The file is truncated afterwards, and safetensors' own error is raised.
        """

        @wraps(original)
        def serializes(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            self.passed("open", filename)
            original(tensors, filename, *args, **kwargs)
            size = Path(filename).stat().st_size
            passed = self.passed("write", filename, size)
            if passed < size:
                from safetensors import SafetensorError

                os.truncate(filename, passed)
                if (error := self._error) is not None:
                    raise SafetensorError(
                        f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
                    )

        return serializes


class _File:
    """File whose writes are intercepted."""

    def __init__(self, file: Any, path: Path, files: _Files) -> None:
        self._file, self._path, self._files = file, path, files

    def write(self, data: Any) -> int:
        is_text = isinstance(data, str)
        raw = data.encode(self._file.encoding) if isinstance(data, str) else memoryview(data).cast("B")
        passed = self._files.passed("write", self._path, len(raw))
        if passed == len(raw):
            return int(self._file.write(data))
        part = bytes(raw[:passed])
        self._file.write(part.decode(self._file.encoding, errors="ignore") if is_text else part)
        self._file.flush()
        self._files.raise_error()
        return len(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Archive:
    """Context of the writer of `torch.save`, for a path. The writer reports a full disk as a RuntimeError."""

    def __init__(self, name: str) -> None:
        self._file: Any = io.open(name, "wb")  # noqa: SIM115, UP020  the intercepted one
        try:
            self._writer: Any = torch.serialization._open_zipfile_writer_buffer(self._file)
        except OSError as error:
            self._file.close()
            raise RuntimeError(_STREAM_ERROR) from error

    def __enter__(self) -> Any:
        return self._writer.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._writer.__exit__(*error)
        except OSError as failed:
            raise RuntimeError(_STREAM_ERROR) from failed
        finally:
            self._file.close()


def _path_of(descriptor: int) -> str | None:
    """Return the path of a descriptor; None: the system does not tell it."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    except OSError:
        return None
