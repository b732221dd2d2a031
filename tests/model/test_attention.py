"""Attention and Block against the same mathematics written out in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from stackwise.model.attention import Attention
from stackwise.model.block import Block
from stackwise.model.feedforward import SwiGLU
from stackwise.model.layout import Layout
from stackwise.model.rotary import rotary_tables, rotate

B, T = 2, 7
HEADS = [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]
HEAD_DIM = 4
WINDOWS = [None, 1, 2, 3, T - 1, T, T + 5]
# Row 0 is padded on the left, row 1 on the right.
KEEP = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
# The angles are float32: at position 6 that leaves about 1e-6.
ROPE_TOLERANCE = 1e-5
EXACT = 1e-12


def kv_head_of(head, n_heads, n_kv_heads):
    return head // (n_heads // n_kv_heads)


def rotated(x_TD, theta):
    """Pair i of a head is the complex number x[i] + 1j * x[i + D/2], turned by position * theta^(-2i/D)."""
    n_positions, head_dim = x_TD.shape
    half = head_dim // 2
    frequency = theta ** (-2.0 * np.arange(half) / head_dim)
    turn = np.exp(1j * np.arange(n_positions)[:, None] * frequency)
    z = (x_TD[:, :half] + 1j * x_TD[:, half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def visible_keys(query, *, causal, window, keep_S):
    reach = math.inf if window is None else window
    return [
        key for key in range(T) if keep_S[key] and abs(query - key) < reach and (key <= query or not causal)
    ]


def reference_attention(
    x_BTC,
    attention,
    *,
    causal=True,
    window=None,
    keep_BS=None,
    theta=None,
    kv_head_of=kv_head_of,
):
    """One head, one query at a time. A query that sees nothing is NaN, so that nobody compares it."""
    H, K, D = attention.n_heads, attention.n_kv_heads, attention.head_dim
    weight = attention.qkv.weight.detach().double().numpy()
    q_weight, k_weight, v_weight = np.split(weight, [H * D, (H + K) * D])
    out_weight = attention.out.weight.detach().double().numpy()
    keep_BS = np.ones((B, T), dtype=bool) if keep_BS is None else keep_BS.numpy()
    x_BTC = x_BTC.double().numpy()
    y_BTC = np.empty_like(x_BTC)
    for b in range(B):
        heads = []
        for h in range(H):
            k = kv_head_of(h, H, K)
            query = x_BTC[b] @ q_weight[h * D : (h + 1) * D].T
            key = x_BTC[b] @ k_weight[k * D : (k + 1) * D].T
            value = x_BTC[b] @ v_weight[k * D : (k + 1) * D].T
            if theta is not None:
                query, key = rotated(query, theta), rotated(key, theta)
            head = np.full((T, D), np.nan)
            for t in range(T):
                seen = visible_keys(t, causal=causal, window=window, keep_S=keep_BS[b])
                if not seen:
                    continue
                weights = np.exp([query[t] @ key[s] / math.sqrt(D) for s in seen])
                head[t] = (weights / weights.sum()) @ value[seen]
            heads.append(head)
        y_BTC[b] = np.concatenate(heads, axis=-1) @ out_weight.T
    return torch.from_numpy(y_BTC)


def reference_norm(x, norm):
    """Root mean square with 1e-6 inside the root, or mean and variance with 1e-5."""
    weight = norm.weight.detach().double().numpy()
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdims=True)
    epsilon = 1e-5 if isinstance(norm, nn.LayerNorm) else 1e-6
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def reference_feedforward(x, feedforward):
    gate, up, down = (
        linear.weight.detach().double().numpy()
        for linear in (feedforward.gate, feedforward.up, feedforward.down)
    )
    z = x @ gate.T
    return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T


def make_attention(n_heads, n_kv_heads, **kwargs):
    attention = Attention(n_heads * HEAD_DIM, n_heads, n_kv_heads, **kwargs).double().eval()
    for weight in attention.parameters():
        # Wide enough for softmax to prefer some keys clearly.
        nn.init.normal_(weight, std=0.6)
    return attention


def make_input(width, dtype=torch.float64):
    return torch.randn(B, T, width, dtype=dtype)


def run_attention(attention, x_BTC, keep_BS=None):
    with torch.no_grad():
        return attention(x_BTC, Layout(x_BTC, keep_BS))


class TestAttentionReference:
    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("n_heads, n_kv_heads", HEADS)
    @pytest.mark.parametrize(
        "theta, tolerance", [(None, EXACT), (10_000.0, ROPE_TOLERANCE), (3.0, ROPE_TOLERANCE)]
    )
    def test_heads(self, n_heads, n_kv_heads, causal, padded, theta, tolerance):
        attention = make_attention(n_heads, n_kv_heads, causal=causal, rope_theta=theta)
        x_BTC, keep_BS = make_input(n_heads * HEAD_DIM), KEEP if padded else None
        expected = reference_attention(x_BTC, attention, causal=causal, keep_BS=keep_BS, theta=theta)
        real = KEEP if padded else torch.ones_like(KEEP)
        actual = run_attention(attention, x_BTC, keep_BS)
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=tolerance)

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", WINDOWS)
    def test_windows(self, window, causal, padded):
        attention = make_attention(4, 2, causal=causal, sliding_window=window, rope_theta=None)
        x_BTC, keep_BS = make_input(16), KEEP if padded else None
        expected = reference_attention(x_BTC, attention, causal=causal, window=window, keep_BS=keep_BS)
        real = KEEP if padded else torch.ones_like(KEEP)
        actual = run_attention(attention, x_BTC, keep_BS)
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=EXACT)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", WINDOWS)
    def test_a_window_of_w_sees_w(self, window, causal):
        attention = make_attention(2, 1, causal=causal, sliding_window=window)
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
        attention = make_attention(4, 2, rope_theta=None)
        x_BTC = make_input(16)
        tiled = reference_attention(x_BTC, attention, kv_head_of=lambda h, H, K: h % K)
        actual = run_attention(attention, x_BTC)
        assert (actual - tiled).abs().max() > 1e-2
        torch.testing.assert_close(actual, reference_attention(x_BTC, attention), rtol=0, atol=EXACT)

    def test_grouped_equals_multi_head_with_repeated_weights(self):
        grouped, full = make_attention(6, 2), make_attention(6, 6)
        q, k, v = grouped.qkv.weight.detach().split([6 * HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM])
        k, v = (w.unflatten(0, (2, HEAD_DIM)).repeat_interleave(3, dim=0).flatten(0, 1) for w in (k, v))
        full.load_state_dict({"qkv.weight": torch.cat([q, k, v]), "out.weight": grouped.out.weight})
        x_BTC = make_input(24)
        torch.testing.assert_close(
            run_attention(grouped, x_BTC), run_attention(full, x_BTC), rtol=0, atol=EXACT
        )

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("padded", [False, True])
    def test_torch_multi_head_attention(self, causal, padded):
        ours = Attention(32, 4, 4, causal=causal, rope_theta=None).eval()
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
        torch.testing.assert_close(actual[keep_BS], expected[keep_BS], rtol=1e-5, atol=1e-6)


class TestBlockReference:
    @pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("window", [None, 2])
    @pytest.mark.parametrize("padded", [False, True])
    def test_block(self, norm, mode, window, padded):
        block = Block(
            16, 24, 4, 2, "gqa", attention_mode=mode, sliding_window=window, norm=norm, rope_theta=100.0
        )
        block = block.double().eval()
        for name, weight in block.named_parameters():
            nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.4)
        x_BTC, keep_BS = make_input(16), KEEP if padded else None
        x = x_BTC.numpy()
        attended = reference_attention(
            torch.from_numpy(reference_norm(x, block.attention_norm)),
            block.attention,
            causal=mode == "causal",
            window=window,
            keep_BS=keep_BS,
            theta=100.0,
        )
        x = x + attended.numpy()
        x = x + reference_feedforward(reference_norm(x, block.feedforward_norm), block.feedforward)
        real = KEEP if padded else torch.ones_like(KEEP)
        with torch.no_grad():
            actual = block(x_BTC, None if keep_BS is None else keep_BS.long())
        torch.testing.assert_close(actual[real], torch.from_numpy(x)[real], rtol=0, atol=1e-4)

    @pytest.mark.parametrize("kind, norm", [("rmsnorm", nn.RMSNorm), ("layernorm", nn.LayerNorm)])
    def test_norm_of_small_values(self, kind, norm):
        # The epsilon decides here, and not in the test above.
        block = Block(16, 24, 4, norm=kind).double()
        assert isinstance(block.attention_norm, norm)
        x = np.random.default_rng(0).normal(0, 1e-3, (5, 16))
        for module in (block.attention_norm, block.feedforward_norm):
            actual = module(torch.from_numpy(x)).detach()
            torch.testing.assert_close(actual, torch.from_numpy(reference_norm(x, module)), rtol=1e-9, atol=0)

    def test_feedforward(self):
        feedforward = SwiGLU(8, 12).double()
        x = torch.randn(3, 5, 8, dtype=torch.float64)
        expected = torch.from_numpy(reference_feedforward(x.numpy(), feedforward))
        torch.testing.assert_close(feedforward(x).detach(), expected, rtol=0, atol=EXACT)

    def test_nothing_has_a_bias(self):
        for norm in ("rmsnorm", "layernorm"):
            names = {name for name, _ in Block(16, 24, 4, norm=norm).named_parameters()}
            assert len(names) == 7 and not any("bias" in name for name in names)

    @pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
    def test_nothing_in_nothing_out(self, shape):
        block = Block(16, 24, 4).eval()
        assert block(torch.zeros(*shape, 16)).shape == (*shape, 16)


class TestRotary:
    def tables(self, n_positions, head_dim=16, theta=10_000.0):
        return rotary_tables(torch.arange(n_positions).float(), head_dim, theta)

    def test_reference(self):
        x = torch.randn(300, 16, dtype=torch.float64)
        expected = torch.from_numpy(rotated(x.numpy(), 10_000.0))
        actual = rotate(x[None, None], *self.tables(300))[0, 0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)

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
        expected = torch.from_numpy(rotated(np.ones((n_positions, 16)), 10_000.0))
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
        layout = Layout(torch.zeros(1, 9, 1))
        for head_dim, theta in [(4, 10.0), (8, 10.0), (4, 100.0), (4, 10.0)]:
            x = torch.randn(9, head_dim, dtype=torch.float64)
            actual = rotate(x[None, None], *layout.rotary(head_dim, theta))[0, 0]
            torch.testing.assert_close(actual, torch.from_numpy(rotated(x.numpy(), theta)), rtol=0, atol=1e-5)

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
        attention = Attention(8, 2, 1, dropout=p)
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
