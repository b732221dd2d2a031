"""The tables and curves of what bench.gate wrote."""

import json

import pytest

from bench.gate import table
from bench.gate.ablation import judge
from bench.gate.findings import summary
from bench.gate.runs import Run
from bench.gate.tools import OURS, TOOLS
from bench.gate.tools.tool import Outcome


def runs():
    found = []
    for block in range(20):
        effect = "up05" if block % 2 else "same"
        for tool in TOOLS:
            rules = ("gate", "flagged") if tool.name == OURS else ("mean:5%",)
            alarmed = effect == "up05" if tool.name == OURS else block % 4 == 0
            said = dict.fromkeys(rules, "REGRESSED" if alarmed else "PASS")
            estimates = dict.fromkeys(rules, 0.05 if alarmed else 0.0)
            raw = {"base": {"mean": 1.0}, "head": {"mean": 1.06 if alarmed else 1.0}}
            outcome = Outcome(said, estimates, raw)
            found.append(Run(block, tool.name, "idle", effect, 12.0, 1.0, "", "", {"gemm": outcome}))
    return found


@pytest.fixture
def record():
    designs = {"in turns": {"calls": {"gemm": judge([0.001, -0.001] * 10)}, "differences": {}}}
    ablations = {"idle": {"series": 2, "designs": designs}}
    # As JSON gives it back.
    return json.loads(json.dumps({"figures": {"rules": summary(runs()), "ablations": ablations}}))


def cells(table):
    return {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in table.splitlines()
    }


def test_rates(record):
    rows = cells(table.rates(record))
    assert rows[""][:2] == ["false alarms", "finds +1%"]
    assert rows["**stackwise**"] == ["0.0% [0.0%, 30.8%] of 10", "-", "-", "100.0%", "-", "-", "0.0%", "12.0"]
    assert rows["pytest-benchmark, mean:5%"][0] == "50.0% [18.7%, 81.3%] of 10"
    assert rows["pytest-benchmark, mean:5%"][3] == "0.0%"
    assert "**stackwise, before its confirmation**" in rows
    assert "pytest-benchmark, stored, mean:5%" in rows


def test_in_short_has_one_rule_of_ours(record):
    rows = cells(table.rates_in_short(record))
    assert sum(name.startswith("**stackwise") for name in rows) == 1
    assert "pytest-benchmark, mean:5%" in rows
    assert "pyperf, mean:5%" not in rows


def test_ablations(record):
    rows = cells(table.ablations(record))
    assert rows["in turns, idle"][:2] == ["0.10%", "+0.00%"]
    assert rows["in turns, idle"][3].startswith("0.0% of 5")


def test_curves_are_drawn_alike(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        table.draw(runs(), "up05", tmp_path / name)
    one = (tmp_path / "one.svg").read_text()
    assert one == (tmp_path / "two.svg").read_text()
    assert "alarms where nothing has changed" in one


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="up10: no block was come through by all tools"):
        table.draw(runs(), "up10", tmp_path / "one.svg")
