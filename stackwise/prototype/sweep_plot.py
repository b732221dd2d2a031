"""Sweep plot: final loss over the learning rate as an SVG, with a line per width."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from stackwise.report.plot import INK, MUTED, svg_plot

if TYPE_CHECKING:
    from stackwise.prototype.sweep_result import LearningRateSweep

__all__ = ["draw_sweep", "sweep_svg"]

# From narrow (light) to wide (dark).
_COLOURS = ("#9cc4e4", "#5b9bd0", "#1f6fb4", "#124a7c", "#0b2c4d", "#05182b")


def sweep_svg(sweep: LearningRateSweep) -> str:
    """Return the sweep as a deterministic SVG.

    A line is the mean loss over seeds, limited to the loss at initialization (dotted). Its band is the range
    over seeds, and a mark shows the best learning rate. The legend has the sensitivities.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return svg_plot((7, 4.2), lambda figure: draw_sweep(figure.subplots(), sweep))


def draw_sweep(axes: Any, sweep: LearningRateSweep, title: str | None = None) -> None:
    """Draw a sweep on matplotlib's `axes`, as `sweep_svg` does."""
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
