"""Answers of checks: what passes a limit, and names in words."""

import math

import pytest
import torch

from stackwise.checks.result import listed
from stackwise.checks.subject import Subject
from stackwise.subject.spec import ModelSpec

SUBJECT = Subject(ModelSpec(lambda: torch.nn.Linear(2, 2), "linear", "vectors", 2), torch.device("cpu"))


@pytest.mark.parametrize(
    "value, status",
    [(0.5, "passed"), (1.0, "passed"), (1.1, "failed"), (math.inf, "failed"), (math.nan, "failed")],
)
def test_at_most(value, status):
    result = SUBJECT.at_most(value, 1.0, where="here", advice="look")
    assert (result.status, result.limit) == (status, 1.0)
    assert (result.where, result.advice) == (("here", "look") if status == "failed" else ("", ""))


def test_failed_unless_a_condition_excuses_it():
    text = {"meaning": "It is wrong.", "advice": "Look there.", "where": "here"}
    failed = SUBJECT.failed_unless(None, 2.0, 1.0, **text)
    warned = SUBJECT.failed_unless("it is meant", 2.0, 1.0, **text)
    assert (failed.status, failed.advice) == ("failed", "Look there.")
    assert (warned.status, warned.where, warned.meaning) == ("warned", "here", "It is wrong.")
    assert warned.advice == "This is correct if it is meant. Otherwise, look there."


@pytest.mark.parametrize(
    "names, most, text",
    [
        ([], 3, ""),
        (["a", "b", "c"], 3, "a, b, c"),
        (["a", "b", "c", "d", "e"], 3, "a, b, c and 2 more"),
        (["a", "b"], 1, "a and 1 more"),
    ],
)
def test_names_in_words(names, most, text):
    assert listed(names, most) == text
