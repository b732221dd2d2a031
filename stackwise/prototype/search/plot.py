"""Plot: the trials of a search in the plane of two objectives, with their Pareto front, as an SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stackwise.argument import require
from stackwise.svg import drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stackwise.prototype.search.search_result import SearchResult

__all__ = ["front_svg"]

_INK, _MUTED, _FRONT, _FAILED = "#1f2430", "#8a93a3", "#1f6fb4", "#c23b2b"


def front_svg(result: SearchResult) -> str:
    """An SVG, the same text each time for the same result.

    Each success is a point; those on the front are larger, have their trial's number and are joined by steps:
    what is above and to the right of these, or wherever worse is, one of them is better than. A trial that
    is known in both coordinates and did not succeed is a cross.

    Raises:
        ValueError: no trial has both coordinates.
        ImportError: matplotlib is not installed.
    """
    across, up = result.front_objectives[1], result.front_objectives[0]
    known = [t for t in result.trials if across.of(t) is not None and up.of(t) is not None]
    require(len(known) > 0, "trials", len(known), f"one or more with {up.name} and {across.name}")
    points = {t.number: (across.of(t), up.of(t)) for t in known}
    front = sorted((t for t in result.front), key=lambda t: points[t.number])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for status, colour, marker in (("success", _MUTED, "o"), ("failed", _FAILED, "x")):
            chosen = [points[t.number] for t in known if (t.status == "success") == (status == "success")]
            if chosen:
                xs, ys = zip(*chosen, strict=True)
                axes.scatter(xs, ys, c=colour, marker=marker, s=24, label=status)
        if front:
            xs, ys = zip(*(points[t.number] for t in front), strict=True)
            # The next point takes over where its own coordinate is reached: what the front has reached holds.
            axes.step(xs, ys, where="pre" if across.maximize else "post", color=_FRONT, linewidth=1)
            axes.scatter(xs, ys, c=_FRONT, s=40, label="Pareto front", zorder=3)
            for trial in front:
                axes.annotate(
                    str(trial.number),
                    points[trial.number],
                    textcoords="offset points",
                    xytext=(5, 5),
                    color=_INK,
                )
        if all(x is not None and x > 0 for x, _ in points.values()):
            axes.set_xscale("log")
        axes.set_xlabel(f"{across.name} [{across.unit}]")
        axes.set_ylabel(f"{up.name} [{up.unit}]")
        axes.set_title(result.name, loc="left", color=_INK, parse_math=False)
        axes.legend(frameon=False)

    return drawn((7, 4.5), draw)
