"""Plot: SVG of a series, with its change points and verdicts, and with the reference below."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stackwise.gate.history.change_point import change_points
from stackwise.gate.history.judgement import WINDOW
from stackwise.gate.history.point import Point
from stackwise.gate.history.store_url import HistoryError
from stackwise.report.plot import ACCENT, BAD, INK, MUTED, svg_plot
from stackwise.support.arguments import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["series_svg"]

_SHIFT = "#7a3fb5"
_COLOURS = {
    "PASS": "#2a7f4f",
    "IMPROVED": ACCENT,
    "REGRESSED": BAD,
    "INCONCLUSIVE": "#c98a1b",
    "": MUTED,
}


def series_svg(points: Sequence[Point], title: str) -> str:
    """Return a series as an SVG. The same series has the same text.

    The upper plot has the cost of each result relative to the median of all, by the log-ratio to the
    reference if there is one. A line is the mean of a segment between change points, and a dashed line is a
    change point. The lower plot has the time of the reference relative to its median.

    Args:
        points: results of one series, oldest first. The newest are shown.
        title: title of the plot.

    Raises:
        ValueError: no points.
        HistoryError: matplotlib is not installed.
    """
    require(len(points) > 0, "points", len(points), "one or more")
    referenced = points[-1].reference is not None
    shown = [point for point in points if (point.reference is not None) == referenced][-WINDOW:]

    def draw(figure: Figure) -> None:
        if referenced:
            above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
            _draw_reference(below, shown)
        else:
            above = below = figure.subplots()
        _draw_costs(above, shown)
        above.set_title(title, loc="left", color=INK, parse_math=False)
        below.set_xlabel(f"result, {shown[0].created:%Y-%m-%d} to {shown[-1].created:%Y-%m-%d}")

    try:
        return svg_plot((9, 5 if referenced else 3.6), draw)
    except ImportError as error:
        raise HistoryError(str(error)) from None


def _draw_costs(axes: Axes, points: Sequence[Point]) -> None:
    values = [point.log_ratio for point in points]
    middle = statistics.median(values)
    shares = [100 * math.expm1(value - middle) for value in values]
    for verdict, colour in _COLOURS.items():
        places = [number for number, point in enumerate(points) if (point.verdict or "") == verdict]
        if places:
            label = verdict or "not judged"
            axes.plot(places, [shares[place] for place in places], "o", ms=4, color=colour, label=label)
    starts = [change.index for change in change_points(values)]
    for start, end in zip([0, *starts], [*starts, len(values)], strict=True):
        mean = 100 * math.expm1(statistics.fmean(values[start:end]) - middle)
        axes.plot([start - 0.5, end - 0.5], [mean, mean], color=INK, lw=1.2)
    for start in starts:
        axes.axvline(start - 0.5, color=_SHIFT, lw=1, ls="--")
        text = points[start].commit[:10]
        axes.annotate(text, (start - 0.5, 1), xycoords=("data", "axes fraction"), color=_SHIFT, va="top")
    axes.set_ylabel("cost against the median, %")
    axes.legend(loc="best", frameon=False, ncols=3)
    _plain(axes)


def _draw_reference(axes: Axes, points: Sequence[Point]) -> None:
    for part, colour in (("gemm", INK), ("copy", MUTED)):
        times = [getattr(point.reference, part) for point in points]
        middle = statistics.median(times)
        shares = [100 * (each / middle - 1) for each in times]
        axes.plot(range(len(shares)), shares, "-", color=colour, lw=1, label=part)
    axes.set_ylabel("reference, %")
    axes.legend(loc="best", frameon=False, ncols=2)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.axhline(0, color=MUTED, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
