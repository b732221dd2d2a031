"""Sweeps: the runs of several learning-rate sweeps, as a part of the bench gets its runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.prototype.part import Work
from stackwise.prototype import LearningRateSweep, PlannedRun, SweepRun, plan_sweep
from stackwise.prototype.sweep_result import draw_sweep
from stackwise.report.plot import svg_plot, write_svg
from stackwise.support.arguments import require

__all__ = ["SweepPlan", "complete", "plotted", "sweep_from"]


@dataclass(frozen=True)
class SweepPlan:
    """A sweep that is to be made: the arguments of `plan_sweep`."""

    subject: Any
    learning_rates: Sequence[float]
    widths: Sequence[int]
    steps: int
    seeds: Sequence[int]
    warmup: float
    parametrization: Any = None

    def runs(self) -> list[PlannedRun]:
        return plan_sweep(
            self.subject,
            self.learning_rates,
            self.widths,
            steps=self.steps,
            seeds=self.seeds,
            parametrization=self.parametrization,
            warmup=self.warmup,
        )


def complete(work: Work, plans: Mapping[str, SweepPlan]) -> dict[str, LearningRateSweep]:
    """The sweeps of which every run is there, by name; runs of all of them are made in turns.

    The longest runs, of the widest models, are made first, so that no process waits for another at the end.
    """
    planned = {(name, each.key): each for name, plan in plans.items() for each in plan.runs()}
    order = sorted(planned, key=lambda key: (-planned[key].width, planned[key].seed))
    runs = {f"{name}; {key}": partial(_train, planned[name, key]) for name, key in order}
    made = work.complete(runs, {"what": "learning-rate sweep"})
    found = {}
    for name, plan in plans.items():
        of = [made[run] for each in plan.runs() if (run := f"{name}; {each.key}") in made]
        if len(of) == len(plan.runs()):
            swept = tuple(map(SweepRun.from_dict, of))
            found[name] = LearningRateSweep(name, plan.parametrization or "own", plan.steps, swept)
    return found


def _train(plan: PlannedRun) -> Iterator[Mapping[str, Any]]:
    torch.set_num_threads(1)
    yield plan.train().to_dict()


def sweep_from(name: str, values: Mapping[str, Any]) -> LearningRateSweep:
    """The sweep of which `to_dict` gave these values."""
    runs = tuple(map(SweepRun.from_dict, values["runs"]))
    return LearningRateSweep(name, values["parametrization"], values["steps"], runs)


def plotted(sweeps: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """An SVG of sweeps beside each other, of what `LearningRateSweep.to_dict` gave.

    Raises:
        ValueError: none of the sweeps has all of its runs.
    """
    require(len(sweeps) > 0, "sweeps", len(sweeps), "one or more whose runs are all there")

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0]
        for axes, (name, values) in zip(panels, sweeps.items(), strict=True):
            draw_sweep(axes, sweep_from(name, values), name)

    write_svg(path, svg_plot((4.5 * len(sweeps), 3.6), draw))
