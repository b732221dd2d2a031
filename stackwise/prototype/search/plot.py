"""Plot: the trials of a search in the plane of two objectives, with their Pareto front, as an SVG."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from stackwise.report.plot import ACCENT, BAD, INK, MUTED, style_axes, svg_plot
from stackwise.support.arguments import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stackwise.prototype.search.search_result import SearchResult

__all__ = ["draw_front", "front_svg"]


def front_svg(result: SearchResult) -> str:
    """Return the trials as an SVG, the same text each time for the same result.

    Raises:
        ValueError: no trial has both coordinates.
        ImportError: matplotlib is not installed.
    """
    return svg_plot((7, 4.5), partial(draw_front, result=result))


def draw_front(figure: Figure, result: SearchResult) -> None:
    """Draw the trials in the plane of two objectives.

    Each success is a dot. Dots on the Pareto front are larger, have the trial's number and are joined by
    steps. A trial that failed with both objectives known is a cross.

    Raises:
        ValueError: no trial has both coordinates.
    """
    across, up = result.front_objectives[1], result.front_objectives[0]
    known = [t for t in result.trials if across.of(t) is not None and up.of(t) is not None]
    require(len(known) > 0, "trials", len(known), f"one or more with {up.name} and {across.name}")
    points = {t.number: (across.of(t), up.of(t)) for t in known}
    front = sorted((t for t in result.front), key=lambda t: points[t.number])
    axes = figure.subplots()
    for status, colour, marker in (("success", MUTED, "o"), ("failed", BAD, "x")):
        chosen = [points[t.number] for t in known if (t.status == "success") == (status == "success")]
        if chosen:
            xs, ys = zip(*chosen, strict=True)
            axes.scatter(xs, ys, c=colour, marker=marker, s=24, label=status)
    if front:
        xs, ys = zip(*(points[t.number] for t in front), strict=True)
        # Between two points, the front stays at the value that it has already reached.
        axes.step(xs, ys, where="pre" if across.maximize else "post", color=ACCENT, linewidth=1)
        axes.scatter(xs, ys, c=ACCENT, s=40, label="Pareto front", zorder=3)
        for trial in front:
            axes.annotate(
                str(trial.number),
                points[trial.number],
                textcoords="offset points",
                xytext=(5, 5),
                color=INK,
            )
    if all(x is not None and x > 0 for x, _ in points.values()):
        axes.set_xscale("log")
    axes.set_xlabel(f"{across.name} [{across.unit}]")
    axes.set_ylabel(f"{up.name} [{up.unit}]")
    axes.set_title(result.name, loc="left", color=INK, parse_math=False)
    axes.legend(frameon=False)
    style_axes(figure)
