"""The bound of attention logits: never below one, reached where a query and a key are parallel."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.model.backend import attend
from stackwise.model.mask import AttentionMask, Keys
from stackwise.support.logit_bound import LogitBound, watching


def bound():
    return LogitBound(torch.device("cpu"))


def heads(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 5), st.integers(1, 6), st.integers(1, 4)),
    scale=st.none() | st.floats(-3, 3).filter(lambda scale: abs(scale) > 1e-3),
    seed=st.integers(0, 99),
)
def test_no_logit_is_above_it(sizes, scale, seed):
    B, K, G, T, S, D = sizes
    q, k = heads(B, K * G, T, D, seed=seed), heads(B, K, S, D, seed=seed + 100)
    found = bound()
    found.note(q, k, scale)
    logits = torch.einsum("bkgtd,bksd->bkgts", q.double().unflatten(1, (K, G)), k.double())
    logits *= D**-0.5 if scale is None else scale
    assert found.take().item() >= logits.abs().max().item() * (1 - 1e-6)


def test_a_query_along_a_key_has_it():
    k = heads(1, 2, 3, 4)
    q = torch.zeros(1, 4, 5, 4)
    q[0, 3, 2] = 7 * k[0, 1, 2]  # of the second key head
    found = bound()
    found.note(q, k)
    norms = k.norm(dim=-1)
    assert found.take().item() == pytest.approx((7 * norms[0, 1, 2] * norms[0, 1].max() / 2).item())


def test_it_is_of_all_since_the_last_time():
    q, k = heads(1, 1, 2, 4), heads(1, 1, 2, 4, seed=1)
    found = bound()
    assert math.isnan(found.take())
    found.note(3 * q, k)
    found.note(q, k)
    of_both = found.take().item()
    found.note(q, k)
    assert of_both == pytest.approx(3 * found.take().item())
    assert math.isnan(found.take())


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_not_lost(value):
    q = heads(1, 1, 2, 4)
    q[0, 0, 0, 0] = value
    found = bound()
    found.note(q, heads(1, 1, 2, 4))
    found.note(heads(1, 1, 2, 4), heads(1, 1, 2, 4))
    assert not math.isfinite(found.take())


def test_narrow_numbers_do_not_overflow():
    found = bound()
    found.note(heads(1, 1, 2, 4, dtype=torch.float16) * 1000, heads(1, 1, 2, 4, dtype=torch.float16) * 1000)
    assert 1e5 < found.take().item() < math.inf


@pytest.mark.parametrize(
    "q, k",
    [
        (heads(2, 3, 0, 4), heads(2, 3, 5, 4)),
        (heads(2, 3, 5, 4), heads(2, 3, 0, 4)),
        (heads(0, 3, 5, 4), heads(0, 3, 5, 4)),
        (heads(1, 2, 3, 4).to_sparse(), heads(1, 2, 3, 4)),
        (heads(1, 2, 3, 4).long(), heads(1, 2, 3, 4).long()),
    ],
    ids=["no queries", "no keys", "no rows", "sparse", "integers"],
)
def test_what_has_no_numbers_to_read_is_passed_over(q, k):
    found = bound()
    found.note(q, k)
    found.note_scores(min(q, k, key=torch.Tensor.numel))
    assert not found.seen and math.isnan(found.take())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_widths_are_bounded_as_they_are(dtype):
    q, k = heads(2, 5, 4, dtype=dtype), heads(2, 5, 4, dtype=dtype, seed=1)
    found, expected = bound(), bound()
    found.note(q, k)
    expected.note(q.float(), k.float())
    assert found.take().item() == pytest.approx(expected.take().item())


def test_a_single_sequence_of_one_head_has_a_bound():
    q, k = heads(5, 4), heads(6, 4, seed=1)
    found = bound()
    found.note(q, k)
    assert found.take().item() == pytest.approx((q.norm(dim=-1).max() * k.norm(dim=-1).max() / 2).item())


@pytest.mark.parametrize("hidden", [-math.inf, -1e4, torch.finfo(torch.float32).min, -100.0])
def test_keys_that_a_constant_hides_have_no_logit(hidden):
    scores = heads(2, 5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), hidden)
    found = bound()
    found.note_scores(scores)
    assert found.take().item() == pytest.approx(scores.amax(-1).abs().max().item())
    if hidden < -5e3:
        scores[1] = hidden  # a row of padding: nothing is seen by its queries
        found.note_scores(scores)
        assert found.take().item() == pytest.approx(scores[0].amax(-1).abs().max().item())


def test_logits_below_zero_grow_as_others_do():
    found = bound()
    found.note_scores(-heads(2, 5, 5).abs() - 1)
    before = found.take().item()
    found.note_scores(100 * (-heads(2, 5, 5).abs() - 1))
    assert before > 1 and found.take().item() == pytest.approx(100 * before)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_trained_is_seen_and_nothing_else(compiled):
    def run(q, k, v):
        return attend(q, k, v, AttentionMask(torch.arange(3), Keys(torch.arange(3), True)))[0]

    run = torch.compile(run) if compiled else run
    q, k, v = (heads(1, 2, 3, 4, seed=seed) for seed in range(3))
    found = bound()
    run(q.clone().requires_grad_(), k, v)
    with watching(found):
        run(q, k, v)
        assert math.isnan(found.take())
        y = run(q.clone().requires_grad_(), k, v)
        y.sum().backward()
        with watching(None):
            run(100 * q.clone().requires_grad_(), k, v)
    alone = bound()
    alone.note(q, k)
    assert found.take().item() == pytest.approx(alone.take().item())
