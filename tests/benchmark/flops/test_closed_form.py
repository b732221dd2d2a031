"""FLOPs in closed form against operations counted one by one, and against what torch counts of real Racks."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.benchmark.flops.closed_form import (
    Flops,
    backward_flops,
    convention_flops_per_token,
    forward_flops,
    model_flops,
    n_pairs,
)
from stackwise.benchmark.flops.counted import count_flops
from stackwise.benchmark.flops.shape_reader import read_shape
from stackwise.benchmark.flops.transformer_shape import (
    ExpertsShape,
    FeedForwardShape,
    KernelShape,
    LatentShape,
    LayerShape,
    SoftmaxShape,
    TransformerShape,
)
from stackwise.config import RecomputeConfig
from stackwise.model import create_simple_rack
from stackwise.model.backend import using
from stackwise.training.recompute import recomputing


class ByHand:
    """Products of matrices, gone through multiplication by multiplication.

    A product of (rows, inner) and (inner, columns) is loops over rows, columns and inner. `visible` takes an
    entry of the result, or of the left factor, that causality or a window hides, out of the loops.
    """

    def __init__(self):
        self.forward = self.backward = 0

    def product(self, rows, inner, columns, *, left=True, right=True, needed=None, summed=None):
        """`left` and `right`: whether that factor wants its derivative."""
        for row in range(rows):
            for column in range(columns):
                if needed is not None and not needed(row, column):
                    continue
                for i in range(inner):
                    if summed is not None and not summed(row, i):
                        continue
                    self.forward += 2
                    # The entry times the derivative of the result goes to the other factor's derivative.
                    self.backward += 2 * left + 2 * right


# Three sizes that share no factor by accident: (B, T, C, H, K, D, d_ff, V).
SIZES = [(1, 3, 4, 2, 1, 2, 5, 7), (2, 5, 6, 4, 2, 3, 7, 11), (3, 4, 5, 3, 3, 4, 2, 3)]
IDS = ["one row", "grouped", "multi-head"]


def can_see(causal, window, context=0):
    def visible(query, key):
        distance = context + query - key
        if causal and distance < 0:
            return False
        return window is None or abs(distance) < window

    return visible


def hide_nothing(query, key):
    return True


def softmax(hand, T, C, H, K, D, visible, context=0):
    S = context + T
    for width in (H * D, K * D, K * D):
        hand.product(T, C, width)
    for _ in range(H):
        hand.product(T, D, S, needed=visible)
        hand.product(T, S, D, summed=visible)
    hand.product(T, H * D, C)


def latent(hand, T, C, H, sizes, visible, q_rank, context=0, absorbs=True):
    R, N, P, V = sizes
    S = context + T
    if q_rank is None:
        hand.product(T, C, H * (N + P))
    else:
        hand.product(T, C, q_rank)
        hand.product(T, q_rank, H * (N + P))
    hand.product(T, C, R + P)
    if context and absorbs:
        for _ in range(H):
            hand.product(T, N, R)
            hand.product(T, R + P, S, needed=visible)
            hand.product(T, S, R, summed=visible)
            hand.product(T, R, V)
    else:
        hand.product(S, R, H * (N + V))
        for _ in range(H):
            hand.product(T, N + P, S, needed=visible)
            hand.product(T, S, V, summed=visible)
    hand.product(T, H * V, C)


def kernel(hand, T, C, H, K, D, M, F, chunk):
    """The recurrent form where `chunk` is None, else squares of `chunk` and sums between them."""
    for width in (H * D, K * D, K * D):
        hand.product(T, C, width)
    for _ in range(H + K):
        hand.product(T, D, F, right=False)
    starts = range(T) if chunk is None else range(0, T, chunk)
    for start in starts:
        L = 1 if chunk is None else min(chunk, T - start)
        first, last = chunk is not None and start == 0, chunk is not None and start + L == T
        for _ in range(K):
            hand.product(M, L, D, left=not last, right=not last)
        for _ in range(H):
            if chunk is not None:
                hand.product(L, M, L)
                hand.product(L, L, D)
            hand.product(L, M, D, right=not first)
            hand.product(L, M, 1, right=not first)
    hand.product(T, H * D, C)


def one_layer(C, attention, d_ff, V, n_matrices=3):
    layer = LayerShape((attention,), FeedForwardShape(d_ff, n_matrices))
    return TransformerShape(C, (layer,), V * C, V * C)


def around(hand, T, C, d_ff, V, n_matrices=3):
    """What is around the attention: the feed-forward part and the head."""
    for rows, columns in [(C, d_ff)] * (n_matrices - 1) + [(d_ff, C)]:
        hand.product(T, rows, columns)
    hand.product(T, C, V)


def expected(B, attend, T, C, d_ff, V, n_matrices=3):
    hand = ByHand()
    attend(hand)
    around(hand, T, C, d_ff, V, n_matrices)
    return B * hand.forward, B * hand.backward


def check(shape, B, T, attend_visible, attend_all, d_ff, V, n_matrices=3):
    """Forward and backward pass, of visible pairs and of all."""
    forward = forward_flops(shape, batch_size=B, seq_len=T)
    backward = backward_flops(shape, batch_size=B, seq_len=T)
    for pairs, attend in (("visible", attend_visible), ("all", attend_all)):
        by_hand = expected(B, attend, T, shape.d_model, d_ff, V, n_matrices)
        assert (forward.total(pairs), backward.total(pairs)) == by_hand, pairs


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 2), (False, 2), (True, 9)])
@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_softmax(size, causal, window):
    """Multi-head, grouped-query and multi-query by their K; causal or not; with and without a window."""
    B, T, C, H, K, D, d_ff, V = size
    shape = one_layer(C, SoftmaxShape(H, K, D, causal, window), d_ff, V)

    def dense(hand):
        # What causality hides is there; a window is a bound on how many keys a query has.
        keys = T if window is None else min(T, window)
        pairs = hide_nothing if window is None else (lambda query, key: key < keys)
        if not causal:
            pairs = can_see(causal, window)
        softmax(hand, T, C, H, K, D, pairs)

    def seen(hand):
        softmax(hand, T, C, H, K, D, can_see(causal, window))

    check(shape, B, T, seen, dense, d_ff, V)


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_two_matrices_without_a_gate(size):
    B, T, C, H, K, D, d_ff, V = size
    shape = one_layer(C, SoftmaxShape(H, K, D, causal=False), d_ff, V, n_matrices=2)

    def attend(hand):
        softmax(hand, T, C, H, K, D, hide_nothing)

    check(shape, B, T, attend, attend, d_ff, V, n_matrices=2)


@pytest.mark.parametrize("q_rank", [None, 3])
@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_latent(size, q_rank):
    B, T, C, H, _, D, d_ff, V = size
    R, N, P, value = D + 3, D, 2, D + 1
    shape = one_layer(C, LatentShape(H, R, N, P, value, q_rank), d_ff, V)

    def attend(visible):
        return lambda hand: latent(hand, T, C, H, (R, N, P, value), visible, q_rank)

    check(shape, B, T, attend(can_see(True, None)), attend(hide_nothing), d_ff, V)


@pytest.mark.parametrize("chunk", [2, 3, 8])
@pytest.mark.parametrize("n_frequencies", [0, 3])
@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_kernel(size, n_frequencies, chunk):
    B, T, C, H, K, D, d_ff, V = size
    M = 5
    shape = one_layer(C, KernelShape(H, K, D, M, n_frequencies, chunk=chunk), d_ff, V)

    def attend(chunk):
        return lambda hand: kernel(hand, T, C, H, K, D, M, n_frequencies, chunk)

    check(shape, B, T, attend(None), attend(chunk), d_ff, V)


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_kernel_that_sees_everything(size):
    """One sum over all keys, which all queries read: as many operations as one after the other."""
    B, T, C, H, K, D, d_ff, V = size
    shape = one_layer(C, KernelShape(H, K, D, 5, 3, causal=False, chunk=2), d_ff, V)

    def attend(hand):
        kernel(hand, T, C, H, K, D, 5, 3, None)

    check(shape, B, T, attend, attend, d_ff, V)


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_experts(size):
    """Every token goes through the router, two experts of five, and what all share."""
    B, T, C, H, K, D, d_ff, V = size
    experts = ExpertsShape(d_ff, n_experts=5, n_routed=2, shared_d_ff=3)
    shape = TransformerShape(C, (LayerShape((SoftmaxShape(H, K, D),), experts),), V * C, 0)
    hand = ByHand()
    softmax(hand, T, C, H, K, D, can_see(True, None))
    for _ in range(T):
        hand.product(1, C, 5)
        for width in (d_ff, d_ff, 3):
            hand.product(1, C, width)
            hand.product(1, C, width)
            hand.product(1, width, C)
    hand.product(T, C, V)
    count = model_flops(shape, batch_size=B, seq_len=T, mode="train")
    assert count.forward.total("visible") == B * hand.forward
    assert count.backward.total("visible") == B * hand.backward


@pytest.mark.parametrize("context", [0, 1, 4])
@pytest.mark.parametrize("size", SIZES, ids=IDS)
class TestDecode:
    """One token in each row, with `context` tokens in the cache."""

    def count(self, shape, B, context):
        count = model_flops(shape, batch_size=B, seq_len=context, mode="decode")
        assert count.tokens == B
        return count

    @pytest.mark.parametrize("window", [None, 2, 5])
    def test_softmax(self, size, context, window):
        B, _, C, H, K, D, d_ff, V = size
        shape = one_layer(C, SoftmaxShape(H, K, D, True, window), d_ff, V)

        def attend(hand):
            softmax(hand, 1, C, H, K, D, can_see(True, window, context), context)

        count = self.count(shape, B, context)
        assert count.model("visible") == count.model("all") == expected(B, attend, 1, C, d_ff, V)[0]

    @pytest.mark.parametrize("absorbs", [True, False])
    def test_latent(self, size, context, absorbs):
        B, _, C, H, _, D, d_ff, V = size
        R, N, P, value = D + 3, D, 2, D + 1
        shape = one_layer(C, LatentShape(H, R, N, P, value, absorbs=absorbs), d_ff, V)

        def attend(hand):
            latent(hand, 1, C, H, (R, N, P, value), hide_nothing, None, context, absorbs)

        assert self.count(shape, B, context).model() == expected(B, attend, 1, C, d_ff, V)[0]

    def test_kernel(self, size, context):
        B, _, C, H, K, D, d_ff, V = size
        shape = one_layer(C, KernelShape(H, K, D, 5, 3, chunk=4), d_ff, V)
        count = self.count(shape, B, context)
        for pairs, chunk in (("visible", None), ("all", 4)):

            def attend(hand, chunk=chunk):
                kernel(hand, 1, C, H, K, D, 5, 3, chunk)

            assert count.model(pairs) == expected(B, attend, 1, C, d_ff, V)[0]


@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_several_tokens_after_others(size, window):
    """As where a prompt is read in parts."""
    B, T, C, H, K, D, d_ff, V = size
    shape = one_layer(C, SoftmaxShape(H, K, D, True, window), d_ff, V)

    def attend(hand):
        softmax(hand, T, C, H, K, D, can_see(True, window, 4), 4)

    found = forward_flops(shape, batch_size=B, seq_len=T, context=4)
    assert found.total("visible") == expected(B, attend, T, C, d_ff, V)[0]


@given(st.integers(1, 12), st.integers(0, 12), st.none() | st.integers(1, 30), st.booleans())
def test_pairs_are_those_of_the_mask(n_queries, context, window, causal):
    visible = can_see(causal, window, context)
    keys = range(context + n_queries)
    seen = sum(visible(query, key) for query, key in itertools.product(range(n_queries), keys))
    found, every = n_pairs(n_queries, context, causal=causal, window=window)
    if not causal and window is not None and context:
        return  # nothing bidirectional has a cache
    assert found == seen
    assert every >= found
    assert (every == n_queries * len(keys)) or window is not None


def test_the_published_formula_of_causal_attention():
    """FlashInfer's B (2 S - T) T H (d_qk + d_vo), which halves the diagonal."""
    T, S = 512, 2048
    visible, _ = n_pairs(T, S - T, causal=True, window=None)
    assert 2 * visible == (2 * S - T) * T + T


def llama_7b():
    """Touvron et al. 2023 (arXiv:2302.13971), table 2; d_ff 11008."""
    return TransformerShape.uniform(
        n_layers=32, d_model=4096, n_heads=32, d_ff=11008, vocab_size=32000, tied=False
    )


def test_convention():
    shape, T = llama_7b(), 2048
    # 6.74 billion parameters, less the embedding and 65 norms of 4096.
    N = 6_738_415_616 - 32000 * 4096 - 65 * 4096
    assert shape.n_weights == N
    assert convention_flops_per_token(shape, T) == 6 * N + 12 * 32 * 32 * 128 * T
    with_table = convention_flops_per_token(shape, T, embeddings=True)
    assert with_table == 6 * (N + 32000 * 4096) + 12 * 32 * 32 * 128 * T
    assert convention_flops_per_token(shape, T, recompute=True) == 8 * N + 16 * 32 * 32 * 128 * T
    count = model_flops(shape, batch_size=3, seq_len=T, mode="train")
    assert count.per_token("all") == 6 * N + 12 * 32 * 32 * 128 * T
    # Causality leaves T (T + 1) / 2 of T^2 pairs.
    assert count.per_token("visible") == 6 * N + 12 * 32 * 32 * 128 * T * (T + 1) / (2 * T)
    forward = model_flops(shape, batch_size=3, seq_len=T, mode="forward")
    assert forward.per_token("all") == 2 * N + 4 * 32 * 32 * 128 * T


def test_convention_of_attention_by_features():
    """Frequencies are fixed, so that a training step is less than three forward passes."""
    shape = one_layer(8, KernelShape(2, 2, 4, 6, 3, chunk=4), 12, 11)
    step = model_flops(shape, batch_size=2, seq_len=10, mode="train")
    forward = model_flops(shape, batch_size=2, seq_len=10, mode="forward").per_token("all")
    assert convention_flops_per_token(shape, 10) == step.per_token("all") < 3 * forward
    assert convention_flops_per_token(shape, 10, recompute=True) == step.per_token("all") + forward


def test_convention_is_for_what_trains():
    with pytest.raises(ValueError, match="n_frozen: got 4"):
        convention_flops_per_token(replace(llama_7b(), n_frozen=4), 8)


def test_prefill_has_one_row_of_logits():
    shape = llama_7b()
    size = {"batch_size": 2, "seq_len": 16}
    forward = model_flops(shape, **size, mode="forward")
    prefill = model_flops(shape, **size, mode="prefill")
    assert forward.model() - prefill.model() == 2 * 2 * 15 * 32000 * 4096
    assert model_flops(shape, **size, mode="prefill", logits="all").model() == forward.model()


def test_what_is_recomputed():
    shape = llama_7b()
    size = {"batch_size": 2, "seq_len": 16, "mode": "train"}
    plain = model_flops(shape, **size)
    again = model_flops(shape, **size, recompute="blocks")
    assert plain.hardware() == plain.model() == again.model()
    assert again.hardware() - again.model() == plain.forward.total() - 2 * 2 * 16 * 32000 * 4096
    # A fused kernel computes the scores a second time: 2 H D for each pair and layer.
    fused = model_flops(shape, **size, fused=True)
    assert fused.hardware("all") - fused.model("all") == 2 * 32 * 2 * 32 * 128 * 16 * 16
    assert fused.hardware("visible") - fused.model("visible") == 2 * 32 * 2 * 32 * 128 * 16 * 17 // 2


def test_a_frozen_matrix_has_one_derivative_less():
    shape, size = llama_7b(), {"batch_size": 2, "seq_len": 16, "mode": "train"}
    n_frozen = 5 * 4096 * 11008
    frozen = model_flops(replace(shape, n_frozen=n_frozen), **size)
    assert model_flops(shape, **size).model() - frozen.model() == 2 * 32 * n_frozen
    assert model_flops(replace(shape, n_frozen=None), **size) is None
    assert model_flops(replace(shape, n_frozen=None), batch_size=2, seq_len=16, mode="forward") is not None
    with pytest.raises(ValueError, match="n_frozen: got None"):
        backward_flops(replace(shape, n_frozen=None), batch_size=1, seq_len=1)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"mode": "generate"}, "mode: got 'generate'"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"seq_len": 0}, "seq_len: got 0"),
        ({"seq_len": -1, "mode": "decode"}, "seq_len: got -1"),
        ({"recompute": "all"}, "recompute: got 'all'"),
        ({"logits": "first"}, "logits: got 'first'"),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        model_flops(llama_7b(), **{"batch_size": 1, "seq_len": 4, "mode": "train", **wrong})


def test_pairs_that_are_neither():
    with pytest.raises(ValueError, match="pairs: got 'some'"):
        Flops(1, 2, 3).total("some")


def test_plain_values():
    count = model_flops(llama_7b(), batch_size=1, seq_len=4, mode="train")
    stored = count.to_dict()
    assert stored["forward"]["weights"] == count.forward.weights
    assert (stored["model_all"], stored["model_visible"]) == (count.model("all"), count.model("visible"))


# One of each kind of attention that a Rack has. 150 positions are more than one chunk of kernel attention.
KINDS = {
    "mha": {},
    "gqa": {"attention_type": "gqa", "n_kv_heads": 2},
    "mqa": {"attention_type": "mqa"},
    "own head size": {"head_dim": 6},
    "window": {"sliding_window": 3},
    "softcap": {"softcap": 5.0},
    "bidirectional": {"attention_mode": "bidirectional"},
    "mla": {
        "attention_type": "mla",
        "latent": {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5},
    },
    "mla, low-rank queries": {
        "attention_type": "mla",
        "latent": {
            "kv_lora_rank": 6,
            "q_lora_rank": 7,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 5,
        },
    },
    "favor": {"attention_type": "kernel", "kernel": {"feature_map": "favor", "n_features": 6}},
    "gaussian": {
        "attention_type": "kernel",
        "n_kv_heads": 2,
        "kernel": {"feature_map": "gaussian", "n_features": 6},
    },
    "laplacian": {"attention_type": "kernel", "kernel": {"feature_map": "laplacian", "n_features": 6}},
    "elu": {"attention_type": "kernel", "kernel": {"feature_map": "elu"}},
    "bidirectional elu": {
        "attention_type": "kernel",
        "attention_mode": "bidirectional",
        "kernel": {"feature_map": "elu"},
    },
    "frozen up-projection": {"freeze_up_proj": True},
}


def rack_of(kind, **options):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 24, "n_heads": 4, "n_kv_heads": None, "vocab_size": 31}
    return create_simple_rack(1, 2, **{**sizes, "attention_type": "mha", **KINDS[kind], **options})


def without_window(shape):
    """A kernel without a rule for windows computes all pairs."""
    layers = [
        replace(layer, attention=tuple(_open(attention) for attention in layer.attention))
        for layer in shape.layers
    ]
    return replace(shape, layers=tuple(layers))


def _open(attention):
    return replace(attention, window=None) if isinstance(attention, SoftmaxShape) else attention


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rack_computes_as_many_as_torch_counts(kind, tied):
    rack = rack_of(kind, tie_embeddings=tied)
    B, T = 2, 150 if "kernel" in str(KINDS[kind]) else 20
    ids = torch.randint(31, (B, T))
    shape = without_window(read_shape(rack).shape)
    dense = KINDS[kind].get("softcap") is None  # soft-capped logits are always sliced
    if not dense:
        T = 64  # one slice of queries: then all pairs are computed
        ids = torch.randint(31, (B, T))
    with using("math"):
        forward = count_flops(lambda: rack(ids))
        step = count_flops(lambda: rack(ids).sum().backward())
    size = {"batch_size": B, "seq_len": T}
    assert forward.uncounted == step.uncounted == ()
    assert forward.total == model_flops(shape, **size, mode="forward").model("all")
    assert step.total == model_flops(shape, **size, mode="train").model("all")


@pytest.mark.parametrize("kind", ["mha", "gqa", "mla"])
def test_a_fused_kernel_computes_scores_again(kind):
    # The kernel of the CPU takes values as wide as keys.
    latent = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6}
    rack = rack_of(kind, **({"latent": latent} if kind == "mla" else {}))
    ids = torch.randint(31, (2, 20))
    with using("sdpa"):
        step = count_flops(lambda: rack(ids).sum().backward())
    assert "_scaled_dot_product_flash_attention_for_cpu" in " ".join(step.by_operation)
    count = model_flops(rack, batch_size=2, seq_len=20, mode="train", fused=True)
    assert step.total == count.hardware("all")


@pytest.mark.parametrize("kind", ["gqa", "mla", "favor"])
def test_recomputed_blocks_are_computed_again(kind):
    rack = rack_of(kind)
    ids = torch.randint(31, (2, 20))
    with using("math"), recomputing(rack, RecomputeConfig(kind="full")) as names:
        step = count_flops(lambda: rack(ids).sum().backward())
    assert len(names) == 2
    count = model_flops(rack, batch_size=2, seq_len=20, mode="train", recompute="blocks")
    # Torch stops in front of the last product of each Block: 16 by 24 weights, two Blocks, 40 tokens.
    assert step.total == count.hardware("all") - 2 * 2 * 40 * 16 * 24


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bidirectional" not in kind and kind != "window"])
@torch.no_grad()
def test_a_rack_decodes_with_as_many_as_torch_counts(kind):
    rack = rack_of(kind).eval()
    cache = rack.new_cache(2, 16)
    rack(torch.randint(31, (2, 9)), cache=cache)
    counted = count_flops(lambda: rack(torch.randint(31, (2, 1)), cache=cache))
    assert counted.uncounted == ()
    assert counted.total == model_flops(rack, batch_size=2, seq_len=9, mode="decode").model("all")


@pytest.mark.parametrize("kind", ["gqa", "mla", "elu"])
@torch.no_grad()
def test_a_rack_reads_a_prompt_in_parts_with_as_many_as_torch_counts(kind):
    rack = rack_of(kind).eval()
    cache = rack.new_cache(2, 16)
    rack(torch.randint(31, (2, 9)), cache=cache)
    counted = count_flops(lambda: rack(torch.randint(31, (2, 3)), cache=cache))
    found = forward_flops(read_shape(rack).shape, batch_size=2, seq_len=3, context=9)
    assert counted.total == found.total("all")


@torch.no_grad()
def test_a_window_decodes_with_as_many_keys():
    rack = rack_of("window").eval()
    cache = rack.new_cache(2, 16)
    rack(torch.randint(31, (2, 9)), cache=cache)
    counted = count_flops(lambda: rack(torch.randint(31, (2, 1)), cache=cache))
    assert counted.total == model_flops(rack, batch_size=2, seq_len=9, mode="decode").model("visible")
