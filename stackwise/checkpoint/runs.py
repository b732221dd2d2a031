"""Runs: find out which run wrote each checkpoint of a directory.

A run is identified by a random number that every checkpoint of it contains. A resumed run keeps it. The saves
of all runs in a directory are numbered, so that the run that saved last is known without a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stackwise.checkpoint import tree
from stackwise.checkpoint.folder import DamagedCheckpointError, Manifest, folder_of, steps_in, verify_files

__all__ = ["Saved", "last_run", "newest", "of_run", "saved_in", "steps_of"]


@dataclass(frozen=True)
class Saved:
    """A checkpoint folder, as its manifest describes it.

    Attributes:
        path: the folder.
        step: step number in the folder's name.
        run: identity of the run that wrote it. None: the manifest cannot be read.
        order: number of the save in the directory; 0 if the manifest cannot be read.
        metric: metric that it was saved with, or None.
    """

    path: Path
    step: int
    run: str | None = None
    order: int = 0
    metric: float | None = None


def saved_in(directory: Path) -> list[Saved]:
    """Return the checkpoints of a directory by ascending step. Reads the manifests only."""
    found = []
    for step in steps_in(directory):
        saved = Saved(folder_of(directory, step), step)
        with suppress(DamagedCheckpointError, OSError):
            manifest = Manifest.read(saved.path)
            metric = tree.decode(manifest.metric, tree.no_tensor)
            saved = Saved(saved.path, step, manifest.run, manifest.order, metric)
        found.append(saved)
    return found


def last_run(saved: Iterable[Saved]) -> str | None:
    """Return the identity of the run that saved last, or None if no manifest can be read."""
    return max(saved, key=lambda each: (each.order, each.step), default=Saved(Path(), 0)).run


def of_run(saved: Sequence[Saved], run: str | None) -> list[Saved]:
    """Return the checkpoints of a run.

    Folders without a readable manifest are included if no other run has a checkpoint among `saved`.
    """
    alone = all(each.run in (run, None) for each in saved)
    return [each for each in saved if each.run == run or (each.run is None and alone)]


def newest(saved: Sequence[Saved]) -> Path | None:
    """Return the last of `saved` whose files are all there and have the right size; None: there is none.

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
