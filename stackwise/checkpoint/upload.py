"""Upload: a second copy of each checkpoint elsewhere, made while the run goes on."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stackwise.checkpoint.folder import (
    TENSORS,
    DamagedCheckpointError,
    Manifest,
    checked_folder,
    clear_damaged,
    folder_of,
    publish,
    recover,
    remove,
    scratch_of,
    verify_files,
)
from stackwise.checkpoint.runs import of_run, saved_in
from stackwise.checkpoint.tensor_file import write_bytes
from stackwise.support.arguments import check_sizes

__all__ = ["DirectoryUpload", "Uploader"]

_PIECE = 2**22


@dataclass(frozen=True)
class DirectoryUpload:
    """Copies a checkpoint into another directory, such as mounted storage; give it to `CheckpointManager`.

    A copy is whole or not there, as what it is of: it is written under another name, every byte is compared
    with the SHA-256 of the list, and it is renamed when all of it is flushed. So the storage has to rename
    folders. No two managers may upload to one directory at the same time. Copies of another run stay; one of
    the same step is renamed to `step-N.run-ID`.

    Attributes:
        directory: where the copies are, made with the first one.
        keep_last: how many of the newest stay there; None: all.

    Raises:
        ValueError: an argument that cannot be.
    """

    directory: Path
    keep_last: int | None = None

    def __init__(self, directory: str | Path, *, keep_last: int | None = None) -> None:
        object.__setattr__(self, "directory", checked_folder(directory))
        object.__setattr__(self, "keep_last", keep_last)
        if keep_last is not None:
            check_sizes(keep_last=keep_last)

    def __call__(self, path: Path) -> None:
        """Copy the checkpoint `path`; one of the same step is replaced.

        Raises:
            DamagedCheckpointError: it is not what was written, so that there is nothing to copy.
            OSError: a disk refused; what was there before is as it was.
        """
        manifest = Manifest.read(path)
        self.directory.mkdir(parents=True, exist_ok=True)
        recover(self.directory, clear=True)
        scratch = scratch_of(self.directory, manifest.step)
        try:
            (scratch / TENSORS).mkdir(parents=True)
            for name, entry in manifest.files.items():
                if write_bytes(scratch / name, _pieces(path / name)) != entry:
                    raise DamagedCheckpointError(path, name, "it was changed since it was written")
            manifest.write(scratch)
            # What a disk has taken without a word of refusal may still be short.
            verify_files(scratch, manifest.files, contents=False)
            publish(scratch, folder_of(self.directory, manifest.step), manifest.run)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        if self.keep_last is not None:
            own = of_run(saved_in(self.directory), manifest.run)
            for each in own[: -self.keep_last]:
                if each.step != manifest.step:
                    remove(each.path)
            oldest = of_run(saved_in(self.directory), manifest.run)[0].step
            clear_damaged(self.directory, oldest, manifest.run)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            yield piece


class Uploader:
    """Uploads one checkpoint after the other in a thread. What goes wrong becomes a message, never an error.

    While one is under way the newest of those that come waits; what it takes the place of is left out. The
    process does not end before the thread has.

    Args:
        upload: given the folder of a checkpoint, makes a copy of it elsewhere.

    Attributes:
        messages: what has gone wrong and nobody was told yet.
    """

    def __init__(self, upload: Callable[[Path], None]) -> None:
        self.messages: deque[str] = deque()
        self._upload = upload
        self._changes = threading.Lock()
        self._thread: threading.Thread | None = None
        self._running: Path | None = None
        self._waiting: Path | None = None

    def add(self, path: Path) -> None:
        """Upload `path`, a checkpoint that is whole, as soon as it is its turn."""
        with self._changes:
            if self._waiting not in (None, path):
                self.messages.append(
                    f"{self._waiting} is not uploaded: the next one came while {self._running} still was"
                )
            self._waiting = path
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="stackwise-upload", daemon=False)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending, and begins no thread any more
                self._thread = None
            else:
                return
        self._run()

    def held(self) -> set[Path]:
        """What has to stay where it is: the one under way, and the one that waits."""
        with self._changes:
            return {path for path in (self._running, self._waiting) if path is not None}

    def wait(self) -> None:
        """Go on when nothing is being uploaded."""
        with self._changes:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changes:
                self._running, self._waiting = self._waiting, None
                path = self._running
                if path is None:
                    self._thread = None
                    return
            try:
                self._upload(path)
            except BaseException as error:  # of somebody's storage: the run has nothing to do with it
                self.messages.append(f"{path} is not uploaded: {type(error).__name__}: {error}")
