"""SVG: drawings of matplotlib as text that is the same each time, and as files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stackwise.argument import require
from stackwise.text_file import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["drawn", "write_svg"]


def drawn(size: tuple[float, float], draw: Callable[[Figure], object], *, font_size: float = 9) -> str:
    """What `draw` puts on a figure, as the text of an SVG; equal drawings are equal texts.

    Args:
        size: width and height of the figure, in inches.
        draw: called once, with the figure.
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
    # A hash salt in place of a random one.
    with mpl.rc_context({"svg.hashsalt": "stackwise", "svg.fonttype": "none", "font.size": font_size}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def write_svg(path: str | Path, text: str) -> Path:
    """Write the text of an SVG, in the place of what `path` has, whose folder is made where there is none.

    Returns:
        `path`.

    Raises:
        ValueError: another ending than .svg.
        OSError: it cannot be written.
    """
    path = Path(path)
    require(path.suffix == ".svg", "path", str(path), "a name ending in .svg")
    write_whole(path, text)
    return path
