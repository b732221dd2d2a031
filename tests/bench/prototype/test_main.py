"""The command of the prototype bench: its parts, what it keeps, what it goes on with."""

import json
import sys
from functools import partial
from types import ModuleType

import pytest

from bench import claim as claim_module
from bench.claim import Bar
from bench.prototype import __main__ as bench
from bench.prototype.part import Part


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    return tmp_path


def give(value):
    yield {"value": value}


def stand_in(monkeypatch, name, values, bar_name=None):
    """A part that is as quick as can be."""

    def measure(work):
        runs = {str(value): partial(give, value) for value in values}
        found = work.complete(runs, {"part": name})
        total = sum(run["value"] for run in found.values())
        bar = Bar(bar_name or f"{name}: total", None if work.missing else float(total), 3.0)
        return Part({"total": total}, (bar,), None, tuple(work.missing))

    module = ModuleType(f"bench.prototype.{name}")
    module.measure = measure
    monkeypatch.setitem(sys.modules, f"bench.prototype.{name}", module)


def record_of(results, quick=False):
    [path] = results.rglob("prototype-quick.json" if quick else "prototype.json")
    return json.loads(path.read_text())


def test_parts_are_kept_beside_each_other(results, monkeypatch, capsys):
    stand_in(monkeypatch, "ranks", [1, 2])
    stand_in(monkeypatch, "lengths", [1])
    assert bench.main(["--only", "ranks", "--jobs", "1"]) == 0
    assert bench.main(["--only", "lengths", "--jobs", "1"]) == 1  # its bar is missed
    record = record_of(results)
    assert {name: of["total"] for name, of in record["figures"].items()} == {"ranks": 3, "lengths": 1}
    assert [(bar["name"], bar["verdict"]) for bar in record["bars"]] == [
        ("ranks: total", "PASS"),
        ("lengths: total", "SHORT"),
    ]
    assert sorted(path.name for path in results.rglob("*.jsonl")) == [
        "prototype-lengths.jsonl",
        "prototype-ranks.jsonl",
    ]
    assert "bar ranks: total" in capsys.readouterr().out


def test_runs_are_not_thrown_away_by_leaving_out_resume(results, monkeypatch, capsys):
    stand_in(monkeypatch, "ranks", [1, 2])
    bench.main(["--only", "ranks"])
    with pytest.raises(SystemExit):
        bench.main(["--only", "ranks"])
    assert "go on with --resume, or take the file away" in capsys.readouterr().err


def test_a_bench_goes_on_where_its_time_was_over(results, monkeypatch, capsys):
    stand_in(monkeypatch, "ranks", [1, 2])
    assert bench.main(["--only", "ranks", "--minutes", "0"]) == 0
    record = record_of(results)
    assert record["figures"]["ranks"]["missing"] == ["1", "2"]
    assert [bar["verdict"] for bar in record["bars"]] == ["NOT MEASURED"]
    assert "2 runs are still to be made" in capsys.readouterr().out
    bench.main(["--only", "ranks", "--resume"])
    record = record_of(results)
    assert record["figures"]["ranks"]["missing"] == []
    assert [bar["verdict"] for bar in record["bars"]] == ["PASS"]


def test_a_quick_bench_begins_anew(results, monkeypatch):
    for values in ([1, 2], [3]):
        stand_in(monkeypatch, "ranks", values)
        assert bench.main(["--quick", "--only", "ranks"]) == 0
    [store] = results.rglob("prototype-quick-ranks.jsonl")
    assert len(store.read_text().splitlines()) == 1
    assert record_of(results, quick=True)["quick"]


def test_a_bar_says_which_part_it_is_of(results, monkeypatch):
    stand_in(monkeypatch, "ranks", [1], bar_name="total")
    with pytest.raises(ValueError, match="its name has to begin with 'ranks:'"):
        bench.main(["--only", "ranks"])


@pytest.mark.parametrize(
    "arguments, message",
    [(["--only", "ranks,rank"], "--only: got rank; allowed: ranks"), (["--jobs", "0"], "--jobs: got 0")],
    ids=["part", "jobs"],
)
def test_what_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_parts_come_in_their_order(results, monkeypatch, capsys):
    for name in ("ranks", "search"):
        stand_in(monkeypatch, name, [3])
    bench.main(["--quick", "--only", "search,ranks"])
    said = capsys.readouterr().out
    assert said.index("-- ranks") < said.index("-- search")


@pytest.mark.slow
def test_quick_goes_through_all_parts(results):
    assert bench.main(["--quick"]) in (0, 1)  # it proves nothing: bars may be missed
    record = record_of(results, quick=True)
    assert list(record["figures"]) == list(bench.PARTS)
    assert all(of["missing"] == [] for of in record["figures"].values())
    assert {bar["name"].partition(":")[0] for bar in record["bars"]} == set(bench.PARTS)
    counts = {bar["name"]: bar["verdict"] for bar in record["bars"] if bar["name"].startswith("lengths:")}
    assert set(counts.values()) == {"PASS"}
