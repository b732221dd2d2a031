"""The plot of lengths: what can be read off the SVG."""

import builtins
import math
import re
from xml.etree import ElementTree as ET

import pytest

from stackwise.stability import StabilityRun, StepRecord
from stackwise.stability.lengths import FirstUnstable, LengthSweep
from stackwise.stability.lengths.instability import Instability, SeedRun
from stackwise.stability.lengths.plot import length_svg
from stackwise.stability.lengths.point import LengthPoint

pytest.importorskip("matplotlib")
GREEN, AMBER, RED = "#2a7f4f", "#c98a1b", "#c23b2b"


def point(seq_len, norms, kind=None, seeds=3):
    records = [StepRecord(step, 2.0, norm, 1e-3, False) for step, norm in enumerate(norms)]
    run = StabilityRun("m", seq_len, records, (), (), (), True, len(records))
    instabilities = () if kind is None else (Instability(kind, 1, "so"),)
    runs = tuple(
        SeedRun(seed, run, instabilities if kind != "spike" or seed == 0 else ()) for seed in range(seeds)
    )
    return LengthPoint("m", seq_len, 1, 2.0, 1.0, 1.0, 0.5, runs)


POINTS = [
    point(512, [1.0, 1.1, 0.9]),
    point(2048, [1.0, 8.0, 1.0], "spike"),
    point(4096, [1.0, math.nan], "non-finite"),
    LengthPoint("m", 8192, 1, stopped="not run"),
]


def texts(svg):
    return [node.text for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_lengths_verdicts_and_the_find_are_told():
    svg = length_svg(POINTS, "a model", 4096)
    said = texts(svg)
    assert {"a model", "512", "2048", "4096", "stable", "spiky", "unstable"} <= set(said)
    assert "8192" not in said
    assert any(text.strip() == "first unstable: 4096" for text in said if text)
    assert all(colour in svg for colour in (GREEN, AMBER, RED))


def test_dots_are_where_the_norms_are():
    svg = length_svg([point(64, [1.0] * 3, seeds=1), point(256, [100.0] * 3, seeds=1)], "m")
    places = re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill: #2a7f4f', svg)
    (x_short, y_low), (x_long, y_high) = (tuple(map(float, place)) for place in places[:2])
    assert x_short < x_long
    assert y_high < y_low  # SVG counts from above


def test_same_points_are_the_same_file():
    assert length_svg(POINTS, "m", 4096) == length_svg(POINTS[::-1], "m", 4096)
    assert length_svg(POINTS, "m", 4096) != length_svg(POINTS, "m")


def test_files(tmp_path):
    sweep = LengthSweep("m", POINTS, None, 0.5, 4.0)
    path = sweep.plot(tmp_path / "new" / "lengths.svg")
    assert path.read_text() == length_svg(POINTS, "m", 4096)
    found = FirstUnstable("m", 512, 8192, 512, 4096, POINTS, [], [])
    assert found.plot(str(tmp_path / "find.svg")).read_text() == path.read_text()
    with pytest.raises(ValueError, match=r"path: got '.*lengths.png'; allowed: a name ending in .svg"):
        sweep.plot(tmp_path / "lengths.png")
    with pytest.raises(ValueError, match="points: got 1; allowed: at least one length that was run"):
        length_svg(POINTS[-1:], "m")


def test_missing_extra_is_named(monkeypatch):
    imported = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'stackwise\[report\]'"):
        length_svg(POINTS, "m")
