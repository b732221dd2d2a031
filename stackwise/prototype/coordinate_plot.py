"""Coordinate plot: sizes of activations over the width as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stackwise.checks.probe.coordinate import Slope
from stackwise.report.plot import BAD, MUTED, svg_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["coordinate_svg"]


def coordinate_svg(slopes: Sequence[Slope], widths: Sequence[int], worst: Slope, title: str) -> str:
    """Return an SVG of sizes at the start and changes after each step over the width, on logarithmic axes.

    The text is deterministic. A line is the geometric mean over seeds of one module. Colours from light to
    dark show the order in which modules run, and the module of `worst` is red. Values that are not finite are
    not drawn.

    Args:
        slopes: slopes of the modules.
        widths: widths of the sizes.
        worst: one of the slopes.
        title: title above all panels.

    Raises:
        ImportError: matplotlib is not installed.
    """
    judged = [slope for slope in slopes if slope.judged]
    modules = list(dict.fromkeys(slope.module for slope in slopes))
    steps = sorted({slope.step for slope in judged})

    def draw(figure: Figure) -> None:
        colours = _colours(modules) | {worst.module: BAD}
        lines: dict[str, Any] = {}
        for panel, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
            shown = [slope for slope in judged if slope.step == step]
            for slope in shown:
                sizes = [size if math.isfinite(size) else math.nan for size in slope.sizes]
                width, front = (2.2, 3) if slope.module == worst.module else (1.0, 2)
                style = {"color": colours[slope.module], "lw": width, "zorder": front}
                (line,) = panel.plot(widths, sizes, "o-", ms=2.5, **style)
                lines.setdefault(slope.where, line)
            panel.set_title(shown[0].what, loc="left", fontsize="medium")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(list(widths), [str(width) for width in widths], minor=False)
            panel.set_xlabel("times as wide")
            panel.grid(color=MUTED, lw=0.3, alpha=0.5)
            panel.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("mean absolute value")
        figure.suptitle(title, x=0.01, ha="left", parse_math=False)
        figure.legend(list(lines.values()), list(lines), loc="outside right upper", frameon=False, fontsize=6)

    return svg_plot((2.3 * len(steps) + 3.4, max(3.2, 0.17 * len(modules) + 0.8)), draw, font_size=8)


def _colours(modules: Sequence[str]) -> dict[str, Any]:
    """Return a colour for each module, from light to dark."""
    import matplotlib as mpl

    shade = mpl.colormaps["viridis_r"]
    return {module: shade(0.1 + 0.85 * i / max(1, len(modules) - 1)) for i, module in enumerate(modules)}
