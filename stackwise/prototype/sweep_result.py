"""LearningRateSweep: final loss over learning rates and widths, with sensitivity and best learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from stackwise.prototype.estimate import Estimate
from stackwise.prototype.sweep_run import SweepRun
from stackwise.report.plot import INK, MUTED, svg_plot, write_svg
from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["BestLearningRate", "Drift", "LearningRateSweep", "draw_sweep", "learning_rate_sensitivity"]


def learning_rate_sensitivity(losses: Sequence[float], initial_loss: float) -> float:
    """Return the mean difference in nats between the loss and the best loss, over learning rates.

    It is mean over eta of min(loss(eta), loss at initialization) - min over eta of loss(eta): the LR
    sensitivity of Wortsman et al. 2023 (arXiv:2309.14322), section 2.2, with the trained weights theta =
    A(eta) for the learning rate eta. It is 0 if all learning rates give the same loss.

    Args:
        losses: final losses, one per learning rate. A loss that is not finite counts as `initial_loss`.
        initial_loss: loss before training.

    Raises:
        ValueError: no losses, or an `initial_loss` that is not finite.
    """
    require(len(losses) > 0, "losses", len(losses), "one or more")
    check_number("initial_loss", initial_loss, "a finite number", lambda _: True)
    ended = [min(loss, initial_loss) if math.isfinite(loss) else initial_loss for loss in losses]
    return fmean(ended) - min(ended)


@dataclass(frozen=True)
class BestLearningRate:
    """Learning rate with the lowest loss of a width.

    Attributes:
        learning_rate: the best of the tested learning rates.
        loss: its loss in nats.
        refined: minimum of the parabola through it and its two neighbours, over the logarithm of the learning
            rate.
        at_edge: True if it is the first or last tested one. The true minimum may be outside, and it is not
            refined.
    """

    learning_rate: float
    loss: float
    refined: float
    at_edge: bool


@dataclass(frozen=True)
class Drift:
    """Drift of the best learning rate with the width.

    Attributes:
        log2_best: by width, log2 of the refined best learning rate relative to that of the narrowest model.
        slope: slope of log2 of the refined best learning rate over log2 of the width, by least squares for
            each seed. 0: constant; -1: half the learning rate at twice the width. None: one width.
        grid_steps: number of grid steps between the lowest and the highest best learning rate.
        at_edge: widths with the best learning rate at an edge of the grid, so that the true one may be
            outside.
    """

    log2_best: Mapping[int, float]
    slope: Estimate | None
    grid_steps: int
    at_edge: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "log2_best": {str(width): value for width, value in self.log2_best.items()}}

    def __str__(self) -> str:
        if self.slope is None:
            return "one width: no drift"
        text = f"{self.slope} log2 of the best learning rate a doubling of the width"
        if self.at_edge:
            text += f"; at an end of the grid: width {', '.join(map(str, self.at_edge))}"
        return text


@dataclass(frozen=True)
class LearningRateSweep:
    """Results of the runs at every width, learning rate and seed.

    Attributes:
        name: name of the trained model.
        parametrization: "standard" or "mup" if requested, "own" for that of the subject.
        steps: number of optimizer steps per run.
        runs: one run for every width, learning rate and seed.

    Raises:
        ValueError: no runs, a missing or duplicate run, or a loss at initialization that is not finite.
    """

    name: str
    parametrization: Literal["standard", "mup", "own"]
    steps: int
    runs: tuple[SweepRun, ...]

    def __post_init__(self) -> None:
        require(len(self.runs) > 0, "runs", len(self.runs), "one or more")
        check_sizes(steps=self.steps)
        keys = [(run.width, run.learning_rate, run.seed) for run in self.runs]
        require(len(set(keys)) == len(keys), "runs", len(keys), "each width, learning rate and seed once")
        missing = set(product(self.widths, self.learning_rates, self.seeds)) - set(keys)
        if missing:
            width, learning_rate, seed = min(missing)
            where = f"none of width {width}, learning rate {learning_rate:g}, seed {seed}"
            require(False, "runs", where, "every width at every learning rate and seed")
        for run in self.runs:
            check_number("initial_loss", run.initial_loss, "a finite number", lambda _: True)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Widths in ascending order."""
        return tuple(sorted({run.width for run in self.runs}))

    @cached_property
    def learning_rates(self) -> tuple[float, ...]:
        """Learning rates in ascending order."""
        return tuple(sorted({run.learning_rate for run in self.runs}))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Seeds in ascending order."""
        return tuple(sorted({run.seed for run in self.runs}))

    @cached_property
    def _by_key(self) -> dict[tuple[int, float, int], SweepRun]:
        return {(run.width, run.learning_rate, run.seed): run for run in self.runs}

    def losses(self, width: int) -> dict[float, tuple[float, ...]]:
        """Return the losses of all seeds by learning rate, limited to the loss at initialization."""
        self._check_width(width)
        return {
            learning_rate: tuple(self._by_key[width, learning_rate, seed].counted for seed in self.seeds)
            for learning_rate in self.learning_rates
        }

    def initial_loss(self, width: int) -> float:
        """Return the mean loss at initialization over seeds, in nats."""
        self._check_width(width)
        return fmean(run.initial_loss for run in self.runs if run.width == width)

    def failed(self, width: int) -> int:
        """Return the number of runs with the status "nan" or "diverged"."""
        self._check_width(width)
        return sum(run.width == width and run.status in ("nan", "diverged") for run in self.runs)

    def sensitivity(self, width: int) -> Estimate:
        """Return the `learning_rate_sensitivity` in nats: mean and t interval over seeds."""
        return Estimate.of(self._sensitivities(width))

    def reduction(self, other: LearningRateSweep, width: int) -> Estimate:
        """Return the sensitivity of `other` minus that of this sweep in nats, paired by seed.

        Raises:
            ValueError: different learning rates or seeds, or a width that one of them does not have.
        """
        require(other.seeds == self.seeds, "seeds", other.seeds, f"{self.seeds}, as here")
        same = other.learning_rates == self.learning_rates
        require(same, "learning_rates", other.learning_rates, f"{self.learning_rates}, as here")
        pairs = zip(other._sensitivities(width), self._sensitivities(width), strict=True)
        return Estimate.of([theirs - own for theirs, own in pairs])

    def best(self, width: int) -> BestLearningRate:
        """Return the learning rate with the lowest mean loss over seeds.

        For a tie, return the smallest one.
        """
        return _best({rate: fmean(losses) for rate, losses in self.losses(width).items()})

    def drift(self) -> Drift:
        """Return the drift of the best learning rate with the width."""
        best = {width: self.best(width) for width in self.widths}
        places = [self.learning_rates.index(each.learning_rate) for each in best.values()]
        narrowest = best[self.widths[0]].refined
        slopes = [self._slope(place) for place in range(len(self.seeds))] if len(self.widths) > 1 else []
        return Drift(
            {width: math.log2(each.refined / narrowest) for width, each in best.items()},
            Estimate.of(slopes) if slopes else None,
            max(places) - min(places),
            tuple(width for width, each in best.items() if each.at_edge),
        )

    def transfers(self, within: int = 1) -> bool:
        """Return True if the best learning rates of all widths differ by at most `within` grid steps.

        Return False if one of them is at an edge of the grid, because its minimum was not observed.
        """
        check_sizes(minimum=0, within=within)
        drift = self.drift()
        return drift.grid_steps <= within and not drift.at_edge

    def plot(self, path: str | Path) -> Path:
        """Draw the loss over the learning rate as a new, deterministic SVG, with a line per width.

        Raises:
            ValueError: another file extension than .svg.
            ImportError: matplotlib is not installed.
        """
        return write_svg(path, svg_plot((7, 4.2), lambda figure: draw_sweep(figure.subplots(), self)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. Values that are not finite are None."""
        drift = self.drift()
        return {
            "name": self.name,
            "parametrization": self.parametrization,
            "steps": self.steps,
            "learning_rates": list(self.learning_rates),
            "seeds": list(self.seeds),
            "widths": {
                str(width): {
                    "sensitivity": self.sensitivity(width).to_dict(),
                    "best": asdict(self.best(width)),
                    "initial_loss": self.initial_loss(width),
                    "failed": self.failed(width),
                }
                for width in self.widths
            },
            "drift": drift.to_dict(),
            "runs": [run.to_dict() for run in self.runs],
        }

    def __str__(self) -> str:
        seeds = "1 seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
        lines = [f"{self.name}, {self.parametrization}, {self.steps} steps, {seeds}"]
        rates = "".join(f"{rate:>9.1e}" for rate in self.learning_rates)
        lines.append(f"{'width':>5} {rates}     best  sensitivity")
        for width in self.widths:
            cells = "".join(f"{fmean(losses):>9.3f}" for losses in self.losses(width).values())
            best = self.best(width)
            mark = "*" if best.at_edge else " "
            text = f"{width:>5} {cells} {best.refined:>8.1e}{mark} {self.sensitivity(width)}"
            failed = self.failed(width)
            lines.append(text + (f", {failed} failed" if failed else ""))
        if len(self.widths) > 1:
            lines.append(f"drift: {self.drift()}")
        return "\n".join(lines)

    def _check_width(self, width: int) -> None:
        require(width in self.widths, "width", width, ", ".join(map(str, self.widths)))

    def _sensitivities(self, width: int) -> list[float]:
        """Return the sensitivity of each seed."""
        self._check_width(width)
        found = []
        for seed in self.seeds:
            runs = [self._by_key[width, rate, seed] for rate in self.learning_rates]
            found.append(learning_rate_sensitivity([run.counted for run in runs], runs[0].initial_loss))
        return found

    def _slope(self, place: int) -> float:
        """Return the slope of the seed at index `place`."""
        x, y = [], []
        for width in self.widths:
            best = _best({rate: losses[place] for rate, losses in self.losses(width).items()})
            x.append(math.log2(width))
            y.append(math.log2(best.refined))
        middle = fmean(x)
        return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def _best(losses: Mapping[float, float]) -> BestLearningRate:
    """Return the best of losses by learning rate in ascending order."""
    rates = list(losses)
    place = min(range(len(rates)), key=lambda i: losses[rates[i]])
    at_edge = place in (0, len(rates) - 1)
    rate = rates[place]
    refined = rate if at_edge else _vertex([(math.log(r), losses[r]) for r in rates[place - 1 : place + 2]])
    return BestLearningRate(rate, losses[rate], refined, at_edge)


def _vertex(points: Iterable[tuple[float, float]]) -> float:
    """Return exp(x) at the minimum x of the parabola through three points. The middle one is the lowest."""
    (x0, y0), (x1, y1), (x2, y2) = points
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    if left == right:  # all three are equal
        return math.exp(x1)
    # The parabola has slope `left` at the midpoint of the first two points and `right` at that of the last
    # two.
    return math.exp((x0 + x1) / 2 - left * (x2 - x0) / (2 * (right - left)))


# From narrow (light) to wide (dark).
_COLOURS = ("#9cc4e4", "#5b9bd0", "#1f6fb4", "#124a7c", "#0b2c4d", "#05182b")


def draw_sweep(axes: Any, sweep: LearningRateSweep, title: str | None = None) -> None:
    """Draw a sweep on matplotlib's `axes`.

    A line is the mean loss over seeds, limited to the loss at initialization (dotted). Its band is the range
    over seeds, and a mark shows the best learning rate. The legend has the sensitivities.
    """
    for number, width in enumerate(sweep.widths):
        losses = sweep.losses(width)
        colour = _COLOURS[min(number, len(_COLOURS) - 1)]
        rates, means = list(losses), [fmean(each) for each in losses.values()]
        label = f"width {width}: sensitivity {sweep.sensitivity(width)}"
        axes.plot(rates, means, "o-", ms=3, color=colour, label=label)
        lowest, highest = ([of(each) for each in losses.values()] for of in (min, max))
        axes.fill_between(rates, lowest, highest, color=colour, alpha=0.2, lw=0)
        best = sweep.best(width)
        axes.plot([best.refined], [best.loss], "v", ms=7, color=colour, markeredgecolor=INK)
    initial = fmean(sweep.initial_loss(width) for width in sweep.widths)
    axes.axhline(initial, color=MUTED, lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss at the end, nats")
    title = f"{sweep.name}, {sweep.parametrization}, {sweep.steps} steps" if title is None else title
    axes.set_title(title, loc="left", color=INK, parse_math=False)
    axes.legend(loc="best", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
