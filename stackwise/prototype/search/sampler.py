"""Samplers by name. A sample depends on the number of the trial, not on the process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stackwise.prototype.search.storage import import_optuna, quiet_optuna
from stackwise.support.arguments import require

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

__all__ = ["SAMPLERS", "make_sampler"]

SAMPLERS = ("tpe", "random", "gp", "nsga2")


def make_sampler(given: Any, *, budget: int, seed: int) -> BaseSampler:
    """Return an Optuna sampler by name. A sampler object is returned unchanged.

    A sampler by name derives the seed of each trial from `seed` and the number of the trial. A search that is
    resumed or shared by several processes therefore does not repeat samples, and its samples do not depend on
    the process.

    - `random`: samples each key independently.
    - `tpe`: tree-structured Parzen estimators, jointly over all keys. The first third of the budget, at most
      ten trials, is random.
    - `gp`: a Gaussian process, for few expensive trials.
    - `nsga2`: a genetic algorithm for several objectives. A generation is a fifth of the budget, from 4 to
      50.

    Args:
        given: name of a sampler, or an Optuna sampler.
        budget: number of trials.
        seed: any integer >= 0.

    Raises:
        ValueError: an unknown name.
    """
    optuna = import_optuna()
    if isinstance(given, optuna.samplers.BaseSampler):
        return given  # type: ignore[no-any-return]
    named = isinstance(given, str) and given in SAMPLERS
    require(named, "sampler", given, f"{', '.join(map(repr, SAMPLERS))}, or an Optuna sampler")
    startup = min(10, max(2, budget // 3))
    population = min(50, max(4, budget // 5))

    def make(number: int) -> BaseSampler:
        own = int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")
        with quiet_optuna() as optuna:
            samplers = optuna.samplers
            match given:
                case "random":
                    found = samplers.RandomSampler(seed=own)
                case "tpe":
                    found = samplers.TPESampler(
                        seed=own, n_startup_trials=startup, multivariate=True, constant_liar=True
                    )
                case "gp":
                    found = samplers.GPSampler(seed=own, n_startup_trials=startup)
                case _:
                    found = samplers.NSGAIISampler(seed=own, population_size=population)
        return found  # type: ignore[no-any-return]

    return _by_number(make)


def _by_number(make: Callable[[int], BaseSampler]) -> BaseSampler:
    """Return a sampler that creates a new sampler for each trial."""
    optuna = import_optuna()

    class ByNumber(optuna.samplers.BaseSampler):  # type: ignore[misc,name-defined]
        """Sampler that forwards all calls to a sampler for the number of the trial."""

        def __init__(self) -> None:
            self._number: int | None = None
            self._inner: BaseSampler | None = None

        def _of(self, trial: FrozenTrial) -> BaseSampler:
            if self._inner is None or self._number != trial.number:
                self._number, self._inner = trial.number, make(trial.number)
            return self._inner

        def reseed_rng(self) -> None:
            """Do nothing, because each trial has its own seed."""

        def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
            with quiet_optuna():
                return self._of(trial).infer_relative_search_space(study, trial)

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
            with quiet_optuna():
                return self._of(trial).sample_relative(study, trial, search_space)

        def sample_independent(self, study: Any, trial: Any, param_name: Any, param_distribution: Any) -> Any:
            with quiet_optuna():
                return self._of(trial).sample_independent(study, trial, param_name, param_distribution)

        def before_trial(self, study: Any, trial: Any) -> None:
            self._of(trial).before_trial(study, trial)

        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            self._of(trial).after_trial(study, trial, state, values)

    return ByNumber()
