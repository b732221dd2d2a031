"""The zoo: each bug moves what it is said to move, is caught by its family, and its clean twin is not."""

import importlib
from pathlib import Path

import pytest
import torch

from stackwise.checks import check_model, check_trainer
from stackwise.checks.check import select_checks
from stackwise.spec import ModelSpec
from tests.zoo.mutant import MUTANTS

for path in sorted(Path(__file__).parent.glob("*.py")):
    if not path.stem.startswith("test_"):
        importlib.import_module(f"tests.zoo.{path.stem}")

TWINS = {mutant.twin_name: mutant.twin for mutant in MUTANTS.values()}
# Each of these starts processes of its own.
SLOW = {"distributed"}
MUTANT_NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if SLOW & set(mutant.family) else name
    for name, mutant in MUTANTS.items()
]


def ask(subject, families=None, suite="full"):
    asks, run = ("model", check_model) if isinstance(subject, ModelSpec) else ("trainer", check_trainer)
    checks = None
    if families is not None:
        checks = [c.name for c in select_checks(suite="full", asks=asks) if c.family in families]
        assert checks, families
    return run(subject, checks=checks, suite=suite)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("name", MUTANT_NAMES)
def test_mutant(name):
    mutant = MUTANTS[name]
    subject, twin = mutant.make(), mutant.twin()
    observed = mutant.observable(twin)
    assert equal(observed, mutant.observable(mutant.twin())), "the twin's observable is not steady"
    assert not equal(observed, mutant.observable(subject)), "the bug moves nothing"
    results = ask(subject, mutant.family)
    assert not [r for r in results if r.status == "error"], results
    assert [r for r in results if r.status == "failed"], results


@pytest.mark.parametrize("suite", ["fast", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TWINS)
def test_clean_twin(name, suite):
    results = ask(TWINS[name](), suite=suite)
    assert not [str(r) for r in results if not r.ok]
    assert [r for r in results if r.status == "passed"]
