"""Pruners by name, and the points of a run at which they are called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stackwise.prototype.search.objective import Objective
from stackwise.prototype.search.storage import import_optuna, quiet_optuna
from stackwise.support.arguments import require

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.pruners import BasePruner

__all__ = ["PRUNERS", "RUNGS", "Rungs", "make_pruner"]

PRUNERS = ("hyperband", "median", "wilcoxon")
RUNGS = 16  # points of a run at which its loss is compared, evenly distributed over its steps
_FEWEST_SEEDS = 5  # the last is not compared; a signed-rank test has p >= 1/8 for three pairs, 1/16 for four


def make_pruner(given: Any, *, seeds: int, objectives: Sequence[Objective]) -> BasePruner | None:
    """Return an Optuna pruner by name. A pruner object is returned unchanged. None: no pruning.

    All of them receive losses, even if the objective is the score, which contains the loss.

    - `median`: prunes a trial with a loss above the median of previous trials at a rung, after five complete
      trials.
    - `hyperband`: successive halving in brackets. A third of a bracket continues at each of its rungs.
    - `wilcoxon`: prunes a trial that is worse than the best one over the seeds so far, by a signed-rank test
      (p < 0.1).

    Raises:
        ValueError: an unknown name; several objectives, which Optuna cannot prune; or, for a name, an
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
    """Reports of a trial's first run to a pruner: at each rung, the mean loss since the previous one.

    Args:
        trial: trial of Optuna.
        maximize: True if the study maximizes its objective. The pruner then receives negative losses.
        is_active: False if reports are not passed to a pruner.
    """

    def __init__(self, trial: Trial, *, maximize: bool, is_active: bool) -> None:
        self._trial, self._sign, self._is_active = trial, -1.0 if maximize else 1.0, is_active
        self._rung, self._sum, self._count = 0, 0.0, 0
        self.last: float | None = None
        self.was_called = False

    def report(self, done: float, loss: float) -> None:
        """Add the loss of a step. `done` is the part of the run up to this step, from 0 to 1.

        Raises:
            optuna.TrialPruned: the pruner stops the trial.
        """
        self.was_called = True
        if not self._is_active or not math.isfinite(loss):
            return
        self._sum, self._count = self._sum + loss, self._count + 1
        rung = math.floor(done * RUNGS + 1e-9)
        if rung <= self._rung:
            return
        self._rung, self.last = rung, self._sum / self._count
        self._sum, self._count = 0.0, 0
        self._trial.report(self._sign * self.last, rung)
        # At the last rung, pruning saves no time.
        if rung < RUNGS and self._trial.should_prune():
            raise import_optuna().TrialPruned
