"""Unexpected exceptions: a variation, or a pair of variations, raises an exception that is no refusal."""

import pytest
import torch

from stackwise import check_model
from tests.zoo.gpt import GPT, spec_of


@pytest.fixture(autouse=True)
def _few_variations(only_variations):
    """Explore the variations that matter here: less than a second."""
    only_variations({"batch", "documents", "mask_of_ones"})


def refusing(error):
    """Return a model that raises an exception if it gets a mask and documents."""

    class Refusing(GPT):
        def visible(self, T, past, keep, documents):
            if keep is not None and documents is not None:
                raise error
            return super().visible(T, past, keep, documents)

    return spec_of(Refusing)


def test_an_exception_of_a_pair_is_a_warning():
    [result] = check_model(refusing(RuntimeError("sizes do not match")), checks=["unexpected_exceptions"])
    assert result.status == "warned"
    assert "documents" in result.where
    assert "RuntimeError: sizes do not match" in result.meaning


@pytest.mark.parametrize("error", [ValueError("unsupported"), NotImplementedError(), AssertionError()])
def test_a_refusal_is_none(error):
    [result] = check_model(refusing(error), checks=["unexpected_exceptions"])
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
