"""Tap: intercept each operation of this process on files below a folder, before it is executed."""

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

import torch

from stackwise.stability.faults.patch import patched

__all__ = ["Operation", "tapped"]

_WRITING = frozenset("wax+")
_COPIED = 2**20  # bytes per step of a copy that the system would do from file to file by itself
# Error message of the writer of `torch.save` if a small file does not fit. For a larger file, the writer
# reports an unexpected position itself.
_STREAM_ERROR = "basic_ios::clear: iostream error"


@dataclass(frozen=True)
class Operation:
    """Operation on a file or, for a rename, on a folder.

    Attributes:
        kind: "open" for writing, "write", "sync" or "rename".
        path: path of the file, before a rename.
        size: number of bytes of a write.
    """

    kind: Literal["open", "write", "sync", "rename"]
    path: Path
    size: int = 0


# Functions of `os`. Some systems do not have all of them.
_CALLS = (
    *("open", "write", "writev", "pwrite", "pwritev", "sendfile", "copy_file_range"),
    *("fsync", "rename", "replace"),
)

# Returns the number of bytes of a write that reach the disk; ignored for other operations. May raise an
# error.
Decide = Callable[[Operation], int]


@contextmanager
def tapped(
    folder: str | os.PathLike[str], pattern: str, decide: Decide, error: OSError | None
) -> Iterator[None]:
    """Call `decide` before each operation in the block on files below `folder`.

    Covered are writes of Python code (`open`, `os.write` and similar) and copies (`shutil`, `os.sendfile`) in
    every thread, `torch.save`, and safetensors' `save_file`. Not covered are memory maps, libraries with
    their own write functions, and other processes.

    Args:
        folder: folder of the files. It may be created later.
        pattern: pattern of paths in the folder.
        decide: decides which part of an operation is executed.
        error: raised by an incomplete write, after its part was written. None: an incomplete write reports
            success.
    """
    tap = _Tap(Path(os.path.abspath(folder)), pattern, decide, error)  # noqa: PTH100  links stay as they are
    with ExitStack() as stack:
        for name in _CALLS:
            if hasattr(os, name):
                stack.enter_context(patched(os, name, getattr(tap, f"around_{name}")))
        if getattr(shutil, "_HAS_FCOPYFILE", False):  # macOS copies whole files by a call of its own
            stack.enter_context(patched(shutil, "_HAS_FCOPYFILE", lambda _: False))
        opened = tap.around_file(io.open)
        stack.enter_context(patched(builtins, "open", lambda _: opened))
        stack.enter_context(patched(io, "open", lambda _: opened))
        for name, around in (
            ("_open_zipfile_writer_file", tap.around_archive),
            ("_should_read_directly", tap.around_descriptor),
        ):
            stack.enter_context(patched(torch.serialization, name, around))
        module = sys.modules.get("safetensors.torch")
        if module is not None:
            stack.enter_context(patched(module, "serialize_file", tap.around_serialize))
        yield


class _Tap:
    def __init__(self, folder: Path, pattern: str, decide: Decide, error: OSError | None) -> None:
        self._folder, self._pattern, self._decide, self._error = folder, pattern, decide, error
        self._paths: dict[int, Path] = {}
        self._asking: set[int] = set()

    def _meant(self, path: Any) -> Path | None:
        """Return the path if it is below the folder and matches."""
        if isinstance(path, int):
            found = self._path_of(path)
            real = Path(os.path.realpath(self._folder))  # the system resolves all links in the path of a file
            if found is not None and found.is_relative_to(real):
                found = self._folder / found.relative_to(real)
        elif isinstance(path, str | bytes | os.PathLike):
            found = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100
        else:
            return None
        if found is None or not found.is_relative_to(self._folder):
            return None
        return found if fnmatch.fnmatch(found.relative_to(self._folder).as_posix(), self._pattern) else None

    def _path_of(self, descriptor: int) -> Path | None:
        try:
            return Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        except OSError:
            return self._paths.get(descriptor)

    def _ask(self, kind: Any, path: Any, size: int = 0) -> int:
        found, thread = self._meant(path), threading.get_ident()
        if found is None or thread in self._asking:  # writes of `decide` are excluded
            return size
        self._asking.add(thread)
        try:
            return min(self._decide(Operation(kind, found, size)), size)
        finally:
            self._asking.discard(thread)

    def around_open(self, original: Any) -> Any:
        @wraps(original)
        def opens(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                self._ask("open", path)
            descriptor: int = original(path, flags, *args, **kwargs)
            if isinstance(path, str | bytes | os.PathLike):
                self._paths[descriptor] = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100
            return descriptor

        return opens

    def around_write(self, original: Any) -> Any:
        @wraps(original)
        def writes(descriptor: int, data: Any, *offset: int) -> int:
            size = memoryview(data).nbytes
            passed = self._ask("write", descriptor, size)
            if passed == size:
                return int(original(descriptor, data, *offset))
            if passed:
                original(descriptor, memoryview(data).cast("B")[:passed], *offset)
            return self._said(passed, size)

        return writes

    around_pwrite = around_write

    def around_writev(self, original: Any) -> Any:
        @wraps(original)
        def writes(descriptor: int, buffers: Any, *offset_and_flags: int) -> int:
            size = sum(memoryview(data).nbytes for data in buffers)
            passed = self._ask("write", descriptor, size)
            if passed == size:
                return int(original(descriptor, buffers, *offset_and_flags))
            if passed:
                original(descriptor, [b"".join(buffers)[:passed]], *offset_and_flags)
            return self._said(passed, size)

        return writes

    around_pwritev = around_writev

    def _said(self, passed: int, size: int) -> int:
        """Return the result of a call of which only `passed` of `size` bytes were written."""
        if self._error is None:
            return size
        if passed:
            return passed  # like the system: the next call raises the error
        raise copy(self._error)  # a handler may write a file name into the error

    def around_sendfile(self, original: Any) -> Any:
        @wraps(original)
        def sends(out_fd: int, in_fd: int, offset: int | None, count: int, *args: Any, **kwargs: Any) -> int:
            if self._meant(out_fd) is None:
                return int(original(out_fd, in_fd, offset, count, *args, **kwargs))
            return _copied(in_fd, out_fd, count, offset, None)

        return sends

    def around_copy_file_range(self, original: Any) -> Any:
        @wraps(original)
        def copies(
            src: int, dst: int, count: int, offset_src: int | None = None, offset_dst: int | None = None
        ) -> int:
            if self._meant(dst) is None:
                return int(original(src, dst, count, offset_src, offset_dst))
            return _copied(src, dst, count, offset_src, offset_dst)

        return copies

    def around_fsync(self, original: Any) -> Any:
        @wraps(original)
        def syncs(descriptor: Any) -> None:
            self._ask("sync", descriptor if isinstance(descriptor, int) else descriptor.fileno())
            original(descriptor)

        return syncs

    def around_rename(self, original: Any) -> Any:
        @wraps(original)
        def renames(source: Any, target: Any, **kwargs: Any) -> None:
            self._ask("rename", source)
            original(source, target, **kwargs)

        return renames

    around_replace = around_rename

    def around_file(self, original: Any) -> Any:
        @wraps(original)
        def opens(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            meant = self._meant(file) if _WRITING & set(mode) else None
            if meant is None:
                return original(file, mode, *args, **kwargs)
            self._ask("open", file)
            return _File(original(file, mode, *args, **kwargs), meant, self)

        return opens

    def around_archive(self, original: Any) -> Any:
        """Wrap the function of `torch.save` that passes a path to its own writer.

        It writes to a Python file instead.
        """

        @wraps(original)
        def opens(name: str) -> Any:
            meant = self._meant(name)
            if meant is None:
                return original(name)
            return _Archive(name)

        return opens

    def around_descriptor(self, original: Any) -> Any:
        """Wrap a check of `torch.save` in the legacy format, which would bypass the Python file."""

        @wraps(original)
        def has_descriptor(file: Any) -> bool:
            return not isinstance(file, _File) and original(file)

        return has_descriptor

    def around_serialize(self, original: Any) -> Any:
        """Wrap safetensors' writer.

        The file is truncated afterwards, and safetensors' own error is raised.
        """

        @wraps(original)
        def serializes(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
            if self._meant(filename) is None:
                original(tensors, filename, *args, **kwargs)
                return
            from safetensors import SafetensorError

            self._ask("open", filename)
            original(tensors, filename, *args, **kwargs)
            size = Path(filename).stat().st_size
            passed = self._ask("write", filename, size)
            if passed < size:
                os.truncate(filename, passed)
                if (error := self._error) is not None:
                    raise SafetensorError(
                        f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
                    )

        return serializes

    def write_of(self, file: Any, path: Path, data: Any) -> int:
        encoded = isinstance(data, str)
        raw = data.encode(file.encoding) if isinstance(data, str) else memoryview(data).cast("B")
        passed = self._ask("write", path, len(raw))
        if passed == len(raw):
            return int(file.write(data))
        part = bytes(raw[:passed])
        file.write(part.decode(file.encoding, errors="ignore") if encoded else part)
        if self._error is not None:
            file.flush()
            raise copy(self._error)
        return len(data)


def _copied(source: int, target: int, count: int, offset: int | None, at: int | None) -> int:
    """Copy at most `count` bytes from file to file through the wrapped functions. Return the number of bytes.

    Args:
        source: descriptor to read.
        target: descriptor to write.
        count: maximum number of bytes.
        offset: offset in the source. None: its current position, which is advanced.
        at: offset in the target. None: its current position.
    """
    begin = os.lseek(source, 0, os.SEEK_CUR) if offset is None else offset
    data = os.pread(source, min(count, _COPIED), begin)
    if not data:
        return 0
    size = os.write(target, data) if at is None else os.pwrite(target, data, at)
    if offset is None:
        os.lseek(source, begin + size, os.SEEK_SET)
    return size


class _File:
    """File whose writes are reported to the tap."""

    def __init__(self, file: Any, path: Path, tap: _Tap) -> None:
        self._file, self._path, self._tap = file, path, tap

    def write(self, data: Any) -> int:
        return self._tap.write_of(self._file, self._path, data)

    def unasked(self, data: Any) -> int:
        return int(self._file.write(data))

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
    """Context and file of the writer of `torch.save`, for a path."""

    def __init__(self, name: str) -> None:
        self._file: Any = io.open(name, "wb")  # noqa: SIM115, UP020  the one that asks
        self._raised: BaseException | None = None
        try:
            self._inner: Any = torch.serialization._open_zipfile_writer_buffer(self)  # type: ignore[arg-type]
        except OSError as error:
            self._file.close()
            raise RuntimeError(_STREAM_ERROR) from error

    def write(self, data: Any) -> int:
        try:
            return int(self._file.write(data))
        except OSError:
            raise
        except BaseException as raised:  # of a signal handler; torch's writer would replace it
            self._raised = self._raised or raised
            return int(self._file.unasked(data))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def flush(self) -> None:
        self._file.flush()

    def __enter__(self) -> Any:
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        except OSError as failed:
            raise RuntimeError(_STREAM_ERROR) from failed
        finally:
            self._file.close()
            if self._raised is not None:
                raise self._raised
