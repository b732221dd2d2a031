"""Runs of the prototype bench on file."""

import math

from bench.prototype.runs import RunStore, digest

PLAN = digest({"steps": 3})


def test_what_is_written_is_read(tmp_path):
    store = RunStore(tmp_path / "folder" / "runs.jsonl")
    assert store.read(PLAN) == {}
    values = {"loss": math.inf, "losses": [1.5, -math.inf], "by": {"a": 2}, "status": "nan"}
    store.append("one", PLAN, values, seconds=2.0)
    store.append("two", PLAN, {"loss": math.nan})
    found = store.read(PLAN)
    assert found["one"] == values
    assert math.isnan(found["two"]["loss"])
    assert "Infinity" not in store.path.read_text()
    assert "NaN" not in store.path.read_text()


def test_a_line_that_was_cut_off_is_not_read_and_spoils_no_other(tmp_path):
    store = RunStore(tmp_path / "runs.jsonl")
    store.append("one", PLAN, {"loss": 1.0})
    whole = store.path.read_text()
    store.path.write_text(whole + whole[: len(whole) // 2])
    assert store.read(PLAN) == {"one": {"loss": 1.0}}
    store.append("two", PLAN, {"loss": 2.0})
    assert store.read(PLAN) == {"one": {"loss": 1.0}, "two": {"loss": 2.0}}


def test_of_two_of_a_name_the_later_counts(tmp_path):
    store = RunStore(tmp_path / "runs.jsonl")
    for loss in (1.0, 2.0):
        store.append("one", PLAN, {"loss": loss})
    assert store.read(PLAN) == {"one": {"loss": 2.0}}


def test_runs_of_another_plan_are_not_read(tmp_path):
    store = RunStore(tmp_path / "runs.jsonl")
    store.append("one", PLAN, {"loss": 1.0})
    assert store.read(digest({"steps": 4})) == {}


def test_a_digest_is_of_values_and_not_of_their_order():
    assert digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
