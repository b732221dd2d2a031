"""Pruners by name, and the losses that they receive."""

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

__all__ = ["LossReports", "make_pruner"]

_PRUNERS = ("hyperband", "median", "wilcoxon")
_RUNGS = 16  # points of a run at which its loss is compared, evenly distributed over its steps
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
    named = isinstance(given, str) and given in _PRUNERS
    require(named, "pruner", given, f"None, {', '.join(map(repr, _PRUNERS))}, or an Optuna pruner")
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
                found = optuna.pruners.HyperbandPruner(
                    min_resource=1, max_resource=_RUNGS, reduction_factor=3
                )
            case _:
                found = optuna.pruners.WilcoxonPruner(p_threshold=0.1)
    return found  # type: ignore[no-any-return]


class LossReports:
    """Losses of a trial for a pruner, which stops the trial by the exception `optuna.TrialPruned`.

    A pruner receives the mean loss since its last call at each rung of the first run. The Wilcoxon pruner
    receives the loss of each run.

    Args:
        trial: trial of Optuna.
        pruner: name of the pruner, an Optuna pruner, or None.
        maximize: True if the study maximizes its objective. The pruner then receives negative losses.
    """

    def __init__(self, trial: Trial, pruner: Any, *, maximize: bool) -> None:
        self._trial, self._sign = trial, -1.0 if maximize else 1.0
        self._by_seed = pruner == "wilcoxon" or isinstance(pruner, import_optuna().pruners.WilcoxonPruner)
        self._by_rung = pruner is not None and not self._by_seed
        self._rung, self._sum, self._count = 0, 0.0, 0
        self.last: float | None = None
        self.was_called = False

    def report(self, done: float, loss: float) -> None:
        """Add the loss of a step. `done` is the part of the run up to this step, from 0 to 1."""
        self.was_called = True
        if not self._by_rung or not math.isfinite(loss):
            return
        self._sum, self._count = self._sum + loss, self._count + 1
        rung = math.floor(done * _RUNGS + 1e-9)
        if rung > self._rung:
            self._rung, self.last = rung, self._sum / self._count
            self._sum, self._count = 0.0, 0
            self._pass_on(self.last, rung, is_last=rung >= _RUNGS)

    def finish_run(self, number: int, loss: float, *, is_last: bool) -> None:
        """Add the loss of a run."""
        self._by_rung = False
        if self._by_seed:
            self._pass_on(loss, number, is_last=is_last)

    def _pass_on(self, loss: float, step: int, *, is_last: bool) -> None:
        self._trial.report(self._sign * loss, step)
        if not is_last and self._trial.should_prune():  # at the end, pruning saves no time
            raise import_optuna().TrialPruned
