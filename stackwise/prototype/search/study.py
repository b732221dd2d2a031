"""search_architecture_space: a search on Optuna that can be resumed, shared and read."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from stackwise.config import ConfigError
from stackwise.prototype.search.evaluation import (
    Evaluate,
    PrototypeEvaluation,
    check_data,
    check_trains,
    data_settings,
    unread_keys,
)
from stackwise.prototype.search.objective import read_objectives
from stackwise.prototype.search.optuna_import import import_optuna, quiet_optuna
from stackwise.prototype.search.record import is_result, read_trial, read_trials
from stackwise.prototype.search.sampler import make_sampler
from stackwise.prototype.search.score import ScoreWeights
from stackwise.prototype.search.search_result import SearchResult
from stackwise.prototype.search.space import Space
from stackwise.prototype.search.storage import MEMORY, open_storage, place_of, shown_place
from stackwise.prototype.search.worker import READY, OnTrial, Task, open_study, work, work_apart
from stackwise.support.arguments import check_number, check_sizes, require
from stackwise.support.device import resolve_device
from stackwise.support.random_state import choose_seeds

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

__all__ = ["load_search", "search_architecture_space"]

Problem = Callable[[Mapping[str, Any]], str | None]
_DEFINITION = "stackwise"  # attribute of a study: definition of its trials
_POLL = 0.2  # seconds between two polls of the workers' results
_PATIENCE = 10.0  # seconds that workers have to release their trials
_DRAWS = 32  # random combinations of end values to find one that can be trained
_DEATHS = 3  # per worker, without a result in between; three deaths of a configuration are an error


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
    stale_seconds: float = 120.0,
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
    - A trial of a dead process is repeated: immediately on the same machine, after `stale_seconds` on another
      machine. After three deaths, it has the status "error".

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
        storage: None: `search.journal` in the current folder; a path: that file, or the one in that folder;
            an Optuna URL; an Optuna storage; "memory": no storage.
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
        stale_seconds: see above.

    Raises:
        ValueError: the message names the argument, or the key of the space; or a study of that name has other
            settings.
        ConfigError: a key of the space without effect on the training, such as `training.seed`; in a study
            without results, a space without a trainable configuration, or a value that cannot be trained with
            any end value of another key.
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
    import_optuna()
    check_sizes(budget=budget, steps=steps, jobs=jobs, small_factor=small_factor)
    check_sizes(0, seed=seed)
    chosen = choose_seeds(seeds, seed)
    check_number("stale_seconds", stale_seconds, "a number above 0", lambda seconds: seconds > 0)
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
        stale_seconds=float(stale_seconds),
    )
    make_sampler(sampler, budget=budget, n_objectives=len(objectives), seed=seed)
    if evaluate is None:
        _check_space(task, device)
    opened = open_storage(place)
    study = open_study(task, opened)
    _agree(study, definition)
    before = _count_of_results(study)
    if jobs == 1:
        work(task, study, opened, on_trial)
    else:
        _work_in_processes(task, study, jobs, on_trial)
    return _result(study, place, budget, made=_count_of_results(study) > before)


def load_search(storage: str | Path | BaseStorage | None = None, name: str | None = None) -> SearchResult:
    """Return the current results of a stored study, finished or not.

    Args:
        storage: as in `search_architecture_space`.
        name: name of the study. None: the only study in the storage.

    Raises:
        ValueError: no such study, or several to choose from.
    """
    place = place_of(storage)
    opened = open_storage(place, create=False)
    with quiet_optuna() as optuna:
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


def _check_space(task: Task, device: str | None) -> None:
    """Raise ConfigError for a space with values that cannot be trained, before a trial runs.

    A study with results is not refused. In it, such a value is the `error` of a trial.
    """
    unread = [*unread_keys(task.space.dimensions, device)]
    if unread:
        raise ConfigError(unread, task.space.source)
    results = _results_in(task)
    if results >= task.budget:
        return
    problem = partial(_problem, task, device, {})
    try:
        problems = [*_untrained_ends(task.space, problem, _trained_ends(task.space, problem))]
    except ConfigError as error:
        problems = [*error.problems]
    if problems and not results:
        raise ConfigError(problems, task.space.source)


def _trained_ends(space: Space, problem_of: Problem) -> dict[str, Any]:
    """Return end values of all keys that can be trained together: the first ones, otherwise random ones.

    Raises:
        ConfigError: none were found.
    """
    ends = {key: dimension.ends for key, dimension in space.dimensions.items()}
    first, source = {key: each[0] for key, each in ends.items()}, random.Random(0)  # noqa: S311
    problem = problem_of(first)
    if problem is None:
        return first
    for _ in range(_DRAWS):
        drawn = {key: source.choice(each) for key, each in ends.items()}
        if problem_of(drawn) is None:
            return drawn
    told = ", ".join(f"{key}={value!r}" for key, value in first.items())
    raise ConfigError([f"space: got {told}; {problem}"], space.source)


def _untrained_ends(space: Space, problem_of: Problem, trained: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each end value that cannot be trained with any end value of another key."""
    ends = [(key, end) for key, dimension in space.dimensions.items() for end in dimension.ends]
    for key, value in ends:
        problem = problem_of({**trained, key: value})
        others = ({**trained, other: end, key: value} for other, end in ends if other != key)
        if problem is not None and all(problem_of(each) is not None for each in others):
            yield f"space.{key}: got {value!r}; {problem}"


def _problem(
    task: Task, device: str | None, seen: dict[str, str | None], values: Mapping[str, Any]
) -> str | None:
    """Return the reason why a sample cannot be trained. None: it can be trained.

    Args:
        task: task of the search.
        device: device of the training.
        seen: cache of data errors by `data_settings`, because creating data may take long.
        values: values by key of the space.
    """
    try:
        config = task.stand_in(task.space.config(values))
        check_trains(config, device)
    except ValueError as error:
        return _told(error)
    data = data_settings(config)
    if data not in seen:
        try:
            check_data(config)
            seen[data] = None
        except ValueError as error:
            seen[data] = _told(error)
    return seen[data]


def _told(error: ValueError) -> str:
    return error.problems[0] if isinstance(error, ConfigError) else str(error)


def _results_in(task: Task) -> int:
    """Return the number of results of the study, 0 if it does not exist. Nothing is created."""
    try:
        opened = open_storage(task.place, create=False)
    except ValueError:
        return 0
    with quiet_optuna() as optuna:
        if task.name not in optuna.get_all_study_names(opened):
            return 0
        return _count_of_results(optuna.load_study(study_name=task.name, storage=opened))


def _work_in_processes(task: Task, study: Study, jobs: int, on_trial: OnTrial | None) -> None:
    """Run the task in several processes, and replace workers that are killed."""
    try:
        pickled = pickle.dumps(task)
    except Exception as error:
        raise ValueError(
            f"jobs: got {jobs}; allowed: 1 with what cannot be pickled, or functions of importable modules"
            f" ({type(error).__name__}: {error})"
        ) from None
    context = multiprocessing.get_context("spawn")
    told = {each.number for each in study.get_trials(deepcopy=False) if each.state.is_finished()}

    def start() -> tuple[SpawnProcess, Connection]:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work_apart, args=(pickled, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    deaths, results = 0, _count_of_results(study)
    workers = [start() for _ in range(jobs)]
    try:
        while workers:
            time.sleep(_POLL)
            _tell_of_new(study, told, on_trial)
            for worker in list(workers):
                process, ours = worker
                if process.is_alive():
                    continue
                process.join()
                workers.remove(worker)
                said = _received(ours)
                if READY not in said:
                    raise RuntimeError(
                        f"a worker ended with exit code {process.exitcode} before it began; a script that "
                        'searches with jobs > 1 does so under `if __name__ == "__main__":`'
                    )
                if said[-1] != READY:
                    raise RuntimeError(f"a worker failed: {said[-1]}")
                if not process.exitcode:
                    continue
                # The worker was killed. Its trial is repeated, but not indefinitely. Each worker may have a
                # different configuration that kills it.
                now = _count_of_results(study)
                deaths, results = deaths + 1 if now == results else 1, now
                if deaths > _DEATHS * jobs:
                    raise RuntimeError(
                        f"{deaths} workers in a row ended without a result, the last with exit code "
                        f"{process.exitcode}"
                    )
                workers.append(start())
        _tell_of_new(study, told, on_trial)
    finally:
        _end([process for process, _ in workers])


def _count_of_results(study: Study) -> int:
    trials = study.get_trials(deepcopy=False)
    return sum(each.state.is_finished() and is_result(each) for each in trials)


def _tell_of_new(study: Study, told: set[int], on_trial: OnTrial | None) -> None:
    if on_trial is None:
        return
    for frozen in study.get_trials(deepcopy=False):
        if frozen.state.is_finished() and frozen.number not in told:
            told.add(frozen.number)
            found = read_trial(frozen)
            if found is not None:
                on_trial(found)


def _received(ours: Connection) -> list[str]:
    """Return all messages of a finished worker."""
    said: list[str] = []
    with suppress(EOFError):
        while ours.poll():
            said.append(str(ours.recv()))
    return said


def _end(processes: Sequence[SpawnProcess]) -> None:
    """Make workers release their trials and exit. Kill workers that exceed the time limit."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
    limit = time.monotonic() + _PATIENCE
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
