"""Storage that fails: a full disk, a write that is lost, and files that rot."""

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
from stackwise.stability.faults.tap import Operation, tapped
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
    """Writes below a folder fail with ENOSPC as soon as `after` bytes are written, which stay.

    In a training it lasts from the beginning of its first step to that of the first step after it, so that
    what is saved behind a step is met. By itself: `with DiskFull(step=0, folder=...).around_saves(acted):`.

    Attributes:
        folder: where.
        target: a pattern of paths in it.
        after: bytes that fit, all files together.
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
        return tapped(self.folder, self.target, decide, error)


@dataclass(frozen=True)
class ShortWrite(_OfFolder):
    """Of each file below a folder, what is written after the first `after` bytes is lost, without an error.

    So does a crash before the disk has it, or a disk that says too early that it has. It lasts as DiskFull.

    Attributes:
        folder: where.
        target: a pattern of paths in it.
        after: bytes of each file that reach the disk.
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

        return tapped(self.folder, self.target, decide, None)


@dataclass(frozen=True)
class BitRot(_OfFolder):
    """Changes one file below a folder as a step begins, or at once by `strike`.

    Attributes:
        folder: where.
        target: a pattern of paths in it.
        kind: "flip" one bit, or "truncate" at a byte.
        seed: chooses the file and the byte; others at each step.
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
            Which, and the number of the byte that is another, or is the first that is not there.

        Raises:
            ValueError: no file that matches has a byte.
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
        # By bytes, so that each is as likely.
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
