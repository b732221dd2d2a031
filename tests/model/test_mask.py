"""Padding: it hides padded content, reveals nothing, and leaves everything finite."""

import copy
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.model import Block, create_simple_rack
from stackwise.model.mask import AttentionMask, padding_mask

B, T, VOCAB = 3, 8, 31
REAL = {
    "none": None,
    "ones": [[1] * T] * B,
    "left": [[0] * 3 + [1] * 5, [0] * 1 + [1] * 7, [1] * T],
    "right": [[1] * 5 + [0] * 3, [1] * 7 + [0] * 1, [1] * T],
    "holes": [[1, 0, 1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 1, 1, 1, 0], [1] * T],
    "a row of padding": [[0] * T, [1] * T, [1] * 5 + [0] * 3],
}
WINDOWS = [None, 1, 3, T]
DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64]
REFUSED = [
    (torch.ones(B, T), "torch.float32"),
    (torch.zeros(B, T, dtype=torch.float16), "torch.float16"),
    (torch.zeros(B, T, dtype=torch.bfloat16), "torch.bfloat16"),
    (torch.ones(B, T, dtype=torch.complex64), "torch.complex64"),
    (torch.ones(T, dtype=torch.long), f"({T},)"),
    (torch.ones(B, T + 1, dtype=torch.long), f"({B}, {T + 1})"),
    (torch.ones(B, 1, dtype=torch.bool), f"({B}, 1)"),
    (torch.ones(1, T, dtype=torch.bool), f"(1, {T})"),
    (torch.ones(T, B, dtype=torch.bool), f"({T}, {B})"),
    (torch.ones(B, 1, 1, T, dtype=torch.bool), f"({B}, 1, 1, {T})"),
    (torch.ones(B, T, T, dtype=torch.bool), f"({B}, {T}, {T})"),
    (torch.tensor(True), "()"),
]


def make_rack(**kwargs):
    """Weights wide enough that every visible token moves the logits."""
    rack = create_simple_rack(1, 2, d_model=32, d_ff=32, n_heads=4, vocab_size=VOCAB, n_kv_heads=2, **kwargs)
    rack.eval()
    for name, weight in rack.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    return rack


def make_ids():
    return torch.randint(VOCAB, (B, T))


def other_tokens(ids, where):
    """The tokens at `where` replaced, each by a different one."""
    return torch.where(where, (ids + torch.randint(1, VOCAB, ids.shape)) % VOCAB, ids)


@torch.no_grad()
def logits_of(rack, ids, mask=None):
    return rack(ids, mask)


def mask_of(name):
    return None if REAL[name] is None else torch.tensor(REAL[name], dtype=torch.bool)


class TestCausality:
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("padding", REAL)
    def test_a_mask_never_reveals_the_future(self, padding, window):
        rack, ids, mask = make_rack(sliding_window=window), make_ids(), mask_of(padding)
        before = logits_of(rack, ids, mask)
        for first in range(1, T):
            future = (torch.arange(T) >= first).expand(B, T)
            after = logits_of(rack, other_tokens(ids, future), mask)
            torch.testing.assert_close(after[:, :first], before[:, :first], rtol=0, atol=1e-6)
            assert (after[:, first:] - before[:, first:]).abs().amax((-1, -2)).min() > 1e-2

    @pytest.mark.parametrize("padding", ["none", "ones", "left", "right", "holes"])
    def test_the_past_stays_in_sight(self, padding):
        rack, ids, mask = make_rack(), make_ids(), mask_of(padding)
        real = torch.ones(B, T, dtype=torch.bool) if mask is None else mask
        before = logits_of(rack, ids, mask)
        for b in range(B):
            first, *_, last = real[b].nonzero().flatten().tolist()
            changed = torch.zeros(B, T, dtype=torch.bool)
            changed[b, first] = True
            after = logits_of(rack, other_tokens(ids, changed), mask)
            assert (after[b, last] - before[b, last]).abs().max() > 1e-4

    def test_all_ones_is_no_mask(self):
        rack, ids = make_rack(), make_ids()
        torch.testing.assert_close(
            logits_of(rack, ids, mask_of("ones")), logits_of(rack, ids), rtol=0, atol=1e-5
        )


class TestPaddedContent:
    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("padding", ["left", "right", "holes", "a row of padding"])
    def test_changes_no_real_token(self, padding, window, mode):
        rack = make_rack(sliding_window=window, attention_mode=mode)
        ids, mask = make_ids(), mask_of(padding)
        other = other_tokens(ids, ~mask)
        before, after = logits_of(rack, ids, mask), logits_of(rack, other, mask)
        torch.testing.assert_close(after[mask], before[mask], rtol=0, atol=1e-6)
        assert (after[~mask] - before[~mask]).abs().amax(-1).min() > 1e-2
        if mode == "bidirectional" and window != 1:
            assert (logits_of(rack, other)[mask] - logits_of(rack, ids)[mask]).abs().max() > 1e-2

    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("n_padding", [1, 3, 11])
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded_equals_unpadded(self, side, n_padding, window, mode):
        rack, ids = make_rack(sliding_window=window, attention_mode=mode), make_ids()
        padding, ones = torch.zeros(B, n_padding, dtype=torch.long), torch.ones_like(ids)
        parts = [(padding, padding), (ids, ones)]
        if side == "right":
            parts.reverse()
        padded, mask = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
        expected = logits_of(rack, ids)
        actual = logits_of(rack, padded, mask)[mask.bool()].view_as(expected)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())

    @given(
        keep=st.lists(st.booleans(), min_size=2, max_size=12).filter(any),
        mode=st.sampled_from(["causal", "bidirectional"]),
        seed=st.integers(0, 2**32),
    )
    def test_without_positions_padding_could_be_cut_out(self, keep, mode, seed):
        torch.manual_seed(seed)
        rack = make_rack(attention_mode=mode, use_rope=False).double()
        ids, mask = torch.randint(VOCAB, (1, len(keep))), torch.tensor([keep])
        actual, expected = logits_of(rack, ids, mask)[mask], logits_of(rack, ids[mask][None])[0]
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)

    def test_rows_have_their_own_padding(self):
        rack, ids, mask = make_rack(), make_ids(), mask_of("holes")
        together = logits_of(rack, ids, mask)
        for b in range(B):
            alone = logits_of(rack, ids[b : b + 1], mask[b : b + 1])[0]
            torch.testing.assert_close(alone[mask[b]], together[b][mask[b]], rtol=0, atol=1e-5)


class TestFinite:
    @pytest.mark.parametrize("mode", ["causal", "bidirectional"])
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("padding", ["left", "right", "holes", "a row of padding"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_logits_and_gradients(self, padding, window, mode, dtype):
        rack = make_rack(sliding_window=window, attention_mode=mode).to(dtype)
        logits = rack(make_ids(), mask_of(padding))
        assert logits.isfinite().all()
        logits.float().logsumexp(-1).sum().backward()
        for name, weight in rack.named_parameters():
            assert weight.grad is not None and weight.grad.isfinite().all(), name

    def test_a_row_of_padding_gives_real_tokens_no_gradient(self):
        rack, ids, mask = make_rack(tie_embeddings=False), make_ids(), mask_of("left")
        ids[0, :3] = VOCAB - 1
        ids[0, 3:], ids[1:] = ids[0, 3:] % (VOCAB - 1), ids[1:] % (VOCAB - 1)
        rack(ids, mask)[mask].sum().backward()
        per_token = rack.embedding.weight.grad.abs().sum(-1)
        assert per_token[VOCAB - 1] == 0 and per_token[ids[mask]].min() > 0


class TestAcceptedMasks:
    @pytest.mark.parametrize("padding", ["ones", "left", "right", "holes", "a row of padding"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_integers_are_booleans(self, padding, dtype):
        rack, ids, mask = make_rack(), make_ids(), mask_of(padding)
        expected = logits_of(rack, ids, mask)
        assert torch.equal(logits_of(rack, ids, mask.to(dtype)), expected)
        if dtype != torch.bool:
            assert torch.equal(logits_of(rack, ids, mask.to(dtype) * 7), expected)

    def test_the_mask_is_only_read(self):
        rack, mask = make_rack(), mask_of("left").long()
        before = copy.deepcopy(mask)
        logits_of(rack, make_ids(), mask)
        assert torch.equal(mask, before)

    @pytest.mark.parametrize("mask, shown", REFUSED)
    def test_refused(self, mask, shown):
        noun = "dtype" if mask.is_floating_point() or mask.is_complex() else "shape"
        allowed = "bool or integer" if noun == "dtype" else f"({B}, {T})"
        pattern = re.escape(f"attention_mask: got {noun} {shown}; allowed: {allowed}")
        with pytest.raises(ValueError, match=pattern):
            padding_mask(mask, B, T)
        with pytest.raises(ValueError, match=pattern):
            make_rack()(make_ids(), mask)
        with pytest.raises(ValueError, match=pattern):
            Block(16, 16, 2)(torch.zeros(B, T, 16), mask)


class TestAttentionMask:
    @given(
        seq_len=st.integers(1, 9),
        causal=st.booleans(),
        window=st.none() | st.integers(1, 12),
        data=st.data(),
    )
    def test_visibility(self, seq_len, causal, window, data):
        row = st.lists(st.booleans(), min_size=seq_len, max_size=seq_len)
        keep = data.draw(st.none() | st.lists(row, min_size=1, max_size=3))
        mask = AttentionMask.build(
            seq_len,
            causal=causal,
            window=window,
            keep_BS=None if keep is None else torch.tensor(keep),
            device=torch.device("cpu"),
        )
        n_rows = 1 if keep is None else len(keep)
        visible = torch.ones(n_rows, 1, seq_len, seq_len, dtype=torch.bool)
        if mask.bias_BTS is not None:
            # Both at once is an error of scaled_dot_product_attention.
            assert mask.bias_BTS.dtype == torch.bool and not mask.is_causal
            visible &= mask.bias_BTS
        if mask.is_causal:
            visible = visible.tril()
        for b in range(n_rows):
            for query in range(seq_len):
                for key in range(seq_len):
                    expected = (
                        (key <= query or not causal)
                        and (window is None or abs(query - key) < window)
                        and (keep is None or keep[b][key])
                    )
                    assert visible[b, 0, query, key] == (expected or query == key)
