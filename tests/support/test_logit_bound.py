"""The bound of attention logits: no logit is larger, and parallel queries and keys reach it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.model.backend import attend
from stackwise.model.mask import AttentionMask, Keys
from stackwise.support.logit_bound import LogitBound, watching


def heads(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bound_of(*pairs, scale=None):
    """Return the bound of the given (queries, keys)."""
    bound = LogitBound(torch.device("cpu"))
    for q, k in pairs:
        bound.note(q, k, scale)
    return bound.take().item()


def bound_of_scores(scores):
    bound = LogitBound(torch.device("cpu"))
    bound.note_scores(scores)
    return bound.take().item()


class TestQueriesAndKeys:
    @given(
        sizes=st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 5), st.integers(1, 6), st.integers(1, 4)),
        scale=st.none() | st.floats(-3, 3).filter(lambda scale: abs(scale) > 1e-3),
        seed=st.integers(0, 99),
    )
    def test_no_logit_is_above_the_bound(self, sizes, scale, seed):
        B, K, G, T, S, D = sizes
        q, k = heads(B, K * G, T, D, seed=seed), heads(B, K, S, D, seed=seed + 100)
        logits = torch.einsum("bkgtd,bksd->bkgts", q.double().unflatten(1, (K, G)), k.double())
        logits *= D**-0.5 if scale is None else scale
        assert bound_of((q, k), scale=scale) >= logits.abs().max().item() * (1 - 1e-6)

    def test_query_along_a_key_reaches_the_bound(self):
        k = heads(1, 2, 3, 4)
        q = torch.zeros(1, 4, 5, 4)
        q[0, 3, 2] = 7 * k[0, 1, 2]  # query head 3 reads key head 1
        norms = k.norm(dim=-1)
        assert bound_of((q, k)) == pytest.approx((7 * norms[0, 1, 2] * norms[0, 1].max() / 2).item())

    def test_single_sequence_of_one_head_has_a_bound(self):
        q, k = heads(5, 4), heads(6, 4, seed=1)
        largest = q.norm(dim=-1).max() * k.norm(dim=-1).max() / 2
        assert bound_of((q, k)) == pytest.approx(largest.item())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_bound_has_the_precision_of_float32(self, dtype):
        q, k = heads(2, 5, 4, dtype=dtype), heads(2, 5, 4, dtype=dtype, seed=1)
        assert bound_of((q, k)) == pytest.approx(bound_of((q.float(), k.float())))

    def test_float16_does_not_overflow(self):
        q = heads(1, 1, 2, 4, dtype=torch.float16) * 1000
        assert 1e5 < bound_of((q, q)) < math.inf

    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_non_finite_value_is_not_lost(self, value):
        q = heads(1, 1, 2, 4)
        q[0, 0, 0, 0] = value
        assert not math.isfinite(bound_of((q, heads(1, 1, 2, 4)), (heads(1, 1, 2, 4), heads(1, 1, 2, 4))))


class TestScores:
    @pytest.mark.parametrize("hidden", [-math.inf, -1e4, torch.finfo(torch.float32).min, -100.0])
    def test_masked_keys_have_no_logit(self, hidden):
        scores = heads(2, 5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), hidden)
        assert bound_of_scores(scores) == pytest.approx(scores.amax(-1).abs().max().item())

    @pytest.mark.parametrize("hidden", [-math.inf, -1e4, torch.finfo(torch.float32).min])
    def test_queries_with_masked_keys_only_have_no_logit(self, hidden):
        scores = heads(2, 5, 5)
        scores[1] = hidden  # a row of padding
        assert bound_of_scores(scores) == pytest.approx(scores[0].amax(-1).abs().max().item())

    def test_negative_logits_are_seen_to_grow(self):
        scores = -heads(2, 5, 5).abs() - 1
        assert bound_of_scores(scores) > 1
        assert bound_of_scores(100 * scores) == pytest.approx(100 * bound_of_scores(scores))


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
def test_tensors_without_readable_numbers_are_ignored(q, k):
    bound = LogitBound(torch.device("cpu"))
    bound.note(q, k)
    bound.note_scores(min(q, k, key=torch.Tensor.numel))
    assert not bound.seen and math.isnan(bound.take())


def test_bound_is_the_largest_since_it_was_taken():
    q, k = heads(1, 1, 2, 4), heads(1, 1, 2, 4, seed=1)
    bound = LogitBound(torch.device("cpu"))
    assert math.isnan(bound.take())
    bound.note(3 * q, k)
    bound.note(q, k)
    assert bound.take().item() == pytest.approx(3 * bound_of((q, k)))
    assert math.isnan(bound.take())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_is_watched_if_it_is_trained(compiled):
    def run(q, k, v):
        return attend(q, k, v, AttentionMask(torch.arange(3), Keys(torch.arange(3), True)))[0]

    run = torch.compile(run) if compiled else run
    q, k, v = (heads(1, 2, 3, 4, seed=seed) for seed in range(3))
    bound = LogitBound(torch.device("cpu"))
    run(q.clone().requires_grad_(), k, v)  # not within the block
    with watching(bound):
        run(q, k, v)  # without gradients
        assert math.isnan(bound.take())
        run(q.clone().requires_grad_(), k, v).sum().backward()
        with watching(None):
            run(100 * q.clone().requires_grad_(), k, v)
    assert bound.take().item() == pytest.approx(bound_of((q, k)))
