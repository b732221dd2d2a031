"""CheckpointFolder: one checkpoint on disk. It is complete and unchanged, or detectably damaged.

A folder `step-N` has a list of its files, `manifest.json`, with the size and the SHA-256 of each file and of
the list itself. It is written as `.step-N.PROCESS` and renamed when it is completely on the disk. `run.txt`
repeats the run of the manifest, so that a folder with a damaged manifest still belongs to its run.

Other names in the directory:

- `.step-N.PROCESS.old`: a folder that is being replaced by a new folder of the same step.
- `.step-N.PROCESS.removed`: a folder that is being deleted.
- `step-N.damaged`: a folder that a restore has skipped.
- `step-N.run-ID`: checkpoint of another run, renamed because this run has written the same step.

PROCESS is a process id and a mark that distinguishes processes with the same id.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
    "nameless_in",
    "publish",
    "read_regular",
    "read_run",
    "recover",
    "remove",
    "run_of",
    "scratch_of",
    "set_aside",
    "steps_in",
    "this_process",
    "verify_files",
    "write_run",
]

MANIFEST = "manifest.json"
TENSORS = "tensors"
RUN = "run.txt"
_FORMAT = 2
_MANIFEST_BYTES = 2**24
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFT_OVER = re.compile(
    r"\.(step-(?:0|[1-9][0-9]*))\.([1-9][0-9]*(?:-[0-9a-f]{12})?)(?:\.(old|removed))?", re.ASCII
)
_ASIDE = re.compile(r"(step-(0|[1-9][0-9]*))\.(damaged|run-[0-9a-f]+)(?:\.[0-9]+)?")
_RUN = re.compile(r"[0-9a-f]{32}")
_RUN_AND_ORDER = re.compile(rb"([0-9a-f]{32}) ([1-9][0-9]{0,18})\n")
_NAME = re.compile(rf"(?:{TENSORS}/)?[A-Za-z0-9][A-Za-z0-9._-]{{0,199}}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_OURS = re.compile(r"manifest\.json|run\.txt|state-[0-9]+\.(?:json|safetensors)", re.IGNORECASE)
_PIECE = 2**22


class DamagedCheckpointError(ValueError):
    """A checkpoint differs from the one that was written.

    Args:
        folder: folder of the checkpoint.
        file: file that differs; None: the folder itself.
        reason: description of the damage.
        whole: True if every file is unchanged, but this one cannot be decoded. Another version may be able
            to.
    """

    def __init__(self, folder: Path, file: str | None, reason: str, whole: bool = False) -> None:
        super().__init__(f"{folder if file is None else folder / file}: {reason}")
        self.folder, self.file, self.reason, self.whole = folder, file, reason, whole


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
        metric: the encoded metric, or None.
        notes: the encoded notes.
        files: size and SHA-256 of each file, by name.
    """

    step: int
    run: str
    order: int
    time: str
    world_size: int
    versions: dict[str, str]
    metric: Any
    notes: Any
    files: dict[str, FileEntry] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, as the last of its files.

        Raises:
            ValueError: the notes are too long.
            OSError: the write failed.
        """
        content = self._bytes()
        require(len(content) <= _MANIFEST_BYTES, "notes", f"{len(content)} bytes", f"up to {_MANIFEST_BYTES}")
        write_bytes(folder / MANIFEST, [content])

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a folder.

        Raises:
            DamagedCheckpointError: it is missing or was changed. If `whole`: it is intact and of an unknown
                format.
            OSError: it cannot be read now.
        """
        content = read_regular(folder, MANIFEST, _MANIFEST_BYTES)
        try:
            values = json.loads(content.decode())  # without decode() it would guess the encoding
            if values["format"] != _FORMAT:
                raise _unknown_format(folder, values)
            fields = {key: values[key] for key in cls.__dataclass_fields__}
            fields["files"] = {name: FileEntry(**entry) for name, entry in fields["files"].items()}
            manifest = cls(**fields)
        except DamagedCheckpointError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DamagedCheckpointError(folder, MANIFEST, "no list of a checkpoint's files") from None
        # Every byte has to be unchanged, not only the values.
        try:
            same = manifest._bytes() == content
        except (ValueError, TypeError, RecursionError):
            same = False
        if not same:
            raise DamagedCheckpointError(folder, MANIFEST, "it was changed since it was written")
        manifest._check(folder)
        return manifest

    def _bytes(self) -> bytes:
        # Shallow: `asdict` would recurse into the notes.
        files = {name: vars(entry) for name, entry in self.files.items()}
        content: dict[str, Any] = {"format": _FORMAT, **vars(self), "files": files}
        body = json.dumps(content, sort_keys=True, allow_nan=False)
        content["digest"] = hashlib.sha256(body.encode()).hexdigest()
        return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()

    def _check(self, folder: Path) -> None:
        """Refuse values that no version of this class writes. The digest of a forged manifest may be right.

        Raises:
            DamagedCheckpointError: a value of a wrong type or out of range.
        """
        versions = self.versions.items() if isinstance(self.versions, dict) else [(None, None)]
        sound = {
            "run": isinstance(self.run, str) and _RUN.fullmatch(self.run) is not None,
            "order": _is_count(self.order, 1),
            "time": isinstance(self.time, str),
            "world_size": _is_count(self.world_size, 1),
            "versions": all(isinstance(text, str) for pair in versions for text in pair),
        }
        for key, holds in sound.items():
            if not holds:
                raise DamagedCheckpointError(folder, MANIFEST, f"{key}: got {getattr(self, key)!r:.60}")
        if type(self.step) is not int or folder_of(Path(), self.step).name != _published_name(folder.name):
            raise DamagedCheckpointError(folder, MANIFEST, f"it is of step {self.step!r:.60}")
        try:
            metric, notes = (tree.decode(value, tree.no_tensor) for value in (self.metric, self.notes))
        except tree.MalformedTreeError as error:
            raise DamagedCheckpointError(folder, MANIFEST, str(error)) from None
        if not isinstance(metric, float | None) or not isinstance(notes, dict):
            raise DamagedCheckpointError(folder, MANIFEST, "its metric or its notes are not understood")
        self._check_files(folder)

    def _check_files(self, folder: Path) -> None:
        for name, entry in self.files.items():
            if name.lower().endswith(_PICKLES):
                raise DamagedCheckpointError(folder, name[:80], "a pickle; loading one runs the code in it")
            if not _NAME.fullmatch(name) or name == MANIFEST:
                raise DamagedCheckpointError(folder, MANIFEST, f"it lists the file {name[:80]!r}")
            if not _is_count(entry.bytes, 0) or not isinstance(entry.sha256, str):
                raise DamagedCheckpointError(folder, MANIFEST, f"it has no size and SHA-256 of {name}")


def checked_folder(directory: str | Path) -> Path:
    """Return the path of a folder, which need not exist.

    Raises:
        ValueError: the path is not valid, or is a file.
    """
    path = Path(directory)
    require("\0" not in str(path), "directory", str(directory), "a path without a null character")
    require(path.is_dir() or not path.exists(), "directory", str(directory), "a folder")
    return path


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
    # ASCII digits only, and not more of them than Python converts to a number.
    return sorted(int(match[1]) for match in names if match and len(match[1]) < 20)


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
        size = _regular(folder, name).st_size
        if size != entry.bytes:
            kind = "truncated" if size < entry.bytes else "too long"
            raise DamagedCheckpointError(
                folder, name, f"{kind}: got {size} bytes; it was written with {entry.bytes}"
            )
    if not contents:
        return
    for name, entry in files.items():
        digest = hashlib.sha256()
        try:
            with (folder / name).open("rb", buffering=0) as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        except OSError as error:
            if not is_damage(error):
                raise
            raise _unreadable(folder, name, error) from error
        if digest.hexdigest() != entry.sha256:
            raise DamagedCheckpointError(
                folder,
                name,
                f"it was changed since it was written: got SHA-256 {digest.hexdigest()[:16]}..., expected "
                f"{entry.sha256[:16]}...",
            )


def _unknown_format(folder: Path, values: dict[str, Any]) -> DamagedCheckpointError:
    """Return the error for a manifest of another format: intact if its digest is right, otherwise damaged."""
    digest = values.pop("digest")
    body = json.dumps(values, sort_keys=True, allow_nan=False)
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        return DamagedCheckpointError(folder, MANIFEST, "it was changed since it was written")
    reason = (
        f"intact checkpoint of format {values['format']!r:.20}, which this version of stackwise cannot read; "
        f"allowed: {_FORMAT}"
    )
    return DamagedCheckpointError(folder, MANIFEST, reason, whole=True)


def write_run(folder: Path, run: str, order: int) -> dict[str, FileEntry]:
    """Write `run.txt`, and return its entry for the manifest.

    Raises:
        OSError: the write failed.
    """
    return {RUN: write_bytes(folder / RUN, [f"{run} {order}\n".encode()])}


def read_run(folder: Path) -> tuple[str | None, int]:
    """Return the run and the order of a save from `run.txt`, or (None, 0) if it is missing or damaged.

    Raises:
        OSError: it cannot be read now.
    """
    with suppress(DamagedCheckpointError):
        match = _RUN_AND_ORDER.fullmatch(read_regular(folder, RUN, 64))
        if match is not None:
            return match[1].decode(), int(match[2])
    return None, 0


def read_regular(folder: Path, name: str, most: int) -> bytes:
    """Return the bytes of a file. It may have at most `most` bytes.

    Raises:
        DamagedCheckpointError: it is missing, too large or not a regular file, or damaged on the disk.
        OSError: it cannot be read now.
    """
    size = _regular(folder, name).st_size
    if size > most:
        raise DamagedCheckpointError(folder, name, f"got {size} bytes; allowed: up to {most}")
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        if not is_damage(error):
            raise
        raise _unreadable(folder, name, error) from error


def publish(scratch: Path, target: Path, run: str | None = None) -> Path | None:
    """Rename a finished folder to its final name. Replace a folder of that name, if it is of the same run.

    A folder of another or an unknown run is renamed and not deleted. Between the renames no folder has the
    final name. If the process is killed at this time, the replaced folder remains as `SCRATCH.old`, and
    `recover` restores its name.

    Args:
        scratch: finished folder.
        target: final name.
        run: identity of the run that writes. None: the folder is not a checkpoint, and replaces any other.

    Returns:
        new name of the folder of another run; None if no such folder existed.

    Raises:
        OSError: a rename failed, or the final name belongs to an intact checkpoint of an unknown format. The
            previous folder is unchanged.
    """
    for folder in (scratch / TENSORS, scratch):
        if folder.is_dir():
            flush(folder)
    replaced, aside = scratch.with_name(scratch.name + ".old"), None
    if target.exists():
        found = None if run is None else _replaceable_run(target)
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


def _replaceable_run(folder: Path) -> str | None:
    try:
        return Manifest.read(folder).run
    except DamagedCheckpointError as error:
        if error.whole:
            raise FileExistsError(errno.EEXIST, error.reason, str(folder)) from error
        return read_run(folder)[0]


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

    This process must not write at the same time.

    Args:
        directory: directory of the checkpoints.
        clear: True to remove leftovers of processes that no longer exist and of this process, including
            another manager of it. Only for a writer: the processes of another machine are not detected.

    Raises:
        OSError: a rename failed.
    """
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        match = _LEFT_OVER.fullmatch(path.name)
        if match is None or not path.is_dir() or lives(match[2]):
            continue
        target = directory / match[1]
        if match[3] == "old" and not target.exists():
            path.rename(target)
        elif clear:
            shutil.rmtree(path, ignore_errors=True)


def nameless_in(directory: Path) -> list[int]:
    """Return the steps whose only folder is one that was being replaced, in ascending order.

    This is the state between two renames. It lasts longer if the name of the folder cannot be restored.
    """
    if not directory.is_dir():
        return []
    left = [match for path in directory.iterdir() if (match := _LEFT_OVER.fullmatch(path.name))]
    names = {match[1] for match in left if match[3] == "old" and not (directory / match[1]).exists()}
    return sorted(int(name.removeprefix("step-")) for name in names if len(name) < 25)


def set_aside(folder: Path, kind: str = "damaged") -> Path:
    """Rename a checkpoint so that no restore finds it. Replace an earlier one of the same name and run.

    Args:
        folder: the checkpoint.
        kind: end of the new name, `step-N.KIND`. A number is added if another run has the name.

    Returns:
        the new name.

    Raises:
        OSError: a rename failed. The folder is unchanged.
    """
    run = run_of(folder)
    names = (f"{folder.name}.{kind}{number}" for number in chain([""], map(".{}".format, count(2))))
    aside = next(
        path for path in map(folder.with_name, names) if not path.exists() or run_of(path) == run is not None
    )
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    flush(folder.parent)
    return aside


def clear_damaged(directory: Path, before: int, run: str) -> None:
    """Delete the skipped checkpoints of a run with steps before `before`, except checkpoints of unknown runs.

    Raises:
        OSError: a deletion failed.
    """
    for path in directory.iterdir():
        match = _ASIDE.fullmatch(path.name)
        if match is None or match[3] != "damaged" or int(match[2][:20]) >= before:
            continue
        if run_of(path) == run:
            shutil.rmtree(path)


def run_of(folder: Path) -> str | None:
    """Return the identity of the run that wrote a checkpoint, or None if it is unknown.

    Raises:
        OSError: a file cannot be read now.
    """
    try:
        return Manifest.read(folder).run
    except DamagedCheckpointError as error:
        return None if error.whole else read_run(folder)[0]


def check_extra_name(name: str) -> None:
    """Refuse a name that a file added to a checkpoint may not have.

    Raises:
        ValueError: it has separators, is the name of a file of the checkpoint itself, or is that of a pickle.
    """
    plain = isinstance(name, str) and _NAME.fullmatch(name) is not None and "/" not in name
    require(plain, "files", name, "letters, digits, dots, dashes and underscores, no separators")
    ours = _OURS.fullmatch(name) is not None or name == TENSORS
    require(not ours, "files", name, "other names than those of the checkpoint's own files")
    no_pickle = not name.lower().endswith(_PICKLES)
    require(no_pickle, "files", name, "no pickles, which run code when they are loaded; safetensors do not")


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
        digest, size = hashlib.sha256(), 0
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
            os.fsync(file.fileno())
        entries[name] = FileEntry(size, digest.hexdigest())
    return entries


def this_process() -> str:
    """Return the text that identifies this process in the name of a folder."""
    mark = _mark(os.getpid())
    return f"{os.getpid()}" if mark is None else f"{os.getpid()}-{mark}"


def lives(process: str) -> bool:
    """Return True if another process with this text exists. Folders of this process are leftovers."""
    text, _, mark = process.partition("-")
    number = int(text[:12])
    if number == os.getpid():
        return False
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    found = _mark(number)
    # If the system has no marks, or hides the marks of other users, only the process ID is compared.
    return found is None or (found != _ENDED and found == mark)


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


def _published_name(name: str) -> str:
    """Return the final name `step-N` of a folder that is being written or was renamed."""
    match = _LEFT_OVER.fullmatch(name) or _ASIDE.fullmatch(name)
    return name if match is None else match[1]


def _regular(folder: Path, name: str) -> os.stat_result:
    """Return the status of a file. Refuse links, which may leave the folder, and pipes, which may block."""
    try:
        found = (folder / name).lstat()
    except FileNotFoundError:
        raise DamagedCheckpointError(folder, name, "missing") from None
    except OSError as error:
        if not is_damage(error):
            raise
        raise _unreadable(folder, name, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpointError(folder, name, "no regular file")
    return found


def _unreadable(folder: Path, name: str, error: OSError) -> DamagedCheckpointError:
    return DamagedCheckpointError(folder, name, f"cannot be read: {error}")


_ENDED = ""


def _mark(number: int) -> str | None:
    """Return a mark that distinguishes processes with the same ID. In containers, IDs are soon reused.

    Returns:
        hash of the start time of the process and of the boot of the machine; "" for a process that has exited
        and for which its parent has not waited yet; None: the system does not report it.
    """
    try:
        fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
        machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return None
    state, began = fields[0], fields[19]  # fields 3 and 22; field 2, a name, may contain any text
    return _ENDED if state in (b"Z", b"X") else hashlib.sha256(machine + began).hexdigest()[:12]
