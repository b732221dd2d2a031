"""The tables of the prototype bench, as pages have them."""

import json

import pytest

from bench import claim as claim_module
from bench import marked_tables
from bench.prototype import __main__ as bench
from bench.prototype import table


def bar_of(name, value, verdict):
    return {"name": name, "value": value, "limit": 0.8, "at_most": False, "verdict": verdict}


RECORD = {
    "bars": [
        {"name": "ranks: Spearman of loss", "value": 0.9, "limit": 0.8, "at_most": False, "verdict": "PASS"},
        {
            "name": "lengths: planted",
            "value": None,
            "limit": 1.0,
            "at_most": False,
            "verdict": "NOT MEASURED",
        },
    ],
    "figures": {},
}


def test_every_part_has_rows():
    assert set(table.ROWS) == set(bench.PARTS)


def test_bars_of_a_part():
    assert "Spearman" in table.part_bars("ranks", RECORD)
    assert "planted" not in table.part_bars("ranks", RECORD)


def test_a_part_that_was_not_run_is_told():
    with pytest.raises(
        ValueError, match=r"no figures of lengths; `python -m bench.prototype --only lengths`"
    ):
        table.part_tables("lengths", RECORD)


def test_what_was_not_run_is_not_drawn(tmp_path):
    assert table.draw_all(RECORD, tmp_path) == []


def test_a_page_has_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(marked_tables, "ROOT", tmp_path)
    monkeypatch.setattr(marked_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "MARKS", {"README.md": {"prototype": marked_tables.bar_rows}})
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "prototype.json").write_text(json.dumps(RECORD))
    page = "before\n<!-- prototype -->\nold\n<!-- end of prototype -->\nbehind\n"
    (tmp_path / "README.md").write_text(page)
    made = table.written("README.md")
    assert "| ranks: Spearman of loss | 0.900 | at least 0.8 |" in made
    assert made.startswith("before\n")
    assert made.endswith("behind\n")
    assert "old" not in made
    assert tmp_path != claim_module.RESULTS
