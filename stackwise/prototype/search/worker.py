"""Worker: does trials of a study, one after the other, until there are none left."""

from __future__ import annotations

import math
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stackwise.config import StackWiseConfig
from stackwise.prototype.search.claims import Claim, Claims
from stackwise.prototype.search.evaluation import Evaluate, Report
from stackwise.prototype.search.heartbeat import Heartbeat
from stackwise.prototype.search.interrupt import kept_interrupts
from stackwise.prototype.search.objective import Objective
from stackwise.prototype.search.optuna_import import import_optuna, quiet_optuna
from stackwise.prototype.search.process_identity import ProcessIdentity
from stackwise.prototype.search.pruner import Rungs, make_pruner
from stackwise.prototype.search.record import finish, finish_pruned, read_trial
from stackwise.prototype.search.sampler import make_sampler
from stackwise.prototype.search.score import ScoreWeights
from stackwise.prototype.search.space import Space
from stackwise.prototype.search.storage import open_storage
from stackwise.prototype.search.trial import SearchTrial, TrialOutcome, merge_outcomes
from stackwise.prototype.shrink import create_small_variant
from stackwise.support.system_errors import is_out_of_memory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from optuna import Study
    from optuna.storages import BaseStorage

__all__ = ["READY", "Task", "open_study", "work", "work_apart"]

OnTrial = Callable[[SearchTrial], object]
READY = "ready"  # the first that a worker says


@dataclass(frozen=True)
class Task:
    """All that a process needs to know of a search.

    Attributes:
        place: of the storage.
        name: of the study.
        space: what is searched.
        objectives: what is made small or large.
        budget: how many results the study is to have.
        evaluate: what is done with a configuration.
        seeds: of the runs of each.
        seed: of all draws.
        sampler: name, or an Optuna sampler.
        pruner: name, an Optuna pruner, or None.
        small_factor: how many times smaller what is trained is.
        weights: of the score.
        stale_seconds: how long a process on another machine may be without a sign of life.
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
    stale_seconds: float

    def stand_in(self, config: StackWiseConfig) -> StackWiseConfig:
        """What is trained in the place of a configuration."""
        return config if self.small_factor == 1 else create_small_variant(config, self.small_factor).config


def open_study(task: Task, storage: BaseStorage) -> Study:
    """The study of a task, begun where it is not there yet.

    Raises:
        ValueError: one of that name has other objectives.
    """
    directions = [each.direction for each in task.objectives]
    n_objectives = len(directions)
    with quiet_optuna() as optuna:
        study: Study = optuna.create_study(
            storage=storage,
            study_name=task.name,
            directions=directions,
            sampler=make_sampler(task.sampler, budget=task.budget, n_objectives=n_objectives, seed=task.seed),
            pruner=make_pruner(task.pruner, seeds=len(task.seeds), objectives=task.objectives)
            or optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
    return study


def work(task: Task, study: Study, storage: BaseStorage, on_trial: OnTrial | None = None) -> None:
    """Do trials in this process until the study has its budget, or its space holds no more.

    An interrupt gives the trial back, and passes through; so does what the machine is to blame for.
    """
    worker = ProcessIdentity.of_new_search()
    try:
        claims = Claims(
            study,
            storage,
            task.space,
            task.objectives,
            task.budget,
            worker,
            task.stand_in,
            seed=task.seed,
            stale_seconds=task.stale_seconds,
        )
        with kept_interrupts() as raise_lost:
            while (claim := claims.next()) is not None:
                try:
                    with Heartbeat(claim.trial, task.stale_seconds / 6):
                        finish_claim = _trained(task, study, claim)
                    if claims.owns(claim):
                        _write_down(finish_claim, claims, claim)
                except BaseException as error:
                    if claims.owns(claim):
                        _give_back(claims, claim, error)
                    raise
                if on_trial is not None:
                    _tell_of(claim, study, on_trial)
                raise_lost()
    finally:
        worker.end()


def work_apart(pickled: bytes, errors: Connection) -> None:
    """The same as a process of its own, with one thread; what it raises is sent to whoever started it.

    But for what leaves the device unusable: it ends this process, and another one may do better.

    Args:
        pickled: a `Task`. What cannot be read here is an error that is told as all others are.
        errors: where `READY` is sent at once, and after it the error, if there is one.
    """
    errors.send(READY)
    try:
        torch.set_num_threads(1)
        task: Task = pickle.loads(pickled)  # noqa: S301  of the process that started this one
        storage = open_storage(task.place)
        work(task, open_study(task, storage), storage)
    except KeyboardInterrupt:
        # The same key may come twice, from the terminal and from who started this.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except Exception as error:
        if _leaves_unusable(error):
            raise
        errors.send(f"{type(error).__name__}: {error}")


def _tell_of(claim: Claim, study: Study, on_trial: OnTrial) -> None:
    frozen = next(t for t in study.get_trials(deepcopy=False) if t.number == claim.trial.number)
    found = read_trial(frozen)
    if found is not None and frozen.state.is_finished():
        on_trial(found)


def _write_down(finish_claim: Callable[[], None], claims: Claims, claim: Claim) -> None:
    """Finish a trial, unless others give up on it meanwhile, whose word then counts."""
    try:
        finish_claim()
    except Exception:  # what is written of a trial, read back or told depends on how far the others were
        if claims.owns(claim):
            raise


def _give_back(claims: Claims, claim: Claim, error: BaseException) -> None:
    """Give back a trial that an error ended; what may be of its configuration counts."""
    if _leaves_unusable(error):
        claims.release(claim, "its process ended", counts=True)
    elif isinstance(error, OSError | ImportError):
        claims.release(claim, _reason(error), counts=True)
    else:
        claims.release(claim, "interrupted")


class _NoOutcomeError(TypeError):
    """What was evaluated says nothing that could be kept."""


def _trained(task: Task, study: Study, claim: Claim) -> Callable[[], None]:
    """Do what a trial asks for.

    Returns:
        What writes it down.

    Raises:
        TypeError: `evaluate` returned no outcome.
        OSError: it raised one before its first report, of its data as a rule; no TimeoutError.
        ImportError: and so it did of a library.
        torch.AcceleratorError: the device cannot be used in this process any more.
    """
    optuna = import_optuna()
    maximize = task.objectives[0].maximize
    by_seed = task.pruner == "wilcoxon" or isinstance(task.pruner, optuna.pruners.WilcoxonPruner)
    rungs = Rungs(claim.trial, maximize=maximize)
    watched = task.pruner is not None and not by_seed
    outcomes: list[TrialOutcome] = []
    try:
        for number, seed in enumerate(task.seeds):
            report = _Report(rungs.report if watched and number == 0 else _unheard)
            outcome = task.evaluate(claim.trained, seed, report)
            if not isinstance(outcome, TrialOutcome):
                raise _NoOutcomeError(
                    f"evaluate: returned {type(outcome).__name__}, {outcome!r}; wanted a TrialOutcome"
                )
            outcomes.append(outcome)
            if not math.isfinite(outcome.loss) or outcome.status not in ("success", "spiky"):
                break
            if by_seed:
                claim.trial.report(-outcome.loss if maximize else outcome.loss, number)
                if number + 1 < len(task.seeds) and claim.trial.should_prune():
                    raise optuna.TrialPruned
    except optuna.TrialPruned:
        last = merge_outcomes(outcomes).loss if outcomes else rungs.last
        return lambda: finish_pruned(study, claim.trial, last, outcomes)
    except _NoOutcomeError:  # of every configuration alike, so that it is none of its results
        raise
    except Exception as error:  # a configuration that cannot be trained is a result as well
        # The next one would fail alike: what is not there is missing before there is a loss.
        missing = isinstance(error, OSError | ImportError) and not isinstance(error, TimeoutError)
        missing = missing and not outcomes and not report.was_called
        if missing or _leaves_unusable(error):
            raise
        outcomes.append(TrialOutcome("error", math.inf, reason=_reason(error)))
    losses = [each.loss for each in outcomes]
    merged = merge_outcomes(outcomes)
    return lambda: finish(study, claim.trial, task.objectives, task.weights, merged, losses)


class _Report:
    """A report that knows whether it was called."""

    def __init__(self, report: Report) -> None:
        self._report, self.was_called = report, False

    def __call__(self, done: float, loss: float) -> None:
        self.was_called = True
        self._report(done, loss)


def _reason(error: BaseException) -> str:
    told = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {told}"


def _leaves_unusable(error: BaseException) -> bool:
    """Whether all that a process does on a device after this error fails as well."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def _unheard(done: float, loss: float) -> None:
    """Nobody asks."""
