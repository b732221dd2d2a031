"""Results: ranks, front and area by hand; tables and files that are read back."""

import csv
import io
import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from stackwise.config import StackWiseConfig
from stackwise.prototype.search import SearchResult, SearchTrial
from stackwise.prototype.search.objective import read_objectives
from stackwise.prototype.search.search_result import hypervolume


def trial(number, loss, rate, status="success", **other):
    config = StackWiseConfig.from_dict({"training": {"seed": number}})
    reason = "" if status == "success" else f"{status} at step 3"
    losses = () if loss is None else (loss,)
    return SearchTrial(
        number, {"n_layers": number}, config, status, reason, loss, losses, rate, 2**20, 1000, **other
    )


def result(*trials, objective="loss"):
    return SearchResult("mine", "search.db", read_objectives(objective), trials)


@pytest.fixture
def found():
    return result(
        trial(0, 3.0, 100.0),
        trial(1, 2.0, 50.0),
        trial(2, 2.5, 40.0),
        trial(3, 1.0, 999.0, "spiky"),
        trial(5, 2.0, 80.0),
        trial(6, None, None, "error"),
    )


def test_rank_best_and_front(found):
    assert [each.number for each in found.ranked] == [1, 5, 2, 0, 3, 6]
    assert found.best.number == 1
    assert [each.number for each in found.front] == [0, 5]
    assert [each.name for each in found.front_objectives] == ["loss", "tokens_per_second"]
    assert result(*found.trials, objective="tokens_per_second").best.number == 0
    assert result(trial(0, 1.0, 1.0, "nan")).best is None


def test_area_by_hand(found):
    # (4 - 3) x (100 - 20) where only trial 0 is, and (3 - 2) x ... : 1 * 80 + ... of the union by strips.
    assert found.hypervolume((4.0, 20.0)) == pytest.approx((100 - 20) * (4 - 3) + (80 - 20) * (3 - 2))
    assert found.hypervolume() == pytest.approx((80 - 40) * (3.0 - 2.0))
    with pytest.raises(ValueError, match="a value for each of 2 objectives"):
        found.hypervolume((4.0,))
    with pytest.raises(ValueError, match="nothing has succeeded"):
        result(trial(0, 1.0, 1.0, "nan")).hypervolume()
    with pytest.raises(ValueError, match="two of them"):
        result(*found.trials, objective=("loss", "peak_bytes", "parameters")).hypervolume()


small = st.integers(0, 5).map(float)


@given(st.lists(st.tuples(small, small), max_size=12))
def test_hypervolume_is_the_number_of_unit_squares(points):
    # With integer coordinates and a reference of (5, 5), each square belongs to the points below and left.
    squares = sum(any(x <= i and y <= j for x, y in points) for i in range(5) for j in range(5))
    assert hypervolume(points, (5.0, 5.0)) == squares


@given(st.lists(st.tuples(small, small), max_size=12))
def test_front_is_the_result_of_brute_force(points):
    def is_dominated(loss, rate):
        return any(
            other_loss <= loss and other_rate >= rate and (other_loss, other_rate) != (loss, rate)
            for other_loss, other_rate in points
        )

    found = result(*(trial(number, *point) for number, point in enumerate(points)))
    expected = [number for number, point in enumerate(points) if not is_dominated(*point)]
    assert [each.number for each in found.front] == expected


def test_markdown(found):
    lines = found.to_markdown().splitlines()
    assert lines[0] == "| trial | front | loss | tokens/s | peak | parameters | status | n_layers |"
    assert lines[2] == "| 1 |  | 2.0000 | 50 | 1 MiB | 1,000 | success | 1 |"
    assert lines[3] == "| 5 | * | 2.0000 | 80 | 1 MiB | 1,000 | success | 5 |"
    assert lines[-1] == "| 6 |  |  |  | 1 MiB | 1,000 | error: error at step 3 | 6 |"
    assert len(found.to_markdown(last=2).splitlines()) == 4
    assert found.table(last=2).row_count == 2
    assert str(found).splitlines() == ["mine: 6 trials, 4 succeeded", "  best loss 2 in trial 1: n_layers=1"]


def test_csv_is_read_back(found):
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [int(row["number"]) for row in rows] == [0, 1, 2, 3, 5, 6]
    assert [row["front"] for row in rows] == ["1", "0", "0", "0", "1", "0"]
    assert (rows[0]["loss"], rows[0]["n_layers"], rows[5]["loss"]) == ("3.0", "0", "")


def test_files(found, tmp_path):
    names = [path.name for path in found.save(tmp_path / "out")]
    assert names == ["trials.md", "trials.csv", "search.json", "report.html", "best.yaml", "front.svg"]
    plain = json.loads((tmp_path / "out/search.json").read_text())
    assert (plain["best"], plain["front"]) == (1, [0, 5])
    assert tuple(SearchTrial.from_dict(each) for each in plain["trials"]) == found.trials
    assert StackWiseConfig.from_yaml(tmp_path / "out/best.yaml") == found.best.config
    svg = (tmp_path / "out/front.svg").read_text()
    texts = {element.text for element in ET.fromstring(svg).iter() if element.tag.endswith("text")}
    assert {"loss [nats]", "tokens_per_second [tokens/s]", "mine", "Pareto front", "0", "5"} <= texts
    found.plot(tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == svg


def test_files_without_matplotlib_are_all_but_the_plot(found, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    names = [path.name for path in found.save(tmp_path / "out")]
    assert names == ["trials.md", "trials.csv", "search.json", "report.html", "best.yaml"]
    with pytest.raises(ImportError, match=r"pip install 'stackwise\[report\]'"):
        found.plot(tmp_path / "front.svg")


def test_page_shows_the_best_first_and_the_front(found):
    page = found.page()
    assert (page.verdict, page.status) == ("loss 2", "passed")
    assert page.summary == "6 trials, 4 succeeded; best in trial 1: n_layers=1"
    [section] = page.sections
    assert [plot.title for plot in section.plots] == ["Trials and Pareto front"]
    [table] = section.tables
    assert [(row.cells[0], row.label, row.status) for row in table.rows][-2:] == [
        ("3", "spiky", "warning"),
        ("6", "error", "warning"),
    ]


def test_a_csv_has_all_digits_of_what_was_drawn(found):
    drawn = replace(
        found.trials[0], values={"training.optimizer.lr": 0.0012345678901234567, "model.softcap": None}
    )
    [row] = csv.DictReader(io.StringIO(result(drawn).to_csv()))
    assert float(row["training.optimizer.lr"]) == 0.0012345678901234567
    assert row["model.softcap"] == "null"
    assert "| 0.001235 | null |" in result(drawn).to_markdown()


def test_nothing_succeeded(tmp_path):
    nothing = result(trial(0, None, None, "nan"))
    names = ["trials.md", "trials.csv", "search.json", "report.html"]
    assert [path.name for path in nothing.save(tmp_path)] == names
    assert nothing.page().verdict == "NONE SUCCEEDED"
    with pytest.raises(ValueError, match="trials: got 0; allowed: one or more with loss"):
        nothing.plot(tmp_path / "none.svg")
    assert result().to_markdown().startswith("| trial | front |")


def test_what_is_no_one_line_stays_a_cell(found):
    odd = replace(found.trials[0], reason="a\nb | c", status="error", peak_bytes=64 * 1024)
    row = result(odd).to_markdown().splitlines()[2:]
    assert row == ["| 0 |  | 3.0000 | 100 | 64 KiB | 1,000 | error: a b \\| c | 0 |"]


def test_brackets_of_a_reason_are_no_markup(found):
    told = "RuntimeError: [enforce fail at alloc_cpu.cpp:124] no file in [/data/x] here"
    odd = replace(found.trials[0], reason=told, status="error")
    shown = io.StringIO()
    Console(file=shown, width=400).print(result(odd).table())
    assert told in shown.getvalue()


def test_a_plot_of_another_kind_is_refused(found, tmp_path):
    with pytest.raises(ValueError, match=r"path: got .*front\.png'; allowed: a name ending in \.svg"):
        found.plot(tmp_path / "front.png")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_leaves_the_old_file(found, tmp_path, monkeypatch):
    found.save(tmp_path)
    before = (tmp_path / "trials.md").read_text()
    write = Path.write_text

    def full(path, text, **options):
        write(path, text[:10], **options)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        result(*found.trials[:2]).save(tmp_path)
    assert (tmp_path / "trials.md").read_text() == before
