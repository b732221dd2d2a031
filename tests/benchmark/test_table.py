"""The table: its rows, and the forms that it is written in."""

import csv
import io
import json
from pathlib import Path

import pytest

from stackwise.benchmark.table import ComparisonTable

ROW = {
    "architecture": "rack",
    "workload": "train 4 x 128",
    "mode": "train",
    "parameters": 12_345,
    "tokens_per_second": 40_960.4,
    "speed_up": 1.25,
    "speed_up_low": 1.2,
    "speed_up_high": 1.3,
    "p50_seconds": 0.0125,
    "p99_seconds": None,
    "memory_bytes": 3 * 2**20,
    "mfu": 0.4123,
    "mbu": None,
    "note": None,
}
BASE = ROW | {
    "architecture": "llama",
    "speed_up": 1.0,
    "speed_up_low": 1.0,
    "speed_up_high": 1.0,
    "mfu": None,
    "note": "a|b\nc",
}
DECODE = ROW | {"workload": "decode 1 x 128", "mode": "decode", "mbu": 0.5, "mfu": None, "speed_up_low": None}


@pytest.fixture
def table():
    return ComparisonTable((ROW, BASE, DECODE), "llama", {"rounds": 4}, {"cpu": "some"})


def test_rows_and_columns(table):
    assert len(table) == 3
    assert list(table) == [ROW, BASE, DECODE]
    assert table.columns == list(ROW)
    assert table["architecture"] == ["rack", "llama", "rack"]
    assert table["mbu"] == [None, None, 0.5]
    with pytest.raises(KeyError, match="'speed'; columns: architecture, workload"):
        table["speed"]


def test_where(table):
    found = table.where(architecture="rack", mode="decode")
    assert list(found) == [DECODE]
    assert (found.baseline, found.settings, found.environment) == ("llama", {"rounds": 4}, {"cpu": "some"})
    with pytest.raises(ValueError, match="column: got 'speed'; allowed: 'architecture', 'workload'"):
        table.where(speed=1)


def test_where_without_a_match_keeps_its_columns(table):
    found = table.where(architecture="gpt")
    assert (len(found), found.columns, found["speed_up"]) == (0, table.columns, [])
    assert len(found.where(mode="train")) == 0
    header, line = found.to_markdown().splitlines()
    assert header.startswith("| architecture | workload |")
    assert header.count("|") == line.count("|")
    assert found.to_csv() == ",".join(table.columns) + "\n"


def test_rows_have_the_same_columns():
    with pytest.raises(ValueError, match=r"rows\[1\]: got \['architecture'\]; allowed: the columns"):
        ComparisonTable((ROW, {"architecture": "llama"}), "llama")


def cells(line):
    return [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]


def test_markdown_shows_what_is_known(table):
    header, rule, *rows = table.to_markdown().splitlines()
    names = cells(header)
    assert names == [
        "architecture",
        "workload",
        "parameters",
        "tokens/s",
        "speed-up",
        "95 %",
        "p50 ms",
        "memory",
        "MFU",
        "MBU",
        "note",
    ]
    assert len(cells(rule)) == len(names)
    shown = [dict(zip(names, cells(row), strict=True)) for row in rows]
    assert shown[0] == {
        "architecture": "rack",
        "workload": "train 4 x 128",
        "parameters": "12,345",
        "tokens/s": "40,960",
        "speed-up": "1.250",
        "95 %": "1.200 to 1.300",
        "p50 ms": "12.500",
        "memory": "3 MiB",
        "MFU": "41.2%",
        "MBU": "-",
        "note": "-",
    }
    assert shown[1]["note"] == "a/b c"
    assert shown[2]["95 %"] == "-"


def test_how_the_work_was_done_is_shown_where_it_differs():
    told = [row | {"execution": "attention: sdpa"} for row in (ROW, BASE, DECODE)]
    assert "execution" not in ComparisonTable(tuple(told), "llama").to_markdown()
    told[2]["execution"] = "decode: with a cache"  # the only row of its workload
    assert "execution" not in ComparisonTable(tuple(told), "llama").to_markdown()
    told[1]["execution"] = "attention: eager"
    header, _, *rows = ComparisonTable(tuple(told), "llama").to_markdown().splitlines()
    assert cells(header)[-2:] == ["execution", "note"]
    assert [cells(row)[-2] for row in rows] == ["attention: sdpa", "attention: eager", "decode: with a cache"]


def test_little_memory_is_not_written_as_none():
    table = ComparisonTable((ROW | {"memory_bytes": 51_200},), "rack")
    assert "| 50 KiB |" in str(table)


def test_as_text(table):
    assert str(table) == table._repr_markdown_() == table.to_markdown()
    assert repr(table) == (
        "ComparisonTable(3 rows: rack, llama at train 4 x 128, decode 1 x 128; baseline 'llama')"
    )
    assert repr(ComparisonTable((), "llama")) == "ComparisonTable(0 rows; baseline 'llama')"


def test_markdown_of_chosen_columns(table):
    lines = table.to_markdown(["architecture", "p99_seconds", "mode"]).splitlines()
    assert cells(lines[0]) == ["architecture", "p99 ms", "mode"]
    assert cells(lines[2]) == ["rack", "-", "train"]
    with pytest.raises(ValueError, match="column: got 'p98'"):
        table.to_markdown(["p98"])


def test_csv_has_everything(table, tmp_path):
    text = table.to_csv(tmp_path / "new" / "t.csv")
    assert (tmp_path / "new" / "t.csv").read_text() == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[0] == {key: "" if value is None else str(value) for key, value in ROW.items()}
    assert rows[1]["note"] == "a|b\nc"


def test_json_comes_back(table, tmp_path):
    text = table.to_json(tmp_path / "t.json")
    assert json.loads(text)["rows"][0]["p99_seconds"] is None
    assert ComparisonTable.from_json(tmp_path / "t.json") == table


@pytest.mark.parametrize("write", ["to_csv", "to_json"])
def test_a_file_is_whole_or_as_it_was(table, tmp_path, monkeypatch, write):
    path = tmp_path / "t"
    path.write_text("old")

    def full(self, other):
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        getattr(table, write)(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_without_rows():
    table = ComparisonTable((), "llama")
    assert (len(table), table.columns) == (0, [])
    assert table.to_csv() == "\n"


def test_pandas_is_asked_for_by_name(table, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas: pip install pandas"):
        table.to_pandas()


def test_a_data_frame(table):
    pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert list(frame.columns) == table.columns
    assert list(frame["architecture"]) == ["rack", "llama", "rack"]


def test_matplotlib_is_asked_for_by_its_extra(table, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot needs matplotlib: pip install 'stackwise\[report\]'"):
        table.plot(tmp_path / "t.svg")


@pytest.mark.parametrize(
    ("name", "column", "text"),
    [
        ("t.pdf", "speed_up", "path: got .*; allowed: a name ending in .svg or .png"),
        ("t.svg", "architecture", "column: got 'architecture'; allowed: 'parameters'"),
        ("t.svg", "p99_seconds", "column: got 'p99_seconds'"),
    ],
)
def test_what_cannot_be_drawn(table, tmp_path, name, column, text):
    with pytest.raises(ValueError, match=text):
        table.plot(tmp_path / name, column)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("column", ["speed_up", "tokens_per_second", "mbu"])
def test_a_drawing(table, tmp_path, column):
    pytest.importorskip("matplotlib")
    path = table.plot(tmp_path / "new" / "t.svg", column)
    text = path.read_text()
    assert "<svg" in text
    assert table.plot(tmp_path / "t.png", column).read_bytes().startswith(b"\x89PNG")


def test_page_has_speed_ups_with_intervals(table, tmp_path):
    page = table.page()
    assert (page.title, page.verdict) == ("Comparison with llama", "MEASURED")
    assert page.summary == (
        "2 architectures, baseline llama; fastest at train 4 x 128: rack (1.250 times); "
        "fastest at decode 1 x 128: rack (1.250 times)"
    )
    measurements, settings = page.sections
    assert [plot.title for plot in measurements.plots] == ["Speed compared with llama"]
    [found] = measurements.tables
    assert found.rows[0].cells[found.header.index("95 %")] == "1.200 to 1.300"
    assert settings.folded
    assert table.page().write(tmp_path / "t.html").read_text().count("<tr data-entry") == 3


def test_page_without_rows_is_a_page(table):
    assert "Comparison with llama" in table.where(architecture="gpt").page().html()
