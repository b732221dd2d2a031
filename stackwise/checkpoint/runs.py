"""Runs: assignment of the checkpoints of a directory to the runs that wrote them.

A run is identified by a random number that every checkpoint of it contains. A resumed run has the same
number. The saves of all runs in a directory are numbered, so that the run that saved last is known without a
clock. If the run of a checkpoint is unknown, so is the run that saved last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stackwise.checkpoint import tree
from stackwise.checkpoint.folder import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    folder_of,
    read_run,
    steps_in,
    verify_files,
)

__all__ = ["Saved", "last_run", "newest", "of_last_run", "of_run", "saved_in", "steps_of", "unknown_runs"]


@dataclass(frozen=True)
class Saved:
    """A checkpoint folder, as its manifest describes it.

    Attributes:
        path: the folder.
        step: step number in the folder's name.
        run: identity of the run that wrote it, or None if it is unknown.
        order: number of the save in the directory, or 0 if it is unknown.
        metric: metric that it was saved with, or None.
        error: reason why the manifest cannot be used, or None.
    """

    path: Path
    step: int
    run: str | None = None
    order: int = 0
    metric: float | None = None
    error: DamagedCheckpointError | None = None


def saved_in(directory: Path) -> list[Saved]:
    """Return the checkpoints of a directory by ascending step. Reads the manifests only.

    If a manifest is damaged, the run is read from `run.txt`. A manifest of an unknown format has no run.

    Raises:
        OSError: a file cannot be read now, which does not mean that the checkpoint is damaged.
    """
    found = []
    for step in steps_in(directory):
        path = folder_of(directory, step)
        try:
            manifest = Manifest.read(path)
        except DamagedCheckpointError as error:
            run, order = (None, 0) if error.whole else read_run(path)
            if path.exists():  # another process may have deleted it since
                found.append(Saved(path, step, run, order, error=error))
            continue
        metric = tree.decode(manifest.metric, tree.no_tensor)
        found.append(Saved(path, step, manifest.run, manifest.order, metric))
    return found


def last_run(saved: Iterable[Saved]) -> str | None:
    """Return the identity of the known run that saved last, or None if no run is known."""
    return max(saved, key=lambda each: (each.order, each.step), default=Saved(Path(), 0)).run


def of_run(saved: Iterable[Saved], run: str) -> list[Saved]:
    """Return the checkpoints of a run."""
    return [each for each in saved if each.run == run]


def of_last_run(saved: Sequence[Saved]) -> list[Saved]:
    """Return the checkpoints of the run that saved last.

    Raises:
        DamagedCheckpointError: the run of a checkpoint is unknown, and may be the one that saved last.
    """
    unknown = next((each for each in saved if each.run is None), None)
    if unknown is not None and unknown.error is not None:
        reason = (
            f"{unknown.error.reason}. {unknown_runs(saved)}, and may be the one that saved last. Pass `step` "
            "to `restore`, or move the checkpoints of unknown runs to another directory"
        )
        raise DamagedCheckpointError(unknown.path, MANIFEST, reason, unknown.error.whole)
    run = last_run(saved)
    return [] if run is None else of_run(saved, run)


def unknown_runs(saved: Iterable[Saved]) -> str:
    """Return a clause that names at most ten checkpoints of unknown runs; "" if all runs are known."""
    paths = [str(each.path) for each in saved if each.run is None]
    shown = ", ".join(paths[:10]) + (", ..." if len(paths) > 10 else "")
    return f"The run that wrote {shown} is unknown" if paths else ""


def newest(saved: Sequence[Saved]) -> Path | None:
    """Return the last of `saved` with all of its files in the right size, or None.

    Raises:
        OSError: a file cannot be inspected now, which does not mean that the checkpoint is damaged.
    """
    for each in reversed(saved):
        with suppress(DamagedCheckpointError):
            verify_files(each.path, Manifest.read(each.path).files, contents=False)
            return each.path
    return None


def steps_of(saved: Iterable[Saved]) -> str:
    """Return the steps as text, at most ten of them."""
    steps = sorted({each.step for each in saved})
    shown = ", ".join(map(str, steps[-10:]))
    return shown if len(steps) <= 10 else f"..., {shown}"
