"""The zoo: each bug moves what it is said to move, is caught by its family, and its clean twin is not."""

import importlib
from pathlib import Path

import pytest
import torch

from stackwise.checks import check_model, check_trainer
from stackwise.checks.check import select_checks
from stackwise.checks.variations import known_variations
from stackwise.subject.spec import ModelSpec
from tests.zoo.mutant import MUTANTS

for path in sorted(Path(__file__).parent.glob("*.py")):
    if not path.stem.startswith("test_"):
        importlib.import_module(f"tests.zoo.{path.stem}")

TWINS = {mutant.twin_name: mutant.twin for mutant in MUTANTS.values()}
FAMILIES = {
    name: {family for mutant in MUTANTS.values() if mutant.twin_name == name for family in mutant.family}
    for name in TWINS
}
FAST_FAMILIES = {check.family for asks in ("model", "trainer") for check in select_checks(asks=asks)}
QUICK_TWINS = [name for name in TWINS if FAMILIES[name] & FAST_FAMILIES]
# Those that start processes of their own, and those that are compiled as others are.
SLOW = {name for name, mutant in MUTANTS.items() if "distributed" in mutant.family} | {
    "position_only_in_memory",
    "residual_detached_while_compiling",
    "softmax_taken_apart_for_the_compiler",
}
MUTANT_NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MUTANTS]


def ask(subject, families=None, suite="full"):
    asks, run = ("model", check_model) if isinstance(subject, ModelSpec) else ("trainer", check_trainer)
    checks = None
    if families is not None:
        checks = [c.name for c in select_checks(suite=suite, asks=asks) if c.family in families]
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


def variations_of(families):
    """Return the variations of some families, and those that a finding may need or be explained by."""
    own = [each for each in known_variations().values() if each.family in families]
    return {name for each in own for name in (each.name, *each.explained_by, *each.includes)} | {
        "batch",
        "cache_parts",
    }


@pytest.mark.parametrize("name", MUTANT_NAMES)
def test_mutant(name, only_variations, monkeypatch):
    mutant = MUTANTS[name]
    only_variations(variations_of(mutant.family))
    subject, twin = mutant.make(), mutant.twin()
    observed = mutant.observable(twin)
    assert equal(observed, mutant.observable(mutant.twin())), "the twin's observable is not steady"
    assert not equal(observed, mutant.observable(subject)), "the bug moves nothing"
    # The quick checks of the family come first, then all of them, then all variations and compositions.
    if FAST_FAMILIES & set(mutant.family) and caught(ask(subject, mutant.family, "fast")):
        return
    if not caught(ask(subject, mutant.family)):
        monkeypatch.undo()
        assert caught(ask(subject, mutant.family))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_that_is_asked_everything(name):
    assert caught(ask(MUTANTS[name].make(), MUTANTS[name].family))


def caught(results):
    assert not [r for r in results if r.status == "error"], results
    return [r for r in results if r.status == "failed"]


def clean(results):
    assert not [str(r) for r in results if not r.ok]
    assert [r for r in results if r.status == "passed"]


@pytest.mark.parametrize("name", QUICK_TWINS)
def test_clean_twin_where_its_mutants_are_caught(name):
    clean(ask(TWINS[name](), FAMILIES[name], suite="fast"))


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["fast", "full"])
@pytest.mark.parametrize("name", TWINS)
def test_clean_twin(name, suite):
    clean(ask(TWINS[name](), suite=suite))
