"""Norms against float64, and the buffer that keeps a step's scalars."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from stackwise.stability import StepRecord
from stackwise.stability.telemetry import (
    StepBuffer,
    global_norm,
    gradient_norms,
    mean_loss,
    norms_by_rows,
)

ARRAYS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, max_side=5),
    elements=st.floats(-1e4, 1e4, width=32),
)


def parameters_of(arrays, dtype=torch.float32):
    parameters = []
    for array in arrays:
        parameters.append(nn.Parameter(torch.zeros(array.shape, dtype=dtype)))
        parameters[-1].grad = torch.tensor(array).to(dtype)
    return parameters


def buffer_of(capacity, rows=()):
    buffer = StepBuffer(capacity, torch.device("cpu"))
    for step, lr, loss, norm, skipped in rows:
        buffer.write_step(
            step,
            lr,
            loss=torch.tensor(loss),
            grad_norm=torch.tensor(norm),
            skipped=torch.tensor(skipped),
        )
    return buffer


@given(st.lists(ARRAYS, min_size=1, max_size=5))
def test_norms(arrays):
    norms = gradient_norms(parameters_of(arrays))
    expected = [np.sqrt((a.astype(np.float64) ** 2).sum()) for a in arrays]
    assert norms.shape == (len(arrays),)
    # Squares of numbers below 1e-19 are nothing in float32, and no gradient that matters.
    np.testing.assert_allclose(norms.numpy(), expected, rtol=1e-5, atol=1e-15)


@given(st.lists(ARRAYS, min_size=1, max_size=5))
def test_global_norm_is_that_of_one_long_vector(arrays):
    total = global_norm(gradient_norms(parameters_of(arrays))).item()
    whole = np.concatenate([a.astype(np.float64).ravel() for a in arrays])
    assert total == pytest.approx(float(np.linalg.norm(whole)), rel=1e-5, abs=1e-15)


@given(st.lists(ARRAYS, min_size=1, max_size=5))
def test_norms_by_rows_is_that_of_one_long_vector(arrays):
    norm = global_norm(norms_by_rows([p.grad for p in parameters_of(arrays)]))
    whole = np.concatenate([a.astype(np.float64).ravel() for a in arrays])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(float(np.linalg.norm(whole)), rel=1e-5, abs=1e-15)


def test_norms_by_rows_of_a_large_matrix_is_exact():
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    gradients = [torch.full((3000, 1000), 0.1, dtype=dtype) for dtype in dtypes]
    expected = [gradient.double().square().sum().sqrt().item() for gradient in gradients]
    compiled = torch.compile(norms_by_rows)(gradients)
    assert compiled.tolist() == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_by_rows_sees_one_broken_element(value):
    assert not norms_by_rows([torch.ones(3), torch.tensor([[1.0, value]])])[1].isfinite()


def test_global_norm_is_not_the_sum_of_norms():
    norms = gradient_norms(parameters_of([np.float32([3.0]), np.float32([[4.0]])]))
    assert norms.tolist() == [3.0, 4.0]
    assert global_norm(norms).item() == pytest.approx(5.0)


def test_global_norm_is_torchs():
    parameters = parameters_of([np.float32([1.0, -2.0]), np.float32([[4.0, 0.5]])])
    ours = global_norm(gradient_norms(parameters)).item()
    assert ours == pytest.approx(nn.utils.clip_grad_norm_(parameters, 1e9).item())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_broken_element_is_seen(value):
    arrays = [np.ones(3, np.float32), np.float32([1.0, value, 1.0])]
    norms = gradient_norms(parameters_of(arrays))
    assert norms.isfinite().tolist() == [True, False]
    assert not global_norm(norms).isfinite()


def test_parameters_without_a_gradient_are_left_out():
    one, two = parameters_of([np.float32([3.0]), np.float32([4.0])])
    one.grad = None
    assert gradient_norms([one, two]).tolist() == [4.0]
    assert global_norm(gradient_norms([one])).item() == 0.0
    assert gradient_norms([]).shape == (0,)


def test_norms_of_bfloat16_are_taken_in_float32():
    # In bfloat16 a sum of squares stops growing at 256 ones.
    norms = gradient_norms(parameters_of([np.ones(10_000, np.float32)], torch.bfloat16))
    assert norms.dtype == torch.float32
    assert norms.item() == pytest.approx(100.0, rel=1e-3)


NORMS = {"foreach": lambda gs: gradient_norms(parameters_of_tensors(gs)), "rows": norms_by_rows}


def parameters_of_tensors(gradients):
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g
    return parameters


@pytest.mark.parametrize("norms_of", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_finite_gradients_of_any_size_have_finite_norms(norms_of, dtype):
    """Their squares are beyond float32."""
    gradients = [torch.full((3, 4), 1e30), torch.tensor([1e19, -1e19]), torch.tensor(3e37), torch.ones(2)]
    gradients = [g.to(dtype) for g in gradients]
    exact = [math.sqrt(sum(x * x for x in g.double().flatten().tolist())) for g in gradients]
    norms_P = norms_of(gradients)
    assert norms_P.dtype == torch.float32
    assert norms_P.tolist() == pytest.approx(exact, rel=1e-5)
    assert global_norm(norms_P).item() == pytest.approx(math.hypot(*exact), rel=1e-5)


@pytest.mark.parametrize("norms_of", NORMS.values(), ids=NORMS)
def test_a_norm_beyond_float32_is_infinite_and_no_nan(norms_of):
    assert norms_of([torch.full((4,), 3e38)]).tolist() == [math.inf]
    assert global_norm(torch.full((4,), 3e38)).item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (5, 1), (7, 0), (6,)])
def test_matrix_norms_are_exact_from_smallest_to_largest_values(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(shape, generator=generator)
    gradients = [(sizes * scale).to(dtype) for scale in (1.0, 1e-7, 1e-25, 1e-38, 0.0, 1e15, 1e30)]
    exact = [math.hypot(*g.double().flatten().tolist()) for g in gradients]
    norms_P = gradient_norms(parameters_of_tensors(gradients))
    np.testing.assert_allclose(norms_P.double().numpy(), exact, rtol=1e-6, atol=1e-45)


def test_a_large_matrix_loses_nothing_to_its_sum():
    g = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    exact = g.double().square().sum().sqrt().item()
    assert gradient_norms(parameters_of_tensors([g])).item() == pytest.approx(exact, rel=2e-7)


def test_compiled_norms_do_not_overflow():
    # As one large matrix beside one small: the second sum is fused with the first.
    gradients = [torch.full((64, 512), 2e25).bfloat16(), torch.full((512,), 1e-3).bfloat16()]
    exact = [g.double().square().sum().sqrt().item() for g in gradients]
    assert torch.compile(norms_by_rows)(gradients).tolist() == pytest.approx(exact, rel=1e-5)


@given(st.lists(ARRAYS, min_size=1, max_size=5))
def test_norms_by_rows_are_those_of_each(arrays):
    norms_P = norms_by_rows([p.grad for p in parameters_of(arrays)])
    expected = [np.linalg.norm(a.astype(np.float64)) for a in arrays]
    np.testing.assert_allclose(norms_P.numpy(), expected, rtol=1e-5, atol=1e-15)


ROWS = [(7, 0.1, 1.5, 2.0, False), (8, 0.2, math.inf, 3.0, True), (9, 0.3, 2.5, 4.0, False)]


def test_rows_come_back_in_order():
    records = buffer_of(3, ROWS).drain()
    assert records == [
        StepRecord(7, 1.5, 2.0, 0.1, False),
        StepRecord(8, math.inf, 3.0, 0.2, True),
        StepRecord(9, 2.5, 4.0, 0.3, False),
    ]
    assert [type(r.skipped) for r in records] == [bool] * 3


def test_drain_empties():
    buffer = buffer_of(3, ROWS[:2])
    assert len(buffer.drain()) == 2
    assert buffer.drain() == []
    buffer.write_step(5, 0.5, loss=torch.tensor(9.0), grad_norm=torch.tensor(8.0), skipped=torch.tensor(True))
    assert buffer.drain() == [StepRecord(5, 9.0, 8.0, 0.5, True)]


def test_full_at_its_capacity():
    for count in range(4):
        assert buffer_of(3, ROWS[:count]).full == (count == 3)
    buffer = buffer_of(3, ROWS)
    with pytest.raises(AssertionError, match="drain"):
        buffer.write_step(
            0, 0.0, loss=torch.tensor(0.0), grad_norm=torch.tensor(0.0), skipped=torch.tensor(False)
        )
    assert len(buffer.drain()) == 3
    assert not buffer.full


def test_records_do_not_change_with_the_buffer():
    buffer = buffer_of(1, ROWS[:1])
    [first] = buffer.drain()
    loss = torch.tensor(5.0)
    buffer.write_step(0, 0.0, loss=loss, grad_norm=loss, skipped=loss > 6)
    loss.zero_()
    assert first.loss == 1.5
    assert buffer.drain()[0].loss == 5.0


def test_low_precision_and_graphs():
    buffer = StepBuffer(1, torch.device("cpu"))
    loss = torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True)
    buffer.write_step(
        0, 0.1, loss=loss * 2, grad_norm=torch.tensor(2.0).double(), skipped=torch.tensor(False)
    )
    assert buffer.drain() == [StepRecord(0, 3.0, 2.0, 0.1, False)]


def test_record_is_data():
    record = StepRecord(7, 1.5, 2.0, 0.1, False)
    assert StepRecord(**json.loads(json.dumps(record.to_dict()))) == record


def test_mean_loss():
    assert mean_loss(buffer_of(2, [(0, 0.0, 1.0, 0.0, False), (1, 0.0, 4.0, 0.0, False)]).drain()) == 2.5
    assert math.isnan(mean_loss([]))


def test_norms_by_name_and_what_the_host_knows():
    buffer = StepBuffer(2, torch.device("cpu"), n_norms=3)
    scalars = {"loss": torch.tensor(1.5), "grad_norm": torch.tensor(5.0), "skipped": torch.tensor(False)}
    buffer.write_step(0, 0.1, **scalars, tokens=64, norms_P=torch.tensor([3.0, math.nan]), names=("a", "b"))
    buffer.write_step(1, 0.2, **scalars)  # the row before had norms in its place
    assert len(buffer) == 2
    first, second = buffer.poll()
    assert first.tokens == 64
    assert first.parameter_norms == pytest.approx({"a": 3.0, "b": math.nan}, nan_ok=True)
    assert first.first_non_finite == "b"
    assert second == StepRecord(1, 1.5, 5.0, 0.2, False)
    assert second.first_non_finite is None
    assert second.to_dict() == {"step": 1, "loss": 1.5, "grad_norm": 5.0, "lr": 0.2, "skipped": False}


@pytest.mark.parametrize(
    "norms, names, message",
    [
        ([1.0, 2.0], ("a", "b"), "norms_P: got 2; allowed: at most n_norms=1"),
        ([1.0], ("a", "b"), "names: got .*; allowed: 1 names"),
        ([1.0], None, "names: got None; allowed: 1 names"),
    ],
)
def test_norms_that_do_not_fit(norms, names, message):
    buffer, scalar = StepBuffer(2, torch.device("cpu"), n_norms=1), torch.tensor(1.0)
    with pytest.raises(ValueError, match=message):
        buffer.write_step(
            0, 0.1, loss=scalar, grad_norm=scalar, skipped=scalar, norms_P=torch.tensor(norms), names=names
        )
    assert buffer.drain() == []


def test_negative_number_of_norms():
    with pytest.raises(ValueError, match="n_norms: got -1"):
        StepBuffer(2, torch.device("cpu"), n_norms=-1)
