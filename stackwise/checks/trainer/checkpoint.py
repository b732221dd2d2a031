"""Checkpoint: a run that is saved and loaded continues exactly like an uninterrupted run."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.another_process import Recipe, run_in_processes
from stackwise.checks.probe.run_state import (
    Trace,
    different,
    drive,
    next_batches,
    save,
    state_of,
)
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.runs.sequence import Sequences
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_adapter import with_one_optimizer
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.random_state import random_states, seeded, set_random_states
from stackwise.support.system_errors import is_out_of_memory

_NEEDS = "needs save(folder) and load(folder)"
_PLACE = (
    "Save the position in the data, which is the epoch and the batch, and pass the epoch to the sampler "
    "(set_epoch). If the global generator draws the order, save its state at the start of the epoch."
)
_LONGEST_EPOCH = 8  # batches; with shorter data, the run is saved in the second epoch
_N_STEPS = 3
_STEP_NUMBERS = (80, 90, 100, 900, 1000)
# Checkpoints of an earlier run, more than a run usually keeps.
_EARLIER_NUMBERS = tuple(range(600, 1300, 100))
_MOST_FILES = 8


@trainer_check
def checkpoint_round_trip(subject: TrainerSubject) -> CheckResult:
    """Does loading a checkpoint restore weights, optimizer, schedule, scaler and position exactly?"""
    run = subject.run()
    if not subject.has(run, "save", "load"):
        return subject.not_applicable(_NEEDS)
    with TemporaryDirectory() as folder:
        with subject.fixed_randomness():
            drive(run, _given(subject), 2)
            save(run, Path(folder))
            saved = state_of(run)
        for trained in (False, True):
            # A run with different initial weights shows which values are missing in the checkpoint.
            other = subject.spec.create(subject.device, subject.seed + 1)
            with seeded(subject.seed + 1, subject.device):
                if trained:
                    drive(other, [subject.batch(11)], 1)
                try:
                    other.load(Path(folder))  # type: ignore[attr-defined]
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    return _unloadable(subject, error)
            # A step may freeze parameters depending on its number. The next step shows a difference.
            changed = different(saved, state_of(other))
            lost = [name for name in changed if not name.endswith("takes gradients")]
            if lost:
                return subject.failed(
                    float(len(lost)),
                    0.0,
                    where=listed(lost) + (", loaded into a run that had made a step" if trained else ""),
                    meaning=_how(saved, state_of(other), lost[0]),
                    advice=_advice(lost[0], saved, state_of(other), trained),
                )
        same = subject.run()
        with seeded(subject.seed + 1, subject.device):
            same.load(Path(folder))  # type: ignore[attr-defined]
        return _hidden(subject, run, [other, same], len(saved))


def _hidden(
    subject: TrainerSubject, run: TrainingRun, others: list[TrainingRun], n_entries: int
) -> CheckResult:
    """Compare the next step, which may depend on state that `state_of` does not contain.

    One other run that agrees is enough: a frozen teacher that is created from the seed needs no checkpoint.
    """
    batch = [subject.batch(5)]
    traces = []
    for each in (run, *others):
        with subject.fixed_randomness():
            traces.append(drive(each, batch, 1))
    wanted, *found = traces
    gap = min((wanted.differs(got) for got in found), key=len)
    if gap and not _repeats(subject):
        return subject.passed(
            0.0, 0.0, meaning="Only the saved state was compared: two runs with the same seed differ."
        )
    if gap:
        return subject.failed(
            1.0,
            0.0,
            where=gap,
            meaning="The saved state is restored, but the next step on the same batch gives a different "
            "result.",
            advice="The step depends on something that is not saved: an average of weights, a counter, "
            "a buffer that is missing in the state_dict of the model, or a gradient of an earlier step.",
        )
    return subject.passed(0.0, 0.0, meaning=f"Compared: the next step, and {n_entries} entries of the state.")


@trainer_check
def resume(subject: TrainerSubject) -> CheckResult:
    """Is a run that is saved, loaded and continued equal to an uninterrupted run?"""
    if not subject.has(subject.run(), "save", "load"):
        return subject.not_applicable(_NEEDS)
    return _resumed(subject, _in_this_process)


@trainer_check(suite="full")
def resume_in_new_process(subject: TrainerSubject) -> CheckResult:
    """Is a run that continues in a new process equal to an uninterrupted run?"""
    if not subject.has(subject.run(), "save", "load"):
        return subject.not_applicable(_NEEDS)
    recipe = Recipe.of(subject.spec)
    if recipe is None:
        return subject.not_applicable(
            "needs TrainerSpec.factory, or a build function that can be pickled (at top level of a module)"
        )
    if _resumed(subject, _in_this_process).status != "passed":
        return subject.not_applicable("needs a run that passes resume")

    def elsewhere(
        subject: TrainerSubject,
        folder: str,
        batches: list[Any] | None,
        randomness: dict[str, Any] | None = None,
    ) -> _Resumed:
        arguments = {
            "randomness": randomness,
            "folder": folder,
            "batches": batches,
            "device": str(subject.device),
            "seed": subject.seed,
        }
        [outcome] = run_in_processes(f"{__name__}:_in_another_process", recipe, [arguments])
        if not outcome.built:
            raise _NoProcessError(outcome.error)
        if outcome.error:
            raise _LoadError(outcome.error)
        return outcome.value  # type: ignore[no-any-return]

    try:
        return _resumed(subject, elsewhere)
    except _NoProcessError as error:
        return subject.not_applicable(f"needs a run that a new process can set up; error: {error}")


class _NoProcessError(Exception):
    """The run cannot be set up in another process."""


class _LoadError(Exception):
    """The setup, the load or a step after it raised."""


# (state and random state after loading, trace of the steps that follow, next batch)
_Resumed = tuple[dict[str, Any], dict[str, Any], Trace]


class _GoOn(Protocol):
    """Loads a checkpoint and continues, from `randomness` or from a random state that was not saved."""

    def __call__(
        self,
        subject: TrainerSubject,
        folder: str,
        batches: list[Any] | None,
        randomness: dict[str, Any] | None = None,
    ) -> _Resumed: ...


def _resumed(subject: TrainerSubject, go_on: _GoOn) -> CheckResult:
    with TemporaryDirectory() as folder:
        straight, before, n_before, own = _straight(subject, folder=None)
        _straight(subject, folder=folder)
        rest = None if own else [subject.batch(n_before + i) for i in range(_N_STEPS)]
        try:
            after, randomness, trace = go_on(subject, folder, rest)
        except _LoadError as error:
            return _unloadable(subject, error)
        if not straight.differs(trace):
            kind = "on its own data" if own else "on random batches"
            return subject.passed(
                0.0,
                0.0,
                meaning=f"After {n_before} steps, {_N_STEPS} steps {kind} agree in losses and state.",
            )
        repeated, *_ = _straight(subject, folder=None)
        if unsteady := straight.differs(repeated):
            return subject.not_applicable(
                f"needs a deterministic step: two runs with the same seed differ in {unsteady}"
            )
        if Sequences(subject).is_rounding(straight, trace, n_before):
            return subject.passed(0.0, 0.0, meaning="Equal up to rounding.")
        lost = different(before.state, after)
        gap = straight.differs(trace)
        # The new run starts with a different random state. A second run with the saved one shows its effect.
        restored = gap
        if not lost and different(before.randomness, randomness):
            *_, second = go_on(subject, folder, rest, before.randomness)
            restored = straight.differs(second)
    if lost:
        advice = _advice(lost[0], before.state, after, False)
    elif not restored:
        advice = (
            "Save and load the random states (torch.get_rng_state, of every CUDA device, random.getstate, "
            "numpy's): dropout and augmentation draw from them."
        )
    elif restored.startswith("batch"):
        advice = _PLACE
    elif restored.startswith("the learning rate"):
        advice = "Save and load the number of the step, from which the learning rate is computed."
    else:
        advice = (
            "The step depends on something that is not saved: the number of the step, an average of weights, "
            "or gradients of earlier steps."
        )
    return subject.failed(
        float(max(1, len(lost))),
        0.0,
        where=f"{gap} (steps counted from the resume)",
        meaning="A resumed run differs from an uninterrupted run"
        + (f". State that differs after loading: {listed(lost)}." if lost else "."),
        advice=advice,
    )


class _Before:
    """State of a run at the time of the save."""

    def __init__(self, run: TrainingRun) -> None:
        self.state, self.randomness = state_of(run), random_states()


def _straight(subject: TrainerSubject, folder: str | None) -> tuple[Trace, _Before, int, bool]:
    """Run an uninterrupted run to its end. With a folder, save there and stop."""
    run = subject.run()
    with subject.fixed_randomness():
        batches = next_batches(run)
        n_before = 2
        if batches is not None:
            with seeded(subject.seed, subject.device):
                position: Any = run.position()  # type: ignore[attr-defined]
                length = len(list(islice(run.epoch(position[0]), _LONGEST_EPOCH + 1)))  # type: ignore[attr-defined]
            n_before = length + 2 if length <= _LONGEST_EPOCH else 3
        source: Iterable[Any] = batches if batches is not None else _given(subject)
        source = iter(source)
        drive(run, source, n_before)
        before = _Before(run)
        if folder is not None:
            save(run, Path(folder))
            return Trace(), before, n_before, batches is not None
        return drive(run, source, _N_STEPS), before, n_before, batches is not None


def _in_this_process(
    subject: TrainerSubject,
    folder: str,
    batches: list[Any] | None,
    randomness: dict[str, Any] | None = None,
) -> _Resumed:
    try:
        return _go_on(subject.spec.create, folder, batches, subject.device, subject.seed, randomness)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _LoadError(f"{type(error).__name__}: {error}") from error


def _in_another_process(
    build: Callable[[], TrainingRun],
    folder: str,
    batches: list[Any] | None,
    device: str,
    seed: int,
    randomness: dict[str, Any] | None,
) -> _Resumed:
    def create(device: torch.device | str, seed: int) -> TrainingRun:
        with seeded(seed, device):
            run: TrainingRun = with_one_optimizer(build(), "the run")
            return run

    return _go_on(create, folder, batches, torch.device(device), seed, randomness)


def _go_on(
    create: Callable[[torch.device | str, int], TrainingRun],
    folder: str,
    batches: list[Any] | None,
    device: torch.device,
    seed: int,
    wanted: dict[str, Any] | None,
) -> _Resumed:
    run = create(device, seed)
    # A new process has a different random state, so load() must restore the saved one if steps use it.
    with seeded(seed + 1, device):
        run.load(Path(folder))  # type: ignore[attr-defined]
        state, randomness = state_of(run), random_states()
        if wanted is not None:
            set_random_states(wanted)
        own = next_batches(run) if batches is None else iter(batches)
        assert own is not None
        return state, randomness, drive(run, own, _N_STEPS)


@trainer_check
def saving_disturbs_nothing(subject: TrainerSubject) -> CheckResult:
    """Is a run with a save in the middle bit-identical to a run without it?"""
    if not subject.has(subject.run(), "save"):
        return subject.not_applicable("needs save(folder)")

    def trained(*, saves: bool) -> tuple[Trace, bool]:
        run = subject.run()
        with subject.fixed_randomness(), TemporaryDirectory() as folder:
            drive(run, _given(subject), 1)
            if saves:
                mode, random = run.model.training, random_states()
                save(run, Path(folder))
                quiet = run.model.training == mode and not different(random, random_states())
            else:
                quiet = True
            return drive(run, [subject.batch(1), subject.batch(2)], 2), quiet

    wanted, (got, quiet) = trained(saves=False)[0], trained(saves=True)
    gap = wanted.differs(got)
    if not gap:
        return subject.passed(0.0, 0.0)
    if wanted.differs(trained(saves=False)[0]):
        return subject.not_applicable("needs a deterministic step: two runs with the same seed differ")
    return subject.failed(
        1.0,
        0.0,
        where=f"{gap} (steps counted from the save)",
        meaning="A run that saves a checkpoint during training gives different results.",
        advice="Look for random numbers that saving draws, and for a mode of the model that saving changes."
        if not quiet
        else "Look for weights that saving moves, casts or replaces in place: model.half(), .cpu(), or a "
        "swap of averaged weights that is not undone.",
    )


@trainer_check
def newest_checkpoint(subject: TrainerSubject) -> CheckResult:
    """Is the checkpoint with the highest step number kept, and does latest() return it?"""
    run: Any = subject.run()
    if not subject.has(run, "checkpoint", "latest"):
        return subject.not_applicable("needs checkpoint(folder, step) and latest(folder)")
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
            found = _found(run, folder, paths)
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
        for step in _EARLIER_NUMBERS:
            run.checkpoint(used, step)
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
        kept = [step for step in paths if paths[step].exists()]
        # Copying a folder changes its modification time, but not its step.
        os.utime(paths[kept[0]], (2e9, 2e9))
        found = _found(run, folder, paths)
    if found != _STEP_NUMBERS[-1] or kept != list(_STEP_NUMBERS[-len(kept) :]):
        return subject.warned(
            -1.0 if found is None else float(found),
            float(_STEP_NUMBERS[-1]),
            where=f"kept: {', '.join(map(str, kept))}; latest() after {kept[0]} was touched: {found}",
            meaning="The newest checkpoint is not chosen by its step number, but by a modification time.",
            correct_if="folders are never copied or changed, which changes their modification times",
            advice="Choose the checkpoint with the highest step number.",
        )
    return subject.passed(float(found), float(_STEP_NUMBERS[-1]), meaning=f"Kept checkpoints: {len(kept)}.")


def _found(run: Any, folder: Path, paths: dict[int, Path]) -> int | None:
    latest = run.latest(folder)
    if latest is None:
        return None
    return next((step for step in paths if paths[step].resolve() == Path(latest).resolve()), None)


@trainer_check
def damaged_checkpoint(subject: TrainerSubject) -> CheckResult:
    """Is an incomplete checkpoint refused?"""
    run: Any = subject.run()
    if not subject.has(run, "save", "load"):
        return subject.not_applicable(_NEEDS)
    silent = []
    with TemporaryDirectory() as name, subject.fixed_randomness():
        whole, broken = Path(name) / "whole", Path(name) / "broken"
        whole.mkdir()
        drive(run, [subject.batch(0)], 1)
        save(run, whole)
        saved = state_of(run)
        files = [path for path in whole.rglob("*") if path.is_file() and path.stat().st_size > 1]
        files = sorted(files, key=lambda path: path.stat().st_size, reverse=True)[:_MOST_FILES]
        if not files:
            return subject.not_applicable("needs a checkpoint that consists of files in its folder")
        for path in files:
            for cut in (True, False):
                shutil.copytree(whole, broken)
                damaged = broken / path.relative_to(whole)
                if cut:
                    os.truncate(damaged, path.stat().st_size // 2)
                else:
                    damaged.unlink()
                lost = _accepted(subject, broken, saved)
                shutil.rmtree(broken)
                if lost and cut:
                    return subject.failed(
                        float(len(lost)),
                        0.0,
                        where=f"{path.relative_to(whole)}, cut in half: {listed(lost)}",
                        meaning="An incomplete checkpoint was loaded without an error.",
                        advice="Do not catch the exception of a damaged file. Write the file under a "
                        "temporary name, and rename it when it is complete.",
                    )
                if lost:
                    silent.append(f"without {path.relative_to(whole)}: {listed(lost)}")
    if silent:
        return subject.warned(
            float(len(silent)),
            0.0,
            where="; ".join(silent),
            meaning="A checkpoint with a missing file is loaded without an error.",
            correct_if="the file is optional",
            advice="Refuse an incomplete checkpoint, or report what was not restored.",
        )
    return subject.passed(0.0, 0.0, meaning=f"{len(files)} files, each truncated and removed.")


def _accepted(subject: TrainerSubject, folder: Path, saved: dict[str, Any]) -> list[str]:
    """Return the state that differs after loading. If loading raises an exception, return nothing."""
    other: Any = subject.spec.create(subject.device, subject.seed + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with seeded(subject.seed + 1, subject.device):
                other.load(folder)
        except Exception:
            return []
    return different(saved, state_of(other))


def _given(subject: TrainerSubject) -> Iterable[Any]:
    number = 0
    while True:
        yield subject.batch(number)
        number += 1


def _repeats(subject: TrainerSubject) -> bool:
    """Return True if two runs with the same seed are equal."""
    traces = []
    for _ in range(2):
        run = subject.run()
        with subject.fixed_randomness():
            traces.append(drive(run, _given(subject), 3))
    return not traces[0].differs(traces[1])


def _unloadable(subject: TrainerSubject, error: Exception) -> CheckResult:
    said = str(error) if isinstance(error, _LoadError) else f"{type(error).__name__}: {error}"
    return subject.failed(
        1.0,
        0.0,
        where="load(folder)",
        meaning=f"A new run cannot load the checkpoint that was just saved: {said.splitlines()[0]}",
        advice="Look for names that a wrapper or torch.compile changes, and for state that training adds.",
    )


def _how(saved: dict[str, Any], got: dict[str, Any], name: str) -> str:
    a, b = saved.get(name, "missing"), got.get(name, "missing")
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{name} was {a.dtype} {tuple(a.shape)}, and is {b.dtype} {tuple(b.shape)} after loading."
        share = (a != b.to(a.device)).double().mean().item()
        return f"{share:.0%} of the elements of {name} differ from the saved ones."
    return f"{name} was {_brief(a)}, and is {_brief(b)} after loading."


def _brief(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)[:200]


def _advice(name: str, saved: dict[str, Any], got: dict[str, Any], trained: bool) -> str:
    if trained:
        return "After loading, state of the earlier training remains: clear or replace it."
    if name == "model: weights that share memory":
        return (
            "Tied weights are two tensors after loading: tie them after the load, and do not use assign=True."
        )
    part = name.partition(".")[0]
    if part == "scheduler" or name.startswith("optimizer.group"):
        return "Save and load the scheduler's state_dict; without it the schedule restarts."
    if part == "scaler":
        return "Save and load the GradScaler's state_dict; without it the first steps overflow."
    a, b = saved.get(name), got.get(name)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype:
            return (
                "The dtype changed. Optimizer.load_state_dict casts state to its parameter's dtype: cast it "
                "back if its dtype was wider."
            )
        if a.shape == b.shape and torch.equal(_rounded(a), _rounded(b)):
            return "The values are rounded to 16 bits: save them in the dtype in which the run trains."
    if part == "position()":
        return _PLACE
    if part == "optimizer":
        return "Save and load the optimizer's state_dict, after its parameter groups are restored."
    return (
        "Look for names that strict=False skips (a prefix of a wrapper such as module. or _orig_mod.), for a "
        "copy that is older than the last optimizer step, and for frozen or tied weights that are not saved."
    )


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
