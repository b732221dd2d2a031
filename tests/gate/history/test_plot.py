"""The plot: an SVG with every result, each change and each verdict, the same bytes each time."""

import sys
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta

import pytest

from stackwise.gate.history import HistoryError
from stackwise.gate.history.plot import series_svg
from stackwise.gate.history.point import Point, Standing
from stackwise.gate.history.reference import ReferenceTime
from stackwise.gate.verdict import Verdict

SVG = "{http://www.w3.org/2000/svg}"


def points(values, reference=None):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    verdicts = [Verdict.PASS, None, Verdict.REGRESSED]
    return [
        Point(
            number, start + timedelta(days=number), f"{number:04d}c", "main", 0.01, value, reference,
            verdicts[number % 3], Standing.PENDING,
        )
        for number, value in enumerate(values)
    ]  # fmt: skip


def texts(svg):
    return [each.text for each in ET.fromstring(svg).iter(f"{SVG}text")]


def marks(svg):
    """Places of results: what is drawn by reference inside of a line."""
    root = ET.fromstring(svg)
    return [each for each in root.iter(f"{SVG}use") if "clip-path" in _parent(root, each).attrib]


def _parent(root, child):
    return next(each for each in root.iter() if child in list(each))


def test_every_result_and_change_is_drawn():
    values = [0.0, 0.01] * 10 + [0.2, 0.21] * 10
    svg = series_svg(points(values), "test_step[$x$] & <b> (time)")
    assert len(marks(svg)) == 40
    found = texts(svg)
    assert "test_step[$x$] & <b> (time)" in found
    assert found.count("0020c") == 1
    assert {"PASS", "REGRESSED", "not judged"} <= set(found) and "INCONCLUSIVE" not in found
    assert "result, 2026-01-01 to 2026-02-09" in found
    assert series_svg(points(values), "test_step[$x$] & <b> (time)") == svg


def test_the_reference_is_drawn_where_there_is_one():
    referenced = points([0.0, 0.1, 0.2], ReferenceTime(1e-3, 2e-3))
    assert {"gemm", "copy", "reference, %"} <= set(texts(series_svg(referenced, "t")))
    assert "gemm" not in texts(series_svg(points([0.0]), "t"))


def test_results_of_another_kind_are_left_out():
    mixed = points([5.0] * 4) + points([0.0] * 3, ReferenceTime(1e-3, 2e-3))
    assert len(marks(series_svg(mixed, "t"))) == 3


def test_no_points_are_refused():
    with pytest.raises(ValueError, match="points: got 0"):
        series_svg([], "t")


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HistoryError, match=r"a plot needs matplotlib: pip install 'stackwise\[report\]'"):
        series_svg(points([0.0]), "t")
