"""Records: what a study keeps of a trial, written and read in one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from stackwise.config import StackWiseConfig
from stackwise.prototype.search.objective import Objective
from stackwise.prototype.search.optuna_import import import_optuna
from stackwise.prototype.search.parameter_count import parameter_count
from stackwise.prototype.search.sampler import INFEASIBLE
from stackwise.prototype.search.score import ScoreWeights, score_config
from stackwise.prototype.search.trial import SearchTrial, TrialOutcome

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

__all__ = [
    "CLAIM",
    "Claimed",
    "finish",
    "finish_lost",
    "finish_pruned",
    "is_result",
    "read_trial",
    "read_trials",
]

CLAIM, OUTCOME = "claim", "outcome"


@dataclass(frozen=True)
class Claimed:
    """What a trial says of itself before it is trained.

    Attributes:
        worker: the process, as text.
        digest: of the configuration that is trained.
        values: by key of the space and by key that was solved for, as they are within the budget.
        config: what came of them, as plain values.
    """

    worker: str
    digest: str
    values: dict[str, Any]
    config: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))

    @classmethod
    def of(cls, frozen: FrozenTrial) -> Self | None:
        """What a trial has said; None: nothing yet."""
        plain = frozen.user_attrs.get(CLAIM)
        return None if plain is None else cls(**plain)


def is_result(frozen: FrozenTrial) -> bool:
    """Whether a trial counts: it is or will be a result, in place of nothing else."""
    states = import_optuna().trial.TrialState
    return bool(frozen.state != states.FAIL)


def read_trials(study: Study) -> tuple[SearchTrial, ...]:
    """All that count, by number."""
    found = (read_trial(frozen) for frozen in study.get_trials(deepcopy=False))
    return tuple(trial for trial in found if trial is not None)


def read_trial(frozen: FrozenTrial) -> SearchTrial | None:
    """A trial of Optuna as one of a search; None: it is no result, or nothing is known of it yet."""
    claimed = Claimed.of(frozen)
    if claimed is None or not is_result(frozen):
        return None
    config = StackWiseConfig.from_json(claimed.config)
    states = import_optuna().trial.TrialState
    known: dict[str, Any] = dict(frozen.user_attrs.get(OUTCOME, {}))
    if not frozen.state.is_finished():
        known = {"status": "running" if frozen.state == states.RUNNING else "waiting"}
    ended = frozen.datetime_complete
    seconds = None
    if ended is not None and frozen.datetime_start is not None:
        seconds = (ended - frozen.datetime_start).total_seconds()
    losses = tuple(known.pop("losses", ()))
    return SearchTrial(
        number=frozen.number,
        values=claimed.values,
        config=config,
        parameters=parameter_count(config.model),
        seconds=seconds,
        worker=claimed.worker,
        losses=losses,
        **known,
    )


def finish(
    study: Study,
    trial: Trial,
    objectives: Sequence[Objective],
    weights: ScoreWeights,
    outcome: TrialOutcome,
    losses: Iterable[float],
) -> None:
    """Keep a trial with its outcome, whatever that is.

    A sampler is told of a failed one as infeasible. Of its objectives it is told what is known, as the number
    of parameters always is, and of the others the worst that a success had.
    """
    known = {
        "status": outcome.status,
        "reason": outcome.reason,
        "loss": _finite(outcome.loss),
        "losses": [each for each in losses if _finite(each) is not None],
        "tokens_per_second": outcome.tokens_per_second,
        "peak_bytes": outcome.peak_bytes,
    }
    asked = {each.name for each in objectives}
    try:
        score = score_config(outcome, weights=weights)
    except ValueError:
        score = None  # what has no peak has no score, which is wrong only where one is asked for
    if outcome.status == "success":
        known["score"] = score
        missing = [name for name in asked - {"parameters"} if known.get(name) is None]
        if missing:
            known |= {"status": "error", "reason": f"not measured: {', '.join(sorted(missing))}"}
    trial.set_user_attr(OUTCOME, known)
    _tell(study, trial, objectives, feasible=known["status"] == "success")


def finish_lost(study: Study, trial: Trial, objectives: Sequence[Objective], reason: str) -> None:
    """Keep a trial that no process has survived."""
    trial.set_user_attr(OUTCOME, {"status": "error", "reason": reason})
    _tell(study, trial, objectives, feasible=False)


def finish_pruned(study: Study, trial: Trial, loss: float | None, outcomes: Sequence[TrialOutcome]) -> None:
    """Keep a trial that was ended early; `loss` is the last that was seen."""
    losses = [each.loss for each in outcomes]
    known = {"status": "pruned", "reason": "others were better at this point", "loss": loss, "losses": losses}
    trial.set_user_attr(OUTCOME, known)
    _constrain(trial, 0.0)
    study.tell(trial, state=import_optuna().trial.TrialState.PRUNED)


def _tell(study: Study, trial: Trial, objectives: Sequence[Objective], *, feasible: bool) -> None:
    _constrain(trial, 0.0 if feasible else 1.0)
    trials = study.get_trials(deepcopy=False)
    found = read_trial(next(each for each in trials if each.number == trial.number))
    assert found is not None, "others gave up on it meanwhile"
    # It is running still, and `read_trial` says no more of such a one than what it is.
    own = replace(found, **trial.user_attrs[OUTCOME])
    values = []
    for objective in objectives:
        value = objective.of(own)
        if value is None:
            value = objective.when_failed(
                [*_of_successes(trials, objective.name)], own.config.model.vocab_size
            )
        values.append(value)
    study.tell(trial, values)


def _of_successes(trials: Iterable[FrozenTrial], name: str) -> Iterator[float]:
    """What each finished success was found to have, where it is known; its configuration is not looked at."""
    for frozen in trials:
        known = frozen.user_attrs.get(OUTCOME, {})
        if is_result(frozen) and frozen.state.is_finished() and known.get("status") == "success":
            value = known.get(name)
            if value is not None and _finite(value) is not None:
                yield float(value)


def _constrain(trial: Trial, value: float) -> None:
    trial.set_user_attr(INFEASIBLE, value)
    if hasattr(trial, "set_constraint"):
        trial.set_constraint(INFEASIBLE, value)


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
