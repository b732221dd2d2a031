"""KernelAttention: chunked, recurrent and bidirectional, against the quadratic form written out in float64.

Shapes: B batch, T positions, S keys, C model width, H query heads, K key/value heads, D head size,
M features, F frequencies.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stackwise.config import BlockConfig
from stackwise.model import kernel
from stackwise.model.attention import Attention
from stackwise.model.cache import RackCache, StateCache
from stackwise.model.feature_map import Features
from stackwise.model.kernel import KernelAttention, PrefixSums
from stackwise.model.layout import Layout

KINDS = ["favor", "gaussian", "laplacian", "elu"]
# Around the chunk size of 128.
LENGTHS = [1, 2, 127, 128, 129, 300]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def make_attention(kind="favor", n_heads=2, n_kv_heads=1, head_dim=4, n_features=8, scale=0.35, **options):
    kernel_options = {"feature_map": kind}
    if kind != "elu":
        kernel_options["n_features"] = n_features
    if kind in ("gaussian", "laplacian"):
        kernel_options["bandwidth"] = 1.5
    config = BlockConfig.from_dict(
        {
            "d_model": 8,
            "d_ff": 1,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "attention_type": "kernel",
            "kernel": kernel_options,
            **options,
        }
    )
    attention = KernelAttention(config).double().eval()
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, std=scale)
    return attention


def make_input(n_rows, seq_len):
    return torch.randn(n_rows, seq_len, 8, dtype=torch.float64)


def one_after_the_other(attention, x_BTC, sizes, mask_BT=None):
    """What chunks of these many tokens give through a cache."""
    n_rows, seq_len, _ = x_BTC.shape
    new_cache = attention.new_cache(n_rows, seq_len, x_BTC.dtype, x_BTC.device)
    cache = RackCache([[new_cache]], n_rows, seq_len, x_BTC.device)
    outputs, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        layout = cache.layout(x_BTC[:, part], None if mask_BT is None else mask_BT[:, part])
        outputs.append(attention(x_BTC[:, part], layout, new_cache))
        cache.advance(size)
        start += size
    assert start == seq_len
    return torch.cat(outputs, dim=1)


def logarithm_of_sums(x, axis):
    highest = x.max(axis, keepdims=True)
    return (np.log(np.exp(x - highest).sum(axis, keepdims=True)) + highest).squeeze(axis)


def kernel_of(feature_map, head, q_TD, k_SD):
    """(T, S): sum over the features, and the logarithm of what each row was divided by."""
    frequencies_FD = feature_map.frequencies_KFD[head].double().numpy()
    q_TD, k_SD = (x / x.shape[-1] ** 0.25 for x in (q_TD, k_SD))
    if feature_map.kind == "elu":
        phi_q, phi_k = (np.where(x > 0, x + 1, np.exp(x)) for x in (q_TD, k_SD))
        return np.log(phi_q @ phi_k.T), None
    q_TF, k_SF = (x @ frequencies_FD.T for x in (q_TD, k_SD))
    if feature_map.kind == "favor":
        q_TF, k_SF = (e - (x**2).sum(-1, keepdims=True) / 2 for e, x in ((q_TF, q_TD), (k_SF, k_SD)))
        return logarithm_of_sums(q_TF[:, None] + k_SF[None], -1) - math.log(len(frequencies_FD)), None
    return None, np.cos(q_TF[:, None] - k_SF[None]).mean(-1)


def rotated(x_TD, position_T):
    half = x_TD.shape[-1] // 2
    turn = np.exp(1j * position_T[:, None] * 10_000.0 ** (-np.arange(half) / half))
    z = (x_TD[:, :half] + 1j * x_TD[:, half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def quadratic(attention, x_BTC, keep_BT=None, document_BT=None):
    """Every weight of every query, written out. A query that sees nothing is 0."""
    H, K, D = attention.n_heads, attention.n_kv_heads, attention.head_dim
    q_weight, k_weight, v_weight = np.split(attention.qkv.weight.detach().numpy(), [H * D, (H + K) * D])
    B, T, _ = x_BTC.shape
    keep_BT = np.ones((B, T), bool) if keep_BT is None else keep_BT.numpy()
    document_BT = np.zeros((B, T), int) if document_BT is None else document_BT.numpy()
    y_BTC = np.empty(x_BTC.shape)
    for b, x_TC in enumerate(x_BTC.numpy()):
        real, document = keep_BT[b], document_BT[b]
        position = np.array([(real & (document == document[t]))[:t].sum() for t in range(T)])
        visible = real[None] & (document[:, None] == document[None])
        if attention.causal:
            visible &= np.tril(np.ones((T, T), bool))
        heads = []
        for h in range(H):
            kv = h // (H // K)
            q, k = x_TC @ q_weight[h * D : (h + 1) * D].T, x_TC @ k_weight[kv * D : (kv + 1) * D].T
            v = x_TC @ v_weight[kv * D : (kv + 1) * D].T
            if attention.rotary is not None:
                q, k = rotated(q, position), rotated(k, position)
            logarithm, weight = kernel_of(attention.feature_map, kv, q, k)
            if logarithm is not None:
                highest = np.where(visible, logarithm, -np.inf).max(-1, keepdims=True, initial=-1e300)
                weight = np.exp(np.where(visible, logarithm, -np.inf) - highest)
                least = 1e-300
            else:
                weight, least = weight * visible, attention.feature_map.n_features**-0.5
            heads.append(weight @ v / np.maximum(weight.sum(-1, keepdims=True), least))
        y_BTC[b] = np.concatenate(heads, -1) @ attention.out.weight.detach().numpy().T
    return torch.from_numpy(y_BTC)


def run(attention, x_BTC, keep_BT=None, document_BT=None):
    with torch.no_grad():
        return attention(x_BTC, Layout(x_BTC, keep_BT, document_BT))


class TestQuadraticForm:
    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("seq_len", LENGTHS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_chunks(self, kind, seq_len, mode):
        attention, x = make_attention(kind, attention_mode=mode), make_input(1, seq_len)
        torch.testing.assert_close(run(attention, x), quadratic(attention, x), **EXACT)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("seq_len", LENGTHS)
    @torch.no_grad()
    def test_one_token_at_a_time(self, seq_len, kind):
        attention, x = make_attention(kind), make_input(1, seq_len)
        actual = one_after_the_other(attention, x, [1] * seq_len)
        torch.testing.assert_close(actual, quadratic(attention, x), **EXACT)

    @pytest.mark.parametrize(
        "sizes", [[300], [128, 1, 171], [1, 127, 128, 44], [5, 290, 5], [129, 1, 1, 169]]
    )
    @pytest.mark.parametrize("kind", KINDS)
    @torch.no_grad()
    def test_any_chunks_of_a_cache(self, kind, sizes):
        attention, x = make_attention(kind), make_input(1, 300)
        actual = one_after_the_other(attention, x, sizes)
        torch.testing.assert_close(actual, quadratic(attention, x), **EXACT)

    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("use_rope", [True, False])
    @pytest.mark.parametrize("n_heads, n_kv_heads", [(1, 1), (4, 4), (6, 3), (6, 2), (4, 1)])
    @pytest.mark.parametrize("kind", KINDS)
    def test_groups_of_heads(self, kind, n_heads, n_kv_heads, use_rope, mode, monkeypatch):
        monkeypatch.setattr(kernel, "CHUNK", 4)
        attention = make_attention(kind, n_heads, n_kv_heads, use_rope=use_rope, attention_mode=mode)
        x = make_input(2, 9)
        torch.testing.assert_close(run(attention, x), quadratic(attention, x), **EXACT)

    @pytest.mark.parametrize("chunk", [1, 2, 5, 100, 1000])
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_size_of_a_chunk_does_not_matter(self, kind, chunk, monkeypatch):
        attention, x = make_attention(kind), make_input(2, 300 if chunk > 5 else 40)
        expected = quadratic(attention, x)
        monkeypatch.setattr(kernel, "CHUNK", chunk)
        torch.testing.assert_close(run(attention, x), expected, **EXACT)

    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
    @pytest.mark.parametrize("kind", KINDS)
    def test_nothing_in_nothing_out(self, kind, shape, mode):
        assert run(make_attention(kind, attention_mode=mode), make_input(*shape)).shape == (*shape, 8)


def padding(*real_ranges, seq_len):
    keep_BT = torch.zeros(len(real_ranges), seq_len, dtype=torch.bool)
    for row, (start, end) in zip(keep_BT, real_ranges, strict=True):
        row[start:end] = True
    return keep_BT


class TestPaddingAndDocuments:
    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("seq_len", [7, 129, 150])
    @pytest.mark.parametrize("kind", KINDS)
    def test_padding(self, kind, seq_len, mode):
        attention, x = make_attention(kind, attention_mode=mode), make_input(4, seq_len)
        keep = padding((3, seq_len), (0, seq_len - 4), (seq_len - 1, seq_len), (0, seq_len), seq_len=seq_len)
        actual, expected = run(attention, x, keep), quadratic(attention, x, keep)
        torch.testing.assert_close(actual[keep], expected[keep], **EXACT)
        assert actual.isfinite().all()

    @pytest.mark.parametrize("kind", KINDS)
    @torch.no_grad()
    def test_padding_in_a_cache(self, kind):
        attention, x = make_attention(kind), make_input(3, 20)
        keep = padding((4, 20), (0, 20), (11, 20), seq_len=20)
        actual = one_after_the_other(attention, x, [12, 1, 1, 5, 1], keep)
        torch.testing.assert_close(actual[keep], quadratic(attention, x, keep)[keep], **EXACT)

    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_what_stands_in_padding_has_no_say(self, side, mode):
        # A key of a larger scale decides what all others are divided by. exp(-2000) is 0 even in float64.
        attention = make_attention("favor", attention_mode=mode, use_rope=False, scale=1.0)
        attention.qkv.weight.data[:8] *= 1e-3  # queries to which no key is alien
        x = make_input(1, 12)
        keep = padding((5, 12) if side == "left" else (0, 7), seq_len=12)
        x[keep] *= 60.0
        x[~keep] *= 0.01
        actual = run(attention, x, keep)[keep]
        torch.testing.assert_close(actual, quadratic(attention, x, keep)[keep], **EXACT)
        torch.testing.assert_close(actual, run(attention, x[keep][None])[0], **EXACT)

    @pytest.mark.parametrize("ends", [[3, 9], [128, 256], [127, 129, 255, 257], [1, 2, 200, 299], [50]])
    @pytest.mark.parametrize("kind", KINDS)
    def test_documents(self, kind, ends):
        attention, x = make_attention(kind), make_input(2, 300)
        documents = torch.zeros(2, 300, dtype=torch.long)
        for end in ends:
            documents[0, end:] += 1
        documents[1, 140:] = 5
        expected = quadratic(attention, x, document_BT=documents)
        torch.testing.assert_close(run(attention, x, None, documents), expected, **EXACT)

    def test_bidirectional_documents_are_refused(self):
        attention = make_attention(attention_mode="bidirectional")
        with pytest.raises(ValueError, match=r"document_ids: .*; allowed: None"):
            run(attention, make_input(1, 4), None, torch.tensor([[0, 0, 1, 1]]))


class TestGradient:
    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_finite_differences(self, kind, mode, monkeypatch):
        monkeypatch.setattr(kernel, "CHUNK", 3)
        attention = make_attention(kind, 2, 1, n_features=6, attention_mode=mode)
        x = make_input(1, 8).requires_grad_()
        keep = padding((2, 8), seq_len=8)
        assert torch.autograd.gradcheck(lambda x: attention(x, Layout(x)), x, fast_mode=True)
        assert torch.autograd.gradcheck(lambda x: attention(x, Layout(x, keep))[:, 2:], x, fast_mode=True)
        if mode == "causal":
            documents = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2]])
            assert torch.autograd.gradcheck(
                lambda x: attention(x, Layout(x, None, documents)), x, fast_mode=True
            )

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_weights(self, kind, monkeypatch):
        monkeypatch.setattr(kernel, "CHUNK", 3)
        attention, x = make_attention(kind, 2, 1, n_features=6), make_input(1, 8)
        names, weights = zip(*attention.named_parameters(), strict=True)

        def output(*weights):
            return torch.func.functional_call(
                attention, dict(zip(names, weights, strict=True)), (x, Layout(x))
            )

        assert torch.autograd.gradcheck(output, weights, fast_mode=True)


class TestCausality:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_future_changes_nothing_at_all(self, kind, dtype):
        attention, x = make_attention(kind).to(dtype), make_input(1, 260).to(dtype)
        before = run(attention, x)
        for first in (1, 100, 127, 128, 129, 256, 259):
            other = x.clone()
            other[:, first:] *= -30
            after = run(attention, other)
            assert torch.equal(after[:, :first], before[:, :first])
            assert (after[:, first:] != before[:, first:]).any()

    @pytest.mark.parametrize("kind", KINDS)
    def test_padding_sees_no_future_either(self, kind):
        attention, x = make_attention(kind), make_input(1, 140)
        for n_padding, first in ((7, 3), (7, 7), (130, 100), (130, 135), (140, 50)):
            keep = padding((n_padding, 140), seq_len=140)
            other = x.clone()
            other[:, first:] *= -30
            assert torch.equal(run(attention, other, keep)[:, :first], run(attention, x, keep)[:, :first])

    @pytest.mark.parametrize("kind", KINDS)
    def test_both_directions_look_ahead(self, kind):
        attention, x = make_attention(kind, attention_mode="bidirectional"), make_input(1, 20)
        other = x.clone()
        other[:, -1] += 1
        assert ((run(attention, other) - run(attention, x)).abs().amax(-1) > 1e-6).all()


class TestPrecision:
    @pytest.mark.parametrize("form", ["chunked", "recurrent", "bidirectional", "autocast"])
    @torch.no_grad()
    def test_bfloat16_sums_do_not_stall(self, form):
        # All keys alike: the last output is the mean of the values, half of them ones and half zeros. A
        # bfloat16 sum of ones stays at 256.
        seq_len = 1024 if form == "recurrent" else 4096
        mode = "bidirectional" if form == "bidirectional" else "causal"
        attention = make_attention("elu", 1, 1, attention_mode=mode)
        attention.qkv.weight.zero_()
        attention.qkv.weight[-4:, 0] = 1
        attention.out.weight.copy_(torch.eye(8, 4))
        attention.to(torch.float32 if form == "autocast" else torch.bfloat16)
        x = torch.zeros(1, seq_len, 8).to(attention.out.weight.dtype)
        x[:, : seq_len // 2, 0] = 1
        with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
            if form == "recurrent":
                y = one_after_the_other(attention, x, [1] * seq_len)
            else:
                y = attention(x, Layout(x))
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y[0, -1, :4].float(), torch.full((4,), 0.5), rtol=0, atol=2e-3)

    @pytest.mark.parametrize("kind, limit", [("favor", 0.04), ("elu", 0.04), ("gaussian", 0.15)])
    def test_bfloat16_costs_no_more_than_its_rounding(self, kind, limit):
        exact = make_attention(kind, use_rope=False)
        x = make_input(1, 600).bfloat16()
        rounded = exact.bfloat16()
        actual = run(rounded, x).double()
        expected = quadratic(rounded.double(), x.double())
        error = (actual - expected)[:, 300:].square().mean().sqrt() / expected[:, 300:].square().mean().sqrt()
        assert error < limit

    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_autocast_reaches_no_further_than_the_projections(self, kind, mode):
        rounded = make_attention(kind, use_rope=False, attention_mode=mode).bfloat16()
        x = make_input(1, 200).bfloat16() * 4
        expected = run(rounded, x).float()
        with torch.autocast("cpu", torch.bfloat16):
            actual = run(rounded.float(), x.float()).float()
        error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < 1e-3

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", KINDS)
    def test_float32_or_better_in_the_state(self, kind, dtype):
        attention = make_attention(kind).to(dtype)
        cache = attention.new_cache(1, 8, dtype, torch.device("cpu"))
        x = make_input(1, 8).to(dtype)
        attention(x, Layout(x), cache)
        assert all(each.dtype == torch.float32 for each in cache.sums)


def log_domain(q_TM, k_TM, log_scale_T, v_TD, documents_T):
    """Each weight as the logarithm of a sum, so that no scale is too large or too small."""
    y = np.zeros_like(v_TD)
    for t in range(len(v_TD)):
        seen = [s for s in range(t + 1) if documents_T[s] == documents_T[t]]
        with np.errstate(divide="ignore"):
            weights = logarithm_of_sums(np.log(q_TM[t]) + np.log(k_TM[seen]), -1) + log_scale_T[seen]
        weights = np.exp(weights - weights.max())
        y[t] = weights / weights.sum() @ v_TD[seen]
    return y


SCALES = {
    "rising": [0, 100, 200, 300, 400, 500, 600, 700, 800, 900],
    "falling": [0, -100, -200, -300, -400, -500, -600, -700, -800, -900],
    "up and down": [0, 500, 0, -500, 0, 500, 499, 501, -500, 0],
    "low, with the past": [-500, -500.5, -501, -500, -499, -500, -502, -500, -501, -500],
}


class TestExtremes:
    @pytest.mark.parametrize("documents", [[0] * 10, [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]])
    @pytest.mark.parametrize("sizes", [[10], [1] * 10, [3, 4, 3]])
    @pytest.mark.parametrize("name", SCALES)
    def test_scales_of_keys(self, name, sizes, documents):
        q, k = torch.rand(2, 10, 6)
        v, scale = torch.randn(10, 3), torch.tensor(SCALES[name], dtype=torch.float32)
        documents = torch.tensor(documents)
        sums, outputs, start = PrefixSums.empty(v[None, None], k.shape[-1]), [], 0
        for size in sizes:
            part = slice(start, start + size)
            before = torch.cat((documents[max(start - 1, 0)][None], documents[part]))
            y, sums = sums.advance(
                q[None, None, None, part],
                Features(k[None, None, part], scale[None, None, part]),
                v[None, None, part],
                1e-30,
                before[None],
            )
            outputs.append(y[0, 0, 0])
            start += size
        wide = [x.double().numpy() for x in (q, k, scale, v, documents)]
        expected = torch.from_numpy(log_domain(*wide)).float()
        torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=1e-5)
        assert all(each.isfinite().all() for each in sums)

    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("size", [1e-4, 1.0, 30.0, 1e3])
    @pytest.mark.parametrize("kind", KINDS)
    def test_finite(self, kind, size, mode):
        attention = make_attention(kind, attention_mode=mode, scale=1.0).float()
        x = make_input(2, 140).float() * size
        x[:, ::7] *= 1e-3  # few tokens of a scale of their own
        x.requires_grad_()
        y = attention(x, Layout(x, padding((5, 140), (0, 130), seq_len=140)))
        y.sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()
        assert all(weight.grad.isfinite().all() for weight in attention.parameters())

    def test_a_token_alone_is_its_value(self):
        # Whatever its weight: here below 1e-20 of what features of that size can give.
        for _ in range(20):
            attention, x = make_attention("favor", scale=1.0).float(), make_input(1, 1).float() * 8
            torch.testing.assert_close(
                run(attention, x), quadratic(attention.double(), x.double()).float(), rtol=1e-4, atol=1e-4
            )

    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    def test_log_scales_of_tokens_that_differ_by_500(self, mode):
        attention = make_attention("favor", 1, 1, attention_mode=mode, use_rope=False, scale=1.0)
        x = make_input(1, 30)
        x[:, ::2] *= 12
        scales = attention.feature_map(attention.project(x, Layout(x))[1]).log_scale_BKT
        assert scales.max() - scales.min() > 500
        expected = quadratic(attention, x)
        torch.testing.assert_close(run(attention, x), expected, rtol=1e-6, atol=1e-6)
        assert run(attention.float(), x.float()).isfinite().all()


class TestCost:
    @pytest.mark.parametrize("dtype, itemsize", [(torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)])
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_state_is_as_large_as_it_must_be(self, kind, dtype, itemsize):
        attention = make_attention(kind, 4, 2, n_features=10)
        n_features = 4 if kind == "elu" else 10
        for capacity in (1, 1_000_000):
            cache = attention.new_cache(3, capacity, dtype, torch.device("cpu"))
            # For each row and key/value head: sums of values and of weights, and one scale.
            assert cache.nbytes == 3 * 2 * (n_features * 4 + n_features + 1) * itemsize

    @torch.no_grad()
    def test_the_state_does_not_grow_nor_move(self):
        # What is replayed from a captured graph finds it only where it was.
        attention, x = make_attention(), make_input(1, 40)
        cache = attention.new_cache(1, 40, torch.float64, x.device)
        assert isinstance(cache, StateCache)
        before = cache.nbytes, [each.data_ptr() for each in cache.sums]
        attention(x, Layout(x), cache)
        attention(x[:, :1], Layout(x[:, :1], start=40), cache)
        assert (cache.nbytes, [each.data_ptr() for each in cache.sums]) == before

    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    def test_operations_per_token_do_not_depend_on_the_length(self, mode, monkeypatch):
        def per_token():
            counts = []
            for seq_len in (1024, 4096):
                x = torch.randn(1, seq_len, 8, dtype=torch.float64)
                with FlopCounterMode(display=False) as counter, torch.no_grad():
                    attention(x, Layout(x))
                counts.append(counter.get_total_flops() / seq_len)
            return counts

        attention = make_attention(attention_mode=mode)
        short, long = per_token()
        assert short > 500 and abs(long / short - 1) < 0.02
        if mode == "causal":
            # The quadratic form shows that what is counted can grow.
            monkeypatch.setattr(kernel, "CHUNK", 4096)
            short, long = per_token()
            assert long > 3 * short

    def test_softmax_attention_is_met_as_features_grow(self):
        # Small queries and keys: for large ones a few lucky features decide, and the error has no variance.
        exact = Attention(BlockConfig.from_dict({"d_model": 8, "d_ff": 1, "n_heads": 2})).double().eval()
        for weight in exact.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        x, sizes, errors = make_input(2, 40), [32, 128, 512, 2048], []
        expected = run(exact, x)
        for n_features in sizes:
            squares = []
            for _ in range(8):
                ours = make_attention("favor", 2, 2, 4, n_features)
                ours.load_state_dict(exact.state_dict(), strict=False)
                squares.append((run(ours, x) - expected).square().mean())
            errors.append(torch.stack(squares).mean().sqrt())
        slope, _ = np.polyfit(np.log(sizes), np.log(errors), 1)
        assert -0.6 < slope < -0.4
        assert errors[-1] < 0.05 * expected.square().mean().sqrt()
