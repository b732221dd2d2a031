"""Combined calls: a pair of variations that raises, though the model takes each of them alone."""

import pytest

from stackwise import check_model
from tests.zoo.gpt import GPT, spec_of

pytestmark = pytest.mark.usefixtures("few_compositions")


def refusing(error):
    """Return a model that raises an exception if it gets a mask and documents."""

    class Refusing(GPT):
        def visible(self, T, past, keep, documents):
            if keep is not None and documents is not None:
                raise error
            return super().visible(T, past, keep, documents)

    return spec_of(Refusing)


def test_an_exception_of_a_pair_is_a_warning():
    [result] = check_model(refusing(RuntimeError("sizes do not match")), checks=["combined_calls"])
    assert result.status == "warned"
    assert "documents" in result.where
    assert "RuntimeError: sizes do not match" in result.meaning


@pytest.mark.parametrize(
    "error", [ValueError("no mask with documents"), NotImplementedError(), AssertionError()]
)
def test_a_refusal_is_none(error):
    [result] = check_model(refusing(error), checks=["combined_calls"])
    assert result.status == "passed"


def test_a_model_that_takes_all_pairs():
    [result] = check_model(spec_of(), checks=["combined_calls"])
    assert result.status == "passed"
    assert "pairs" in result.meaning
