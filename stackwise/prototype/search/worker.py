"""Worker: runs trials of a study one after the other until none are left. Optuna coordinates the processes.

A trial in Optuna's state FAIL is not a result: a duplicate, a sample beyond the budget, or a trial whose
process failed. All other states are results, or become results.
"""

from __future__ import annotations

import math
import os
import pickle
import platform
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.prototype.search.evaluation import Evaluate, Report
from stackwise.prototype.search.objective import Objective
from stackwise.prototype.search.pruner import Rungs, make_pruner
from stackwise.prototype.search.record import (
    SAMPLE,
    Sample,
    finished_trials,
    live_trials,
    read_trial,
    requeue,
    store_outcome,
    store_pruned,
)
from stackwise.prototype.search.sampler import make_sampler
from stackwise.prototype.search.score import ScoreWeights
from stackwise.prototype.search.space import Space, config_digest
from stackwise.prototype.search.storage import import_optuna, open_storage, quiet_optuna
from stackwise.prototype.search.trial import SearchTrial, TrialOutcome, merge_outcomes
from stackwise.prototype.shrink import create_small_variant
from stackwise.support.system_errors import is_out_of_memory

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

__all__ = ["OnTrial", "Task", "Worker", "work_in_processes"]

OnTrial = Callable[[SearchTrial], object]
_DUPLICATES = 3  # consecutive duplicates before a configuration without a trial is selected
_ENUMERATED = 4096  # maximum number of samples of a space that is enumerated for this
_TRIED = 256  # random samples for larger spaces
_POLL = 0.3  # seconds between two polls of other processes
_PATIENCE = 10.0  # seconds that workers have to requeue their trials
_DEATHS = 3  # per worker, without a result in between; three deaths of a configuration are an error
_DEVICE_LOST = 75  # exit code of a worker whose device is unusable


@dataclass(frozen=True)
class Task:
    """Description of a search for a process.

    Attributes:
        place: place of the storage.
        name: name of the study.
        space: search space.
        objectives: minimized or maximized numbers.
        budget: number of results that the study should have.
        evaluate: evaluation of a configuration.
        seeds: seeds of the runs of each configuration.
        seed: seed of all samples.
        sampler: name, or an Optuna sampler.
        pruner: name, an Optuna pruner, or None.
        small_factor: factor by which the trained variant is smaller.
        weights: weights of the score.
        stale_seconds: seconds without a heartbeat after which a process is treated as dead.
    """

    place: Any
    name: str
    space: Space
    objectives: tuple[Objective, ...]
    budget: int
    evaluate: Evaluate
    seeds: tuple[int, ...]
    seed: int
    sampler: Any
    pruner: Any
    small_factor: int
    weights: ScoreWeights
    stale_seconds: int

    def stand_in(self, config: StackWiseConfig) -> StackWiseConfig:
        """Return the configuration that is trained instead of `config`."""
        return config if self.small_factor == 1 else create_small_variant(config, self.small_factor).config

    @contextmanager
    def open_study(self) -> Iterator[Study]:
        """Context with the study. It is created if it does not exist.

        Raises:
            ValueError: an unknown sampler or pruner; a study of that name has other objectives.
        """
        sampler = make_sampler(self.sampler, budget=self.budget, seed=self.seed)
        pruner = make_pruner(self.pruner, seeds=len(self.seeds), objectives=self.objectives)
        with open_storage(self.place, self.stale_seconds, partial(requeue, self.objectives)) as storage:
            with quiet_optuna() as optuna:
                study: Study = optuna.create_study(
                    storage=storage,
                    study_name=self.name,
                    directions=[each.direction for each in self.objectives],
                    sampler=sampler,
                    pruner=pruner or optuna.pruners.NopPruner(),
                    load_if_exists=True,
                )
            yield study


class _SkippedError(Exception):
    """Trial that is not a result."""


class _NoOutcomeError(TypeError):
    """Error for an evaluation that returned no outcome."""


class Worker:
    """Runner of trials in this process.

    Args:
        task: task of the search.
        study: study of the task.
        on_trial: function that is called with each finished trial.
    """

    def __init__(self, task: Task, study: Study, on_trial: OnTrial | None = None) -> None:
        self._task, self._study, self._on_trial = task, study, on_trial
        self._running: Trial | None = None  # trial that has been started
        self._is_taken_over = False
        self._duplicates = 0
        self._digests: dict[str, str] = {}

    def run(self) -> None:
        """Run trials until the budget is reached, or the space is exhausted.

        An interrupt or a failure of the machine requeues the trial and is passed on.
        """
        while (is_free := self._has_free_trial()) is not None:
            if is_free:
                self._run_trial()
            else:
                # Another process runs the last trial. If it dies, the trial is requeued.
                time.sleep(_POLL)
                with quiet_optuna() as optuna:
                    optuna.storages.fail_stale_trials(self._study)

    def _has_free_trial(self) -> bool | None:
        """Return True if a trial can be run, False if others run the last ones, None if all are finished."""
        trials = live_trials(self._study)
        states = [each.state.name for each in trials]
        if "WAITING" in states:
            return True
        is_full = len(trials) >= self._task.budget
        if not is_full and self._duplicates >= _DUPLICATES:
            unseen = self._unseen(trials)
            is_full = unseen is None
            if unseen is not None:
                self._duplicates = 0
                with quiet_optuna():
                    self._study.enqueue_trial(unseen)
        if not is_full:
            return True
        return False if "RUNNING" in states else None

    def _run_trial(self) -> None:
        self._running = None
        try:
            with quiet_optuna():
                self._study.optimize(
                    self._objective, n_trials=1, catch=(_SkippedError,), callbacks=[self._told]
                )
        except BaseException as error:
            if self._is_taken_over:
                self._is_taken_over = False
                return
            self._give_back(error)
            raise

    def _objective(self, trial: Trial) -> list[float]:
        """Sample, evaluate and store a trial."""
        self._running = trial
        trained = self._sampled(trial)
        optuna, task = import_optuna(), self._task
        outcomes: list[TrialOutcome] = []
        is_pruned_by_seed = task.pruner == "wilcoxon" or isinstance(
            task.pruner, optuna.pruners.WilcoxonPruner
        )
        is_pruned = task.pruner is not None and not is_pruned_by_seed
        rungs = Rungs(trial, maximize=task.objectives[0].maximize, is_active=is_pruned)
        try:
            try:
                _evaluate(task, trained, trial if is_pruned_by_seed else None, rungs, outcomes)
            except optuna.TrialPruned:
                last = merge_outcomes(outcomes).loss if outcomes else rungs.last
                store_pruned(trial, last, [each.loss for each in outcomes])
                raise
            return store_outcome(
                self._study,
                trial,
                task.objectives,
                task.weights,
                merge_outcomes(outcomes),
                [each.loss for each in outcomes],
            )
        except optuna.exceptions.UpdateFinishedTrialError:
            self._is_taken_over = True  # without a heartbeat, another process has repeated the trial
            raise

    def _sampled(self, trial: Trial) -> StackWiseConfig:
        """Sample the configuration of a trial, record it, and return the one that is trained."""
        task = self._task
        others = [each for each in live_trials(self._study) if each.number != trial.number]
        if sum(each.number < trial.number for each in others) >= task.budget:
            raise _SkippedError("beyond the budget")
        drawn = {key: each.suggest(trial, key) for key, each in task.space.dimensions.items()}
        try:
            values = task.space.settled(drawn)
            config = task.space.build(values)
        except ConfigError as error:
            self._duplicates += 1
            raise _SkippedError(str(error)) from None
        trained = task.stand_in(config)
        digest = config_digest(trained)
        worker = f"{platform.node()} {os.getpid()}"
        trial.set_user_attr(SAMPLE, Sample(values, config.to_dict(), digest, worker).to_dict())
        # The digest is stored before it is compared, so that at least one of two processes sees the other's.
        others = [each for each in live_trials(self._study) if each.number != trial.number]
        if digest in _digests(others):
            self._duplicates += 1
            raise _SkippedError("duplicate")
        self._duplicates = 0
        return trained

    def _told(self, _study: Study, frozen: FrozenTrial) -> None:
        if frozen.state.name != "FAIL":
            _tell(frozen, self._on_trial)

    def _give_back(self, error: BaseException) -> None:
        """Requeue the trial after an error. If the configuration may be the cause, the attempt counts."""
        if self._running is None:
            return
        frozen = self._study.get_trials(deepcopy=False)[self._running.number]
        if not frozen.state.is_finished():
            return  # it becomes stale
        if _leaves_unusable(error):
            requeue(self._task.objectives, self._study, frozen)
        elif isinstance(error, OSError | ImportError):
            requeue(self._task.objectives, self._study, frozen, _reason(error))
        else:
            with quiet_optuna():
                self._study.enqueue_trial(frozen.params)

    def _unseen(self, trials: list[FrozenTrial]) -> dict[str, Any] | None:
        """Return a sample, as it is stored, of a configuration without a trial. None: not found."""
        space, known = self._task.space, _digests(trials)
        source = random.Random(f"{self._task.seed}/{len(self._study.get_trials(deepcopy=False))}")  # noqa: S311
        if space.size is not None and space.size <= _ENUMERATED:
            samples = list(space.points())
            source.shuffle(samples)
        else:
            samples = [space.sample(source) for _ in range(_TRIED)]
        for values in samples:
            with suppress(ConfigError):
                if self._digest(values) not in known:
                    return {key: each.stored(values[key]) for key, each in space.dimensions.items()}
        return None

    def _digest(self, values: dict[str, Any]) -> str:
        text = repr(sorted(values.items()))
        if text not in self._digests:
            self._digests[text] = config_digest(self._task.stand_in(self._task.space.config(values)))
        return self._digests[text]


def work_in_processes(task: Task, study: Study, jobs: int, on_trial: OnTrial | None) -> None:
    """Run a task in several processes with one thread each, and replace workers that are killed.

    Raises:
        ValueError: the task cannot be pickled.
        RuntimeError: a worker failed outside of a trial, exited before it started, or died repeatedly.
    """
    try:
        pickled = pickle.dumps(task)
    except Exception as error:
        raise ValueError(
            f"jobs: got {jobs}; allowed: 1 with what cannot be pickled, or functions of importable modules"
            f" ({type(error).__name__}: {error})"
        ) from None
    known = {each.number for each in finished_trials(study)}
    deaths = 0
    workers = [_start(pickled) for _ in range(jobs)]
    try:
        while workers:
            time.sleep(_POLL)
            for frozen in finished_trials(study):
                if frozen.number not in known:
                    known.add(frozen.number)
                    deaths = 0
                    _tell(frozen, on_trial)
            for worker in list(workers):
                if (is_alive := _is_alive(worker)) is False:
                    workers.remove(worker)
                elif is_alive is None:
                    # Its trial is repeated, but not indefinitely. Each worker may have another configuration
                    # that kills it.
                    deaths += 1
                    if deaths > _DEATHS * jobs:
                        raise RuntimeError(f"{deaths} workers were killed without a result in between")
                    workers[workers.index(worker)] = _start(pickled)
    finally:
        _stop(workers)


def _start(pickled: bytes) -> ProcessContext:
    context: ProcessContext = start_processes(  # type: ignore[no-untyped-call]
        _work_apart, (pickled,), join=False, daemon=True, start_method="spawn"
    )
    return context


def _is_alive(worker: ProcessContext) -> bool | None:
    """Return True for a running worker, False for a finished one, None for one that was killed.

    Raises:
        RuntimeError: the worker failed.
    """
    try:
        return not worker.join(timeout=0)
    except ProcessRaisedException as error:
        raise RuntimeError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from error
    except ProcessExitedException as error:
        if error.signal_name is None and error.exit_code != _DEVICE_LOST:
            raise RuntimeError(
                f"a worker ended with exit code {error.exit_code}; a script that searches with jobs > 1 "
                'does so under `if __name__ == "__main__":`'
            ) from error
        return None


def _work_apart(_index: int, pickled: bytes) -> None:
    """Run trials in a separate process with one thread.

    Args:
        _index: index of the process.
        pickled: a `Task`. An error while it is unpickled is reported like any other.
    """
    torch.set_num_threads(1)
    task: Task = pickle.loads(pickled)  # noqa: S301  from the process that started this one
    try:
        with task.open_study() as study:
            Worker(task, study).run()
    except KeyboardInterrupt:
        # The same Ctrl-C may arrive twice: from the terminal and from the parent process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except Exception as error:
        if _leaves_unusable(error):
            sys.exit(_DEVICE_LOST)
        raise


def _stop(workers: list[ProcessContext]) -> None:
    """Make workers requeue their trials and exit. Kill workers that exceed the time limit."""
    processes = [process for worker in workers for process in worker.processes]
    for process in processes:
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
    limit = time.monotonic() + _PATIENCE
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _tell(frozen: FrozenTrial, on_trial: OnTrial | None) -> None:
    found = None if on_trial is None else read_trial(frozen)
    if on_trial is not None and found is not None:
        on_trial(found)


def _digests(trials: list[FrozenTrial]) -> set[str]:
    return {each.user_attrs[SAMPLE]["digest"] for each in trials if SAMPLE in each.user_attrs}


def _evaluate(
    task: Task, config: StackWiseConfig, by_seed: Trial | None, rungs: Rungs, outcomes: list[TrialOutcome]
) -> None:
    """Run a configuration with each seed, until one fails.

    Args:
        task: task of the search.
        config: configuration to train.
        by_seed: trial with a pruner that compares the runs of seeds. None: another pruner.
        rungs: reports of the first run to another pruner.
        outcomes: list to which the outcomes are added.

    Raises:
        optuna.TrialPruned: the pruner stops the trial.
        TypeError: `evaluate` returned no outcome.
        OSError: raised before the first report, usually for the data. A TimeoutError is excluded.
        ImportError: raised before the first report.
        torch.AcceleratorError: the device is unusable in this process.
    """
    optuna = import_optuna()
    report: Report = rungs.report
    try:
        for number, seed in enumerate(task.seeds):
            outcome = task.evaluate(config, seed, report)
            if not isinstance(outcome, TrialOutcome):
                raise _NoOutcomeError(
                    f"evaluate: returned {type(outcome).__name__}, {outcome!r}; wanted a TrialOutcome"
                )
            outcomes.append(outcome)
            if not math.isfinite(outcome.loss) or outcome.status not in ("success", "spiky"):
                break
            if by_seed is not None:
                by_seed.report(-outcome.loss if task.objectives[0].maximize else outcome.loss, number)
                if number + 1 < len(task.seeds) and by_seed.should_prune():
                    raise optuna.TrialPruned
            report = _ignore
    except (optuna.TrialPruned, _NoOutcomeError):
        raise
    except Exception as error:  # a configuration that cannot be trained is a result
        # A missing file or library is noticed before the first loss.
        is_early = not outcomes and not rungs.was_called
        is_missing = isinstance(error, OSError | ImportError) and not isinstance(error, TimeoutError)
        if _leaves_unusable(error) or (is_early and is_missing):
            raise
        outcomes.append(TrialOutcome("error", math.inf, reason=_reason(error)))


def _ignore(_done: float, _loss: float) -> None:
    """Ignore a report of a later seed."""


def _reason(error: BaseException) -> str:
    told = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {told}"


def _leaves_unusable(error: BaseException) -> bool:
    """Return True if everything that the process does on a device after this error fails."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
