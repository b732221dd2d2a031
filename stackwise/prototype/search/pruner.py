"""Pruners by name, and the points of a run at which they are asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stackwise.prototype.search.objective import Objective
from stackwise.prototype.search.optuna_import import import_optuna, quiet_optuna
from stackwise.support.arguments import require

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.pruners import BasePruner

__all__ = ["PRUNERS", "RUNGS", "Rungs", "make_pruner"]

PRUNERS = ("hyperband", "median", "wilcoxon")
RUNGS = 16  # points of a run at which its loss is compared, evenly over its steps
_FEWEST_SEEDS = 5  # the last is not compared; a signed-rank test of three pairs has p >= 1/8, of four 1/16


def make_pruner(given: Any, *, seeds: int, objectives: Sequence[Objective]) -> BasePruner | None:
    """An Optuna pruner by name, or the one that is given, as it is; None: nothing ends early.

    All of them are told of losses, also where the objective is the score, of which that is a part.

    - `median`: what is worse at a rung than the median of those before it, after five whole trials.
    - `hyperband`: successive halving in brackets; a third of a bracket goes on at each of its rungs.
    - `wilcoxon`: what is worse than the best over the seeds so far, by a signed-rank test (p < 0.1).

    Raises:
        ValueError: no name of a pruner; several objectives, which Optuna prunes none of; for a name, an
            objective other than loss and score, or too few seeds.
    """
    optuna = import_optuna()
    if given is None:
        return None
    require(len(objectives) == 1, "pruner", given, "None with several objectives")
    if isinstance(given, optuna.pruners.BasePruner):
        return given  # type: ignore[no-any-return]
    named = isinstance(given, str) and given in PRUNERS
    require(named, "pruner", given, f"None, {', '.join(map(repr, PRUNERS))}, or an Optuna pruner")
    objective = objectives[0].name
    allowed = f"'loss' or 'score' with pruner={given!r}, which compares losses"
    require(objective in ("loss", "score"), "objective", objective, allowed)
    if given == "wilcoxon":
        require(seeds >= _FEWEST_SEEDS, "seeds", seeds, f"{_FEWEST_SEEDS} or more with pruner='wilcoxon'")
    with quiet_optuna() as optuna:
        match given:
            case "median":
                found = optuna.pruners.MedianPruner(n_startup_trials=5)
            case "hyperband":
                found = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=RUNGS, reduction_factor=3)
            case _:
                found = optuna.pruners.WilcoxonPruner(p_threshold=0.1)
    return found  # type: ignore[no-any-return]


class Rungs:
    """What a pruner is told of the first run of a trial: at each rung the mean loss since the one before.

    Args:
        trial: of Optuna.
        maximize: whether the study makes its objective large; the pruner is told of a loss in its direction.
    """

    def __init__(self, trial: Trial, *, maximize: bool) -> None:
        self._trial, self._sign = trial, -1.0 if maximize else 1.0
        self._rung, self._sum, self._count = 0, 0.0, 0
        self.last: float | None = None

    def report(self, done: float, loss: float) -> None:
        """Take the loss of a step; `done` is the part of the run that it ends, from 0 to 1.

        Raises:
            optuna.TrialPruned: the pruner says so.
        """
        if not math.isfinite(loss):
            return
        self._sum, self._count = self._sum + loss, self._count + 1
        rung = math.floor(done * RUNGS + 1e-9)
        if rung <= self._rung:
            return
        self._rung, self.last = rung, self._sum / self._count
        self._sum, self._count = 0.0, 0
        self._trial.report(self._sign * self.last, rung)
        # At the last rung there is nothing to be saved any more.
        if rung < RUNGS and self._trial.should_prune():
            raise import_optuna().TrialPruned
