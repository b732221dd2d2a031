"""Attention and Block against the same mathematics written out in float64, and against published modules."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Gemma2Config, LlamaConfig, Olmo2Config, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from stackwise.config import BlockConfig, RopeScalingConfig
from stackwise.model import rotary, sliced
from stackwise.model.attention import Attention
from stackwise.model.backend import attend
from stackwise.model.block import Block
from stackwise.model.feedforward import SwiGLU
from stackwise.model.layout import Layout
from stackwise.model.mask import AttentionMask, Keys
from stackwise.model.rotary import Rotary, constant_tables, rotate
from stackwise.model.sliced import sliced_attention

B, T = 2, 7
HEADS = [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]
HEAD_DIM = 4
WINDOWS = [None, 1, 2, 3, T - 1, T, T + 5]
# Row 0 is padded on the left, row 1 on the right.
KEEP = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
EXACT = 1e-12
LINEAR = {"rope_type": "linear", "factor": 2.5}
# Of the 8 frequencies of a head of 16 at theta 10000, the first is kept, the last four are divided.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 128,
}


def kv_head_of(head, n_heads, n_kv_heads):
    return head // (n_heads // n_kv_heads)


def frequencies_of(head_dim, theta, scaling=None):
    """theta^(-2i/D), each then scaled as its wavelength demands; Llama 3.1 blends between two wavelengths."""
    scaled = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / frequency
        if scaling is None:
            scaled.append(frequency)
        elif scaling["rope_type"] == "linear":
            scaled.append(frequency / scaling["factor"])
        else:
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            context = scaling["original_max_position_embeddings"]
            if wavelength < context / high:
                scaled.append(frequency)
            elif wavelength > context / low:
                scaled.append(frequency / scaling["factor"])
            else:
                smooth = (context / wavelength - low) / (high - low)
                scaled.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return np.array(scaled)


def rotated(x_TD, frequencies, positions=None):
    """Pair i of a head is the complex number x[i] + 1j * x[i + D/2], turned by position * frequency i."""
    half = x_TD.shape[1] // 2
    positions = np.arange(len(x_TD)) if positions is None else positions
    turn = np.exp(1j * positions[:, None] * frequencies)
    z = (x_TD[:, :half] + 1j * x_TD[:, half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def positions_of(keep_T, documents_T):
    """How many real tokens of its own document come before each token."""
    return np.array(
        [sum(keep_T[s] and documents_T[s] == documents_T[t] for s in range(t)) for t in range(len(keep_T))]
    )


def reference_rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def weight_of(parameter):
    return parameter.detach().double().numpy()


def reference_attention(
    x_BTC,
    attention,
    *,
    causal=True,
    window=None,
    keep_BS=None,
    documents_BS=None,
    frequencies=None,
    softcap=None,
    qk_norm=None,
    eps=1e-6,
    kv_head_of=kv_head_of,
):
    """One head, one query at a time. A query that sees nothing is NaN, so that nobody compares it."""
    H, K, D = attention.n_heads, attention.n_kv_heads, attention.head_dim
    n_rows, n_tokens, _ = x_BTC.shape
    weight, out_weight = weight_of(attention.qkv.weight), weight_of(attention.out.weight)
    bias = np.zeros(len(weight)) if attention.qkv.bias is None else weight_of(attention.qkv.bias)
    everywhere = np.ones((n_rows, n_tokens), dtype=bool)
    keep_BS = everywhere if keep_BS is None else keep_BS.numpy()
    documents_BS = everywhere if documents_BS is None else documents_BS.numpy()
    x_BTC = x_BTC.double().numpy()
    y_BTC = np.empty((n_rows, n_tokens, len(out_weight)))
    for b in range(n_rows):
        projected = x_BTC[b] @ weight.T + bias
        queries, keys, values = np.split(projected, [H * D, (H + K) * D], axis=1)
        if qk_norm == "width":
            queries = reference_rms(queries, weight_of(attention.q_norm.weight), eps)
            keys = reference_rms(keys, weight_of(attention.k_norm.weight), eps)
        positions = positions_of(keep_BS[b], documents_BS[b])
        heads = []
        for h in range(H):
            k = kv_head_of(h, H, K)
            query, key, value = (
                part[:, i * D : (i + 1) * D] for part, i in ((queries, h), (keys, k), (values, k))
            )
            if qk_norm == "head":
                query = reference_rms(query, weight_of(attention.q_norm.weight), eps)
                key = reference_rms(key, weight_of(attention.k_norm.weight), eps)
            if frequencies is not None:
                query, key = rotated(query, frequencies, positions), rotated(key, frequencies, positions)
            head = np.full((n_tokens, D), np.nan)
            for t in range(n_tokens):
                seen = [
                    s
                    for s in range(n_tokens)
                    if keep_BS[b, s]
                    and documents_BS[b, s] == documents_BS[b, t]
                    and (window is None or abs(t - s) < window)
                    and (s <= t or not causal)
                ]
                if not seen:
                    continue
                logits = key[seen] @ query[t] / math.sqrt(D)
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                weights = np.exp(logits)
                head[t] = (weights / weights.sum()) @ value[seen]
            heads.append(head)
        y_BTC[b] = np.concatenate(heads, axis=-1) @ out_weight.T
    return torch.from_numpy(y_BTC)


def reference_norm(x, norm):
    """Root mean square, or mean and variance, with 1e-6 inside the root."""
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdims=True)
    return reference_rms(x, weight_of(norm.weight), 1e-6)


def reference_feedforward(x, feedforward):
    gate, up, down = (
        weight_of(linear.weight) for linear in (feedforward.gate, feedforward.up, feedforward.down)
    )
    z = x @ gate.T
    return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T


def config_of(n_heads, n_kv_heads=None, *, width=None, **options):
    kind = "mha" if n_kv_heads in (None, n_heads) else "gqa"
    sizes = {"d_model": width or n_heads * HEAD_DIM, "d_ff": 8, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return BlockConfig.from_dict({**sizes, "attention_type": kind, **options})


def make_attention(n_heads, n_kv_heads=None, *, causal=True, theta=None, **options):
    if theta is not None:
        options["rope_theta"] = theta
    mode = "causal" if causal else "bidirectional"
    config = config_of(n_heads, n_kv_heads, attention_mode=mode, use_rope=theta is not None, **options)
    attention = Attention(config).double().eval()
    for name, weight in attention.named_parameters():
        # Wide enough for softmax to prefer some keys clearly.
        nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.6)
    return attention


def make_input(width, dtype=torch.float64):
    return torch.randn(B, T, width, dtype=dtype)


def run_attention(attention, x_BTC, keep_BS=None, documents_BS=None):
    with torch.no_grad():
        return attention(x_BTC, Layout(x_BTC, keep_BS, documents_BS))


@st.composite
def runs(draw, n_rows, n_tokens):
    """Document ids (B, T) whose runs are the documents; two documents may have one id."""
    row = st.lists(st.integers(0, 2), min_size=n_tokens, max_size=n_tokens)
    return torch.tensor(draw(st.lists(row, min_size=n_rows, max_size=n_rows)))


def numbered(ids):
    """Another number for each run."""
    return F.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)


class TestAttentionReference:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("n_heads, n_kv_heads", HEADS)
    @pytest.mark.parametrize("theta", [None, 10_000.0, 3.0])
    def test_heads(self, n_heads, n_kv_heads, causal, padded, theta):
        attention = make_attention(n_heads, n_kv_heads, causal=causal, theta=theta)
        x_BTC, keep_BS = make_input(n_heads * HEAD_DIM), KEEP if padded else None
        expected = reference_attention(
            x_BTC,
            attention,
            causal=causal,
            keep_BS=keep_BS,
            frequencies=None if theta is None else frequencies_of(HEAD_DIM, theta),
        )
        real = KEEP if padded else torch.ones_like(KEEP)
        actual = run_attention(attention, x_BTC, keep_BS)
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=EXACT)

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", WINDOWS)
    def test_windows(self, window, causal, padded):
        attention = make_attention(4, 2, causal=causal, sliding_window=window)
        x_BTC, keep_BS = make_input(16), KEEP if padded else None
        expected = reference_attention(x_BTC, attention, causal=causal, window=window, keep_BS=keep_BS)
        real = KEEP if padded else torch.ones_like(KEEP)
        actual = run_attention(attention, x_BTC, keep_BS)
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=EXACT)

    @settings(max_examples=60, derandomize=True)
    @given(data=st.data(), seed=st.integers(0, 2**32))
    def test_everything_at_once(self, data, seed):
        torch.manual_seed(seed)
        n_kv_heads, group, head_dim, width, n_tokens = (
            data.draw(st.integers(1, 3)),
            data.draw(st.integers(1, 3)),
            data.draw(st.sampled_from([2, 4, 10])),
            data.draw(st.integers(1, 9)),
            data.draw(st.integers(1, 9)),
        )
        causal, window = data.draw(st.booleans()), data.draw(st.none() | st.integers(1, 10))
        qk_norm = data.draw(st.sampled_from([None, "head", "width"]))
        softcap = data.draw(st.sampled_from([None, 0.5, 5.0]))
        theta = data.draw(st.sampled_from([None, 10_000.0, 3.0]))
        scaling = None if theta is None else data.draw(st.sampled_from([None, LINEAR, LLAMA3]))
        eps = data.draw(st.sampled_from([1e-6, 0.1]))
        attention = make_attention(
            n_kv_heads * group,
            n_kv_heads,
            width=width,
            head_dim=head_dim,
            causal=causal,
            sliding_window=window,
            qk_norm=qk_norm,
            norm_eps=eps,
            softcap=softcap,
            qkv_bias=data.draw(st.booleans()),
            theta=theta,
            rope_scaling=scaling,
        )
        x_BTC = torch.randn(2, n_tokens, width, dtype=torch.float64)
        row = st.lists(st.booleans(), min_size=n_tokens, max_size=n_tokens)
        keep = data.draw(st.none() | st.lists(row, min_size=2, max_size=2))
        keep_BS = None if keep is None else torch.tensor(keep)
        documents = data.draw(st.none() | runs(2, n_tokens))
        expected = reference_attention(
            x_BTC,
            attention,
            causal=causal,
            window=window,
            keep_BS=keep_BS,
            documents_BS=None if documents is None else numbered(documents),
            frequencies=None if theta is None else frequencies_of(head_dim, theta, scaling),
            softcap=softcap,
            qk_norm=qk_norm,
            eps=eps,
        )
        actual = run_attention(attention, x_BTC, keep_BS, documents)
        real = torch.ones(2, n_tokens, dtype=torch.bool) if keep_BS is None else keep_BS
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", WINDOWS)
    def test_a_window_of_w_sees_w(self, window, causal):
        attention = make_attention(2, 1, causal=causal, sliding_window=window, theta=10_000.0)
        x_BTC = make_input(8)[:1]
        jacobian = torch.autograd.functional.jacobian(lambda x: attention(x, Layout(x))[0].sum(-1), x_BTC)
        influences = jacobian[:, 0].abs().amax(-1) > 1e-9
        reach = T if window is None else min(window, T)
        for query in range(T):
            before = min(reach - 1, query)
            after = 0 if causal else min(reach - 1, T - 1 - query)
            expected = [query - before <= key <= query + after for key in range(T)]
            assert influences[query].tolist() == expected
            assert sum(expected) == before + 1 + after

    def test_tiled_key_value_heads_would_differ(self):
        attention = make_attention(4, 2)
        x_BTC = make_input(16)
        tiled = reference_attention(x_BTC, attention, kv_head_of=lambda h, H, K: h % K)
        actual = run_attention(attention, x_BTC)
        assert (actual - tiled).abs().max() > 1e-2
        torch.testing.assert_close(actual, reference_attention(x_BTC, attention), rtol=0, atol=EXACT)

    def test_grouped_equals_multi_head_with_repeated_weights(self):
        grouped, full = make_attention(6, 2, theta=10_000.0), make_attention(6, 6, theta=10_000.0)
        q, k, v = grouped.qkv.weight.detach().split([6 * HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM])
        k, v = (w.unflatten(0, (2, HEAD_DIM)).repeat_interleave(3, dim=0).flatten(0, 1) for w in (k, v))
        full.load_state_dict({"qkv.weight": torch.cat([q, k, v]), "out.weight": grouped.out.weight})
        x_BTC = make_input(24)
        torch.testing.assert_close(
            run_attention(grouped, x_BTC), run_attention(full, x_BTC), rtol=0, atol=EXACT
        )

    @pytest.mark.parametrize("n_kv_heads", [None, 1])
    def test_multi_query_is_one_key_value_head(self, n_kv_heads):
        attention = make_attention(4, n_kv_heads, attention_type="mqa", theta=10_000.0)
        assert attention.n_kv_heads == 1 and attention.qkv.weight.shape == ((4 + 2) * HEAD_DIM, 16)
        x_BTC = make_input(16)
        expected = reference_attention(x_BTC, attention, frequencies=frequencies_of(HEAD_DIM, 10_000.0))
        torch.testing.assert_close(run_attention(attention, x_BTC), expected, rtol=0, atol=EXACT)

    @pytest.mark.parametrize("head_dim, width", [(2, 16), (6, 16), (32, 16), (4, 7)])
    def test_head_size_apart_from_the_width(self, head_dim, width):
        attention = make_attention(4, 2, head_dim=head_dim, width=width, theta=10_000.0)
        assert attention.qkv.weight.shape == (8 * head_dim, width)
        assert attention.out.weight.shape == (width, 4 * head_dim)
        x_BTC = make_input(width)
        expected = reference_attention(x_BTC, attention, frequencies=frequencies_of(head_dim, 10_000.0))
        torch.testing.assert_close(run_attention(attention, x_BTC), expected, rtol=0, atol=EXACT)

    @pytest.mark.parametrize("qk_norm, sizes", [("head", (4, 4)), ("width", (16, 8))])
    def test_norms_of_queries_and_keys(self, qk_norm, sizes):
        attention = make_attention(4, 2, qk_norm=qk_norm, theta=10_000.0)
        assert (attention.q_norm.weight.numel(), attention.k_norm.weight.numel()) == sizes
        x_BTC, rope = make_input(16), frequencies_of(HEAD_DIM, 10_000.0)
        actual = run_attention(attention, x_BTC)
        expected = reference_attention(x_BTC, attention, frequencies=rope, qk_norm=qk_norm)
        torch.testing.assert_close(actual, expected, rtol=0, atol=EXACT)
        # Normalised queries and keys do not care how large their projections are; values do.
        larger = make_attention(4, 2, qk_norm=qk_norm, theta=10_000.0)
        larger.load_state_dict(attention.state_dict())
        with torch.no_grad():
            larger.qkv.weight[: 6 * HEAD_DIM] *= 1e6
            attention.qkv.weight[: 6 * HEAD_DIM] *= 1e3
        torch.testing.assert_close(
            run_attention(larger, x_BTC), run_attention(attention, x_BTC), rtol=0, atol=1e-6
        )

    def test_softcap_bounds_the_logits(self):
        attention, x_BTC = make_attention(2, softcap=0.1), 100 * make_input(8)
        with torch.no_grad():
            attention.qkv.weight[16:] = torch.eye(8)
            attention.out.weight.copy_(torch.eye(8))
        last = run_attention(attention, x_BTC)[:, -1]
        # Of T weights, whose logits are within +-c, none is further from 1/T than a factor of e^2c.
        mean = x_BTC.mean(1)
        reach = (math.exp(0.2) - 1) * x_BTC.abs().mean(1)
        assert ((last - mean).abs() <= reach).all()
        free = make_attention(2)
        free.load_state_dict(attention.state_dict())
        assert ((run_attention(free, x_BTC)[:, -1] - mean).abs() > reach).any()

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("padded", [False, True])
    def test_torch_multi_head_attention(self, causal, padded):
        ours = make_attention(4, width=32, head_dim=8, causal=causal).float()
        theirs = nn.MultiheadAttention(32, 4, bias=False, batch_first=True).eval()
        theirs.load_state_dict({"in_proj_weight": ours.qkv.weight, "out_proj.weight": ours.out.weight})
        x_BTC = make_input(32, torch.float32)
        # Right-padding only: with nothing to see, theirs is NaN.
        keep_BS = KEEP[1:].expand(B, T) if padded else torch.ones_like(KEEP)
        with torch.no_grad():
            expected, _ = theirs(
                x_BTC,
                x_BTC,
                x_BTC,
                attn_mask=torch.ones(T, T, dtype=torch.bool).triu(1) if causal else None,
                key_padding_mask=~keep_BS if padded else None,
                need_weights=False,
            )
        actual = run_attention(ours, x_BTC, keep_BS if padded else None)
        scale = expected[keep_BS].abs().max().item()
        torch.testing.assert_close(actual[keep_BS], expected[keep_BS], rtol=1e-5, atol=1e-6 * scale)


def published(config_class, **options):
    return config_class(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="eager",
        **options,
    )


def widened(module):
    for name, weight in module.named_parameters():
        nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.4)
    return module.eval()


def causal_inputs(x_BTC, head_dim=8):
    """What a published layer wants beside hidden states: tables and an additive mask."""
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    tables = LlamaRotaryEmbedding(config)(x_BTC, torch.arange(T)[None])
    return {"position_embeddings": tables, "attention_mask": torch.full((T, T), -1e30).triu(1)[None, None]}


def fused(theirs):
    """The weights of a published attention under our names."""
    parts = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
    weights = {"qkv.weight": torch.cat([p.weight for p in parts]), "out.weight": theirs.o_proj.weight}
    if theirs.q_proj.bias is not None:
        weights["qkv.bias"] = torch.cat([p.bias for p in parts])
    if hasattr(theirs, "q_norm"):
        weights |= {"q_norm.weight": theirs.q_norm.weight, "k_norm.weight": theirs.k_norm.weight}
    return weights


class TestPublishedAttention:
    @pytest.mark.parametrize(
        "theirs, options",
        [
            (lambda: Qwen2Attention(published(Qwen2Config), 0), {"qkv_bias": True}),
            (lambda: Qwen3Attention(published(Qwen3Config), 0), {"qk_norm": "head"}),
            (
                lambda: Gemma2Attention(
                    published(Gemma2Config, query_pre_attn_scalar=8, attn_logit_softcapping=2.0), 0
                ),
                {"softcap": 2.0},
            ),
        ],
        ids=["Qwen2", "Qwen3", "Gemma2"],
    )
    def test_attention(self, theirs, options):
        theirs = widened(theirs())
        config = config_of(4, 2, width=16, head_dim=8, **options)
        ours = Attention(config).eval()
        ours.load_state_dict(fused(theirs))
        x_BTC = make_input(16, torch.float32)
        with torch.no_grad():
            expected = theirs(x_BTC, **causal_inputs(x_BTC))[0]
        actual = run_attention(ours, x_BTC)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
        without = Attention(config_of(4, 2, width=16, head_dim=8)).eval()
        without.load_state_dict(fused(theirs), strict=False)
        assert (run_attention(without, x_BTC) - expected).abs().max() > 1e-2 * expected.abs().max()

    def test_block_that_normalises_what_it_adds(self):
        theirs = widened(Olmo2DecoderLayer(published(Olmo2Config), 0))
        ours = Block(
            16, 24, 4, 2, attention_type="gqa", head_dim=8, qk_norm="width", norm_position="post"
        ).eval()
        weights = {f"attention.{name}": weight for name, weight in fused(theirs.self_attn).items()}
        for part in ("gate", "up", "down"):
            weights[f"feedforward.{part}.weight"] = getattr(theirs.mlp, f"{part}_proj").weight
        weights["attention_norm.weight"] = theirs.post_attention_layernorm.weight
        weights["feedforward_norm.weight"] = theirs.post_feedforward_layernorm.weight
        ours.load_state_dict(weights)
        x_BTC = make_input(16, torch.float32)
        with torch.no_grad():
            expected = theirs(x_BTC, **causal_inputs(x_BTC))
            expected = expected[0] if isinstance(expected, tuple) else expected
            actual = ours(x_BTC)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


class TestBlockReference:
    @pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("window", [None, 2])
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("position", ["pre", "post"])
    def test_block(self, norm, mode, window, padded, position):
        block = Block(
            16,
            24,
            4,
            2,
            attention_type="gqa",
            attention_mode=mode,
            sliding_window=window,
            norm=norm,
            norm_position=position,
            rope_theta=100.0,
        )
        block = block.double().eval()
        for name, weight in block.named_parameters():
            nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.4)
        x_BTC, keep_BS = make_input(16), KEEP if padded else None

        def attended(x):
            return reference_attention(
                torch.from_numpy(x),
                block.attention,
                causal=mode == "causal",
                window=window,
                keep_BS=keep_BS,
                frequencies=frequencies_of(4, 100.0),
            ).numpy()

        x = x_BTC.numpy()
        if position == "pre":
            x = x + attended(reference_norm(x, block.attention_norm))
            x = x + reference_feedforward(reference_norm(x, block.feedforward_norm), block.feedforward)
        else:
            x = x + reference_norm(attended(x), block.attention_norm)
            x = x + reference_norm(reference_feedforward(x, block.feedforward), block.feedforward_norm)
        real = KEEP if padded else torch.ones_like(KEEP)
        with torch.no_grad():
            actual = block(x_BTC, None if keep_BS is None else keep_BS.long())
        torch.testing.assert_close(actual[real], torch.from_numpy(x)[real], rtol=0, atol=1e-10)

    @pytest.mark.parametrize("kind, norm", [("rmsnorm", nn.RMSNorm), ("layernorm", nn.LayerNorm)])
    def test_norm_of_small_values(self, kind, norm):
        # The epsilon decides here, and not in the test above.
        block = Block(16, 24, 4, norm=kind).double()
        assert isinstance(block.attention_norm, norm)
        x = np.random.default_rng(0).normal(0, 1e-3, (5, 16))
        for module in (block.attention_norm, block.feedforward_norm):
            actual = module(torch.from_numpy(x)).detach()
            torch.testing.assert_close(actual, torch.from_numpy(reference_norm(x, module)), rtol=1e-9, atol=0)

    @pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
    def test_one_epsilon_for_every_norm(self, kind):
        block = Block(16, 24, 4, norm=kind, norm_eps=1e-3, qk_norm="head")
        attention = block.attention
        norms = (block.attention_norm, block.feedforward_norm, attention.q_norm, attention.k_norm)
        assert [norm.eps for norm in norms] == [1e-3] * 4

    @pytest.mark.parametrize(
        "options",
        [
            {"qk_norm": "head"},
            {"qk_norm": "width"},
            {"norm_position": "post"},
            {"norm_position": "post", "norm": "layernorm"},
            {"softcap": 2.0},
            {"qkv_bias": True},
        ],
        ids=str,
    )
    def test_bfloat16(self, options):
        """Under autocast, what a norm reads may be bfloat16 and its weight is not: no warning comes of it."""
        block = widened(Block(16, 24, 4, **options))
        x_BTC = make_input(16, torch.float32)
        warn_always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        try:
            with torch.no_grad():
                expected = block(x_BTC)
                with torch.autocast("cpu", torch.bfloat16):
                    under_autocast = block(x_BTC)
                throughout = block.bfloat16()(x_BTC.bfloat16()).float()
        finally:
            torch.set_warn_always(warn_always)
        scale = expected.abs().max().item()
        for actual in (under_autocast, throughout):
            # bfloat16 has 8 bits, and a few operations follow each other.
            torch.testing.assert_close(actual, expected, rtol=0, atol=0.05 * scale)

    def test_feedforward(self):
        feedforward = SwiGLU(8, 12).double()
        x = torch.randn(3, 5, 8, dtype=torch.float64)
        expected = torch.from_numpy(reference_feedforward(x.numpy(), feedforward))
        torch.testing.assert_close(feedforward(x).detach(), expected, rtol=0, atol=EXACT)

    def test_nothing_has_a_bias_that_was_not_asked_for(self):
        for norm in ("rmsnorm", "layernorm"):
            names = {name for name, _ in Block(16, 24, 4, norm=norm).named_parameters()}
            assert len(names) == 7 and not any("bias" in name for name in names)
            asked = {name for name, _ in Block(16, 24, 4, norm=norm, qkv_bias=True).named_parameters()}
            assert asked - names == {"attention.qkv.bias"}

    @pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
    @pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sliding_window": 2}])
    def test_nothing_in_nothing_out(self, shape, options):
        block = Block(16, 24, 4, **options).eval()
        assert block(torch.zeros(*shape, 16)).shape == (*shape, 16)


def reference_of_backends(q_BHTD, k_BKSD, v_BKSD, visible_BTS, scale, softcap):
    """softmax(scale * q k^T) v over the visible keys in float64, one head after the other."""
    q, k, v = (each.double().numpy() for each in (q_BHTD, k_BKSD, v_BKSD))
    H, K = q.shape[1], k.shape[1]
    y = np.empty((*q.shape[:3], v.shape[3]))
    for b, h in itertools.product(range(len(q)), range(H)):
        logits = q[b, h] @ k[b, h // (H // K)].T * scale
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        weights = np.where(visible_BTS[b], np.exp(logits), 0.0)
        y[b, h] = weights / weights.sum(-1, keepdims=True) @ v[b, h // (H // K)]
    return torch.from_numpy(y)


def visible_of(mask, rows):
    """The rules of a mask of consecutive keys, written out: bool (B, T, S)."""
    query, key = mask.query_time_T.numpy()[:, None], mask.key_time_S.numpy()
    visible = (key <= query) if mask.causal else np.ones((len(query), len(key)), dtype=bool)
    if mask.window is not None:
        visible = visible & (abs(query - key) < mask.window)
    visible = np.repeat(visible[None], rows, axis=0)
    if mask.keep_BS is not None:
        visible = visible & (mask.keep_BS.numpy()[:, None] | (query == key))
    if mask.documents is not None:
        of_query, of_key = (each.numpy() for each in mask.documents)
        visible = visible & (of_query[:, :, None] == of_key[:, None])
    return visible


def mask_of(n_queries, n_keys, *, causal, window, keep=None, documents=None):
    time_S = torch.arange(n_keys)
    both = None if documents is None else (documents[:, n_keys - n_queries :], documents)
    return AttentionMask(
        time_S[n_keys - n_queries :],
        Keys(time_S, True),
        causal=causal,
        window=window,
        keep_BS=keep,
        documents=both,
    )


class TestBackends:
    @settings(max_examples=60, derandomize=True)
    @given(data=st.data(), seed=st.integers(0, 2**32))
    def test_every_way_is_the_same(self, data, seed):
        torch.manual_seed(seed)
        K, group, D, V, rows = (
            data.draw(st.integers(1, 3)),
            data.draw(st.integers(1, 3)),
            data.draw(st.integers(1, 6)),
            data.draw(st.integers(1, 6)),
            data.draw(st.integers(1, 2)),
        )
        S = data.draw(st.integers(1, 11))
        T = data.draw(st.integers(1, S))
        row = st.lists(st.booleans(), min_size=S, max_size=S)
        keep = data.draw(st.none() | st.lists(row, min_size=rows, max_size=rows))
        documents = data.draw(st.none() | runs(rows, S))
        mask = mask_of(
            T,
            S,
            causal=data.draw(st.booleans()),
            window=data.draw(st.none() | st.integers(1, 12)),
            keep=None if keep is None else torch.tensor(keep),
            documents=None if documents is None else numbered(documents),
        )
        scale, softcap = data.draw(st.sampled_from([None, 0.3])), data.draw(st.sampled_from([None, 0.7]))
        q = 2 * torch.randn(rows, K * group, T, D, dtype=torch.float64)
        k, v = (torch.randn(rows, K, S, size, dtype=torch.float64) for size in (D, V))
        expected = reference_of_backends(q, k, v, visible_of(mask, rows), scale or D**-0.5, softcap)
        whole, _ = attend(q, k, v, mask, scale=scale, softcap=softcap)
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sliced, "QUERIES_PER_SLICE", data.draw(st.integers(1, 12)))
            in_slices = sliced_attention(q, k, v, mask, scale=scale, softcap=softcap)
        torch.testing.assert_close(in_slices, expected, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("n_queries, n_keys", [(128, 128), (129, 129), (300, 300), (200, 333)])
    @pytest.mark.parametrize("causal, window", [(True, None), (True, 50), (False, None), (False, 50)])
    def test_more_queries_than_a_slice_holds(self, n_queries, n_keys, causal, window):
        mask = mask_of(n_queries, n_keys, causal=causal, window=window)
        q = torch.randn(1, 2, n_queries, 4, dtype=torch.float64)
        k, v = torch.randn(2, 1, 1, n_keys, 4, dtype=torch.float64)
        expected = reference_of_backends(q, k, v, visible_of(mask, 1), 0.5, None)
        for actual in (attend(q, k, v, mask)[0], sliced_attention(q, k, v, mask)):
            torch.testing.assert_close(actual, expected, rtol=0, atol=EXACT)

    def test_a_slice_reads_only_the_keys_that_it_may_see(self, monkeypatch):
        """What is hidden from a whole slice is not multiplied by zero: it is not touched."""
        monkeypatch.setattr(sliced, "QUERIES_PER_SLICE", 4)
        q, k, v = torch.randn(3, 1, 1, 12, 4)
        mask = mask_of(12, 12, causal=True, window=3)
        expected = sliced_attention(q, k, v, mask)[:, :, 4:8]
        for hidden in (slice(0, 2), slice(8, 12)):
            k[:, :, hidden] = v[:, :, hidden] = math.nan
        assert torch.equal(sliced_attention(q, k, v, mask)[:, :, 4:8], expected)

    @pytest.mark.parametrize("softcap", [None, 1.0])
    def test_gradients(self, softcap, monkeypatch):
        monkeypatch.setattr(sliced, "QUERIES_PER_SLICE", 3)
        mask = mask_of(7, 7, causal=True, window=4, keep=KEEP)
        inputs = [torch.randn(2, heads, 7, 2, dtype=torch.float64) for heads in (4, 2, 2)]
        for each in inputs:
            each.requires_grad_()
        assert torch.autograd.gradcheck(
            lambda q, k, v: sliced_attention(q, k, v, mask, softcap=softcap), inputs
        )

    @pytest.mark.parametrize("p", [0.2, 0.5])
    def test_dropout_of_a_slice(self, p):
        """A share p of the weights is zero, and the others are larger by 1 / (1 - p)."""
        mask = mask_of(8, 8, causal=False, window=None)
        q, k = torch.zeros(2, 1000, 2, 8, 4)
        v = torch.eye(8).expand(1000, 2, 8, 8)
        weights = sliced_attention(q, k, v, mask, dropout=p)
        kept = weights != 0
        torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 8 / (1 - p)))
        share = 1 - kept.double().mean().item()
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / kept.numel())


class TestRotary:
    def tables(self, n_positions, head_dim=16, theta=10_000.0):
        return Rotary(head_dim, theta).tables(torch.arange(n_positions).float())

    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-11)])
    def test_reference(self, dtype, tolerance):
        x = torch.randn(300, 16, dtype=torch.float64)
        expected = torch.from_numpy(rotated(x.numpy(), frequencies_of(16, 10_000.0)))
        tables = Rotary(16).tables(torch.arange(300, dtype=dtype))
        assert tables[0].dtype == tables[1].dtype == dtype
        actual = rotate(x[None, None], *tables)[0, 0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)

    def test_positions_of_each_row(self):
        x, positions = (
            torch.randn(2, 5, 16, dtype=torch.float64),
            torch.tensor([[0, 1, 2, 3, 4], [9, 0, 0, 7, 1]]),
        )
        cos, sin = Rotary(16).tables(positions.double())
        assert cos.shape == sin.shape == (2, 1, 5, 8)
        frequencies = frequencies_of(16, 10_000.0)
        expected = [rotated(x[b].numpy(), frequencies, positions[b].numpy()) for b in range(2)]
        actual = rotate(x[:, None].expand(2, 3, 5, 16), cos, sin)
        for head in range(3):
            torch.testing.assert_close(
                actual[:, head], torch.from_numpy(np.stack(expected)), rtol=0, atol=EXACT
            )

    @pytest.mark.parametrize("head_dim, theta", [(16, 10_000.0), (128, 500_000.0)])
    @pytest.mark.parametrize(
        "scaling",
        [
            None,
            LINEAR,
            LLAMA3,
            {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 4.0},
            {**LLAMA3, "factor": 32.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        ],
    )
    def test_scaled_frequencies(self, scaling, head_dim, theta):
        section = None if scaling is None else RopeScalingConfig.from_dict(scaling)
        rotary = Rotary(head_dim, theta, section)
        expected = frequencies_of(head_dim, theta, scaling)
        exact = rotary.frequencies(torch.device("cpu"), torch.float64).numpy()
        np.testing.assert_allclose(exact, expected, rtol=1e-12, atol=0)
        if scaling is None:
            return
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            rope_parameters={"rope_theta": theta, **scaling},
        )
        theirs, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
        assert attention_factor == 1.0
        # Theirs are float32.
        np.testing.assert_allclose(exact, theirs.double().numpy(), rtol=3e-6, atol=0)
        torch.testing.assert_close(rotary.frequencies(torch.device("cpu")), theirs, rtol=3e-6, atol=0)

    def test_the_example_of_llama3_keeps_blends_and_divides(self):
        ratio = frequencies_of(16, 10_000.0, LLAMA3) / frequencies_of(16, 10_000.0)
        assert ratio[0] == 1 and (ratio[4:] == 0.25).all() and ((ratio[1:3] > 0.25) & (ratio[1:3] < 1)).all()

    @pytest.mark.parametrize("again", [lambda r: pickle.loads(pickle.dumps(r)), copy.deepcopy, copy.copy])
    def test_a_copy_is_known_where_nothing_else_is(self, again, monkeypatch):
        """As in a process that unpickles a Rack and compiles it."""
        original = Rotary(8, 9.0, RopeScalingConfig.from_dict(LLAMA3))
        monkeypatch.setattr(rotary, "_known", {})
        made = again(original)
        assert made == original and made.key == original.key
        tables = constant_tables(made.key, 5, torch.device("cpu"), torch.float64)
        expected = original.tables(torch.arange(5, dtype=torch.float64))
        assert all(map(torch.equal, tables, expected))

    def test_rotary_with_other_scaling_is_another(self):
        scalings = [None, LINEAR, LLAMA3, {**LLAMA3, "factor": 3.0}]
        sections = [None if each is None else RopeScalingConfig.from_dict(each) for each in scalings]
        keys = {
            Rotary(head, theta, each).key for head in (8, 16) for theta in (10.0, 9.0) for each in sections
        }
        assert len(keys) == 16

    @pytest.mark.parametrize("head_dim, theta", [(16, 10_000.0), (8, 500_000.0), (2, 10.0)])
    def test_transformers(self, head_dim, theta):
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
        q, k = torch.randn(2, B, 3, 64, head_dim)
        cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(64)[None])
        expected = apply_rotary_pos_emb(q, k, cos, sin)
        tables = self.tables(64, head_dim, theta)
        torch.testing.assert_close((rotate(q, *tables), rotate(k, *tables)), expected, rtol=0, atol=3e-5)

    @pytest.mark.parametrize("autocast", [False, True])
    def test_bfloat16_keeps_neighbours_apart(self, autocast):
        n_positions = 2048
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            cos, sin = self.tables(n_positions)
            x = torch.ones(1, 1, n_positions, 16, dtype=torch.bfloat16)
            turned = rotate(x, cos, sin)[0, 0]
        assert cos.dtype == sin.dtype == torch.float32 and turned.dtype == torch.bfloat16
        assert (turned[1:] != turned[:-1]).any(-1).all()
        expected = torch.from_numpy(rotated(np.ones((n_positions, 16)), frequencies_of(16, 10_000.0)))
        # bfloat16 has 8 bits; a value of up to sqrt(2) is rounded by at most 2^-8.
        torch.testing.assert_close(turned.double(), expected, rtol=0, atol=2**-8 + 1e-3)
        positions = torch.arange(n_positions).bfloat16()
        assert (positions[257:] == positions[256:-1]).any()

    @pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-3), (torch.bfloat16, 0.25)])
    def test_only_the_distance_matters(self, dtype, tolerance):
        n_positions = 1024
        q, k = torch.randn(2, 1, 1, 1, 16).to(dtype).expand(2, 1, 1, n_positions, 16)
        cos, sin = self.tables(n_positions)
        q_TD, k_TD = rotate(q, cos, sin)[0, 0].double(), rotate(k, cos, sin)[0, 0].double()
        for distance in (0, 1, 17, 300):
            scores = (q_TD[distance:] * k_TD[: n_positions - distance]).sum(-1)
            assert scores.max() - scores.min() < tolerance
        # Angles in bfloat16, as an autocast model would compute them, are far outside the tolerance.
        angle = torch.outer(
            torch.arange(n_positions).bfloat16(), 10_000.0 ** (-torch.arange(0, 16, 2) / 16).bfloat16()
        )
        q_TD, k_TD = (rotate(x, angle.cos(), angle.sin())[0, 0].double() for x in (q, k))
        scores = (q_TD[17:] * k_TD[:-17]).sum(-1)
        assert scores.max() - scores.min() > 4 * tolerance

    def test_blocks_of_one_pass_may_differ(self):
        layout = Layout(torch.zeros(1, 9, 1, dtype=torch.float64))
        for head_dim, theta, scaling in [
            (4, 10.0, None),
            (8, 10.0, None),
            (4, 100.0, None),
            (4, 10.0, LINEAR),
            (4, 10.0, None),
        ]:
            section = None if scaling is None else RopeScalingConfig.from_dict(scaling)
            x = torch.randn(9, head_dim, dtype=torch.float64)
            actual = rotate(x[None, None], *layout.rotary(Rotary(head_dim, theta, section)))[0, 0]
            expected = rotated(x.numpy(), frequencies_of(head_dim, theta, scaling))
            torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=0, atol=EXACT)

    def test_length_is_kept(self):
        x = torch.randn(1, 2, 50, 16, dtype=torch.float64)
        torch.testing.assert_close(
            rotate(x, *self.tables(50)).norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0
        )

    @pytest.mark.parametrize("use_rope", [False, True])
    def test_order_matters_only_with_positions(self, use_rope):
        block = Block(16, 16, 2, attention_mode="bidirectional", use_rope=use_rope).double().eval()
        x_BTC = make_input(16)
        shuffle = torch.tensor([3, 0, 6, 2, 1, 5, 4])
        with torch.no_grad():
            difference = (block(x_BTC[:, shuffle]) - block(x_BTC)[:, shuffle]).abs().max()
        assert difference > 1e-3 if use_rope else difference < EXACT


class TestDropout:
    def test_inactive_in_eval(self):
        dropping, plain = Block(16, 24, 4, dropout=0.5).eval(), Block(16, 24, 4).eval()
        plain.load_state_dict(dropping.state_dict())
        x_BTC = make_input(16, torch.float32)
        with torch.no_grad():
            assert torch.equal(dropping(x_BTC), plain(x_BTC))

    def test_active_in_train(self):
        block = Block(16, 24, 4, dropout=0.5).train()
        x_BTC = make_input(16, torch.float32)
        with torch.no_grad():
            assert not torch.equal(block(x_BTC), block(x_BTC))

    def test_no_dropout_is_the_same_in_train(self):
        block = Block(16, 24, 4, dropout=0.0)
        x_BTC = make_input(16, torch.float32)
        with torch.no_grad():
            assert torch.equal(block.train()(x_BTC), block.eval()(x_BTC))

    @pytest.mark.parametrize("p", [0.1, 0.5])
    def test_feedforward_share_and_scale(self, p):
        feedforward = SwiGLU(8, 12, dropout=p)
        x = torch.randn(1, 8).expand(4000, 8)
        with torch.no_grad():
            full, dropped = feedforward.eval()(x), feedforward.train()(x)
        zero = dropped == 0
        # Five standard errors of a share of 32000.
        assert abs(zero.double().mean() - p) < 5 * math.sqrt(p * (1 - p) / zero.numel())
        torch.testing.assert_close(dropped[~zero], full[~zero] / (1 - p))

    @pytest.mark.parametrize("p", [0.2, 0.5])
    def test_attention_on_weights_and_output(self, p):
        attention = Attention(config_of(2, 1, dropout=p))
        x_BTC = torch.randn(1, 4, 8).expand(4000, 4, 8)
        with torch.no_grad():
            full = attention.eval()(x_BTC, Layout(x_BTC))[0]
            dropped = attention.train()(x_BTC, Layout(x_BTC))
        error = dropped.std(0) / math.sqrt(len(dropped))
        assert ((dropped.mean(0) - full).abs() < 5 * error).all()
        kept = [dropped[:, 3, c][dropped[:, 3, c] != 0] for c in range(8)]
        assert all(abs(len(column) / 4000 - (1 - p)) < 0.05 for column in kept)
        # Dropout on the output alone leaves a single value.
        assert all(column.unique().numel() > 4 for column in kept)
