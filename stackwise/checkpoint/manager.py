"""CheckpointManager: write, rotate and restore the checkpoints of a training run."""

from __future__ import annotations

import platform
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
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
    checked_folder,
    clear_damaged,
    entries_of,
    folder_of,
    manifests_in,
    newest_of,
    of_run,
    publish,
    recover,
    remove,
    scratch_of,
    set_aside,
    steps_in,
    verify_files,
)
from stackwise.checkpoint.object_state import Objects
from stackwise.checkpoint.ranks import REFUSALS, Ranks
from stackwise.checkpoint.retention import Retention
from stackwise.checkpoint.tensor_file import FileEntry
from stackwise.checkpoint.writer import Staging, Writer
from stackwise.support.arguments import check_sizes, require

__all__ = ["CheckpointManager", "CheckpointWarning", "Restored"]

_Files = Mapping[str, Callable[[Path], None] | Mapping[str, Tensor]]


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written, or is damaged. The run continues."""


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
        damaged: former names of the skipped checkpoints. They are now `step-N.damaged`.
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
    starts a new run too, so that the later checkpoints of the old one remain.

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
        asynchronous: True to copy the state in `save`, and to write it while the run continues.
        on_complete: called with the folder of each complete checkpoint, in the first process. With
            `asynchronous`, it is called in the thread that writes. An error is a `CheckpointWarning`.
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
        asynchronous: bool = False,
        on_complete: Callable[[Path], None] | None = None,
        group: Any = None,
    ) -> None:
        self.directory = checked_folder(directory)
        require(isinstance(asynchronous, bool), "asynchronous", asynchronous, "True or False")
        callback = on_complete is None or callable(on_complete)
        require(callback, "on_complete", on_complete, "a function of a path, or None")
        self.retention = Retention(keep_last, keep_every, keep_best, lower_is_better)
        self.asynchronous, self.on_complete = asynchronous, on_complete
        self._ranks = Ranks(group, in_thread=asynchronous)
        self._staging, self._writer = Staging[tuple[str, str]](), Writer()
        self._warnings = deque[str]()
        self._failure: tuple[int, BaseException] | None = None  # error of the last save
        self._rolled_back: list[Path] = []  # checkpoints to set aside, once another one exists
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
        files: _Files | None = None,
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
        self._failure = None
        manifest = self._ranks.agree(partial(_manifest, step, self._ranks.size, metric, notes or {}))
        content = self._ranks.agree(partial(Content.of, objects, self._ranks.rank, files or {}))
        with self._discarding(manifest.step):
            begun = self._ranks.agree(partial(self._begin, manifest, files or {}))
            main = self._ranks.gather(begun)[0]
            assert main is not None
            manifest, scratch = main
            self._run = manifest.run
            places = self._ranks.gather(content.places())
            content = content.without(places[: self._ranks.rank])
            if self.asynchronous:
                copies, copied = self._ranks.agree(partial(self._staging.copy, content.parts()))
                content = content.with_parts(copies)
                self._writer.begin(partial(self._finish, content, scratch, manifest, copied))
            else:
                self._finish(content, scratch, manifest)
        self._warn()
        return None if self._failure is not None else folder_of(self.directory, manifest.step)

    def restore(self, objects: Mapping[str, Any], step: int | Restored | None = None) -> Restored | None:
        """Load the newest intact checkpoint into `objects` and the random generators.

        Without `step`, it is a checkpoint of this run, or of the run that saved last if this manager has
        neither saved nor restored. If the directory has several runs, a `CheckpointWarning` names the steps
        of this run and of all other runs.

        Every byte is verified before any state is loaded. Damaged checkpoints are named in a
        `CheckpointWarning` and skipped. They are renamed to `step-N.damaged`, so that no later restore uses a
        checkpoint from a step that was rolled back. A file that cannot be read is not damage, but an error.

        Args:
            objects: all saved objects, or some of them.
            step: step of a checkpoint of any run; or the result of an earlier call, to restore more objects
                from the same checkpoint without a second verification of its files.

        Returns:
            the restored checkpoint; None if no checkpoint exists.

        Raises:
            DamagedCheckpointError: the checkpoint of `step` is damaged, or all of them are.
            ValueError: no checkpoint of `step` exists, it does not fit the objects, or a checkpoint has the
                format of another version of stackwise.
            OSError: a file cannot be read now.
        """
        self.wait()
        ours = self._ranks.agree(partial(Objects, objects))
        if isinstance(step, Restored):
            loaded = self._ranks.agree(partial(Loaded.of, ours, step.path, step.manifest, self._ranks))
            self._ranks.agree(partial(loaded.into, ours))
            self._continue(step.run, step.step)
            return step
        damaged: list[DamagedCheckpointError] = []
        for path in self._ranks.gather(self._ranks.agree(partial(self._candidates, step)))[0]:
            try:
                manifest = self._ranks.agree(partial(self._verified, path))
                loaded = self._ranks.agree(partial(Loaded.of, ours, path, manifest, self._ranks))
            except DamagedCheckpointError as error:
                if step is not None:
                    raise
                damaged.append(error)
                continue
            break
        else:
            if not damaged:
                return None
            first = damaged[0]
            reason = f"{first.reason}; and none of the {len(damaged)} checkpoints of the run is whole"
            raise DamagedCheckpointError(first.folder, first.file, reason)
        self._ranks.agree(partial(loaded.into, ours))
        if self._ranks.is_main:
            for skipped in damaged:
                self._set_aside(skipped)
        self._continue(manifest.run, manifest.step)
        self._warn()
        return Restored(
            step=manifest.step,
            run=manifest.run,
            path=path,
            metric=manifest.metric,
            notes=manifest.notes,
            world_size=manifest.world_size,
            versions=manifest.versions,
            remarks=loaded.remarks,
            damaged=tuple(skipped.folder for skipped in damaged),
            manifest=manifest,
        )

    def rewind(self, step: int) -> None:
        """Set aside the run's checkpoints later than `step`, after a rollback to it. No restore uses them.

        They are renamed to `step-N.damaged`. If no other checkpoint exists, they remain until the next one is
        written. The call waits for a running write, and is collective.

        Raises:
            OSError: a checkpoint cannot be read now.
        """
        self.wait()
        self._ranks.agree(partial(self._roll_back, step))
        self._warn()

    @property
    def run(self) -> str | None:
        """Identity of the run, after the first `save`, `restore` or `begin_run`.

        None: none of them was called.
        """
        return self._run

    def begin_run(self) -> str:
        """Begin a new run before its first `save`, and return its identity.

        It is needed only to know the identity early: without it, the first `save` starts the run.
        """
        self.wait()
        return self._continue(self._ranks.gather(uuid4().hex)[0], -1)

    @property
    def writing(self) -> bool:
        """True if the thread is writing a checkpoint."""
        return self._writer.runs

    def steps(self) -> list[int]:
        """Return the steps of the run's checkpoints, ascending. Those with a damaged manifest are excluded.

        Before the first `save` or `restore`, it is the run that saved last, as in `latest` and `best`.
        """
        return [manifest.step for manifest in self._own().values()]

    def latest(self) -> Path | None:
        """Return the newest checkpoint of the run of which no file is missing, too short or too long.

        None if the run has no such checkpoint. File contents are not read; `verify` reads them.
        """
        return newest_of(self._own())

    def best(self) -> Path | None:
        """Return the run's checkpoint with the best metric, the newest of equal ones, or None."""
        ranked = self.retention.ranked({each.step: each.metric for each in self._own().values()})
        return folder_of(self.directory, ranked[0]) if ranked else None

    def verify(self, step: int) -> None:
        """Read every byte of a checkpoint of any run, and open its files as `restore` does.

        A call in one process is enough.

        Raises:
            DamagedCheckpointError: names the first file that is missing, was changed or cannot be opened.
            ValueError: no checkpoint of `step` exists.
        """
        path = self._existing(step)
        manifest = Manifest.read(path)
        verify_files(path, manifest.files)
        check_readable(path, manifest)

    def wait(self) -> None:
        """Wait for the running write, and warn if it failed.

        Raises:
            Exception: error of the write, except an error of the disk.
        """
        try:
            self._writer.wait()
        finally:
            self._warn()

    def close(self) -> None:
        """Wait for the running write. Raise if the last checkpoint was not written.

        Raises:
            OSError: the last `save` failed.
        """
        try:
            self.wait()
        finally:
            self._ranks.close()
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
        finally:
            self._ranks.close()

    def _own(self) -> dict[Path, Manifest]:
        return of_run(manifests_in(self.directory), self._run)

    def _continue(self, run: str, restored_step: int) -> str:
        """Use a run from the next save on, and return it."""
        self._run, self._restored_step, self._is_first_save = run, restored_step, True
        return run

    def _begin(self, manifest: Manifest, files: _Files) -> tuple[Manifest, Path] | None:
        """Number the save, create its folder and call the user's functions. Only the first process does."""
        if not self._ranks.is_main:
            return None
        self._number_save(manifest.step)
        recover(self.directory, clear=True)
        scratch = scratch_of(self.directory, manifest.step)
        (scratch / TENSORS).mkdir(parents=True)
        called = {name: file for name, file in files.items() if callable(file)}
        for name, write in called.items():
            write(scratch / name)
            allowed = "what writes the path that it is given"
            require((scratch / name).is_file(), f"files[{name!r}]", "no file", allowed)
        assert self._run is not None
        entries = entries_of(scratch, called)
        return replace(manifest, run=self._run, order=self._order, files=entries), scratch

    def _number_save(self, step: int) -> None:
        """Number the next save. Before the first one, begin a run unless it continues the restored one."""
        self._order += 1
        if not self._is_first_save:
            return
        found = manifests_in(self.directory)
        start = min(step, self._restored_step)
        ours = {} if self._run is None else of_run(found, self._run)
        passed = any(path not in self._rolled_back and each.step > start for path, each in ours.items())
        run = self._continue(uuid4().hex, -1) if passed or self._run is None else self._run
        known = [each for each in found.values() if each is not None]
        others = [each.step for each in known if each.run != run]
        if others and self._restored_step < 0:
            self._warnings.append(
                f"{self.directory}: a new run begins with step {step}, and the folder holds checkpoints "
                f"of another run, of steps {_listed(others)}. They stay: this run does not count, delete "
                "or restore them, and renames one of a step that it saves too to step-N.run-ID. A new "
                "process resumes the run that saved last"
            )
        self._order = 1 + max((each.order for each in known), default=0)
        self._is_first_save = False

    def _finish(
        self,
        content: Content,
        scratch: Path,
        manifest: Manifest,
        copied: Callable[[], None] | None = None,
    ) -> None:
        """Write the files of this process. Then the first one publishes."""
        with self._discarding(manifest.step):

            def written() -> dict[str, FileEntry]:
                if copied is not None:
                    copied()
                return content.write(scratch)

            files = dict(manifest.files)
            for entries in self._ranks.gather(self._ranks.agree(written)):
                files.update(entries)
            self._ranks.agree(partial(self._publish, scratch, replace(manifest, files=files)))

    def _publish(self, scratch: Path, manifest: Manifest) -> None:
        if not self._ranks.is_main:
            return
        path = folder_of(self.directory, manifest.step)
        manifest.write(scratch)
        aside = publish(scratch, path, manifest.run)
        if aside is not None:
            self._warnings.append(f"{path} was not written by this run: it is now {aside.name}")
        self._leave_behind(path)
        self._retain(manifest.step)
        try:
            if self.on_complete is not None:
                self.on_complete(path)
        except Exception as error:  # such as an error of another storage, which must not end the run
            self._warnings.append(f"on_complete of {path}: {type(error).__name__}: {error}")

    @contextmanager
    def _discarding(self, step: int) -> Iterator[None]:
        """Remove the unfinished folder if the block fails. An error of the disk becomes a warning."""
        try:
            yield
        except BaseException as error:
            if self._ranks.is_main:
                shutil.rmtree(scratch_of(self.directory, step), ignore_errors=True)
            if not isinstance(error, REFUSALS):
                raise
            self._failure = step, error
            self._warnings.append(
                f"the checkpoint of step {step} is not written; earlier ones are as they were: {error}"
            )

    def _retain(self, written: int) -> None:
        """Delete old checkpoints of this run, never the one just written: its files were opened after that.

        If a manifest cannot be read now, all checkpoints remain, since this one may be the best.
        """
        try:
            own = self._own()
        except OSError as error:
            self._warnings.append(f"no checkpoint is deleted this time, as one cannot be read: {error}")
            return
        try:
            metrics = {each.step: each.metric for each in own.values()}
            stays = self.retention.kept(metrics) | {written}
            for path, manifest in own.items():
                if manifest.step not in stays:
                    remove(path)
            assert self._run is not None
            oldest = min(sorted(metrics)[-self.retention.keep_last :], default=0)
            clear_damaged(self.directory, oldest, self._run)
        except OSError as error:
            self._warnings.append(f"an older checkpoint could not be removed: {error}")

    def _candidates(self, step: int | None) -> list[Path]:
        """Return the checkpoints that may be restored, the newest first, in the first process only."""
        if not self._ranks.is_main:
            return []
        if step is not None:
            return [self._existing(step)]
        recover(self.directory, clear=False)
        found = manifests_in(self.directory)
        own = of_run(found, self._run)
        others = [each.step for path, each in found.items() if each is not None and path not in own]
        if others and self._run is None:
            self._warnings.append(
                f"{self.directory} holds checkpoints of several runs. This process resumes the run that "
                f"saved last, with steps {_listed([each.step for each in own.values()])}. Steps "
                f"{_listed(others)} are of others and stay; restore(objects, step) takes one of them"
            )
        return [path for path, manifest in reversed(found.items()) if manifest is None or path in own]

    def _existing(self, step: int) -> Path:
        step = _plain(step)
        check_sizes(0, step=step)
        recover(self.directory, clear=False)
        there = steps_in(self.directory)
        require(step in there, "step", step, f"one of those in {self.directory}: {there}")
        return folder_of(self.directory, step)

    def _verified(self, path: Path) -> Manifest:
        """Return the manifest after a verification. Each process reads an equal share of the files."""
        manifest = Manifest.read(path)
        verify_files(path, manifest.files, contents=False)
        names = sorted(manifest.files)[self._ranks.rank :: self._ranks.size]
        verify_files(path, {name: manifest.files[name] for name in names})
        return manifest

    def _roll_back(self, step: int) -> None:
        if not self._ranks.is_main:
            return
        own = {} if self._run is None else self._own()
        self._rolled_back = [path for path, manifest in own.items() if manifest.step > step]
        if len(self._rolled_back) < len(own):
            self._leave_behind()

    def _leave_behind(self, written: Path | None = None) -> None:
        """Rename the checkpoints that were rolled back, except the one that has been written since."""
        left, self._rolled_back = self._rolled_back, []
        for path in left:
            try:
                if path != written:
                    set_aside(path)
            except OSError as error:
                self._warnings.append(f"a checkpoint that was rolled back keeps its name: {path}: {error}")

    def _set_aside(self, damaged: DamagedCheckpointError) -> None:
        """Rename a checkpoint that was skipped."""
        try:
            place = f"it is now {set_aside(damaged.folder).name}"
        except OSError as error:
            place = f"it keeps its name: {error}"
        self._warnings.append(f"a damaged checkpoint is passed over: {damaged}; {place}")

    def _warn(self) -> None:
        """Issue the pending warnings, in the first process only."""
        while self._warnings:
            message = self._warnings.popleft()
            if self._ranks.is_main:
                warnings.warn(message, CheckpointWarning, stacklevel=3)


def _manifest(
    step: int, world_size: int, metric: float | Tensor | None, notes: Mapping[str, Any]
) -> Manifest:
    """Return the manifest without its run and its files.

    Raises:
        ValueError: an invalid step, or a metric or a note that is not a plain value.
    """
    step, value = _plain(step), _plain(metric)
    check_sizes(0, step=step)
    require(step < 10**19, "step", step, "below 10**19")
    number = isinstance(value, float) or (type(value) is int and value.bit_length() < 1024)
    require(metric is None or number, "metric", metric, "a number that a float can hold, or None")
    held: dict[str, Tensor] = {}
    tree.encode(dict(notes), ("notes",), held)
    require(not held, "notes", ", ".join(held), "plain values; tensors and arrays belong to objects")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions["stackwise"] = stackwise.__version__
    written = datetime.now(UTC).isoformat(timespec="seconds")
    return Manifest(
        step=step,
        run="",
        order=0,
        time=written,
        world_size=world_size,
        versions=versions,
        metric=None if metric is None else float(value),
        notes=dict(notes),
    )


def _plain(value: Any) -> Any:
    """Return the number of a tensor or an array without dimensions. Return any other value unchanged."""
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0 else value


def _listed(steps: list[int]) -> str:
    """Return the steps as text, at most ten of them."""
    shown = ", ".join(map(str, sorted(steps)[-10:]))
    return shown if len(steps) <= 10 else f"..., {shown}"
