"""Sizes: weights against real modules, bytes of caches against real caches, and what is refused."""

import pytest
import torch
from torch import nn

from stackwise.benchmark.flops.transformer_shape import (
    ExpertsShape,
    FeedForwardShape,
    KernelShape,
    LatentShape,
    LayerShape,
    SoftmaxShape,
    TransformerShape,
)


def test_uniform_is_torch_s_own_layer():
    layer = nn.TransformerEncoderLayer(12, 3, 20)
    shape = TransformerShape.uniform(
        n_layers=1, d_model=12, n_heads=3, d_ff=20, vocab_size=5, n_matrices=2, causal=False, tied=True
    )
    matrices = sum(p.numel() for p in layer.parameters() if p.ndim > 1)
    assert shape.n_weights == shape.n_active == matrices + 5 * 12
    assert shape.embedding_weights == 0


def test_experts_by_hand():
    experts = ExpertsShape(d_ff=3, n_experts=4, n_routed=2, shared_d_ff=5, n_matrices=2)
    assert experts.n_weights(7) == 7 * 4 + 4 * (2 * 7 * 3) + 2 * 7 * 5
    assert experts.n_active(7) == 7 * 4 + 2 * (2 * 7 * 3) + 2 * 7 * 5


def test_a_layer_may_have_two_attentions_and_nothing_else():
    both = (SoftmaxShape(2, 1, 3), LatentShape(2, 4, 3, 2, 5))
    layer = LayerShape(both, None)
    by_hand = 6 * (6 + 3 + 3) + 6 * 6 + 6 * 2 * 5 + 6 * (4 + 2) + 4 * 2 * (3 + 5) + 2 * 5 * 6
    assert layer.n_weights(6) == layer.n_active(6) == by_hand
    shape = TransformerShape(6, (layer,), 0, 0)
    found = shape.cache_bytes(batch_size=2, tokens=10, dtype=torch.bfloat16)
    assert found == 2 * 2 * 10 * (2 * 3 + 4 + 2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SoftmaxShape(4, 3, 2), "n_kv_heads: got 3; allowed: what divides n_heads=4"),
        (lambda: SoftmaxShape(4, 2, 0), "head_dim: got 0"),
        (lambda: SoftmaxShape(4, 2, 2, window=0), "window: got 0"),
        (lambda: SoftmaxShape(4, 2, 2, cached_tokens=-1), "cached_tokens: got -1"),
        (lambda: LatentShape(4, 0, 2, 2, 2), "rank: got 0"),
        (lambda: LatentShape(4, 2, 2, 2, 2, q_rank=0), "q_rank: got 0"),
        (lambda: KernelShape(4, 2, 2, 0), "n_features: got 0"),
        (lambda: KernelShape(4, 2, 2, 2, -1), "n_frequencies: got -1"),
        (lambda: KernelShape(4, 2, 2, 2, chunk=0), "chunk: got 0"),
        (lambda: FeedForwardShape(3, 4), "n_matrices: got 4; allowed: 2, 3"),
        (lambda: ExpertsShape(3, 2, 3), "n_routed: got 3; allowed: at most n_experts=2"),
        (lambda: TransformerShape(0, (), 0, 0), "d_model: got 0"),
        (lambda: TransformerShape(1, (), -1, 0), "head_weights: got -1"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_heads_divide_the_width():
    with pytest.raises(ValueError, match="n_heads: got 3; allowed: what divides d_model=16"):
        TransformerShape.uniform(n_layers=1, d_model=16, n_heads=3, d_ff=4, vocab_size=5)


def test_plain_values():
    shape = TransformerShape.uniform(n_layers=2, d_model=16, n_heads=2, d_ff=4, vocab_size=5, window=3)
    stored = shape.to_dict()
    assert stored["layers"][0]["attention"][0] == {
        "kind": "softmax",
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": 8,
        "causal": True,
        "window": 3,
        "cached_tokens": 3,
    }
    assert stored["layers"][1]["feedforward"] == {"kind": "feedforward", "d_ff": 4, "n_matrices": 3}
    assert stored["n_weights"] == shape.n_weights
