"""Worker: runs trials of a study one after the other until none are left. Optuna coordinates the processes.

A trial in Optuna's state FAIL is not a result: a duplicate, a sample beyond the budget, or a trial whose
process failed. All other states are results, or become results.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.prototype.search.evaluation import Evaluate, error_text, evaluate_seeds, leaves_unusable
from stackwise.prototype.search.objective import Objective
from stackwise.prototype.search.pruner import LossReports, make_pruner
from stackwise.prototype.search.record import (
    SAMPLE,
    Sample,
    is_sampled,
    live_trials,
    read_trial,
    requeue,
    store_outcome,
    store_pruned,
)
from stackwise.prototype.search.sampler import make_sampler
from stackwise.prototype.search.score import ScoreWeights
from stackwise.prototype.search.space import Space, config_digest
from stackwise.prototype.search.storage import has_heartbeat, import_optuna, open_storage, quiet_optuna
from stackwise.prototype.search.trial import SearchTrial, TrialOutcome, merge_outcomes
from stackwise.prototype.shrink import create_small_variant

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

__all__ = ["OnTrial", "Task", "Worker", "report_trial"]

OnTrial = Callable[[SearchTrial], object]
_DUPLICATES = 3  # consecutive duplicates before a configuration without a trial is selected
_ENUMERATED = 4096  # maximum number of samples of a space that is enumerated for this
_TRIED = 256  # random samples for larger spaces
_POLL = 0.3  # seconds between two polls of other processes


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
                self._fail_stale_trials()

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
        return False if "RUNNING" in states and has_heartbeat(self._task.place) else None

    def _fail_stale_trials(self) -> None:
        """Requeue trials of dead processes. One that died before its first heartbeat had no sample yet."""
        with quiet_optuna() as optuna:
            optuna.storages.fail_stale_trials(self._study)
            limit = datetime.now() - timedelta(seconds=self._task.stale_seconds)
            for each in self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
                if not is_sampled(each) and each.datetime_start and each.datetime_start < limit:
                    fail = optuna.trial.TrialState.FAIL
                    self._study.tell(each.number, state=fail, skip_if_finished=True)

    def _run_trial(self) -> None:
        self._running = None
        try:
            with quiet_optuna():
                self._study.optimize(
                    self._objective, n_trials=1, catch=(_SkippedError,), callbacks=[self._finished]
                )
        except BaseException as error:
            if self._is_taken_over:
                self._is_taken_over = False
                return
            if multiprocessing.parent_process() is not None:
                # Ctrl-C may arrive twice: from the terminal and from the parent process.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._requeue_running(error)
            raise

    def _objective(self, trial: Trial) -> list[float]:
        """Sample, evaluate and store a trial."""
        self._running = trial
        optuna, task = import_optuna(), self._task
        outcomes: list[TrialOutcome] = []
        reports = LossReports(trial, task.pruner, maximize=task.objectives[0].maximize)
        try:
            trained = self._sampled(trial)
            try:
                evaluate_seeds(task.evaluate, trained, task.seeds, reports, outcomes)
            except optuna.TrialPruned:
                last = merge_outcomes(outcomes).loss if outcomes else reports.last
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
        if has_heartbeat(task.place):
            # Optuna's thread may be late. A sampled trial without a heartbeat would never be stale.
            storage: Any = trial.storage
            study_id = storage.get_study_id_from_name(self._study.study_name)
            storage.record_heartbeat(storage.get_trial_id_from_study_id_trial_number(study_id, trial.number))
        trial.set_user_attr(SAMPLE, Sample(trial.number, values, config.to_dict(), digest, worker).to_dict())
        # The digest is stored before it is compared, so that at least one of two processes sees the other's.
        others = [each for each in live_trials(self._study) if each.number != trial.number]
        if digest in _digests(others):
            self._duplicates += 1
            raise _SkippedError("duplicate")
        self._duplicates = 0
        return trained

    def _finished(self, _study: Study, frozen: FrozenTrial) -> None:
        if frozen.state.name != "FAIL":
            report_trial(frozen, self._on_trial)

    def _requeue_running(self, error: BaseException) -> None:
        """Requeue the trial after an error. If the configuration may be the cause, the attempt counts."""
        if self._running is None:
            return
        number, fail = self._running.number, import_optuna().trial.TrialState.FAIL
        if self._study.get_trials(deepcopy=False)[number].state.name == "RUNNING":
            self._study.tell(number, state=fail)  # an interrupt while Optuna stored the state
        frozen = self._study.get_trials(deepcopy=False)[number]
        if frozen.state != fail:
            return  # it has a result
        if leaves_unusable(error):
            requeue(self._task.objectives, self._study, frozen)
        elif isinstance(error, OSError | ImportError):
            requeue(self._task.objectives, self._study, frozen, error_text(error))
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


def report_trial(frozen: FrozenTrial, on_trial: OnTrial | None) -> None:
    """Call `on_trial` with a finished trial."""
    found = None if on_trial is None else read_trial(frozen)
    if on_trial is not None and found is not None:
        on_trial(found)


def _digests(trials: list[FrozenTrial]) -> set[str]:
    return {each.user_attrs[SAMPLE]["digest"] for each in trials if SAMPLE in each.user_attrs}
