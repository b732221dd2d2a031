"""Plots: matplotlib figures as reproducible SVG files, and as drawings of an HTML page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from stackwise.support.arguments import require
from stackwise.support.files import write_whole

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

__all__ = [
    "ACCENT",
    "BAD",
    "GOOD",
    "GRID",
    "INK",
    "MUTED",
    "WARN",
    "Plot",
    "draw_legend",
    "label_text",
    "style_axes",
    "svg_plot",
    "write_svg",
]

# Colours of drawings. On a page each becomes a variable of the style sheet with a light and a dark value.
INK, MUTED, GRID, ACCENT, BAD, WARN, GOOD = (
    "#1f2430",
    "#8a93a3",
    "#d5dae1",
    "#1f6fb4",
    "#c23b2b",
    "#b86e00",
    "#2a7d4f",
)
_PAPER = "#ffffff"
_VARIABLES = {
    "#000000": "--ink",
    INK: "--ink",
    MUTED: "--plot-muted",
    GRID: "--line",
    ACCENT: "--accent",
    BAD: "--bad",
    WARN: "--warn",
    GOOD: "--good",
    _PAPER: "--paper",
}
_MOST_LABEL = 44  # characters
_COLOUR = re.compile("|".join(_VARIABLES))
_SHORT_FONT = re.compile(r"font: ((?:\w+ )*?)([\d.]+)px [^;]*")  # matplotlib 3.10
_FAMILY = re.compile(r"font-family: [^;]*;? ?")


def svg_plot(size: tuple[float, float], draw: Callable[[Figure], object], *, font_size: float = 9) -> str:
    """Return a figure as SVG text. Equal figures have equal texts.

    Args:
        size: width and height of the figure, in inches.
        draw: function that draws on the figure.
        font_size: size of the font in points.

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


@dataclass(frozen=True)
class Plot:
    """Drawing of a page.

    Attributes:
        title: heading above the drawing, and its name for screen readers.
        draw: function that draws on the matplotlib figure. It is called once. Black becomes the text colour
            of the page.
        height: height of the drawing in inches. The width is 6.6 inches.
        caption: explanation of the drawing in a sentence; "": no explanation.
        status: status of the record that the drawing belongs to, for the filter of the page.
    """

    title: str
    draw: Callable[[Figure], object]
    height: float = 3.0
    caption: str = ""
    status: str = "neutral"

    def svg(self, prefix: str) -> str:
        """Return the drawing as an `<svg>` element that can stand in an HTML page.

        Args:
            prefix: prefix of all ids in the drawing. It must be unique within the page.

        Raises:
            ImportError: matplotlib is not installed.
        """
        with warnings.catch_warnings():
            # The page draws text with fonts of the reader's system, which may have the glyph.
            warnings.filterwarnings("ignore", r"Glyph .* missing from font")
            text = svg_plot((6.6, self.height), self.draw, font_size=10)
        root = ET.fromstring(text)  # noqa: S314 - matplotlib's output
        for parent in list(root.iter()):
            for child in list(parent):
                # A style element would apply to the entire page, and the page's style sheet has these rules.
                if child.tag.endswith(("metadata", "style")):
                    parent.remove(child)
        for element in root.iter():
            # HTML needs no namespaces, and the name of a namespace looks like a link.
            element.tag = element.tag.rpartition("}")[2]
            attributes = dict(element.attrib)
            element.attrib.clear()
            for name, value in attributes.items():
                element.set(name.rpartition("}")[2], _adapted(name.rpartition("}")[2], value, prefix))
        root.set("role", "img")
        root.set("aria-label", self.title)
        for name in ("width", "height", "version"):
            root.attrib.pop(name, None)
        return ET.tostring(root, encoding="unicode")


def label_text(name: str) -> str:
    """Return a name as a label of a drawing: shortened at its beginning, and never rendered as a formula."""
    name = "".join(character if character.isprintable() else " " for character in name)
    short = name if len(name) <= _MOST_LABEL else f"…{name[1 - _MOST_LABEL :]}"
    return short.replace("$", r"\$")


def draw_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Draw a legend in one line above all axes."""
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=len(labels),
        frameon=False,
        labelcolor=INK,
        handlelength=1.4,
        columnspacing=1.1,
    )


def style_axes(figure: Figure) -> None:
    """Hide the top and right spines of all axes, and draw the grid below the data."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(color=MUTED, labelcolor=INK)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)


def _adapted(name: str, value: str, prefix: str) -> str:
    """Return the value of an attribute with ids that are unique, and with the page's colours and font."""
    match name:
        case "id":
            return f"{prefix}-{value}"
        case "href":
            return value.replace("#", f"#{prefix}-", 1)
        case "style":
            value = _COLOUR.sub(lambda match: f"var({_VARIABLES[match[0]]})", value)
            value = _SHORT_FONT.sub(lambda match: _size(match[1], match[2]), value)
            return _FAMILY.sub("", value)
    return value.replace("url(#", f"url(#{prefix}-")


def _size(style: str, size: str) -> str:
    weight = "; font-weight: bold" if "bold" in style or "700" in style else ""
    return f"font-size: {size}px{weight}"
