"""What is asked of a model at a task."""

import json
import math

import numpy as np
import pytest

from stackwise.quality import Requirement, TaskResult


def result(metric, values, weights=None):
    names = tuple(map(str, range(len(values))))
    return TaskResult("task", metric, weights is not None, names, np.array(values, dtype=float), weights)


def right(*answers):
    """Return a result by whether each question is answered right."""
    return result("acc", answers)


def bits(*each):
    return result("bits_per_byte", each, np.full(len(each), 8.0))


@pytest.mark.parametrize(("share", "verdict"), [(0.5, "met"), (0.75, "met"), (0.76, "missed"), (0.0, "met")])
def test_at_least(share, verdict):
    found = Requirement(at_least=share).judge(right(True, True, True, False))
    assert (found.verdict, found.metric, found.value, found.examples) == (verdict, "acc", 0.75, 4)
    assert found.reason == f"acc 0.7500, at least {share:g} is asked"


@pytest.mark.parametrize(("limit", "verdict"), [(2.0, "met"), (1.9, "missed")])
def test_at_most(limit, verdict):
    found = Requirement(at_most=limit).judge(bits(1.0, 3.0))
    assert found.verdict == verdict
    assert found.value == pytest.approx(2.0)


def test_beside_a_baseline_few_examples_tell_nothing_and_many_do():
    asked = Requirement(within_of_baseline=0.02)
    for n, verdict in ((10, "inconclusive"), (4000, "met")):
        model, base = [True, False] * n, [True, False] * n
        model[0], base[1] = False, True  # worse in two
        assert asked.judge(right(*model), right(*base)).verdict == verdict
    found = asked.judge(right(*[True, False, False] * 100), right(*[True, True, False] * 100))
    assert found.verdict == "missed"
    assert found.reason.startswith("acc -0.3333 [-0.3")
    assert found.reason.endswith("on 300 examples: surely worse by more than 0.02")
    assert asked.judge(right(*[True] * 300), right(*[False] * 300)).verdict == "met"


def test_of_bits_less_is_better():
    asked = Requirement(within_of_baseline=0.1)
    low, high = [1.0 + 0.01 * (i % 7) for i in range(50)], [2.0 + 0.01 * (i % 5) for i in range(50)]
    assert asked.judge(bits(*low), bits(*high)).verdict == "met"
    assert asked.judge(bits(*high), bits(*low)).verdict == "missed"
    assert asked.judge(bits(1.0, 3.0), bits(2.0, 1.5)).verdict == "inconclusive"


def test_a_single_text_tells_nothing_and_is_told_in_json():
    found = Requirement(within_of_baseline=0.1).judge(bits(1.0), bits(2.0))
    assert found.verdict == "inconclusive"
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["value"] == pytest.approx(1.0)
    assert (told["difference"]["low"], told["difference"]["wins"]) == ("-inf", 1)
    found = Requirement(at_most=1.0).judge(bits(math.inf))
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["value"] == "inf"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_missed_and_not_open(value):
    """More examples would not help."""
    found = Requirement(within_of_baseline=0.1).judge(bits(value, 1.0), bits(2.0, 1.0))
    assert (found.verdict, found.reason) == ("missed", f"bits_per_byte is {value}, which is no finite number")
    assert Requirement(at_most=5.0).judge(bits(value)).verdict == "missed"
    with pytest.raises(ValueError, match=f"bits_per_byte of the baseline: got {value}; allowed: a finite"):
        Requirement(within_of_baseline=0.1).judge(bits(2.0), bits(value))


def test_the_worst_counts():
    asked = Requirement(at_least=0.9, within_of_baseline=0.5)
    assert asked.judge(right(*[True, False] * 100), right(*[True, False] * 100)).verdict == "missed"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Requirement(), "requirement: got"),
        (lambda: Requirement(at_least=1.5), "at_least: got 1.5; allowed: a share"),
        (lambda: Requirement(at_most=-1), "at_most: got -1"),
        (lambda: Requirement(within_of_baseline=math.nan), "within_of_baseline: got nan"),
        (lambda: Requirement(at_least=0.5, level=1), "level: got 1"),
        (lambda: Requirement(at_least=0.5).judge(bits(1.0)), "bits per byte: use at_most"),
        (lambda: Requirement(at_most=0.5).judge(right(True)), "right answers: use at_least"),
        (
            lambda: Requirement(within_of_baseline=0.5).judge(right(True)),
            "baseline: got None; allowed: a model",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
