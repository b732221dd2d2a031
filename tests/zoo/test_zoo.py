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

TWINS = {mutant.twin.__name__: mutant.twin for mutant in MUTANTS.values()}


def ask(subject, families=None):
    asks, run = ("model", check_model) if isinstance(subject, ModelSpec) else ("trainer", check_trainer)
    checks = None
    if families is not None:
        checks = [c.name for c in select_checks(suite="full", asks=asks) if c.family in families]
        assert checks, families
    return run(subject, checks=checks, suite="full")


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name):
    mutant = MUTANTS[name]
    subject, twin = mutant.make(), mutant.twin()
    observed = mutant.observable(twin)
    assert equal(observed, mutant.observable(mutant.twin())), "the twin's observable is not steady"
    assert not equal(observed, mutant.observable(subject)), "the bug moves nothing"
    results = ask(subject, mutant.family)
    assert not [r for r in results if r.status == "error"], results
    assert [r for r in results if r.status == "failed"], results


@pytest.mark.parametrize("name", TWINS)
def test_clean_twin(name):
    results = ask(TWINS[name]())
    assert not [str(r) for r in results if not r.ok]
    assert [r for r in results if r.status == "passed"]
