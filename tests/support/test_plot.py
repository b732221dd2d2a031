"""Drawings as SVG: equal ones are equal texts, and what is asked for under another ending is refused."""

import sys
from xml.etree import ElementTree as ET

import pytest

from stackwise.support.plot import svg_plot, write_svg


def line(figure):
    figure.subplots().plot([1, 2, 3], label="a $line$")


def test_equal_drawings_are_equal_texts():
    mpl = pytest.importorskip("matplotlib")
    before = dict(mpl.rcParams)
    text = svg_plot((4, 3), line)
    assert text == svg_plot((4, 3), line)
    assert text != svg_plot((4, 3), line, font_size=12)
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert ET.fromstring(text).get("width") == f"{4 * 72}pt"
    assert dict(mpl.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"a plot needs matplotlib: pip install 'stackwise\[report\]'"):
        svg_plot((4, 3), line)


def test_files(tmp_path):
    path = write_svg(str(tmp_path / "new" / "a.svg"), "<svg/>")
    assert path == tmp_path / "new" / "a.svg"
    assert path.read_text() == "<svg/>"
    for name in ("a.png", "svg", "a.svg.gz"):
        with pytest.raises(ValueError, match=r"path: got '.*'; allowed: a name ending in \.svg"):
            write_svg(tmp_path / name, "<svg/>")
    assert [each.name for each in tmp_path.iterdir()] == ["new"]
