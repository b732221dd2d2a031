"""Transfer: whether the learning rate that is best for a narrow model is best for wider ones.

One architecture at four widths, up to eight times the narrowest, by more heads of one size: in the maximal
update parametrisation (Yang et al. 2022, arXiv:2203.03466) of the narrowest, and beside it in the standard
one. What counts is the validation loss at the end, on the documentation that every CPython carries. The
learning rates are a factor of two apart; the best one is that with the lowest mean over seeds.

That muP's best learning rate holds is no use where the standard one's holds as well, or where the losses
are higher: the two are compared seed by seed, at the best learning rate of each width and at that of the
narrowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from bench.claim import Bar
from bench.prototype.part import Part, Work
from bench.prototype.sweeps import SweepPlan, complete, plotted, sweep_from
from stackwise import StackWiseConfig
from stackwise.prototype.estimate import Estimate
from stackwise.prototype.sweep_result import LearningRateSweep

__all__ = ["RATES", "draw", "loss_difference", "measure", "rows", "slope_difference"]

MUP, STANDARD = "muP", "standard"
# Where losses are compared: (sweep, width) -> learning rate.
RATES: dict[str, Callable[[LearningRateSweep, int], float]] = {
    "best learning rate": lambda sweep, width: sweep.best(width).learning_rate,
    "that of 1 x": lambda sweep, _: sweep.best(sweep.widths[0]).learning_rate,
}


@dataclass(frozen=True)
class Plan:
    """What is swept.

    Attributes:
        exponents: of two, the learning rates.
        widths: times the narrowest, whose d_model is 32.
        steps: of each run.
        seeds: of weights and batches.
        batch_size: rows of 64 bytes.
    """

    exponents: tuple[int, ...] = (-11, -10, -9, -8, -7, -6, -5, -4)
    widths: tuple[int, ...] = (1, 2, 4, 8)
    steps: int = 200
    seeds: tuple[int, ...] = (0, 1, 2)
    batch_size: int = 16

    def sweep(self, parametrization: str) -> SweepPlan:
        return SweepPlan(
            subject=config_of(self.batch_size),
            learning_rates=tuple(2.0**exponent for exponent in self.exponents),
            widths=self.widths,
            steps=self.steps,
            seeds=self.seeds,
            warmup=0.1,
            parametrization=parametrization,
        )


QUICK = Plan((-9, -7, -5), (1, 2), 20, (0,), 4)


def config_of(batch_size: int) -> StackWiseConfig:
    """The narrowest: two Blocks, heads of 16."""
    return StackWiseConfig.from_dict(
        {
            "model": {
                "vocab_size": 256,
                "d_model": 32,
                "d_ff": 64,
                "n_heads": 2,
                "n_kv_heads": 2,
                "attention_type": "mha",
                "tie_embeddings": False,
                "architecture": {"n_stacks": 1, "blocks_per_stack": 2},
            },
            "training": {
                "batch_size": batch_size,
                "seq_len": 64,
                "precision": "fp32",
                "device": "cpu",
                "optimizer": {"weight_decay": 0.0},
            },
        }
    )


def measure(work: Work) -> Part:
    """Sweep what is missing, and compare the two."""
    plan = QUICK if work.quick else Plan()
    sweeps = complete(work, {MUP: plan.sweep("mup"), STANDARD: plan.sweep("standard")})
    figures = {name: sweep.to_dict() for name, sweep in sweeps.items()}
    return Part(figures, bars(sweeps), table(sweeps), tuple(work.missing))


def bars(sweeps: Mapping[str, LearningRateSweep]) -> tuple[Bar, ...]:
    """The distance in octaves between the best learning rates of any two widths, of muP.

    A best one at an end of the grid is no best one: then the bar is not measured.
    """
    drift = sweeps[MUP].drift() if MUP in sweeps else None
    value = None if drift is None or drift.at_edge else float(drift.grid_steps)
    return (Bar("transfer: octaves of drift with muP", value, 1.0, at_most=True, full_size=True),)


def table(sweeps: Mapping[str, LearningRateSweep]) -> Table | None:
    if not sweeps:
        return None
    widths = next(iter(sweeps.values())).widths
    shown = Table("parametrisation", *(f"width {width}" for width in widths), "log2 a doubling")
    for name, sweep in sweeps.items():
        cells = [_best(sweep.to_dict()["widths"][str(width)]["best"]) for width in widths]
        shown.add_row(name, *cells, str(sweep.drift().slope))
    return shown


def rows(figures: Mapping[str, Any]) -> str:
    """The best learning rates, and the losses there and at that of the narrowest, as Markdown tables."""
    given = {name: figures[name] for name in (MUP, STANDARD) if name in figures}
    if not given:
        return ""
    sweeps = {name: sweep_from(name, values) for name, values in given.items()}
    widths = next(iter(sweeps.values())).widths
    heads = " | ".join(f"{width} x" for width in widths)
    lines = [
        f"| parametrisation | {heads} | log2 a doubling of width | octaves of drift |",
        "|---|" + "---|" * (len(widths) + 2),
    ]
    for name, sweep in sweeps.items():
        cells = [_best(given[name]["widths"][str(width)]["best"]) for width in widths]
        drift = sweep.drift()
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {_signed(drift.slope)} | {drift.grid_steps} |")
    if len(sweeps) == 2:
        blank = " |" * len(widths)
        lines.append(f"| {MUP} - {STANDARD} |{blank} {_signed(slope_difference(sweeps))} | |")
        lines += ["", f"| loss, nats | {heads} |", "|---|" + "---|" * len(widths)]
        for where, rate_of in RATES.items():
            for name, sweep in sweeps.items():
                means = [f"{fmean(sweep.losses(width)[rate_of(sweep, width)]):.3f}" for width in widths]
                lines.append(f"| {name}, {where} | " + " | ".join(means) + " |")
            apart = [_signed(loss_difference(sweeps, width, rate_of)) for width in widths]
            lines.append(f"| {MUP} - {STANDARD} | " + " | ".join(apart) + " |")
    return "\n".join(lines) + "\n"


def slope_difference(sweeps: Mapping[str, LearningRateSweep]) -> Estimate:
    """By how much more of log2 a doubling muP's best learning rate moves than the standard one's, by seed."""
    slopes = {}
    for name, sweep in sweeps.items():
        of_seed = [tuple(run for run in sweep.runs if run.seed == seed) for seed in sweep.seeds]
        alone = [LearningRateSweep(name, sweep.parametrization, sweep.steps, runs) for runs in of_seed]
        slopes[name] = [slope.value for each in alone if (slope := each.drift().slope) is not None]
    return Estimate.of([mup - standard for mup, standard in zip(slopes[MUP], slopes[STANDARD], strict=True)])


def loss_difference(
    sweeps: Mapping[str, LearningRateSweep], width: int, rate_of: Callable[[LearningRateSweep, int], float]
) -> Estimate:
    """By how many nats muP's loss is above the standard one's, each at its own learning rate, by seed."""
    mup, standard = (sweeps[name].losses(width)[rate_of(sweeps[name], width)] for name in (MUP, STANDARD))
    return Estimate.of([one - other for one, other in zip(mup, standard, strict=True)])


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """The two sweeps beside each other, as an SVG."""
    plotted({name: figures[name] for name in (MUP, STANDARD) if name in figures}, path)


def _best(best: Mapping[str, Any]) -> str:
    return f"{best['learning_rate']:.2g}" + (" (end of the grid)" if best["at_edge"] else "")


def _signed(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:+.2f}"
    return f"{estimate.value:+.2f} [{estimate.low:+.2f}, {estimate.high:+.2f}]"
