"""Checkpoint: the newest checkpoint is kept and found, and an incomplete one is refused."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.run_state import different, save, state_of
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.support.random_state import seeded
from stackwise.support.system_errors import is_out_of_memory, reraise_unless_failure

_STEP_NUMBERS = (80, 90, 100, 900, 1000)
# Checkpoints of an earlier run, more than a run usually keeps.
_EARLIER_NUMBERS = tuple(range(600, 1300, 100))
_MOST_FILES = 8


@trainer_check
def newest_checkpoint(subject: TrainerSubject) -> CheckResult:
    """Is the checkpoint with the highest step number kept, and does latest() return it?"""
    run: Any = subject.run()
    needed(subject.has(run, "checkpoint", "latest"), "checkpoint(folder, step) and latest(folder)")
    with TemporaryDirectory() as name, subject.fixed_randomness():
        folder = Path(name)
        paths: dict[int, Path] = {}
        for step in _STEP_NUMBERS:
            path = paths[step] = Path(run.checkpoint(folder, step))
            kept = [number for number in paths if paths[number].exists()]
            if not path.exists():
                return subject.failed(
                    float(step),
                    float(step),
                    where=f"checkpoint {step}, written last",
                    meaning=f"The newest checkpoint was removed immediately. Kept: {kept or 'none'}.",
                    advice="Look for an order by name: sort by the number of the step, not by text.",
                )
            latest = run.latest(folder)
            places = {path.resolve(): number for number, path in paths.items()}
            found = None if latest is None else places.get(Path(latest).resolve())
            if found != step:
                return subject.failed(
                    -1.0 if found is None else float(found),
                    float(step),
                    where=f"of the checkpoints {', '.join(map(str, kept))}",
                    meaning=f"Method latest() returns {found or 'none'}; the newest checkpoint is {step}.",
                    advice="Sort by the number of the step, not by text, in which '900' follows '1000'.",
                )
        used = Path(name) / "used"
        used.mkdir()
        for earlier in _EARLIER_NUMBERS:
            run.checkpoint(used, earlier)
        files = sorted(used.rglob("*"))
        try:
            first = Path(subject.run().checkpoint(used, 100))  # type: ignore[attr-defined]
        except Exception as error:
            # A run may refuse the folder by an exception if it does not change the files.
            if is_out_of_memory(error) or sorted(used.rglob("*")) != files:
                raise
            first = used
        if not first.exists():
            return subject.failed(
                100.0,
                100.0,
                where="checkpoint 100, written last, after those of an earlier run",
                meaning="In the folder of an earlier run, the new checkpoint was removed immediately.",
                advice="Keep the checkpoint that was just written, or raise an exception for a used folder.",
            )
    return subject.passed(float(step), float(step), meaning=f"Kept checkpoints: {len(kept)}.")


@trainer_check
def damaged_checkpoint(subject: TrainerSubject) -> CheckResult:
    """Is an incomplete checkpoint refused?"""
    run: Any = subject.run()
    needed(subject.has(run, "save", "load"), "save(folder) and load(folder)")
    with TemporaryDirectory() as name, subject.fixed_randomness():
        whole, broken = Path(name) / "whole", Path(name) / "broken"
        whole.mkdir()
        run.step(subject.batch(0))
        save(run, whole)
        saved = state_of(run)
        files = [path for path in whole.rglob("*") if path.is_file() and path.stat().st_size > 1]
        files = sorted(files, key=lambda path: path.stat().st_size, reverse=True)[:_MOST_FILES]
        needed(files, "a checkpoint that consists of files in its folder")
        for path in files:
            shutil.copytree(whole, broken)
            os.truncate(broken / path.relative_to(whole), path.stat().st_size // 2)
            lost = _accepted(subject, broken, saved)
            shutil.rmtree(broken)
            if lost:
                return subject.failed(
                    float(len(lost)),
                    0.0,
                    where=f"{path.relative_to(whole)}, cut in half: {listed(lost)}",
                    meaning="An incomplete checkpoint was loaded without an error.",
                    advice="Do not catch the exception. Write a file under another name, then rename it.",
                )
    return subject.passed(0.0, 0.0, meaning=f"{len(files)} files, each truncated.")


def _accepted(subject: TrainerSubject, folder: Path, saved: dict[str, Any]) -> list[str]:
    """Return the state that differs after loading. If loading raises an exception, return nothing."""
    other: Any = subject.spec.create(subject.device, subject.seed + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with seeded(subject.seed + 1, subject.device):
                other.load(folder)
        except BaseException as error:
            reraise_unless_failure(error)
            return []
    return different(saved, state_of(other))
