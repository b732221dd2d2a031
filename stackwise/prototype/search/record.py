"""Records: data of a trial in the storage, with the functions that write and read it."""

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
    """Claim that a trial records before it is trained.

    Attributes:
        worker: identity of the process, as text.
        digest: digest of the configuration that is trained.
        values: values within the budget, by key of the space and by solved key.
        config: resulting configuration as plain values.
    """

    worker: str
    digest: str
    values: dict[str, Any]
    config: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))

    @classmethod
    def of(cls, frozen: FrozenTrial) -> Self | None:
        """Return the claim of a trial. None: not yet recorded."""
        plain = frozen.user_attrs.get(CLAIM)
        return None if plain is None else cls(**plain)


def is_result(frozen: FrozenTrial) -> bool:
    """Return True if a trial counts as a present or future result."""
    states = import_optuna().trial.TrialState
    return bool(frozen.state != states.FAIL)


def read_trials(study: Study) -> tuple[SearchTrial, ...]:
    """Return all trials that count, by number."""
    found = (read_trial(frozen) for frozen in study.get_trials(deepcopy=False))
    return tuple(trial for trial in found if trial is not None)


def read_trial(frozen: FrozenTrial) -> SearchTrial | None:
    """Return an Optuna trial as a `SearchTrial`. None: it does not count, or has no claim yet."""
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
    """Store a trial with its outcome, successful or not.

    A failed trial is infeasible for the sampler. Its objectives have their known values, such as the number
    of parameters. Unknown objectives have the worst value of all successes, or a default before the first
    success.
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
        score = None  # without a peak, no score; an error only if the score is an objective
    if outcome.status == "success":
        known["score"] = score
        missing = [name for name in asked - {"parameters"} if known.get(name) is None]
        if missing:
            known |= {"status": "error", "reason": f"not measured: {', '.join(sorted(missing))}"}
    trial.set_user_attr(OUTCOME, known)
    _tell(study, trial, objectives, feasible=known["status"] == "success")


def finish_lost(study: Study, trial: Trial, objectives: Sequence[Objective], reason: str) -> None:
    """Store a trial as an error, because every process that ran it has died."""
    trial.set_user_attr(OUTCOME, {"status": "error", "reason": reason})
    _tell(study, trial, objectives, feasible=False)


def finish_pruned(study: Study, trial: Trial, loss: float | None, outcomes: Sequence[TrialOutcome]) -> None:
    """Store a pruned trial. `loss` is its last known loss."""
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
    # The trial is still running, so `read_trial` does not include its outcome.
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
    """Yield the known values of an objective of all finished successes, without reading configurations."""
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
