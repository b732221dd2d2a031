"""Plots: equal drawings are equal SVG texts, and a drawing of a page fits any page and colour mode."""

import sys
from xml.etree import ElementTree as ET

import pytest

from stackwise.report.plot import ACCENT, INK, Plot, label_text, style_axes, svg_plot, write_svg

mpl = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.figure")  # a run of pytester drops modules that it imports


def line(figure):
    figure.subplots().plot([1, 2, 3], label="a $line$")


def drawing(figure):
    axes = figure.subplots()
    axes.plot([1, 2, 3], "o", color=ACCENT)
    axes.set_title("a title", color=INK)
    style_axes(figure)


class TestSvgPlot:
    def test_equal_drawings_are_equal_texts(self):
        text = svg_plot((4, 3), line)
        assert text == svg_plot((4, 3), line)
        assert text != svg_plot((4, 3), line, font_size=12)
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert ET.fromstring(text).get("width") == f"{4 * 72}pt"

    def test_settings_of_matplotlib_are_unchanged(self):
        before = dict(mpl.rcParams)
        svg_plot((4, 3), line)
        assert dict(mpl.rcParams) == before
        pyplot = sys.modules.get("matplotlib.pyplot")
        assert pyplot is None or not pyplot.get_fignums()

    def test_missing_extra_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ImportError, match=r"a plot needs matplotlib: pip install 'stackwise\[report\]'"):
            svg_plot((4, 3), line)


def test_file_is_written_into_a_new_folder(tmp_path):
    path = write_svg(str(tmp_path / "new" / "a.svg"), "<svg/>")
    assert path == tmp_path / "new" / "a.svg"
    assert path.read_text() == "<svg/>"


@pytest.mark.parametrize("name", ["a.png", "svg", "a.svg.gz"])
def test_file_with_another_ending_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"path: got '.*'; allowed: a name ending in \.svg"):
        write_svg(tmp_path / name, "<svg/>")
    assert not list(tmp_path.iterdir())


class TestDrawingOfAPage:
    def test_has_a_name_and_the_width_of_the_page(self):
        root = ET.fromstring(Plot("Loss & norm", drawing).svg("p"))
        assert (root.tag, root.get("role"), root.get("aria-label")) == ("svg", "img", "Loss & norm")
        assert root.get("viewBox") is not None
        assert root.get("width") is None

    def test_has_the_colours_and_the_font_of_the_page(self):
        text = Plot("a", drawing).svg("p")
        assert "var(--accent)" in text and "var(--ink)" in text
        assert "#" not in text.replace("#p-", "").replace("url(#", "")
        assert "DejaVu" not in text

    def test_has_ids_that_begin_with_the_prefix(self):
        root = ET.fromstring(Plot("a", drawing).svg("p"))
        ids = {element.get("id") for element in root.iter()} - {None}
        links = {element.get("href") for element in root.iter()} - {None}
        assert ids and links
        assert all(each.startswith("p-") for each in ids)
        assert {link.removeprefix("#") for link in links} <= ids

    @pytest.mark.parametrize("name", ["a$b_{$", r"\frac{$1", "x\x00\n<&>", "漢字 🙂", "long_name_" * 20])
    def test_has_labels_of_any_text(self, name):
        root = ET.fromstring(Plot("a", lambda figure: figure.subplots().set_title(label_text(name))).svg("p"))
        shown = "".join(root.itertext())
        assert name.replace("\x00\n", "  ")[-43:] in shown
