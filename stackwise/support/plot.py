"""Plots: matplotlib figures as reproducible SVG text and files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stackwise.support.arguments import require
from stackwise.support.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["svg_plot", "write_svg"]


def svg_plot(size: tuple[float, float], draw: Callable[[Figure], object], *, font_size: float = 9) -> str:
    """Return a figure as SVG text. Equal figures have equal texts.

    Args:
        size: width and height of the figure, in inches.
        draw: function that draws on the figure.
        font_size: in points.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plot needs matplotlib: pip install 'stackwise[report]'") from None
    # With a fixed salt and no date, equal figures have equal texts.
    with mpl.rc_context({"svg.hashsalt": "stackwise", "svg.fonttype": "none", "font.size": font_size}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def write_svg(path: str | Path, text: str) -> Path:
    """Write SVG text atomically and return the path. Create the folder if it does not exist.

    Raises:
        ValueError: the name does not end in .svg.
        OSError: the file cannot be written.
    """
    path = Path(path)
    require(path.suffix == ".svg", "path", str(path), "a name ending in .svg")
    write_whole(path, text)
    return path
