"""Worker: runs trials of a study one after the other until none are left."""

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
READY = "ready"  # first message of a worker


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
        stale_seconds: seconds without a heartbeat after which a process on another machine is treated as
            dead.
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
        """Return the configuration that is trained instead of `config`."""
        return config if self.small_factor == 1 else create_small_variant(config, self.small_factor).config


def open_study(task: Task, storage: BaseStorage) -> Study:
    """Return the study of a task. Create it if it does not exist.

    Raises:
        ValueError: a study of that name has other objectives.
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
    """Run trials in this process until the budget is reached or the space is exhausted.

    An interrupt or a failure of the machine releases the trial and is passed on.
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
    finally:
        worker.end()


def work_apart(pickled: bytes, errors: Connection) -> None:
    """Run `work` in a separate process with one thread, and send its errors to the parent process.

    An error that leaves the device unusable is not sent but ends this process, because a new process may
    succeed.

    Args:
        pickled: a `Task`. If it cannot be unpickled here, this error is sent like any other.
        errors: connection to which `READY` is sent first, and later the error, if one occurs.
    """
    errors.send(READY)
    try:
        torch.set_num_threads(1)
        task: Task = pickle.loads(pickled)  # noqa: S301  from the process that started this one
        storage = open_storage(task.place)
        work(task, open_study(task, storage), storage)
    except KeyboardInterrupt:
        # The same Ctrl-C may arrive twice: from the terminal and from the parent process.
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
    """Finish a trial. Ignore errors if another process has taken it over meanwhile."""
    try:
        finish_claim()
    except Exception:  # errors of writing, reading or reporting depend on the progress of the other process
        if claims.owns(claim):
            raise


def _give_back(claims: Claims, claim: Claim, error: BaseException) -> None:
    """Release a trial after an error. If the configuration may be the cause, the attempt counts."""
    if _leaves_unusable(error):
        claims.release(claim, "its process ended", counts=True)
    elif isinstance(error, OSError | ImportError):
        claims.release(claim, _reason(error), counts=True)
    else:
        claims.release(claim, "interrupted")


class _NoOutcomeError(TypeError):
    """Error for an evaluation that returned no outcome."""


def _trained(task: Task, study: Study, claim: Claim) -> Callable[[], None]:
    """Run a trial.

    Returns:
        Function that stores the result.

    Raises:
        TypeError: `evaluate` returned no outcome.
        OSError: raised before the first report, usually for the data. A TimeoutError is excluded.
        ImportError: raised before the first report.
        torch.AcceleratorError: the device is unusable in this process.
    """
    optuna = import_optuna()
    by_seed = task.pruner == "wilcoxon" or isinstance(task.pruner, optuna.pruners.WilcoxonPruner)
    rungs = Rungs(claim.trial, maximize=task.objectives[0].maximize)
    report = _Report(rungs.report if task.pruner is not None and not by_seed else None)
    outcomes: list[TrialOutcome] = []
    try:
        for number, seed in enumerate(task.seeds):
            outcome = task.evaluate(claim.trained, seed, report)
            if not isinstance(outcome, TrialOutcome):
                raise _NoOutcomeError(
                    f"evaluate: returned {type(outcome).__name__}, {outcome!r}; wanted a TrialOutcome"
                )
            outcomes.append(outcome)
            if not math.isfinite(outcome.loss) or outcome.status not in ("success", "spiky"):
                break
            if by_seed:
                _report_seed(task, claim, number, outcome.loss)
            report = _Report()
    except optuna.TrialPruned:
        last = merge_outcomes(outcomes).loss if outcomes else rungs.last
        return lambda: finish_pruned(study, claim.trial, last, outcomes)
    except Exception as error:  # a configuration that cannot be trained is a result
        if _affects_all(error, is_early=not outcomes and not report.was_called):
            raise
        outcomes.append(TrialOutcome("error", math.inf, reason=_reason(error)))
    losses = [each.loss for each in outcomes]
    merged = merge_outcomes(outcomes)
    return lambda: finish(study, claim.trial, task.objectives, task.weights, merged, losses)


def _report_seed(task: Task, claim: Claim, number: int, loss: float) -> None:
    """Report the loss of a run to a pruner of seeds. Raise TrialPruned if it stops the trial."""
    claim.trial.report(-loss if task.objectives[0].maximize else loss, number)
    if number + 1 < len(task.seeds) and claim.trial.should_prune():
        raise import_optuna().TrialPruned


class _Report:
    """Report function that passes reports to a receiver, if there is one, and records that it was called."""

    def __init__(self, receiver: Report | None = None) -> None:
        self._receiver, self.was_called = receiver, False

    def __call__(self, done: float, loss: float) -> None:
        self.was_called = True
        if self._receiver is not None:
            self._receiver(done, loss)


def _affects_all(error: Exception, *, is_early: bool) -> bool:
    """Return True if other configurations would fail in the same way, in this process or in any.

    A missing file or library is noticed before the first loss.
    """
    if isinstance(error, _NoOutcomeError) or _leaves_unusable(error):
        return True
    return is_early and isinstance(error, OSError | ImportError) and not isinstance(error, TimeoutError)


def _reason(error: BaseException) -> str:
    told = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {told}"


def _leaves_unusable(error: BaseException) -> bool:
    """Return True if everything that the process does on a device after this error fails."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
