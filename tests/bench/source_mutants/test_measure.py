"""Mutants are drawn repeatably, executed as modules of their library, and counted."""

import importlib
import sys

import pytest

from bench import detection_table
from bench.claim import Claim
from bench.isolated import isolated
from bench.source_mutants import measure
from bench.source_mutants.measure import (
    by_operator,
    draw,
    install,
    measure_source_mutants,
    source_mutant_bars,
)
from bench.source_mutants.operators import Mutant, mutants
from bench.source_mutants.oracle import Answer, ask

LLAMA = "transformers/llama"
RECORDS = {
    "a | kept_state | f | 1 | x": {"kind": "decidable", "found_by": ["history"]},
    "a | kept_state | f | 2 | x": {"kind": "decidable", "found_by": []},
    "a | kept_state | f | 3 | x": {"kind": "another model"},
    "a | off_by_one | f | 4 | x": {"kind": "crashes"},
    "a | off_by_one | f | 5 | x": {"kind": "raises in a way"},
}


def test_draw_is_repeatable_and_takes_turns(monkeypatch):
    source = "def f(x, y):\n    a = g(x, y)\n    b = a[1:] - y.float()\n    return b\n"
    monkeypatch.setattr(measure, "_source", lambda name: source)
    lines = {"one": [2, 3], "two": [3]}
    drawn = draw(lines)
    assert drawn == draw(lines) != draw(lines, seed=1)
    kinds = [(name, mutant.operator) for name, mutant in drawn]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))


def test_install_executes_the_mutant_where_its_library_uses_it(monkeypatch, tmp_path):
    """The module has a relative import, and the package has imported its function."""
    source = "from .one import ONE\n\ndef f(x):\n    return x[:ONE]\n"
    house = tmp_path / "mutated_house"
    house.mkdir()
    (house / "__init__.py").write_text("from .model import f\n")
    (house / "one.py").write_text("ONE = 1\n")
    (house / "model.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(measure, "_module", lambda name: "mutated_house.model")
    monkeypatch.setattr(measure, "_source", lambda name: source)
    (mutant,) = (each for each in mutants(source, {4}) if each.variant.endswith("+1"))
    house = importlib.import_module("mutated_house")
    original = house.f
    try:
        install("a model", mutant)
        assert (house.f("abc"), original("abc")) == ("ab", "a")
        assert house.f is sys.modules["mutated_house.model"].f
    finally:
        for name in ("mutated_house", "mutated_house.one", "mutated_house.model"):
            del sys.modules[name]


def test_oracle_judges_a_mutant_of_transformers():
    """A view in place of a transposition mixes positions and heads."""
    pytest.importorskip("transformers")
    (answers,) = isolated(lambda: iter([ask(measure._make(LLAMA))])).values
    source = measure._source(LLAMA)
    mutant = next(
        each
        for each in mutants(source, range(1000))
        if each.function == "LlamaAttention.forward" and "view in place" in each.variant
    )
    ended = isolated(
        lambda: measure._measured(LLAMA, mutant, answers, {}, lambda make, first: iter([{"check": "asked"}]))
    )
    assert ended.error is None
    assert ended.values[0]["kind"] == "decidable"


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        ({"batch": Answer(None, None, "ValueError"), "prefix": Answer([1.0], 1.0)}, "crashes"),
        ({"prefix": Answer(None, None, "ValueError")}, "raises in a way"),
        ({"batch": Answer([1.0], 0.0), "prefix": Answer([1.0], 1.0)}, "decidable"),
        ({"batch": Answer([2.0], 0.0), "prefix": Answer([2.0], 0.0)}, "another model"),
        ({"batch": Answer([1.0], 0.0), "prefix": Answer([1.0], 0.0)}, "no change"),
    ],
)
def test_kind_of_a_mutant(monkeypatch, mutant, kind):
    originals = {"batch": Answer([1.0], 0.0), "prefix": Answer([1.0], 0.0)}
    monkeypatch.setattr(measure, "_make", lambda name: None)
    monkeypatch.setattr(measure, "install", lambda name, mutant: None)
    monkeypatch.setattr(measure, "ask", lambda make: mutant)
    verdict, *_ = measure._measured("model", None, originals, {}, lambda make, first: iter(()))
    assert verdict["kind"] == kind


def test_mutant_is_found_by_the_first_new_finding(monkeypatch):
    """A check that has the same finding for the unchanged model finds nothing."""
    monkeypatch.setattr(measure, "_make", lambda name: None)
    monkeypatch.setattr(measure, "install", lambda name, mutant: None)
    monkeypatch.setattr(
        measure, "ask", lambda make: {"batch": Answer([1.0], 0.0), "prefix": Answer([1.0], 1.0)}
    )

    def answers(make, first):
        for check, meaning in (("always", "same"), ("sometimes", "another"), ("causality", "later")):
            yield {"check": check, "status": "failed", "meaning": meaning}

    failed = {"always": "same", "sometimes": "one"}
    originals = {"batch": Answer([1.0], 0.0), "prefix": Answer([1.0], 0.0)}
    _, *found = measure._measured("model", None, originals, failed, answers)
    assert found == ["sometimes"]


def test_counts_of_operators():
    counts = by_operator(RECORDS)
    assert counts["kept_state"] == {
        "drawn": 3,
        "changes": 3,
        "decidable": 2,
        "another model": 1,
        "found": 1,
        "found at first sight": 1,
    }
    assert (counts["all"]["drawn"], counts["all"]["crashes"], counts["all"]["changes"]) == (5, 1, 3)
    assert "wrong_dtype" not in counts


def test_bars_are_the_number_of_mutants_and_the_share_found():
    bars = source_mutant_bars({"mutants": RECORDS})
    assert [(bar.value, bar.limit) for bar in bars] == [(3.0, 2000.0), (0.5, 0.97)]
    assert source_mutant_bars({}) == []


def test_table_has_a_row_per_operator():
    table = detection_table.source_mutants({"figures": {"source_mutants": {"mutants": RECORDS}}})
    assert "| kept state | 3 | 3 | 2 | 1 | 1 | 0 | 0 |" in table
    assert table.endswith("| all | 5 | 3 | 2 | 1 | 1 | 1 | 1 |")


def test_mutants_are_measured_again_only_if_they_were_missed(monkeypatch):
    mutant = Mutant("off_by_one", "f", 2, "x")
    texts = {line: f"model | {' | '.join(map(str, mutant._replace(line=line)))}" for line in (2, 3, 4, 5)}
    asked = []

    def measured(name, mutant, originals, failed, answers):
        asked.append(mutant.line)
        yield {"kind": "decidable", "contradictions": {"prefix": 1.0}}
        yield from (check for check in ("always", "sometimes") if check not in failed)

    def in_this_process(functions, *, jobs, seconds):
        for name, function in functions.items():
            yield name, measure.Ended(list(function()), None, 0.5)

    monkeypatch.setattr(measure, "MODELS", ("model",))
    monkeypatch.setattr(measure, "_subjects", dict)
    monkeypatch.setattr(measure, "_original", lambda name: iter([[2], {}]))
    monkeypatch.setattr(measure, "_failed", lambda name, answers: iter([("always", "same")]))
    monkeypatch.setattr(measure, "_measured", measured)
    monkeypatch.setattr(measure, "all_isolated", in_this_process)
    monkeypatch.setattr(
        measure, "draw", lambda lines: [("model", mutant._replace(line=line)) for line in texts]
    )
    claim = Claim("detection", quick=True)
    monkeypatch.setattr(claim, "write", lambda: None)
    missed = {"kind": "decidable", "found_by": []}
    mutants = {texts[2]: {"kind": "crashes"}, texts[4]: missed, texts[5]: missed | {"missed_at_first": True}}
    claim.figures = {"source_mutants": {"originals": {}, "mutants": mutants}}
    measure_source_mutants(claim, 1, lambda make: iter(()))
    assert asked == [4, 5, 3]
    assert mutants[texts[3]]["found_by"] == mutants[texts[4]]["found_by"] == ["sometimes"]
    assert [texts[line] for line in (4, 5)] == [
        name for name in mutants if "missed_at_first" in mutants[name]
    ]
