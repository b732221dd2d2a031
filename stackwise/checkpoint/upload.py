"""Upload: second copy of each checkpoint at another place, created while the run continues."""

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
    """Upload of checkpoints into another directory, such as mounted storage, for `CheckpointManager`.

    A copy is complete or absent, like the original: it is written under another name, every byte is compared
    with the SHA-256 of the list, and the copy is renamed when it is flushed completely. So the storage has to
    rename folders. Two managers must not upload to one directory at the same time. Copies of another run
    remain. If one has the same step, it is renamed to `step-N.run-ID`.

    Attributes:
        directory: directory of the copies, created with the first one.
        keep_last: number of newest copies that remain; None: all.

    Raises:
        ValueError: an invalid argument.
    """

    directory: Path
    keep_last: int | None = None

    def __init__(self, directory: str | Path, *, keep_last: int | None = None) -> None:
        object.__setattr__(self, "directory", checked_folder(directory))
        object.__setattr__(self, "keep_last", keep_last)
        if keep_last is not None:
            check_sizes(keep_last=keep_last)

    def __call__(self, path: Path) -> None:
        """Copy the checkpoint `path`. Replace a copy of the same step.

        Raises:
            DamagedCheckpointError: the checkpoint is damaged, so it is not copied.
            OSError: a read or a write failed. Previous copies are unchanged.
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
            # A disk may accept a write without an error and still truncate the file.
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
    """Queue of uploads, which run one after another in a thread. Errors are messages and never raised.

    During an upload, only the newest added checkpoint waits. It replaces a waiting one, which is skipped. The
    process does not exit before the thread does.

    Args:
        upload: copies a checkpoint to another place, called with its folder.

    Attributes:
        messages: errors that were not reported yet.
    """

    def __init__(self, upload: Callable[[Path], None]) -> None:
        self.messages: deque[str] = deque()
        self._upload = upload
        self._changes = threading.Lock()
        self._thread: threading.Thread | None = None
        self._running: Path | None = None
        self._waiting: Path | None = None

    def add(self, path: Path) -> None:
        """Upload `path`, a complete checkpoint, after the running upload."""
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
            except RuntimeError:  # the interpreter is exiting and starts no more threads
                self._thread = None
            else:
                return
        self._run()

    def held(self) -> set[Path]:
        """Return the checkpoints that must not be removed: the running upload and the waiting one."""
        with self._changes:
            return {path for path in (self._running, self._waiting) if path is not None}

    def wait(self) -> None:
        """Wait until no upload is running."""
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
            except BaseException as error:  # an error of a third-party storage must not stop the run
                self.messages.append(f"{path} is not uploaded: {type(error).__name__}: {error}")
