"""Comparison of two revisions: stored values, renames and intended changes."""

import json
from collections.abc import Iterator

import pytest

from bench.same import collect
from bench.same.__main__ import differences, renamed


@pytest.mark.parametrize(
    ("base", "current", "unexplained"),
    [
        ({"zoo/a/loss": "passed"}, {"zoo/a/loss": "passed"}, []),
        ({"zoo/a/loss": "passed"}, {"zoo/a/loss": "failed"}, ["zoo/a/loss"]),
        ({"zoo/a/loss": "passed"}, {}, ["zoo/a/loss"]),
        ({}, {"zoo/a/loss": None}, ["zoo/a/loss"]),
        ({"names/a": 1}, {"names/a": 2}, []),
    ],
    ids=["equal", "changed", "removed", "added", "intended"],
)
def test_differences(base, current, unexplained):
    intended, found = differences(base, current, {"names/*": "renamed on purpose"})
    assert found == unexplained
    assert set(intended.values()) <= {"renamed on purpose"}


def test_renames_apply_to_whole_parts_of_a_name():
    values = {"zoo/a/old": 1, "zoo/older/old_check": 2}
    assert renamed(values, {"old": "new"}) == {"zoo/a/new": 1, "zoo/older/old_check": 2}


def test_interrupted_collection_continues(tmp_path, monkeypatch):
    calls = []

    def observation(name) -> Iterator[dict[str, object]]:
        yield {"value": name}

    def group():
        calls.append(1)
        return {name: lambda name=name: observation(name) for name in ("one", "two")}

    monkeypatch.setattr(collect, "GROUPS", {"group": group})
    path = tmp_path / "values.jsonl"
    done = {"name": "group/one", "seconds": 1.0, "values": {"value": "stored", "error": None}}
    path.write_text(json.dumps(done) + '\n{"name": "gro')
    collect.collect(path, ["group"], jobs=1)
    values = collect.read(path)
    assert values["group/one/value"] == "stored"
    assert values["group/two/value"] == "two" and values["group/two/error"] is None


def test_error_of_an_observation_is_stored(tmp_path, monkeypatch):
    def broken():
        yield {"first": 1}
        raise RuntimeError("lost")

    monkeypatch.setattr(collect, "GROUPS", {"group": lambda: {"broken": broken}})
    collect.collect(tmp_path / "values.jsonl", ["group"], jobs=1)
    values = collect.read(tmp_path / "values.jsonl")
    assert values["group/broken/first"] == 1 and "RuntimeError: lost" in values["group/broken/error"]
