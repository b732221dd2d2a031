"""Coordinate plot: sizes of activations over the width as an SVG, a panel a step and a line a module."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from stackwise.checks.probe.coordinate import Slope

__all__ = ["coordinate_svg"]

_MUTED, _WORST = "#8a93a3", "#c23b2b"


def coordinate_svg(slopes: Sequence[Slope], widths: Sequence[int], worst: Slope, title: str) -> str:
    """Sizes at the start, and changes after each step, over the width, both on logarithmic axes.

    The same text each time. A line is the geometric mean over seeds of one module, from light to dark in the
    order in which modules run; the module of `worst` is red. What is not finite is not drawn.

    Args:
        slopes: of the modules.
        widths: of their sizes.
        worst: one of them.
        title: above all panels.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plot needs matplotlib: pip install 'stackwise[report]'") from None
    modules = list(dict.fromkeys(slope.module for slope in slopes))
    steps = sorted({slope.step for slope in slopes if slope.judged})
    shade = mpl.colormaps["viridis_r"]
    colours: dict[str, Any] = {
        m: shade(0.1 + 0.85 * i / max(1, len(modules) - 1)) for i, m in enumerate(modules)
    }
    colours[worst.module] = _WORST
    # A hash salt in place of a random one, so that equal checks are equal files.
    with mpl.rc_context({"svg.hashsalt": "stackwise", "svg.fonttype": "none", "font.size": 8}):
        height = max(3.2, 0.17 * len(modules) + 0.8)
        figure = Figure(figsize=(2.3 * len(steps) + 3.4, height), layout="constrained")
        FigureCanvasSVG(figure)
        lines: dict[str, Any] = {}
        for panel, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
            drawn = [slope for slope in slopes if slope.judged and slope.step == step]
            for slope in drawn:
                sizes = [size if math.isfinite(size) else math.nan for size in slope.sizes]
                width, front = (2.2, 3) if slope.module == worst.module else (1.0, 2)
                style = {"color": colours[slope.module], "lw": width, "zorder": front}
                (line,) = panel.plot(widths, sizes, "o-", ms=2.5, **style)
                lines.setdefault(slope.where, line)
            panel.set_title(drawn[0].what, loc="left", fontsize="medium")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(list(widths), [str(width) for width in widths], minor=False)
            panel.set_xlabel("times as wide")
            panel.grid(color=_MUTED, lw=0.3, alpha=0.5)
            panel.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("mean absolute value")
        figure.suptitle(title, x=0.01, ha="left", parse_math=False)
        figure.legend(list(lines.values()), list(lines), loc="outside right upper", frameon=False, fontsize=6)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()
