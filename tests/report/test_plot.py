"""Plot: an SVG that fits into a page of any colour mode."""

from xml.etree import ElementTree as ET

import pytest

from stackwise.support.plot import ACCENT, INK, Plot, label_text, style_axes

pytest.importorskip("matplotlib")


def drawing(figure):
    axes = figure.subplots()
    axes.plot([1, 2, 3], "o", color=ACCENT)
    axes.set_title("a title", color=INK)
    style_axes(figure)


def test_svg_has_a_name_and_a_size_of_its_own():
    root = ET.fromstring(Plot("Loss & norm", drawing).svg("p"))
    assert (root.tag, root.get("role"), root.get("aria-label")) == ("svg", "img", "Loss & norm")
    assert root.get("viewBox") is not None
    assert root.get("width") is None


def test_colours_are_variables_of_the_style_sheet():
    text = Plot("a", drawing).svg("p")
    assert "var(--accent)" in text
    assert "var(--ink)" in text
    assert "#" not in text.replace("#p-", "").replace("url(#", "")


def test_text_has_the_font_of_the_page():
    assert "DejaVu" not in Plot("a", drawing).svg("p")


def test_ids_begin_with_the_prefix():
    root = ET.fromstring(Plot("a", drawing).svg("p"))
    ids = {element.get("id") for element in root.iter()} - {None}
    assert ids
    assert all(each.startswith("p-") for each in ids)
    links = {element.get("href") for element in root.iter()} - {None}
    assert links
    assert {link.removeprefix("#") for link in links} <= ids


@pytest.mark.parametrize("name", ["a$b_{$", r"\frac{$1", "x\x00\n<&>", "漢字 🙂", "long_name_" * 20])
def test_label_of_any_name_can_be_drawn(name):
    root = ET.fromstring(Plot("a", lambda figure: figure.subplots().set_title(label_text(name))).svg("p"))
    shown = "".join(root.itertext())
    assert name.replace("\x00\n", "  ")[-43:] in shown
