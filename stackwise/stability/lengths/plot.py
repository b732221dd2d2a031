"""Length plot: gradient norms over the sequence length, with the first unstable length, as an SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stackwise.report.plot import BAD, INK, MUTED, svg_plot, write_svg
from stackwise.stability.lengths.instability import SeedRun
from stackwise.stability.lengths.point import LengthPoint
from stackwise.support.arguments import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["length_svg", "write_length_plot"]

_COLOURS = {"stable": "#2a7f4f", "spiky": "#c98a1b", "unstable": BAD}
_LEAST_SPAN = 20.0  # minimum ratio of the upper and lower end of the axis of norms


def write_length_plot(
    path: str | Path, points: Sequence[LengthPoint], title: str, first: int | None = None
) -> Path:
    """Write the plot of `length_svg` to a file.

    Raises:
        ValueError: the path does not end with .svg, or no length was run.
        ImportError: matplotlib is not installed.
    """
    return write_svg(path, length_svg(points, title, first))


def length_svg(points: Sequence[LengthPoint], title: str, first: int | None = None) -> str:
    """Return a plot of gradient norms over the sequence length as SVG. The text is reproducible.

    A dot is the median norm of one seed's training. The thin line above it ends at the largest norm. The
    colour is the verdict of the length. If a norm of a seed is not finite, the seed is a cross above all
    dots.

    Args:
        points: points in any order. Points that were not run are omitted.
        title: title above the plot.
        first: first unstable length, marked by a line. None: no line.

    Raises:
        ValueError: no length was run.
        ImportError: matplotlib is not installed.
    """
    shown = sorted((point for point in points if point.runs), key=lambda point: point.seq_len)
    require(bool(shown), "points", len(points), "at least one length that was run")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _draw_norms(axes, shown)
        _scale(axes, [point.seq_len for point in shown])
        if first is not None:
            axes.axvline(first, color=_COLOURS["unstable"], lw=1, ls="--")
            axes.annotate(
                f"first unstable: {first}",
                (first, 0.5),
                xycoords=("data", "axes fraction"),
                color=_COLOURS["unstable"],
                xytext=(4, 0),
                textcoords="offset points",
                rotation=90,
                va="center",
            )
        axes.set_title(title, loc="left", color=INK, parse_math=False)
        axes.set_xlabel("sequence length")
        axes.set_ylabel("gradient norm")
        axes.spines[["top", "right"]].set_visible(False)

    return svg_plot((7.5, 4), draw)


def _draw_norms(axes: Axes, points: Sequence[LengthPoint]) -> None:
    top = 2 * max((norm for point in points for run in point.runs for norm in _finite(run)), default=1.0)
    told = set[str]()
    middles: list[tuple[int, float]] = []
    for point in points:
        colour = _COLOURS[point.verdict]
        medians = []
        for number, each in enumerate(point.runs):
            norms = _finite(each)
            # Shift the seeds horizontally, so that equal values do not overlap.
            place = point.seq_len * 1.012 ** (number - (len(point.runs) - 1) / 2)
            label = "" if point.verdict in told else point.verdict
            told.add(point.verdict)
            if len(norms) < len(each.gradient_norms) or not norms:
                axes.plot([place], [top], "x", ms=5, color=colour, label=label)
                continue
            medians.append(statistics.median(norms))
            axes.plot([place, place], [medians[-1], max(norms)], "-", lw=0.8, color=colour)
            axes.plot([place], [medians[-1]], "o", ms=3.5, color=colour, label=label)
        if medians:
            middles.append((point.seq_len, statistics.median(medians)))
    axes.plot(*zip(*middles, strict=True) if middles else ([], []), "-", lw=0.8, color=MUTED, zorder=0)


def _finite(run: SeedRun) -> list[float]:
    return [norm for norm in run.gradient_norms if 0 < norm < math.inf]


def _scale(axes: Axes, places: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    # Ticks at the lengths, without overlapping labels.
    ticks = [n for n, before in zip(places, [0, *places], strict=False) if n > 1.25 * before]
    axes.set_xticks(ticks, labels=[str(n) for n in ticks], rotation=45 if len(ticks) > 8 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda norm, _: f"{norm:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    # Widen a narrow axis, so that small differences look small.
    low, high = axes.get_ylim()
    widen = max(1.0, math.sqrt(_LEAST_SPAN / (high / low)))
    axes.set_ylim(low / widen, high * widen)
    axes.set_xlim(places[0] / 1.2, places[-1] * 1.2)
    axes.legend(loc="best", frameon=False)
