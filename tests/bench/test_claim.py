"""A claim on file: bars, figures, and a row that is measured again."""

import json

import pytest

from bench import claim as claim_module
from bench.claim import Bar, Claim, interleave, ratio


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "value, at_most, verdict",
    [(1.2, False, "PASS"), (1.19, False, "SHORT"), (1.19, True, "PASS"), (1.21, True, "SHORT")],
)
def test_verdict(value, at_most, verdict):
    assert Bar("speed", value, 1.2, at_most).verdict == verdict


def test_what_was_not_measured_is_neither():
    assert Bar("speed", None, 1.2).verdict == "NOT MEASURED"


def test_a_row_measured_again_replaces_its_own_and_no_other(results):
    first = Claim("speed", quick=False, commit="one")
    first.enter(Bar("a", 1.0, 1.2), {"seconds": [1]})
    first.enter(Bar("b", 2.0, 1.2), {"seconds": [2]})
    assert first.conclude() == 1

    again = Claim("speed", quick=False, commit="two")
    again.resume()
    again.enter(Bar("a", 1.3, 1.2), {"seconds": [3]})
    assert again.conclude() == 0

    [path] = results.rglob("speed.json")
    record = json.loads(path.read_text())
    assert [(bar["name"], bar["value"], bar["verdict"]) for bar in record["bars"]] == [
        ("a", 1.3, "PASS"),
        ("b", 2.0, "PASS"),
    ]
    assert record["figures"] == {"a": {"seconds": [3]}, "b": {"seconds": [2]}}
    assert {name: each["commit"] for name, each in record["measured"].items()} == {"a": "two", "b": "one"}


def test_nothing_to_resume_is_a_beginning(results):
    claim = Claim("speed", quick=True)
    claim.resume()
    assert (claim.bars, claim.figures) == ([], {})


def test_a_row_is_on_file_as_soon_as_it_is_measured(results):
    Claim("speed", quick=True).enter(Bar("a", 1.0, 1.2))
    [path] = results.rglob("speed-quick.json")
    assert json.loads(path.read_text())["bars"][0]["value"] == 1.0


def test_ratio_is_of_a_round():
    # The machine slows down by two from round to round; the ratio does not.
    assert ratio([3.0, 6.0, 12.0], [1.0, 2.0, 4.0])["median"] == 3.0


def test_each_call_is_sampled_once_a_round():
    made = []
    samples = interleave({name: lambda n=name: made.append(n) for name in "ab"}, rounds=3, seconds=0.0)
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    rounds = [set(made[4 + 2 * i : 6 + 2 * i]) for i in range(3)]  # after two of each to warm up
    assert rounds == [{"a", "b"}] * 3
