"""Difference of two outputs, and the decision if it is more than rounding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from stackwise.checks import Subject
from stackwise.checks.probe.difference import (
    Finding,
    absolute_difference,
    measure_difference,
    relative_difference,
    same_bits,
    variation,
)
from stackwise.subject.spec import ModelSpec

NAN, INF = math.nan, math.inf
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)
OUTPUTS = hnp.arrays(np.float32, (2, 3, 2), elements=st.floats(-1e6, 1e6, width=32))


def absolute(a, b):
    return absolute_difference(torch.tensor(a), torch.tensor(b)).tolist()


def output_of(*values):
    """An output of one row and one channel."""
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_finite_values(pairs):
    a, b = (list(column) for column in zip(*pairs, strict=True))
    assert absolute(a, b) == np.abs(np.array(a) - np.array(b)).tolist()


@pytest.mark.parametrize("same", [NAN, INF, -INF])
def test_equal_and_not_finite(same):
    assert absolute([same, 2.0], [same, 3.0]) == [0.0, 1.0]


@pytest.mark.parametrize("finite", [0.0, -3.0, 1e30])
@pytest.mark.parametrize("other", [NAN, INF, -INF])
def test_not_finite_in_one_of_them(finite, other):
    assert absolute([finite, 8.0], [other, 8.0]) == [INF, 0.0]
    assert absolute([other, 8.0], [finite, 8.0]) == [INF, 0.0]


@pytest.mark.parametrize("pair", [(INF, -INF), (INF, NAN), (NAN, -INF)])
def test_not_finite_in_different_ways(pair):
    assert absolute([pair[0], 8.0], [pair[1], 8.0]) == [INF, 0.0]


def test_signed_zeros_are_equal():
    assert absolute([0.0, 0.0], [0.0, -0.0]) == [0.0, 0.0]


def test_bits_of_one_expanded_element():
    ids = torch.ones((), dtype=torch.long).expand(1)  # with a stride of 0

    assert same_bits(ids, torch.ones(1, dtype=torch.long))


def test_shape_and_precision():
    a = torch.full((2, 3, 1), 1.0, dtype=torch.bfloat16)
    found = absolute_difference(a, a + 0.5)
    assert found.shape == (2, 3, 1)
    assert found.dtype == torch.float64
    assert (found == 0.5).all()


@given(OUTPUTS)
def test_variation_is_the_largest_distance_from_the_first_position(output):
    spread = np.abs(output.astype(np.float64) - output[:1, :1].astype(np.float64)).max()
    expected = spread or np.abs(output.astype(np.float64)).max() or 1.0
    assert variation(torch.tensor(output)).item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_is_no_variation(dtype):
    noise = 2 * torch.finfo(dtype).eps * torch.tensor([[[0.0], [1.0], [-1.0]]], dtype=torch.float64)
    constant = (4 + 4 * noise).to(dtype)
    assert variation(constant).item() == pytest.approx(4, rel=0.05)
    near_zero = 4 * noise.to(dtype)  # a sum of large terms that cancel
    assert variation(torch.cat([constant] * 4 + [near_zero], dim=-1)).item() == pytest.approx(4, rel=0.05)
    varying = torch.tensor([[[0.0], [0.5], [0.25]]], dtype=dtype)
    assert variation(torch.cat([constant, varying], dim=-1)).item() == 0.5


def test_variation_does_not_see_constants():
    # A bias of a million, or the columns at -1e9 of a padded vocabulary, would hide everything else.
    output = torch.randn(2, 5, 3)
    padded = torch.cat([output, torch.full((2, 5, 4), -1e9)], dim=-1)
    assert variation(padded) == variation(output)
    assert variation(output.double() + 1e6).item() == pytest.approx(variation(output).item(), rel=1e-5)


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1.0, 3.0, -4.0], 5.0),
        ([7.0, 7.0], 7.0),
        ([0.0, 0.0], 1.0),
        ([INF, INF], 1.0),
        ([2.0, INF, 3.0], 1.0),
        ([NAN, 1.0, 4.0], 3.0),
    ],
)
def test_variation_of_little(values, expected):
    assert variation(output_of(*values)).item() == expected


@given(OUTPUTS, OUTPUTS)
def test_relative_difference(a, b):
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    scale = np.abs(a64 - a64[:1, :1]).max() or np.abs(a64).max() or 1.0
    found = relative_difference(torch.tensor(a), torch.tensor(b)).numpy()
    np.testing.assert_allclose(found, np.abs(a64 - b64) / scale, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 8.0])
@pytest.mark.parametrize("other", [NAN, INF])
def test_relative_difference_to_a_non_finite_value_is_infinite(scale, other):
    a, b = output_of(0.0, scale, 1.0), output_of(0.0, scale, other)
    assert relative_difference(a, b).flatten().tolist() == [0.0, 0.0, INF]
    assert relative_difference(b, a).flatten().tolist() == [0.0, 0.0, INF]


def subject_of(**changes):
    return Subject(ModelSpec(lambda: nn.Linear(4, 4), "linear", "vectors", 4, **changes), torch.device("cpu"))


def by_dtype(native, exact):
    """A measurement with one value in float32, and another in float64."""
    return lambda model: exact if model.weight.dtype == torch.float64 else native


def test_each_measurement_has_a_new_model_of_one_seed():
    measured = []

    def measure(model):
        measured.append((model.weight.dtype, model.training, model.weight[0, 0].item()))
        return 0.0

    subject = subject_of()
    measure_difference(subject, measure)
    weight = subject.model().weight[0, 0].item()
    assert measured == [(torch.float32, False, weight), (torch.float64, False, weight)]


@pytest.mark.parametrize(
    "native, exact, real, value, limit, dtype",
    [
        (0.0, 0.0, False, 0.0, 1e-6, torch.float64),
        (1e-4, 1e-12, False, 1e-12, 1e-6, torch.float64),
        (0.1, 0.1, True, 0.1, 1e-6, torch.float64),
        # A defect below the rounding of float32.
        (0.0, 1e-5, True, 1e-5, 1e-6, torch.float64),
        (0.0, NAN, True, NAN, 1e-6, torch.float64),
        (0.0, INF, True, INF, 1e-6, torch.float64),
        # More than rounding: a branch for the model's own dtype is wrong.
        (0.5, 0.0, True, 0.5, 1e-5, torch.float32),
        (NAN, 0.0, True, NAN, 1e-5, torch.float32),
    ],
)
def test_decision_by_two_dtypes(native, exact, real, value, limit, dtype):
    found = measure_difference(subject_of(), by_dtype(native, exact))
    assert (found.real, found.limit, found.dtype) == (real, limit, dtype)
    assert found.value == value or (math.isnan(found.value) and math.isnan(value))


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError, NotImplementedError])
@pytest.mark.parametrize(
    "value, tolerance, real", [(1e-6, 1e-5, False), (1e-4, 1e-5, True), (1e-4, 1e-3, False)]
)
def test_model_that_cannot_run_in_float64(error, value, tolerance, real):
    def measure(model):
        if model.weight.dtype == torch.float64:
            raise error
        return value

    found = measure_difference(subject_of(tolerance=tolerance), measure)
    assert found == Finding(value, tolerance, real, torch.float32)


def test_low_precision_may_round_more():
    spec = ModelSpec(lambda: nn.Linear(4, 4).bfloat16(), "linear", "vectors", 4)

    def measure(model):
        if model.weight.dtype == torch.float64:
            raise NotImplementedError
        return 0.03

    found = measure_difference(Subject(spec, torch.device("cpu")), measure)
    assert (found.real, found.dtype) == (False, torch.bfloat16)
    assert found.limit > 0.03


def test_other_exceptions_are_raised():
    def measure(model):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_difference(subject_of(), measure)


def test_meaning_names_the_dtype():
    texts = [Finding(0.0, 1.0, False, d).meaning for d in (torch.float64, torch.float32, torch.bfloat16)]
    assert len(set(texts)) == 3 and texts[0] == ""
    assert "bfloat16" in texts[2]


def test_difference_in_bfloat16_only_is_real():
    spec = ModelSpec(lambda: nn.Linear(4, 4).bfloat16(), "linear", "vectors", 4)
    found = measure_difference(
        Subject(spec, torch.device("cpu")),
        lambda model: 0.0 if model.weight.dtype == torch.float64 else 0.6,
    )
    assert (found.real, found.dtype) == (True, torch.bfloat16)


@pytest.mark.parametrize(
    "native, narrow, real", [(1e-7, True, False), (1e-3, True, True), (1e-7, False, True)]
)
@pytest.mark.parametrize("overflow", [INF, NAN])
def test_overflow_in_float64_only(native, narrow, real, overflow):
    """A softmax that stays float32 cannot hold the lowest float64 of a mask."""

    def measure(model):
        if model.weight.dtype == torch.float64 and narrow:
            model.weight.float().sum()
        return overflow if model.weight.dtype == torch.float64 else native

    found = measure_difference(subject_of(), measure)
    assert found.real is real
    if not real:
        assert (found.value, found.dtype) == (native, torch.float32)
