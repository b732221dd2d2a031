"""Readings against numpy, in every dtype and layout."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.stability.locate.reading import Reading, Readings

VALUES = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=8)


def read(value):
    readings = Readings()
    places = readings.take(value)
    settled = readings.settle()
    assert places == list(range(len(settled)))
    return settled


@given(VALUES)
def test_a_tensor(values):
    [reading] = read(torch.tensor(values, dtype=torch.float32))
    array = np.array(values, dtype=np.float32).astype(np.float64)
    assert reading.count == len(values)
    assert reading.is_broken == bool(np.isnan(array).any() or np.isposinf(array).any())
    assert reading.is_finite == bool(np.isfinite(array).all())
    if reading.is_finite:
        assert (reading.low, reading.high) == (array.min(), array.max())
        assert reading.square == pytest.approx(np.square(array).sum(), rel=1e-6, abs=1e-300)
        assert abs(reading.worst) == np.abs(array).max()
    else:
        assert not math.isfinite(reading.worst)
    if not np.isnan(array).any():
        assert reading.has_negative_infinity == bool(np.isneginf(array).any())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_dtypes(dtype):
    [reading] = read(torch.tensor([-2.0, 1.0, 4.0]).to(dtype))
    assert reading == Reading(-2.0, 4.0, pytest.approx(21.0), 3)


def test_what_has_no_values_is_left_out():
    assert read((torch.ones(2, dtype=torch.long), torch.empty(0), None, "words", torch.ones(1).bool())) == []
    assert read(torch.ones(2, device="meta")) == []


def test_layouts():
    assert read(torch.tensor([3 + 4j]))[0].square == pytest.approx(25.0)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 1.0, 3.0]), (4,), check_invariants=True
    )
    assert read(sparse)[0] == Reading(2.0, 3.0, pytest.approx(13.0), 2)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.full((3,), 2.0)], layout=torch.jagged)
    assert read(jagged)[0] == Reading(1.0, 2.0, pytest.approx(14.0), 5)


def test_masks():
    inf = math.inf
    masks = [[0.0, -inf], [-inf, -inf], [-3.0, 0.0, -inf]]
    others = [[1.0, -inf], [-1.0, -inf], [0.0, 1.0], [math.nan, -inf, 0.0]]
    assert all(read(torch.tensor(values))[0].is_mask for values in masks)
    assert not any(read(torch.tensor(values))[0].is_mask for values in others)


def test_large_values_do_not_overflow():
    [reading] = read(torch.full((4,), 1e30))
    assert reading.square == pytest.approx(4e60)


def test_parts():
    whole = Reading.of_parts([Reading(-1.0, 2.0, 5.0, 2), Reading(-3.0, 1.0, 10.0, 3)])
    assert whole == Reading(-3.0, 2.0, 15.0, 5)
    for order in (1, -1):
        parts = [Reading(math.nan, math.nan, math.nan, 1), Reading(0.0, 1.0, 1.0, 2)][::order]
        assert Reading.of_parts(parts).is_broken
