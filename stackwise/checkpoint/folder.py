"""Checkpoint folder: one checkpoint on disk. It is complete and unchanged, or detectably damaged.

A folder `step-N` has a list of its files, `manifest.json`, with the size and the SHA-256 of each file and of
the list itself. It is written as `.step-N.PROCESS` and renamed when it is completely on the disk.

Other names in the directory, in which PROCESS is a process id:

- `.step-N.PROCESS.old`: a folder that is being replaced by a new folder of the same step.
- `.step-N.PROCESS.removed`: a folder that is being deleted.
- `step-N.damaged`: a folder that a restore has skipped, or that a rollback has left behind.
- `step-N.run-ID`: checkpoint of another run, renamed because this run has written the same step.

A number is added to the last two names if they exist already.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from stackwise.checkpoint import tree
from stackwise.checkpoint.tensor_file import FileEntry, is_damage, write_bytes
from stackwise.support.arguments import require

__all__ = [
    "DamagedCheckpointError",
    "Manifest",
    "check_extra_name",
    "checked_folder",
    "clear_damaged",
    "entries_of",
    "flush",
    "folder_of",
    "lives",
    "manifests_in",
    "newest_of",
    "of_run",
    "publish",
    "read_regular",
    "recover",
    "remove",
    "scratch_of",
    "set_aside",
    "steps_in",
    "this_process",
    "verify_files",
]

MANIFEST = "manifest.json"
TENSORS = "tensors"
_FORMAT = 3
_MANIFEST_BYTES = 2**24
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_LEFT_OVER = re.compile(r"\.(step-(?:0|[1-9][0-9]{0,18}))\.([1-9][0-9]*)(?:\.(old|removed))?", re.ASCII)
_ASIDE = re.compile(r"step-(0|[1-9][0-9]{0,18})\.damaged(?:\.[0-9]+)?")
_NAME = re.compile(rf"(?:{TENSORS}/)?[A-Za-z0-9][A-Za-z0-9._-]{{0,199}}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_OURS = re.compile(rf"manifest\.json|{TENSORS}|state-[0-9]+\.(?:json|safetensors)", re.IGNORECASE)


class DamagedCheckpointError(ValueError):
    """A checkpoint differs from the one that was written.

    Args:
        folder: folder of the checkpoint.
        file: file that differs; None: the folder itself, or one of several files.
        reason: description of the damage.
    """

    def __init__(self, folder: Path, file: str | None, reason: str) -> None:
        super().__init__(f"{folder if file is None else folder / file}: {reason}")
        self.folder, self.file, self.reason = folder, file, reason


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint.

    Attributes:
        step: step number in the run.
        run: identity of the run, 32 hexadecimal digits.
        order: number of the save among all saves of all runs in the directory, from 1.
        time: time of the save, UTC, ISO 8601.
        world_size: number of processes that wrote the checkpoint.
        versions: versions of the libraries that wrote the checkpoint, by name.
        metric: metric that it was saved with, or None.
        notes: notes that it was saved with.
        files: size and SHA-256 of each file, by name.
    """

    step: int
    run: str
    order: int
    time: str
    world_size: int
    versions: dict[str, str]
    metric: float | None
    notes: dict[str, Any]
    files: dict[str, FileEntry] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, as the last of its files.

        Raises:
            ValueError: the notes are too long.
            OSError: the write failed.
        """
        content: dict[str, Any] = {"format": _FORMAT, **vars(self)}
        content["files"] = {name: vars(entry) for name, entry in self.files.items()}
        for key in ("metric", "notes"):
            content[key] = tree.encode(content[key], (key,), {})
        text = _with_digest(content)
        require(len(text) <= _MANIFEST_BYTES, "notes", f"{len(text)} bytes", f"up to {_MANIFEST_BYTES}")
        write_bytes(folder / MANIFEST, [text])

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a folder.

        Raises:
            DamagedCheckpointError: it is missing or was changed.
            ValueError: it is intact, and of another format than that of this version.
            OSError: it cannot be read now.
        """
        text = read_regular(folder, MANIFEST, _MANIFEST_BYTES)
        try:
            content = json.loads(text.decode())  # without decode() it would guess the encoding
            del content["digest"]
            intact = _with_digest(content) == text
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DamagedCheckpointError(folder, MANIFEST, "no list of a checkpoint's files") from None
        if not intact:
            raise DamagedCheckpointError(folder, MANIFEST, "it was changed since it was written")
        found = content.pop("format", None)
        require(found == _FORMAT, f"{folder / MANIFEST}: format", found, f"{_FORMAT}, in this version")
        try:
            content["files"] = {name: FileEntry(**entry) for name, entry in content["files"].items()}
            for key in ("metric", "notes"):
                content[key] = tree.decode(content[key], tree.no_tensor)
            manifest = cls(**content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedCheckpointError(folder, MANIFEST, f"not understood: {error}") from None
        named = re.match(r"step-[0-9]+", folder.name)  # it may be renamed, such as `step-5.damaged`
        if named is None or named[0] != f"step-{manifest.step}":
            raise DamagedCheckpointError(folder, MANIFEST, f"it is of step {manifest.step!r:.60}")
        for name in manifest.files:
            if not _NAME.fullmatch(name):  # such as a path to another folder
                raise DamagedCheckpointError(folder, MANIFEST, f"it lists the file {name!r:.80}")
        return manifest


def _with_digest(content: dict[str, Any]) -> bytes:
    """Return the text of a manifest, with the SHA-256 of all other values."""
    body = json.dumps(content, sort_keys=True, allow_nan=False)
    whole = {**content, "digest": hashlib.sha256(body.encode()).hexdigest()}
    return (json.dumps(whole, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def checked_folder(directory: str | Path) -> Path:
    """Return the path of a folder, which need not exist.

    Raises:
        ValueError: the path is not valid, or is a file.
    """
    path = Path(directory)
    require("\0" not in str(path), "directory", str(directory), "a path without a null character")
    require(path.is_dir() or not path.exists(), "directory", str(directory), "a folder")
    return path


def check_extra_name(name: str) -> None:
    """Refuse a name that a file added to a checkpoint may not have.

    Raises:
        ValueError: it has separators, is the name of a file of the checkpoint itself, or is that of a pickle.
    """
    plain = isinstance(name, str) and _NAME.fullmatch(name) is not None and "/" not in name
    require(plain, "files", name, "letters, digits, dots, dashes and underscores, no separators")
    ours = _OURS.fullmatch(name) is not None
    require(not ours, "files", name, "other names than those of the checkpoint's own files")
    no_pickle = not name.lower().endswith(_PICKLES)
    require(no_pickle, "files", name, "no pickles, which run code when they are loaded; safetensors do not")


def folder_of(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return directory / f"step-{step}"


def scratch_of(directory: Path, step: int) -> Path:
    """Return the path at which this process writes the checkpoint of a step."""
    return directory / f".step-{step}.{this_process()}"


def steps_in(directory: Path) -> list[int]:
    """Return the steps that have a folder, in ascending order."""
    if not directory.is_dir():
        return []
    names = (_STEP.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in names if match)


def manifests_in(directory: Path) -> dict[Path, Manifest | None]:
    """Return the manifest of each checkpoint by ascending step; None for a damaged manifest.

    Raises:
        ValueError: a manifest of another format.
        OSError: a file cannot be read now, which does not mean that the checkpoint is damaged.
    """
    found: dict[Path, Manifest | None] = {}
    for step in steps_in(directory):
        path = folder_of(directory, step)
        try:
            found[path] = Manifest.read(path)
        except DamagedCheckpointError:
            if path.exists():  # another process may have deleted it since
                found[path] = None
    return found


def of_run(found: Mapping[Path, Manifest | None], run: str | None) -> dict[Path, Manifest]:
    """Return the checkpoints of a run; None: of the run that saved last."""
    intact = {path: manifest for path, manifest in found.items() if manifest is not None}
    if run is None and intact:
        run = max(intact.values(), key=lambda each: each.order).run
    return {path: manifest for path, manifest in intact.items() if manifest.run == run}


def newest_of(found: dict[Path, Manifest]) -> Path | None:
    """Return the last checkpoint with all of its files in the right size, or None.

    Raises:
        OSError: a file cannot be inspected now, which does not mean that the checkpoint is damaged.
    """
    for path, manifest in reversed(found.items()):
        with suppress(DamagedCheckpointError):
            verify_files(path, manifest.files, contents=False)
            return path
    return None


def verify_files(folder: Path, files: Mapping[str, FileEntry], *, contents: bool = True) -> None:
    """Raise DamagedCheckpointError if a file was changed.

    Args:
        folder: folder of the checkpoint.
        files: entries of its manifest, or some of them.
        contents: True to read the files; False to compare only their sizes.

    Raises:
        DamagedCheckpointError: names the first file that is missing or was changed.
        OSError: a file cannot be read now, which does not mean that it is damaged.
    """
    for name, entry in files.items():
        size = _size(folder, name)
        if size != entry.bytes:
            kind = "truncated" if size < entry.bytes else "too long"
            told = f"{kind}: got {size} bytes; it was written with {entry.bytes}"
            raise DamagedCheckpointError(folder, name, told)
    for name, entry in files.items() if contents else ():
        with _reading(folder, name), (folder / name).open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry.sha256:
            told = (
                f"it was changed since it was written: got SHA-256 {digest[:16]}..., expected "
                f"{entry.sha256[:16]}..."
            )
            raise DamagedCheckpointError(folder, name, told)


def read_regular(folder: Path, name: str, most: int) -> bytes:
    """Return the bytes of a file. It may have at most `most` bytes.

    Raises:
        DamagedCheckpointError: it is missing, too large or not a regular file, or damaged on the disk.
        OSError: it cannot be read now.
    """
    size = _size(folder, name)
    if size > most:
        raise DamagedCheckpointError(folder, name, f"got {size} bytes; allowed: up to {most}")
    with _reading(folder, name):
        return (folder / name).read_bytes()


def _size(folder: Path, name: str) -> int:
    """Return the size of a file. Refuse links, which may leave the folder, and pipes, which may block."""
    with _reading(folder, name):
        found = (folder / name).lstat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpointError(folder, name, "no regular file")
    return found.st_size


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    """Raise DamagedCheckpointError for an error that means damage. After other errors a read may succeed."""
    try:
        yield
    except OSError as error:
        if not is_damage(error):
            raise
        reason = "missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise DamagedCheckpointError(folder, name, reason) from error


def publish(scratch: Path, target: Path, run: str | None = None) -> Path | None:
    """Rename a finished folder to its final name. Replace a folder of that name, if it is of the same run.

    A folder of another run is renamed and not deleted, and so is a damaged one. Between the renames no folder
    has the final name. If the process is killed at this time, the replaced folder remains as `SCRATCH.old`,
    and `recover` restores its name.

    Args:
        scratch: finished folder.
        target: final name.
        run: identity of the run that writes. None: the folder is not a checkpoint, and replaces any other.

    Returns:
        new name of the folder that was there and remains; None if no such folder existed.

    Raises:
        OSError: a rename failed. The previous folder is unchanged.
    """
    for folder in (scratch / TENSORS, scratch):
        if folder.is_dir():
            flush(folder)
    replaced, aside = scratch.with_name(scratch.name + ".old"), None
    if target.exists():
        found = _run_of(target)
        if found == run:
            target.rename(replaced)
        else:
            aside = set_aside(target, "damaged" if found is None else f"run-{found[:8]}")
    try:
        scratch.rename(target)
    except BaseException:
        if replaced.exists():
            replaced.rename(target)
        if aside is not None:
            aside.rename(target)
        raise
    flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return aside


def remove(folder: Path) -> None:
    """Remove a checkpoint. Its name never belongs to a partial checkpoint.

    Raises:
        OSError: the removal failed. The checkpoint still exists.
    """
    removed = folder.with_name(f".{folder.name}.{this_process()}.removed")
    folder.rename(removed)
    flush(folder.parent)
    shutil.rmtree(removed, ignore_errors=True)


def recover(directory: Path, *, clear: bool) -> None:
    """Restore the name of a folder that was being replaced when its process stopped.

    Args:
        directory: directory of the checkpoints.
        clear: True to remove leftovers of processes that no longer exist and of this process. Only for a
            writer: the processes of another machine are not detected.

    Raises:
        OSError: a rename failed.
    """
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        match = _LEFT_OVER.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        target = directory / match[1]
        if match[3] == "old" and not target.exists():
            path.rename(target)
        elif clear and not lives(match[2]):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path, kind: str = "damaged") -> Path:
    """Rename a checkpoint to `step-N.KIND`, so that no restore finds it, and return the new path.

    Raises:
        OSError: a rename failed. The folder is unchanged.
    """
    names = (f"{folder.name}.{kind}{number}" for number in chain([""], map(".{}".format, count(2))))
    aside = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(aside)
    flush(folder.parent)
    return aside


def clear_damaged(directory: Path, before: int, run: str) -> None:
    """Delete the folders `step-N.damaged` of a run with steps before `before`.

    Raises:
        OSError: a deletion failed.
    """
    for path in directory.iterdir():
        match = _ASIDE.fullmatch(path.name)
        if match is not None and int(match[1]) < before and _run_of(path) == run:
            shutil.rmtree(path)


def _run_of(folder: Path) -> str | None:
    try:
        return Manifest.read(folder).run
    except DamagedCheckpointError:
        return None


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Raises:
        OSError: the disk has an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entries_of(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return size and SHA-256 of files that user functions have written. Set their mode, and flush them.

    Raises:
        OSError: a file is missing, or the disk has an error.
    """
    entries = {}
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for name in names:
        path = folder / name
        path.chmod(mode)
        with path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        entries[name] = FileEntry(path.stat().st_size, digest)
    return entries


def this_process() -> str:
    """Return the text that identifies this process in the name of a folder."""
    return str(os.getpid())


def lives(process: str) -> bool:
    """Return True if another process with this text exists. Folders of this process are leftovers."""
    number = int(process[:12])
    if number == os.getpid():
        return False
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
