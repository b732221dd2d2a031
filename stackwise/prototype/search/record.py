"""Records: data of a trial in the storage, with the functions that write and read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stackwise.config import StackWiseConfig
from stackwise.prototype.search.objective import Objective
from stackwise.prototype.search.parameter_count import count_of, parameter_count
from stackwise.prototype.search.score import ScoreWeights, score_config
from stackwise.prototype.search.storage import import_optuna, quiet_optuna
from stackwise.prototype.search.trial import SearchTrial, TrialOutcome

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

__all__ = [
    "SAMPLE",
    "Sample",
    "finished_trials",
    "is_sampled",
    "live_trials",
    "read_trial",
    "read_trials",
    "requeue",
    "store_outcome",
    "store_pruned",
]

SAMPLE, _OUTCOME = "sample", "outcome"  # user attributes
_INFEASIBLE = "infeasible"  # constraint: above 0 for failed trials
_ATTEMPTS = 3  # attempts per configuration; if its process dies each time, this is its result


@dataclass(frozen=True)
class Sample:
    """Sample that a trial stores before it is trained.

    Attributes:
        number: number of the trial. A repeated trial starts with the sample of the previous one.
        values: values within the budget, by key of the space and by solved key.
        config: resulting configuration as plain values.
        digest: digest of the configuration that is trained.
        worker: machine and process.
    """

    number: int
    values: dict[str, Any]
    config: dict[str, Any]
    digest: str
    worker: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))


def is_sampled(frozen: FrozenTrial) -> bool:
    """Return True if a started trial has stored its own sample."""
    return SAMPLE in frozen.user_attrs and frozen.user_attrs[SAMPLE]["number"] == frozen.number


def live_trials(study: Study) -> list[FrozenTrial]:
    """Return the trials that are results or may become results: all without Optuna's state FAIL."""
    fail = import_optuna().trial.TrialState.FAIL
    return [each for each in study.get_trials(deepcopy=False) if each.state != fail]


def finished_trials(study: Study) -> list[FrozenTrial]:
    """Return the trials that are results."""
    return [each for each in live_trials(study) if each.state.is_finished()]


def read_trials(study: Study) -> tuple[SearchTrial, ...]:
    """Return all live trials with a configuration, by number."""
    found = map(read_trial, live_trials(study))
    return tuple(trial for trial in found if trial is not None)


def read_trial(frozen: FrozenTrial) -> SearchTrial | None:
    """Return a live Optuna trial as a `SearchTrial`. None: it has no configuration yet."""
    if SAMPLE not in frozen.user_attrs:
        return None
    sample = Sample(**frozen.user_attrs[SAMPLE])
    config = StackWiseConfig.from_json(sample.config)
    known: dict[str, Any] = {"status": frozen.state.name.lower(), "losses": ()}
    if frozen.state.is_finished():
        known = dict(frozen.user_attrs[_OUTCOME])
    return SearchTrial(
        number=frozen.number,
        values=sample.values,
        config=config,
        parameters=parameter_count(config.model),
        seconds=frozen.duration.total_seconds() if frozen.duration else None,
        worker=sample.worker,
        losses=tuple(known.pop("losses")),
        **known,
    )


def store_outcome(
    study: Study,
    trial: Trial,
    objectives: Sequence[Objective],
    weights: ScoreWeights,
    outcome: TrialOutcome,
    losses: Iterable[float],
) -> list[float]:
    """Store the outcome of a trial, successful or not, and return the values of its objectives.

    A failed trial is infeasible for the sampler. Its objectives have their known values, such as the number
    of parameters. Unknown objectives have the worst value of all successes, or a default before the first
    success.
    """
    known = {
        "status": outcome.status,
        "reason": outcome.reason,
        "loss": _finite(outcome.loss),
        "losses": [loss for loss in losses if math.isfinite(loss)],
        "tokens_per_second": outcome.tokens_per_second,
        "peak_bytes": outcome.peak_bytes,
    }
    if outcome.status == "success":
        try:
            known["score"] = score_config(outcome, weights=weights)
        except ValueError:
            known["score"] = None  # without a peak, no score; an error only if the score is an objective
        missing = [each.name for each in objectives if each.name != "parameters" and known[each.name] is None]
        if missing:
            known |= {"status": "error", "reason": f"not measured: {', '.join(sorted(missing))}"}
    trial.set_user_attr(_OUTCOME, known)
    trial.set_constraint(_INFEASIBLE, float(known["status"] != "success"))
    return _values(study, objectives, known, trial.user_attrs)


def store_pruned(trial: Trial, loss: float | None, losses: Sequence[float]) -> None:
    """Store a pruned trial. `loss` is its last known loss."""
    known = {"status": "pruned", "reason": "others were better at this point", "loss": loss, "losses": losses}
    trial.set_user_attr(_OUTCOME, known)
    trial.set_constraint(_INFEASIBLE, 0.0)


def requeue(
    objectives: Sequence[Objective], study: Study, frozen: FrozenTrial, reason: str = "its process ended"
) -> None:
    """Repeat a trial that failed without being the cause. The third failure is its result, an error."""
    with quiet_optuna() as optuna:
        retry = optuna.storages.RetryHeartbeatStaleTrialCallback
        if len(retry.retry_history(frozen)) + 1 < _ATTEMPTS:
            retry()(study, frozen)
            return
        known = {"status": "error", "reason": f"{reason}, {_ATTEMPTS} times", "losses": []}
        study.add_trial(
            optuna.trial.create_trial(
                values=_values(study, objectives, known, frozen.user_attrs),
                params=frozen.params,
                distributions=frozen.distributions,
                user_attrs=frozen.user_attrs | {_OUTCOME: known},
                constraints={_INFEASIBLE: 1.0},
            )
        )


def _values(
    study: Study, objectives: Sequence[Objective], known: Mapping[str, Any], attributes: Mapping[str, Any]
) -> list[float]:
    """Return the objectives of a trial. An unknown one has the worst value of all successes, or a default."""
    model = attributes[SAMPLE]["config"]["model"]
    values = []
    for objective in objectives:
        name = objective.name
        value = count_of(model) if name == "parameters" else known.get(name)
        if value is None:
            outcomes = (each.user_attrs.get(_OUTCOME, {}) for each in live_trials(study))
            successes = [each[name] for each in outcomes if each.get("status") == "success"]
            value = objective.when_failed(successes, model["vocab_size"])
        values.append(float(value))
    return values


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
