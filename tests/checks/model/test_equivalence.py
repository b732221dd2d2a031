"""Unexpected exceptions: a variation, or a pair of variations, raises an exception that is no refusal."""

import pytest
import torch
from torch import nn

from stackwise import check_model
from stackwise.checks.model import equivalence
from tests.zoo.gpt import GPT, spec_of


@pytest.fixture(autouse=True)
def _few_variations(only_variations):
    """Explore the variations that matter here: less than a second."""
    only_variations({"batch", "documents", "mask_of_ones", "compiled"})


def refusing(act):
    """Return a model that calls `act` if it gets a mask and documents."""

    class Refusing(GPT):
        def visible(self, T, past, keep, documents):
            if keep is not None and documents is not None:
                act()
            return super().visible(T, past, keep, documents)

    return spec_of(Refusing)


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: torch.ones(2) + torch.ones(3), "RuntimeError: The size of tensor a (2)"),
        (lambda: nn.Linear(2, 2).wieght, "AttributeError: 'Linear' object has no attribute 'wieght'"),
        (lambda: None.shape, "AttributeError: 'NoneType' object has no attribute 'shape'"),
    ],
)
def test_an_exception_of_a_pair_is_a_warning(act, message):
    [result] = check_model(refusing(act), checks=["unexpected_exceptions"])
    assert result.status == "warned"
    assert "documents" in result.where
    assert message in result.meaning


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, AssertionError, RuntimeError, KeyError])
def test_an_exception_that_the_model_raises_itself_is_a_refusal(error):
    def act():
        raise error("a mask and documents are not supported")

    [result] = check_model(refusing(act), checks=["unexpected_exceptions"])
    assert result.status == "passed"


def test_an_exception_of_one_variation_is_a_warning():
    class Raising(GPT):
        def embed(self, input_ids):
            return super().embed(input_ids) / (1 // (len(input_ids) <= 1))

    [result] = check_model(spec_of(Raising), checks=["unexpected_exceptions"])
    assert (result.status, result.where) == ("warned", "batch")
    assert "ZeroDivisionError" in result.meaning


def test_an_exception_of_some_values_is_a_warning():
    """Two rows run, and three do not."""

    class Raising(GPT):
        def embed(self, input_ids):
            return super().embed(input_ids) / (1 // (len(input_ids) <= 2))

    [result] = check_model(spec_of(Raising), checks=["unexpected_exceptions"], seed=3)
    assert result.status == "warned"
    assert "seed=3" in result.advice


def test_an_exception_in_the_own_dtype_is_a_warning():
    class Raising(GPT):
        def embed(self, input_ids):
            x = super().embed(input_ids)
            return x / (1 // (len(input_ids) <= 1 or x.dtype == torch.float64))

    [result] = check_model(spec_of(Raising), checks=["unexpected_exceptions"])
    assert result.status == "warned"
    assert "own_dtype=True" in result.advice


def test_a_model_that_takes_all_pairs():
    [result] = check_model(spec_of(), checks=["unexpected_exceptions"])
    assert result.status == "passed"
    assert "pairs" in result.meaning


class ShiftedByTheCompiler(GPT):
    """A compiled call changes the next one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))

    def embed(self, input_ids):
        if torch.compiler.is_compiling():
            self.shift.add_(0.1)
        return super().embed(input_ids) + self.shift


class NotCompiled(GPT):
    @torch.compiler.disable
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    "build, status", [(GPT, "passed"), (ShiftedByTheCompiler, "failed"), (NotCompiled, "not applicable")]
)
def test_compiled_outputs(build, status):
    [result] = check_model(spec_of(build), checks=["compiled_outputs"])
    assert result.status == status, result


class NeedsThree(GPT):
    """In a batch of two rows, a mask removes the border between documents."""

    def visible(self, T, past, keep, documents):
        together = keep is not None and documents is not None and len(documents) == 2
        return super().visible(T, past, keep, None if together else documents)


def test_many_compositions_find_what_few_do_not(monkeypatch):
    [few] = check_model(spec_of(NeedsThree), checks=["mask_of_ones"])
    monkeypatch.setattr(equivalence, "_MANY", 400)
    [many] = check_model(spec_of(NeedsThree), checks=["many_compositions"])
    assert (few.status, many.status) == ("passed", "failed")
