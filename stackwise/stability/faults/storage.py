"""Storage faults: a full disk, lost writes and damaged files."""

from __future__ import annotations

import errno
import fnmatch
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

import torch

from stackwise.stability.faults.fault import Acted, Fault
from stackwise.stability.faults.file_operations import Operation, intercepted
from stackwise.support.arguments import check_choice, check_sizes, require

__all__ = ["BitRot", "DiskFull", "ShortWrite"]


@dataclass(frozen=True)
class _OfFolder(Fault):
    breaks: ClassVar[str] = "storage"

    folder: str | os.PathLike[str] = field(kw_only=True)
    target: str = "*"

    def __post_init__(self) -> None:
        super().__post_init__()
        sound = isinstance(self.folder, str | os.PathLike) and bool(os.fspath(self.folder))
        require(sound, f"{self.name}: folder", self.folder, "a path")
        sound = isinstance(self.target, str) and bool(self.target)
        require(sound, f"{self.name}: target", self.target, "a pattern of paths in the folder")


@dataclass(frozen=True)
class DiskFull(_OfFolder):
    """Fault that makes writes below a folder fail with ENOSPC after `after` bytes. These bytes stay written.

    In a training, it lasts from the beginning of its first step to the beginning of the first step after it.
    So it affects saves that follow a step. Usage without a training:
    `with DiskFull(step=0, folder=...).around_saves(acted):`.

    Attributes:
        folder: folder of the files.
        target: pattern of paths in the folder.
        after: number of bytes that fit, in all files together.
    """

    name: ClassVar[str] = "disk_full"

    after: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(0, **{f"{self.name}: after": self.after})

    def around_saves(self, acted: Acted) -> AbstractContextManager[None]:  # noqa: D102
        left = self.after

        def decide(operation: Operation) -> int:
            nonlocal left
            if operation.kind != "write":
                return 0
            passed = min(left, operation.size)
            left -= passed
            if passed < operation.size:
                acted()
            return passed

        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self.folder))
        return intercepted(self.folder, self.target, decide, error)


@dataclass(frozen=True)
class ShortWrite(_OfFolder):
    """Fault that drops the bytes of each file below a folder after the first `after` bytes, without an error.

    This is like a crash before the data is on the disk, or a disk that confirms a write too early. The
    duration is the same as for DiskFull.

    Attributes:
        folder: folder of the files.
        target: pattern of paths in the folder.
        after: number of bytes of each file that reach the disk.
    """

    name: ClassVar[str] = "short_write"

    after: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(0, **{f"{self.name}: after": self.after})

    def around_saves(self, acted: Acted) -> AbstractContextManager[None]:  # noqa: D102
        written: dict[Path, int] = {}

        def decide(operation: Operation) -> int:
            if operation.kind == "open":
                written[operation.path] = 0
            if operation.kind != "write":
                return 0
            before = written.get(operation.path, 0)
            passed = min(max(self.after - before, 0), operation.size)
            written[operation.path] = before + passed
            if passed < operation.size:
                acted()
            return passed

        return intercepted(self.folder, self.target, decide, None)


@dataclass(frozen=True)
class BitRot(_OfFolder):
    """Fault that changes one file below a folder when a step begins, or immediately by `strike`.

    Attributes:
        folder: folder of the files.
        target: pattern of paths in the folder.
        kind: "flip" flips one bit, "truncate" cuts the file at a byte.
        seed: seed of the random file and byte, which differ from step to step.
    """

    name: ClassVar[str] = "bit_rot"

    kind: str = "flip"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: kind", self.kind, ("flip", "truncate"))
        check_sizes(0, **{f"{self.name}: seed": self.seed})

    def at(self, step: int) -> Self:  # noqa: D102
        return replace(self, seed=self.seed + step - self.step)

    def strike(self) -> tuple[Path, int]:
        """Change a file.

        Returns:
            The path of the file, and the offset of the changed byte or of the first removed byte.

        Raises:
            ValueError: every matching file is empty, or no file matches.
        """
        folder = Path(self.folder)
        files = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
            and path.stat().st_size
            and fnmatch.fnmatch(path.relative_to(folder).as_posix(), self.target)
        ]
        if not files:
            raise ValueError(
                f"{self.name}: target: got {self.target!r}, which matches no file with content in {folder}"
            )
        generator = torch.Generator().manual_seed(self.seed)
        # Choose by bytes, so that each byte has the same probability.
        sizes = [path.stat().st_size for path in files]
        offset = int(torch.randint(sum(sizes), (), generator=generator))
        bit = int(torch.randint(8, (), generator=generator))
        number = 0
        while offset >= sizes[number]:
            offset -= sizes[number]
            number += 1
        path = files[number]
        if self.kind == "truncate":
            os.truncate(path, offset)
        else:
            with path.open("r+b") as file:
                file.seek(offset)
                [byte] = file.read(1)
                file.seek(offset)
                file.write(bytes([byte ^ (1 << bit)]))
        return path, offset

    def on_start(self, acted: Acted) -> None:  # noqa: D102
        self.strike()
        acted()
