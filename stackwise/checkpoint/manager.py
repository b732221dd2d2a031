"""CheckpointManager: write, rotate and restore the checkpoints of a training run."""

from __future__ import annotations

import errno
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

import stackwise
from stackwise.checkpoint import tree
from stackwise.checkpoint.content import Content, Loaded, check_readable
from stackwise.checkpoint.folder import (
    TENSORS,
    DamagedCheckpointError,
    Manifest,
    check_extra_name,
    checked_folder,
    clear_damaged,
    entries_of,
    folder_of,
    nameless_in,
    publish,
    recover,
    remove,
    scratch_of,
    set_aside,
    steps_in,
    verify_files,
    write_run,
)
from stackwise.checkpoint.object_state import Objects
from stackwise.checkpoint.ranks import REFUSALS, Ranks
from stackwise.checkpoint.retention import Retention
from stackwise.checkpoint.runs import (
    Saved,
    last_run,
    newest,
    of_last_run,
    of_run,
    saved_in,
    steps_of,
    unknown_runs,
)
from stackwise.checkpoint.tensor_file import FileEntry
from stackwise.checkpoint.upload import DirectoryUpload, Uploader
from stackwise.checkpoint.writer import Staging, Writer
from stackwise.support.arguments import check_sizes, require

__all__ = ["CheckpointManager", "CheckpointWarning", "Restored"]

_PAUSES = (0.01, 0.1, 1.0)  # seconds; another process needs less between two renames


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written or uploaded, or is damaged. The run continues."""


@dataclass(frozen=True)
class Restored:
    """Checkpoint that was restored.

    Attributes:
        step: step number.
        run: identity of the run that wrote it.
        path: folder of the checkpoint.
        metric: metric that it was saved with, or None.
        notes: notes that it was saved with.
        world_size: number of processes that wrote it.
        versions: versions of the libraries that wrote it, by name.
        remarks: differences to the saved state, such as new random states of added processes.
        damaged: former names of the skipped checkpoints. They are now `step-N.damaged`, except intact ones
            that this version cannot read.
        manifest: verified list of its files.
    """

    step: int
    run: str
    path: Path
    metric: float | None
    notes: Mapping[str, Any]
    world_size: int
    versions: Mapping[str, str]
    remarks: tuple[str, ...]
    damaged: tuple[Path, ...]
    manifest: Manifest = field(repr=False)


class CheckpointManager:
    """Manager that saves and restores checkpoints in a directory, with one folder `step-N` per step.

    A folder of this name is complete: it is written under another name, every file is flushed to the disk and
    opened once more, a list with the SHA-256 of each file is added, and the folder is renamed. Checkpoints
    are sorted by the number N, never by name or time. Every checkpoint has the random states of Python,
    numpy, torch and CUDA of each process. Only one manager of a process may write into a directory: it treats
    the unfinished folder of another manager as a leftover.

    Every checkpoint contains the identity of its run. `restore` before the first `save` resumes the run that
    saved last. Without it, the first `save` starts a new run, and warns if the directory has checkpoints of
    another one. Retention, `rewind`, `steps`, `latest`, `best` and `restore` without a step use the
    checkpoints of their own run only. A save below the restored step, or after `restore` of an earlier step,
    starts a new run too, so that the later checkpoints of the old one remain. A checkpoint of an unknown run
    is never counted or deleted.

    If several processes train, each of them creates a manager and calls all methods in the same order. They
    write into one directory that all of them can access. Modules and optimizers are assumed to be equal in
    all processes, or to be sharded (DTensors, as in FSDP2). Each process writes its own shards. The state of
    any other object is stored per process.

    Args:
        directory: directory of the checkpoints, created at the first save.
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep each checkpoint with a step divisible by this number.
        keep_best: also keep this number of checkpoints with the best metric.
        lower_is_better: True if a lower metric is better.
        asynchronous: True to copy the state in `save`, and to write it while the run continues. With
            "overlapped", parameters and optimizer states are also copied while the run continues, and the
            next step of an optimizer waits for the copies. Until then, they must not be changed in another
            way, for example manually. If torch counts such a change, the checkpoint is not written. Changes
            of `.data`, and changes within a compiled optimizer step, are not detected.
        upload: copies a published checkpoint to another place: `DirectoryUpload`, or a function that is
            called with its folder in a thread of the first process. Uploads run one at a time. Of the
            checkpoints that are published meanwhile, only the newest is uploaded next. A failure is a
            `CheckpointWarning`.
        group: group of torch.distributed; None: all processes.

    Raises:
        ValueError: an invalid argument.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        keep_best: int = 0,
        lower_is_better: bool = True,
        asynchronous: bool | Literal["overlapped"] = False,
        upload: Callable[[Path], None] | None = None,
        group: Any = None,
    ) -> None:
        self.directory = checked_folder(directory)
        sound = isinstance(asynchronous, bool) or asynchronous == "overlapped"
        require(sound, "asynchronous", asynchronous, "True, False or 'overlapped'")
        require(upload is None or callable(upload), "upload", upload, "a function of a path, or None")
        self.retention = Retention(keep_last, keep_every, keep_best, lower_is_better)
        self.asynchronous = asynchronous
        apart = not isinstance(upload, DirectoryUpload) or (
            upload.directory.resolve() != self.directory.resolve()
        )
        require(apart, "upload", str(directory), "another directory than that of the checkpoints")
        self._ranks = Ranks(group, in_thread=bool(asynchronous))
        self._staging, self._writer = Staging[tuple[str, str]](), Writer()
        self._uploader = None if upload is None else Uploader(upload)
        uploads = isinstance(upload, DirectoryUpload)
        self._places = [self.directory, *([upload.directory] if uploads else [])]  # type: ignore[union-attr]
        self._warnings: list[str] = []
        self._damaged: set[int] = set()
        self._newest, self._held_back = -1, False  # last written step; True if an upload delays a removal
        self._failure: tuple[int, BaseException] | None = None  # error of the last save
        self._behind: list[Path] = []  # rolled-back checkpoints, until another one exists
        self._run: str | None = None  # identity of the run, once it has saved or is resumed
        self._order = 0  # number of the last save in the directory
        self._restored_step = -1
        self._is_first_save = True  # since the last restore

    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        metric: float | Tensor | None = None,
        files: Mapping[str, Callable[[Path], None] | Mapping[str, Tensor]] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """Write the checkpoint of `step`, then remove the checkpoints that are not to be retained.

        A checkpoint of the same step is replaced, and exists until the new one does. If a write fails, there
        is a `CheckpointWarning`, earlier checkpoints are unchanged, and the run continues. If this was the
        last save, `close` raises an error.

        Args:
            step: step number of the run.
            objects: objects by name. Each has `state_dict` and `load_state_dict`, or is a mutable mapping.
            metric: metric for `keep_best`: a number, or a tensor or an array with one number and no
                dimensions.
            files: more files of the checkpoint by name, of the first process only. Each is a mapping of
                tensors by name for a safetensors file, or a function that writes the file at the path that it
                receives. Functions are called before `save` returns.
            notes: plain values that `restore` returns.

        Returns:
            folder of the checkpoint; None if it could not be written. With `asynchronous`, the folder will
            exist later.

        Raises:
            ValueError: a value that cannot be stored; the message has its place in the state.
        """
        self.wait()
        manifest = self._ranks.agree(partial(_manifest, step, self._ranks.size, metric, notes or {}))
        step = manifest.step
        self._failure = None
        try:
            content = self._ranks.agree(partial(self._content, step, objects, files or {}))
            runs, places = zip(*self._ranks.gather((self._run, content.places())), strict=True)
            self._run = runs[0]
            manifest = replace(manifest, run=self._run or "", order=self._order)
            content = content.without(places[: self._ranks.rank])
            called = [name for name, file in (files or {}).items() if callable(file)]
            if self.asynchronous:
                self._warn()  # before the thread may add messages
                self._start(content, objects, manifest, called)
                return self._path(step)
            self._finish(content, manifest, called)
        except REFUSALS as error:
            self._abandon(step, error)
            self._warn()
            return None
        except BaseException:
            self._discard(step)
            raise
        self._warn()
        return self._path(step)

    def restore(self, objects: Mapping[str, Any], step: int | Restored | None = None) -> Restored | None:
        """Load the newest intact checkpoint into `objects` and the random generators.

        Without `step`, it is a checkpoint of this run, or of the run that saved last if this manager has
        neither saved nor restored. If the directory has several runs, a `CheckpointWarning` names the steps
        of this run and of all other runs. If the run of a checkpoint is unknown, so is the run that saved
        last, and `step` is required.

        Every byte is verified before any state is loaded. Damaged checkpoints are named in a
        `CheckpointWarning` and skipped. They are renamed to `step-N.damaged`, so that no later restore uses a
        checkpoint from a step that was rolled back. An intact checkpoint that cannot be decoded, for example
        of a later version, is not renamed. A file that cannot be read is not damage, but an error. The
        directory of a `DirectoryUpload` is searched too. If both directories have a step, the checkpoint in
        `directory` is preferred.

        Args:
            objects: all saved objects, or some of them.
            step: step of a checkpoint of any run; or the result of an earlier call, to restore more objects
                from the same checkpoint without a second verification of its files.

        Returns:
            the restored checkpoint; None if no checkpoint exists.

        Raises:
            DamagedCheckpointError: the checkpoint of `step` is damaged, or all of them are. Without `step`,
                also if the run of a checkpoint is unknown.
            ValueError: no checkpoint of `step` exists, or it does not fit the objects.
            OSError: a file cannot be read now, or the name of the newest checkpoint cannot be restored.
        """
        self.wait()
        if step is not None and not isinstance(step, Restored):
            step = _plain(step)
            check_sizes(0, step=step)
        ours = self._ranks.agree(partial(Objects, objects))
        if isinstance(step, Restored):
            load = partial(Loaded.of, ours, step.path, step.manifest, self._ranks)
            loaded = self._ranks.agree(load)
            self._ranks.agree(partial(loaded.into, ours))
            self._go_on(step.run, step.step)
            return step
        places = self._ranks.gather(self._ranks.agree(partial(self._found, step)))[0]
        damaged: list[DamagedCheckpointError] = []
        for path in places:
            try:
                manifest = self._ranks.agree(partial(self._verified, path))
                loaded = self._ranks.agree(partial(Loaded.of, ours, path, manifest, self._ranks))
            except DamagedCheckpointError as error:
                damaged.append(error)
                continue
            break
        else:
            self._ranks.agree(partial(self._raise_damaged, damaged, step))
            return None
        self._ranks.agree(partial(loaded.into, ours))
        if self._ranks.is_main:
            self._set_aside(damaged)
        self._go_on(manifest.run, manifest.step)
        self._warn()
        return Restored(
            step=manifest.step,
            run=manifest.run,
            path=path,
            metric=tree.decode(manifest.metric, tree.no_tensor),
            notes=tree.decode(manifest.notes, tree.no_tensor),
            world_size=manifest.world_size,
            versions=manifest.versions,
            remarks=loaded.remarks,
            damaged=tuple(error.folder for error in damaged),
            manifest=manifest,
        )

    def rewind(self, step: int) -> None:
        """Set aside the run's checkpoints later than `step`, after a rollback to it. No restore uses them.

        They are renamed to `step-N.damaged`, also in the directory of a `DirectoryUpload`. If no other
        checkpoint exists, they remain until the next one is written. The call waits for running writes and
        uploads. It can be passed to a guard: `Guard(..., on_rewind=manager.rewind)`.
        """
        self.wait()
        self._ranks.agree(partial(self._go_back, step))
        self._warn()

    @property
    def run(self) -> str | None:
        """Identity of the run of the last `save`, `restore` or `begin_run`, 32 hexadecimal digits.

        None: none of them was called.
        """
        return self._run

    def begin_run(self) -> str:
        """Begin a new run before its first `save`, and return its identity.

        It is needed only to know the identity early: without it, the first `save` starts the run.
        """
        self.wait()
        return self._go_on(self._ranks.gather(uuid4().hex)[0], -1)

    @property
    def writing(self) -> bool:
        """True if the thread is writing a checkpoint."""
        return self._writer.runs

    def steps(self) -> list[int]:
        """Return the steps of the run's checkpoints, ascending. Damaged ones are included.

        Before the first `save` or `restore`, it is the run that saved last, as in `latest` and `best`.
        """
        return [each.step for each in self._own()]

    def latest(self) -> Path | None:
        """Return the newest checkpoint of the run of which no file is missing, too short or too long.

        None if the run has no such checkpoint. File contents are not read; `verify` reads them.
        """
        return newest(self._own())

    def best(self) -> Path | None:
        """Return the run's checkpoint with the best metric, the newest of equal ones, or None."""
        ranked = self.retention.ranked({each.step: each.metric for each in self._own()})
        return self._path(ranked[0]) if ranked else None

    def verify(self, step: int) -> None:
        """Read every byte of a checkpoint of any run, and open its files as `restore` does.

        A call in one process is enough.

        Raises:
            DamagedCheckpointError: names the first file that is missing, was changed or cannot be opened.
            ValueError: no checkpoint of `step` exists.
        """
        step, there = _plain(step), steps_in(self.directory)
        require(step in there, "step", step, f"one of those in {self.directory}: {there}")
        manifest = Manifest.read(self._path(step))
        verify_files(self._path(step), manifest.files)
        check_readable(self._path(step), manifest)

    def wait(self) -> None:
        """Wait for the running write, and warn if it failed. Do not wait for uploads.

        Raises:
            Exception: error of the write, except an error of the disk.
        """
        try:
            self._writer.wait()
        finally:
            self._warn()

    def close(self) -> None:
        """Wait for the running write and for uploads. Raise if the last checkpoint was not written.

        Raises:
            OSError: the last `save` failed.
        """
        try:
            self.wait()
            self._wait_for_uploads()
        finally:
            self._ranks.close()
            self._staging.close()
        failure, self._failure = self._failure, None
        if failure is not None:
            step, error = failure
            number = getattr(error, "errno", None) or 0
            raise OSError(number, f"the last checkpoint, of step {step}, is not written: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.wait()
            self._wait_for_uploads()
        finally:
            self._ranks.close()
            self._staging.close()

    def _path(self, step: int) -> Path:
        return folder_of(self.directory, step)

    def _own(self) -> list[Saved]:
        return self._own_of(saved_in(self.directory))

    def _own_of(self, saved: list[Saved]) -> list[Saved]:
        return of_last_run(saved) if self._run is None else of_run(saved, self._run)

    def _go_on(self, run: str, restored_step: int) -> str:
        """Use a run from the next save on, and return it."""
        self._run, self._restored_step, self._is_first_save = run, restored_step, True
        return run

    def _number_save(self, step: int) -> None:
        """Number the next save. Before the first one, begin a run unless it continues the restored one."""
        self._order += 1
        if not self._is_first_save:
            return
        found = [each for place in self._places for each in saved_in(place)]
        start = min(step, self._restored_step)
        later = [each for each in found if each.run == self._run and each.step > start]
        passed = any(each.path not in self._behind and each.step not in self._damaged for each in later)
        run = self._go_on(uuid4().hex, -1) if passed or self._run is None else self._run
        others = [each for each in found if each.run != run]
        if others and self._restored_step < 0:
            self._warnings.append(
                f"{self.directory}: a new run begins with step {step}, and the folder holds checkpoints "
                f"of another run, of steps {steps_of(others)}. They stay: this run does not count, delete "
                "or restore them, and renames one of a step that it saves too to step-N.run-ID. A new "
                "process resumes the run that saved last"
            )
        self._order = 1 + max((each.order for each in found), default=0)
        self._is_first_save = False

    def _content(
        self, step: int, objects: Mapping[str, Any], files: Mapping[str, Callable[[Path], None] | Any]
    ) -> Content:
        """Return the part of this process. Files of user functions are written now."""
        if self._ranks.is_main:
            self._number_save(step)
        for name, file in files.items():
            check_extra_name(name)
            allowed = "a function of a path, or tensors by name"
            require(callable(file) or isinstance(file, Mapping), f"files[{name!r}]", file, allowed)
        tensors = {name: file for name, file in files.items() if not callable(file)}
        content = Content.of(objects, self._ranks.rank, tensors)
        calls = {name: file for name, file in files.items() if callable(file)}
        if calls and self._ranks.is_main:
            scratch = self._begin(step)
            for name, write in calls.items():
                write(scratch / name)
                allowed = "what writes the path that it is given"
                require((scratch / name).is_file(), f"files[{name!r}]", "no file", allowed)
        return content

    def _start(
        self, content: Content, objects: Mapping[str, Any], manifest: Manifest, called: list[str]
    ) -> None:
        """Copy the state, and start the thread. If one process fails, no thread is started."""

        def prepared() -> None:
            overlaps = self.asynchronous == "overlapped"
            late = content.updated_by_optimizers(objects) if overlaps else ()
            copies, arrived = self._staging.copy(content.parts(), late)
            copied = content.with_parts(copies)
            self._writer.prepare(partial(self._finish_later, copied, manifest, called, arrived))

        try:
            # The threads communicate in the same group. None of them starts before this call is over.
            self._ranks.agree(prepared)
        except BaseException:
            self._staging.release()
            self._writer.drop()
            raise
        self._writer.begin()

    def _begin(self, step: int) -> Path:
        """Create the folder to write in. Its name has the process ID of the first process."""
        recover(self.directory, clear=True)
        scratch = scratch_of(self.directory, step)
        (scratch / TENSORS).mkdir(parents=True)
        return scratch

    def _finish(self, content: Content, manifest: Manifest, called: list[str]) -> None:
        """Write the files of this process. The first one publishes. `called`: files of user functions."""

        def begun() -> Path | None:
            if not self._ranks.is_main:
                return None
            return scratch_of(self.directory, manifest.step) if called else self._begin(manifest.step)

        scratch = self._ranks.gather(self._ranks.agree(begun))[0]
        assert scratch is not None

        def written() -> dict[str, FileEntry]:
            extra: dict[str, FileEntry] = {}
            if self._ranks.is_main:
                extra = entries_of(scratch, called) | write_run(scratch, manifest.run, manifest.order)
            return extra | content.write(scratch, self._ranks.rank)

        files: dict[str, FileEntry] = {}
        for each in self._ranks.gather(self._ranks.agree(written)):
            files.update(each)
        self._ranks.agree(partial(self._publish, scratch, replace(manifest, files=files)))

    def _finish_later(
        self,
        content: Content,
        manifest: Manifest,
        called: list[str],
        arrived: Callable[[], None],
    ) -> None:
        """Run `_finish` in the thread."""
        try:
            self._ranks.agree(arrived)
            self._finish(content, manifest, called)
        except REFUSALS as error:
            self._abandon(manifest.step, error)
        except BaseException:
            self._discard(manifest.step)
            raise

    def _publish(self, scratch: Path, manifest: Manifest) -> None:
        if not self._ranks.is_main:
            return
        manifest.write(scratch)
        aside = publish(scratch, self._path(manifest.step), manifest.run)
        if aside is not None:
            self._warnings.append(
                f"{self._path(manifest.step)} was not written by this run: it is now {aside.name}"
            )
        self._damaged.discard(manifest.step)
        self._behind = [path for path in self._behind if path != self._path(manifest.step)]
        self._leave_behind()
        if self._uploader is not None:
            self._uploader.add(self._path(manifest.step))
        self._newest = manifest.step
        self._retain()

    def _retain(self) -> None:
        """Delete old checkpoints of this run. The newest one remains: its files were opened after the write.

        A checkpoint that is being uploaded remains until the next call. If a manifest cannot be read now, all
        checkpoints remain, since this one may be the best.
        """
        held = self._uploader.held() if self._uploader is not None else set()
        assert self._run is not None
        try:
            own = self._own()
        except OSError as error:
            self._warnings.append(f"no checkpoint is deleted this time, as one cannot be read: {error}")
            return
        try:
            metrics = {each.step: each.metric for each in own}
            damaged = self._damaged | {each.step for each in own if each.error is not None}
            stays = self.retention.kept(metrics, damaged) | {self._newest}
            leaving = [self._path(step) for step in sorted(metrics.keys() - stays)]
            self._held_back = not held.isdisjoint(leaving)
            for path in leaving:
                if path not in held:
                    remove(path)
            oldest = min(sorted(metrics)[-self.retention.keep_last :], default=0)
            clear_damaged(self.directory, oldest, self._run)
        except OSError as error:
            self._warnings.append(f"an older checkpoint could not be removed: {error}")

    def _wait_for_uploads(self) -> None:
        """Wait for all uploads, and remove the checkpoints that were retained for them."""
        if self._uploader is None:
            return
        self._uploader.wait()
        if self._held_back:
            self._retain()
        self._warn()

    def _found(self, step: int | None) -> list[Path]:
        """Return the checkpoints that may be restored, the newest first, in the first process only."""
        if not self._ranks.is_main:
            return []
        for directory in self._places:
            _recover_names(directory, step)
        saved = [each for directory in self._places for each in saved_in(directory)]
        run = self._run or last_run(saved)
        others = [each for each in saved if each.run not in (run, None)]
        if step is not None:
            saved = [each for each in saved if each.step == step]
        else:
            unknown = unknown_runs(saved)
            saved = self._own_of(saved)
            if unknown:
                self._warnings.append(f"{unknown}. Checkpoints of unknown runs are not restored")
            if others and self._run is None:
                self._warnings.append(
                    f"{self.directory} holds checkpoints of several runs. This process resumes the run that "
                    f"saved last, with steps {steps_of(saved)}. Steps {steps_of(others)} are of others and "
                    "stay; restore(objects, step) takes one of them"
                )
        # For one step: first the checkpoints of this run, in the order of the places.
        return [each.path for each in sorted(saved, key=lambda each: (-each.step, each in others))]

    def _raise_damaged(self, damaged: list[DamagedCheckpointError], step: int | None) -> None:
        """Raise an error because no checkpoint could be restored. Return if no checkpoint exists."""
        places = " and ".join(map(str, self._places))
        if not damaged:
            steps = sorted({each for directory in self._places for each in steps_in(directory)})
            require(step is None, "step", step, f"one of those in {places}: {steps}")
            return
        first = damaged[0]
        if len(damaged) == 1 and step is not None:
            raise first
        reason = f"{first.reason}; and none of the {len(damaged)} checkpoints of the run is whole"
        raise DamagedCheckpointError(first.folder, first.file, reason)

    def _go_back(self, step: int) -> None:
        if not self._ranks.is_main:
            return
        self._behind = []
        if self._uploader is not None:
            self._uploader.wait()
        left = 0
        for place in self._places:
            try:
                own = [] if self._run is None else of_run(saved_in(place), self._run)
            except OSError as refused:
                told = f"checkpoints that the run has gone back behind keep their names: {place}: {refused}"
                self._warnings.append(told)
                continue
            self._behind += [each.path for each in own if each.step > step]
            left += sum(each.step <= step and each.step not in self._damaged for each in own)
        if left:
            self._leave_behind()

    def _leave_behind(self) -> None:
        """Rename the checkpoints that were rolled back."""
        left, self._behind = self._behind, []
        for path in left:
            try:
                set_aside(path)
            except OSError as refused:
                self._pass_over(path)
                told = f"a checkpoint that the run has gone back behind keeps its name: {path}: {refused}"
                self._warnings.append(told)

    def _set_aside(self, damaged: list[DamagedCheckpointError]) -> None:
        """Rename the checkpoints that were skipped."""
        for error in damaged:
            if error.whole:
                self._pass_over(error.folder)
                self._warnings.append(
                    f"a checkpoint that is whole is passed over: {error}; it keeps its name"
                )
                continue
            try:
                place = f"it is now {set_aside(error.folder).name}"
            except OSError as refused:
                place = f"it keeps its name: {refused}"
                self._pass_over(error.folder)
            self._warnings.append(f"a damaged checkpoint is passed over: {error}; {place}")

    def _pass_over(self, path: Path) -> None:
        """Exclude a skipped checkpoint that could not be renamed from the retention."""
        if path.parent == self.directory:
            self._damaged.add(int(path.name.removeprefix("step-")))

    def _verified(self, path: Path) -> Manifest:
        """Return the manifest after a verification. Each process reads an equal share of the files."""
        manifest = Manifest.read(path)
        verify_files(path, manifest.files, contents=False)
        names = sorted(manifest.files)[self._ranks.rank :: self._ranks.size]
        verify_files(path, {name: manifest.files[name] for name in names})
        return manifest

    def _abandon(self, step: int, error: BaseException) -> None:
        self._discard(step)
        self._failure = step, error
        self._warnings.append(
            f"the checkpoint of step {step} is not written; earlier ones are as they were: {error}"
        )

    def _discard(self, step: int) -> None:
        if self._ranks.is_main:
            shutil.rmtree(scratch_of(self.directory, step), ignore_errors=True)

    def _warn(self) -> None:
        """Issue the pending warnings, in the first process only."""
        messages, self._warnings = self._warnings, []
        while self._uploader is not None and self._uploader.messages:
            messages.append(self._uploader.messages.popleft())
        for message in messages:
            if self._ranks.is_main:
                warnings.warn(message, CheckpointWarning, stacklevel=3)


def _recover_names(directory: Path, step: int | None) -> None:
    """Restore the names of all checkpoints.

    Raises:
        OSError: the requested checkpoint has no name, even after a wait for another process to restore it.
    """
    refused: OSError | None = None
    for pause in (0.0, *_PAUSES):
        time.sleep(pause)
        try:
            recover(directory, clear=False)
        except OSError as error:  # for example in a read-only directory
            refused = error
        newest = max(steps_in(directory), default=-1)
        found = nameless_in(directory)
        wanted = [each for each in found if each == step or (step is None and each > newest)]
        if not wanted:
            return
    told = (
        f"the checkpoint of step {wanted[-1]} has no name: it is being replaced, or was and cannot be renamed"
    )
    raise OSError(refused.errno if refused else errno.EBUSY, told, str(directory)) from refused


def _manifest(
    step: int, world_size: int, metric: float | Tensor | None, notes: Mapping[str, Any]
) -> Manifest:
    """Return the manifest without its files.

    Raises:
        ValueError: an invalid step, or a metric or a note that is not a plain value.
    """
    step, value = _plain(step), _plain(metric)
    check_sizes(0, step=step)
    require(step < 10**19, "step", step, "below 10**19")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    number = number and (isinstance(value, float) or value.bit_length() < 1024)  # within the range of a float
    require(metric is None or number, "metric", metric, "a number that a float can hold, or None")
    held: dict[str, Tensor] = {}
    plain = tree.encode(dict(notes), ("notes",), held)
    require(not held, "notes", ", ".join(held), "plain values; tensors and arrays belong to objects")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions["stackwise"] = stackwise.__version__
    written = datetime.now(UTC).isoformat(timespec="seconds")
    kept = None if value is None else tree.encode(float(value), ("metric",), held)
    return Manifest(step, "", 0, written, world_size, versions, kept, plain)


def _plain(value: Any) -> Any:
    """Return the number of a tensor or an array without dimensions. Return any other value unchanged."""
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0 else value
