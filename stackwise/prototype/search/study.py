"""search_architecture_space: a search on Optuna that can be resumed, shared and read."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from stackwise.prototype.search.evaluation import Evaluate, PrototypeEvaluation
from stackwise.prototype.search.objective import read_objectives
from stackwise.prototype.search.processes import work_in_processes
from stackwise.prototype.search.record import finished_trials, read_trials
from stackwise.prototype.search.score import ScoreWeights
from stackwise.prototype.search.search_result import SearchResult
from stackwise.prototype.search.space import Space
from stackwise.prototype.search.storage import (
    MEMORY,
    check_storage,
    open_storage,
    place_of,
    quiet_optuna,
    shown_place,
)
from stackwise.prototype.search.trainable import check_space
from stackwise.prototype.search.worker import OnTrial, Task, Worker
from stackwise.support.arguments import check_sizes, require
from stackwise.support.device import resolve_device
from stackwise.support.random_state import choose_seeds

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

__all__ = ["load_search", "search_architecture_space"]

_DEFINITION = "stackwise"  # attribute of a study: definition of its trials


def search_architecture_space(
    space: Space | Mapping[str, Any] | str | Path,
    budget: int = 20,
    *,
    objective: str | Sequence[str] = "score",
    sampler: str | BaseSampler = "tpe",
    pruner: str | BasePruner | None = None,
    steps: int = 1000,
    seeds: int | Sequence[int] = 1,
    storage: str | Path | BaseStorage | None = None,
    name: str | None = None,
    jobs: int = 1,
    seed: int = 0,
    device: str | None = None,
    small_factor: int = 1,
    weights: ScoreWeights | None = None,
    evaluate: Evaluate | None = None,
    on_trial: OnTrial | None = None,
    stale_seconds: int = 120,
) -> SearchResult:
    """Search for good architectures in a space.

    The budget is that of the study. If the search is called again with the same storage, or at the same time
    in a second process or machine, only missing trials run. The call returns when all are finished. No trial
    runs twice.

    - A failure is a result: "nan", "diverged" or "spiky" from the verdict of `ArchitecturePrototype`, "error"
      for an exception, "pruned" for an early stop by a pruner. It ranks after every success, and is
      infeasible for a sampler.
    - A sample with the configuration of another trial is not trained and does not count. After three
      consecutive duplicates, a configuration without a trial is selected. If none is left, the search ends.
    - A failure of the machine is not a result: see OSError, ImportError and AcceleratorError below.
    - A trial of a dead process is repeated after `stale_seconds` without a heartbeat. After three deaths, it
      has the status "error".

    Args:
        space: a `Space`, a mapping that describes one, or a YAML file.
        budget: number of results of the study, including failures.
        objective: "loss", "score", "tokens_per_second", "peak_bytes" or "parameters". Several give a Pareto
            front.
        sampler: "tpe", "random", "gp", "nsga2", or an Optuna sampler; see `make_sampler`.
        pruner: None; for loss or score, "median", "hyperband" or "wilcoxon" (over `seeds`); for one
            objective, an Optuna pruner. A pruner receives the mean loss since its last call at 16 equidistant
            points of the first run.
        steps: number of updates per run. A verdict on stability requires 1000.
        seeds: runs of each configuration: their number, starting at `seed`, or a list of seeds. The loss is
            their mean, and the worst status counts.
        storage: None: the SQLite file `search.db` in the current folder; a path: that file, or the one in
            that folder; an Optuna URL; an Optuna storage, which needs a heartbeat of its own if trials of
            dead processes are to be repeated; "memory": no storage.
        name: name of the study. None: derived from everything that defines a trial, so that another search in
            the same storage is another study.
        jobs: number of processes on this machine, with one thread each. 1: this process. With more, a script
            must be importable: it must call this function under `if __name__ == "__main__":`.
        seed: seed of all samples, and the first of `seeds`.
        device: device of the training. None: the configured one. Another type of device is another study.
        small_factor: train `create_small_variant` of each configuration instead of the configuration.
        weights: weights of the score. None: `ScoreWeights()`.
        evaluate: replacement for the training of an `ArchitecturePrototype`: (configuration, seed, report) ->
            `TrialOutcome`; see `Evaluate`. A function of a module is identified by its name. Any other
            callable, such as a function of a script, requires a `name`. Choose another name if the callable
            computes other results.
        on_trial: called in this process with each trial that finishes during this call.
        stale_seconds: see above; at least 2.

    Raises:
        ValueError: the message names the argument, or the key of the space; or a study of that name has other
            settings.
        ConfigError: a key of the space without effect on the training, such as `training.seed`; a space
            without a trainable configuration, or a value that cannot be trained with any end value of another
            key.
        ImportError: Optuna is not installed, or a library for a precision or a tokenizer of the space; or a
            trial required a library before its first update, and is requeued. With several jobs, this is a
            RuntimeError. The third time for one configuration is its `error`.
        OSError: the data cannot be read; in a trial before its first update, with the same consequences. A
            TimeoutError of a trial is its `error`.
        torch.AcceleratorError: a trial left the device unusable for this process, and is requeued. With
            several jobs, another process replaces the worker.
        TypeError: `evaluate` did not return a `TrialOutcome`. With several jobs, this is a RuntimeError.
        RuntimeError: a worker failed outside of a trial, exited before it started, or died repeatedly.
    """
    check_sizes(budget=budget, steps=steps, jobs=jobs, small_factor=small_factor)
    check_sizes(0, seed=seed)
    chosen = choose_seeds(seeds, seed)
    check_sizes(2, stale_seconds=stale_seconds)
    require(
        evaluate is None or callable(evaluate),
        "evaluate",
        evaluate,
        "None, or a callable (configuration, seed, report) -> TrialOutcome",
    )
    place, space = place_of(storage), Space.of(space)
    shared = isinstance(place, str) and place != MEMORY
    require(shared or jobs == 1, "jobs", jobs, "1 with a storage that other processes cannot open")
    weights = ScoreWeights() if weights is None else weights
    objectives = read_objectives(objective)
    definition = {
        "space": space.to_dict(),
        "objectives": [each.name for each in objectives],
        "steps": steps,
        "seeds": seeds if isinstance(seeds, int) else list(chosen),
        "seed": seed,
        "small_factor": small_factor,
        "weights": weights.to_dict(),
        **_evaluation(evaluate, space, device, is_named=name is not None or place == MEMORY),
    }
    task = Task(
        place=place,
        name=_name(definition) if name is None else name,
        space=space,
        objectives=objectives,
        budget=budget,
        evaluate=PrototypeEvaluation(steps, device) if evaluate is None else evaluate,
        seeds=chosen,
        seed=seed,
        sampler=sampler,
        pruner=pruner,
        small_factor=small_factor,
        weights=weights,
        stale_seconds=stale_seconds,
    )
    if evaluate is None:
        check_space(space, task.stand_in, device)
    with task.open_study() as study:
        _agree(study, definition)
        before = len(finished_trials(study))
        if jobs == 1:
            Worker(task, study, on_trial).run()
        else:
            work_in_processes(task, study, jobs, on_trial)
        return _result(study, place, budget, made=len(finished_trials(study)) > before)


def load_search(storage: str | Path | BaseStorage | None = None, name: str | None = None) -> SearchResult:
    """Return the current results of a stored study, finished or not.

    Args:
        storage: as in `search_architecture_space`.
        name: name of the study. None: the only study in the storage.

    Raises:
        ValueError: no such study, or several to choose from.
    """
    place = place_of(storage)
    check_storage(place)
    with open_storage(place) as opened, quiet_optuna() as optuna:
        names = optuna.get_all_study_names(opened)
        told = ", ".join(map(repr, names)) or "none: there is no study"
        require(name in names if name is not None else len(names) == 1, "name", name, told)
        study = optuna.load_study(study_name=name or names[0], storage=opened)
        require(_DEFINITION in study.user_attrs, "name", study.study_name, "a study of stackwise")
        return _result(study, place)


def _result(study: Study, place: Any, budget: int | None = None, *, made: bool = True) -> SearchResult:
    definition = study.user_attrs[_DEFINITION]
    trials = read_trials(study)
    notes = []
    if not made:
        notes.append(f"no trial was made: all {len(trials)} were in the storage")
    if budget is not None and len(trials) < budget:
        notes.append(f"{len(trials)} of {budget} trials: the space holds no further configuration")
    if len({trial.worker for trial in trials}) > 1 and _overlap(study):
        notes.append("trials ran at the same time: their speeds are those of a shared machine, if it was one")
    if definition["small_factor"] > 1:
        factor = definition["small_factor"]
        notes.append(f"what was trained are small variants, {factor} times fewer heads and Blocks")
    is_validated = all(trial.config.data.validation_fraction > 0 for trial in trials)
    penalised = "training.objective.z_loss" in definition["space"]["space"]
    if definition["evaluate"] is None and penalised and not is_validated:
        notes.append("losses without validation data have z_loss in them, and say little of two values of it")
    if definition["steps"] < 1000 and definition["evaluate"] is None:
        notes.append(f"{definition['steps']} steps: a verdict on stability wants at least 1000")
    return SearchResult(
        name=study.study_name,
        storage=shown_place(place),
        objectives=read_objectives(definition["objectives"]),
        trials=trials,
        definition=definition,
        notes=tuple(notes),
    )


def _overlap(study: Study) -> bool:
    """Return True if two trials ran at the same time."""
    spans = sorted(
        (each.datetime_start, each.datetime_complete)
        for each in study.get_trials(deepcopy=False)
        if each.datetime_start is not None and each.datetime_complete is not None
    )
    return any(after[0] < before[1] for before, after in itertools.pairwise(spans))


def _evaluation(
    evaluate: Evaluate | None, space: Space, device: str | None, *, is_named: bool
) -> dict[str, str | None]:
    """Return the part of a study's definition that identifies the evaluation of a configuration.

    Args:
        evaluate: replacement for the training; None: the training.
        space: search space.
        device: device of the training.
        is_named: True if the study needs no name that is derived from this part.
    """
    if evaluate is None:
        return {"evaluate": None, "device": _device_type(space, device)}
    # Scripts, closures and objects with values of their own may share a name.
    needs_name = (
        not isinstance(evaluate, FunctionType)
        or "<" in evaluate.__qualname__
        or evaluate.__module__ == "__main__"
    )
    allowed = f"a name of the study, because evaluate={evaluate!r} is not a function of an imported module"
    require(is_named or not needs_name, "name", None, allowed)
    kind = evaluate if hasattr(evaluate, "__qualname__") else type(evaluate)
    return {"evaluate": f"{kind.__module__}:{kind.__qualname__}", "device": None}


def _device_type(space: Space, device: str | None) -> str | None:
    """Return the type of device of all trials. None: the device is searched."""
    if device is None and "training.device" in space.dimensions:
        return None
    return resolve_device(str(device or space.base.training.device)).type


def _name(definition: Mapping[str, Any]) -> str:
    text = json.dumps(definition, sort_keys=True, default=str)
    return f"search-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def _agree(study: Study, definition: Mapping[str, Any]) -> None:
    """Raise ValueError if the study has another definition. Set it for a new study."""
    there = study.user_attrs.get(_DEFINITION)
    wanted = json.loads(json.dumps(definition))
    if there is None:
        study.set_user_attr(_DEFINITION, wanted)
        return
    for key, value in wanted.items():
        if there.get(key) != value:
            seen = "another one" if key == "space" else repr(there.get(key))
            raise ValueError(
                f"{key}: study {study.study_name!r} was begun with {seen}; allowed: the same, or another name"
            )
