"""Page: what stands in the file, in which order, and that it needs nothing else."""

import re
import sys
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from stackwise.report.page import Finding, Page, Row, Section, Table
from stackwise.report.plot import Plot

HOSTILE = "<script>alert('x')</script> & \"quoted\""


class Elements(HTMLParser):
    """All elements of a page with their attributes, and its text."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def page(*sections, **changes):
    given = {"title": "Checks of gpt", "verdict": "FAIL", "status": "failed", "summary": "1 failed, 2 passed"}
    return Page(**given | changes, sections=sections)


def line(figure):
    figure.subplots().plot([1, 2], label="a")


FAILURE = Finding(
    "failed",
    "causality",
    "gpt",
    "",
    "It moved.",
    "position 5",
    "measured 1, limit 0",
    "Look at the mask.",
    "stackwise check m:f",
)
PASSED = Section(
    "Passed checks", tables=[Table("Passed", ["check"], [Row(["padding"], "passed")])], folded=True, count=1
)


def test_page_starts_with_the_verdict_and_the_summary():
    text = Elements(page(Section("Failed checks", [FAILURE]), PASSED).html()).text
    # The names of sections are also in the list of links.
    places = [text.rindex(part) for part in ("FAIL ", "1 failed, 2 passed", "It moved.", "Passed checks 1\n")]
    assert places == sorted(places)


def test_finding_shows_location_evidence_advice_and_command():
    html = page(Section("Failed checks", [FAILURE])).html()
    for text in (
        "position 5",
        "measured 1, limit 0",
        "Look at the mask.",
        "<code>stackwise check m:f</code>",
    ):
        assert text in html


def test_folded_section_is_closed_and_others_are_open():
    elements = Elements(page(Section("Failed checks", [FAILURE]), PASSED).html())
    [fold] = elements.of("details")
    assert "open" not in fold


@pytest.mark.parametrize("field", ["title", "subject", "message", "where", "evidence", "advice", "command"])
def test_text_of_a_finding_is_escaped(field):
    finding = Finding(**{"status": "failed", "title": "a", field: HOSTILE})
    elements = Elements(page(Section("Failed", [finding])).html())
    assert len(elements.of("script")) == 1, "only the script of the page"
    assert HOSTILE in elements.text


def test_text_of_page_section_and_table_is_escaped():
    table = Table(HOSTILE, [HOSTILE], [Row([HOSTILE], "passed", HOSTILE)])
    section = Section(HOSTILE, tables=[table], notes=[HOSTILE])
    changes = {"title": HOSTILE, "verdict": HOSTILE, "summary": HOSTILE, "environment": {"cpu": HOSTILE}}
    elements = Elements(page(section, **changes).html())
    assert len(elements.of("script")) == 1
    assert elements.text.count(HOSTILE) >= 10


def test_text_of_a_plot_is_escaped():
    pytest.importorskip("matplotlib")

    def draw(figure):
        figure.subplots().set_title(HOSTILE, parse_math=False)

    elements = Elements(page(Section("Runs", plots=[Plot(HOSTILE, draw, caption=HOSTILE)])).html())
    assert len(elements.of("script")) == 1
    [svg] = elements.of("svg")
    assert svg["aria-label"] == HOSTILE


def test_page_loads_nothing():
    pytest.importorskip("matplotlib")
    html = page(Section("Runs", [FAILURE], plots=[Plot("a", line)])).html()
    assert "http:" not in html
    assert "https:" not in html
    elements = Elements(html)
    assert not any(elements.of(tag) for tag in ("img", "iframe", "object", "embed"))
    assert [each["href"] for each in elements.of("link")] == ["data:,"]
    assert not any("src" in attributes for _, attributes in elements.elements)
    assert "@import" not in html


def test_ids_are_unique_with_two_plots():
    pytest.importorskip("matplotlib")
    html = page(Section("Runs", plots=[Plot("a", line), Plot("b", line)]), PASSED).html()
    ids = [attributes["id"] for _, attributes in Elements(html).elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)|href=\"#(plot[^\"]+)\"", html)) != set()
    for pair in re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", html):
        assert (pair[0] or pair[1]) in ids


def test_page_without_matplotlib_says_how_to_get_plots(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = page(Section("Runs", plots=[Plot("a", line)]), PASSED).html()
    elements = Elements(html)
    assert not elements.of("svg")
    assert not elements.of("figure")
    assert "To get them, run: pip install 'stackwise[report]'" in elements.text
    assert "padding" in elements.text


def test_page_without_plots_does_not_ask_for_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install" not in page(PASSED).html()


def test_environment_is_shown_in_words():
    environment = {
        "cpu_count": 8,
        "gpu": {"name": "H100", "memory_bytes": 80 * 2**30, "driver": None},
        "omp": None,
    }
    text = Elements(page(environment=environment).html()).text
    assert "Cores: 8" in text
    assert "GPU: H100, memory 80 GiB" in text
    assert "None" not in text


def test_counts_are_of_findings_and_of_rows_without_one():
    runs = Table("Runs", ["run"], [Row(["a"], "failed"), Row(["b"], "passed"), Row(["c"], "neutral")])
    elements = Elements(page(Section("Failed", [FAILURE]), Section("Runs", tables=[runs]), PASSED).html())
    text = " ".join(elements.text.split())
    assert "1 failed 2 passed 1 measured" in text


def test_templates_are_in_the_package():
    folder = files("stackwise.report") / "templates"
    assert {each.name for each in folder.iterdir()} == {"page.html.j2", "page.css", "page.js"}


def test_write_creates_the_folder(tmp_path):
    page().write(tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").read_text().startswith("<!doctype html>")
