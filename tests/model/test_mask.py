"""Masks: each rule is its table; padding hides padded content, reveals nothing and leaves all finite."""

import copy
import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.model import Block, create_simple_rack
from stackwise.model.mask import AttentionMask, Keys, document_runs, padding_mask

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


def expected_visibility(mask_rules, query_times, key_times):
    """The rules, one query and one key at a time: bool (B, T, S)."""
    causal, window, keep, documents = mask_rules
    n_rows = len(keep or documents or [0])
    table = torch.zeros(n_rows, len(query_times), len(key_times), dtype=torch.bool)
    for b in range(n_rows):
        for t, query in enumerate(query_times):
            for s, key in enumerate(key_times):
                of_the_rest = (keep is None or keep[b][s]) and (
                    documents is None or documents[b][query] == documents[b][key]
                )
                table[b, t, s] = (
                    key >= 0
                    and (key <= query or not causal)
                    and (window is None or abs(query - key) < window)
                    and (of_the_rest or query == key)
                )
    return table


def written_out(visible, rows, n_queries, n_keys):
    """What `visible` or `dense` said, as (B, T, S)."""
    if visible is None:
        return torch.ones(rows, n_queries, n_keys, dtype=torch.bool)
    assert visible.dtype == torch.bool and visible.ndim == 4 and visible.shape[1] == 1
    return visible[:, 0].expand(rows, n_queries, n_keys)


@st.composite
def masks(draw, *, plain=False):
    """A mask of T queries after S - T older keys, its rules, and when its queries and keys happened."""
    n_keys = draw(st.integers(1, 9))
    n_queries = draw(st.integers(1, n_keys))
    causal, window = draw(st.booleans()), draw(st.none() | st.integers(1, 12))
    keep = documents = None
    if not plain:
        rows = draw(st.integers(1, 3))
        row = st.lists(st.booleans(), min_size=n_keys, max_size=n_keys)
        keep = draw(st.none() | st.lists(row, min_size=rows, max_size=rows))
        row = st.lists(st.integers(0, 2), min_size=n_keys, max_size=n_keys)
        documents = draw(st.none() | st.lists(row.map(sorted), min_size=rows, max_size=rows))
    key_times = list(range(n_keys))
    query_times = key_times[n_keys - n_queries :]
    mask = AttentionMask(
        torch.tensor(query_times),
        Keys(torch.tensor(key_times), True),
        causal=causal,
        window=window,
        keep_BS=None if keep is None else torch.tensor(keep),
        documents=None
        if documents is None
        else (torch.tensor(documents)[:, n_keys - n_queries :], torch.tensor(documents)),
    )
    return mask, (causal, window, keep, documents), query_times, key_times


@st.composite
def parts(draw, n):
    start = draw(st.integers(0, n - 1))
    return slice(start, draw(st.integers(start + 1, n)))


class TestAttentionMask:
    @given(drawn=masks())
    def test_visibility(self, drawn):
        mask, rules, query_times, key_times = drawn
        expected = expected_visibility(rules, query_times, key_times)
        rows, n_queries, n_keys = expected.shape
        assert torch.equal(written_out(mask.dense(), rows, n_queries, n_keys), expected)
        # What a backend computes without a table must be what the table says.
        assert not mask.hides_nothing or expected.all()
        lower_triangle = torch.ones(n_queries, n_keys, dtype=torch.bool).tril().expand_as(expected)
        assert not mask.is_lower_triangle or torch.equal(expected, lower_triangle)

    @given(drawn=masks(), data=st.data())
    def test_a_part_is_that_part_of_the_whole(self, drawn, data):
        mask, rules, query_times, key_times = drawn
        queries, keys = data.draw(parts(len(query_times))), data.draw(parts(len(key_times)))
        whole = expected_visibility(rules, query_times, key_times)[:, queries, keys]
        assert torch.equal(written_out(mask.visible(queries, keys), *whole.shape), whole)

    @given(drawn=masks(), data=st.data())
    def test_key_range_covers_what_is_visible(self, drawn, data):
        mask, rules, query_times, key_times = drawn
        queries = data.draw(parts(len(query_times)))
        first, last = mask.key_range(queries.start, queries.stop)
        seen = expected_visibility(rules, query_times, key_times)[:, queries].any(0).any(0).nonzero()
        assert 0 <= first <= seen.min() and seen.max() < last <= len(key_times)

    @given(drawn=masks(plain=True), data=st.data())
    def test_key_range_is_tight(self, drawn, data):
        """Where causality and window are the only rules; padding and documents hide parts of it."""
        mask, rules, query_times, key_times = drawn
        queries = data.draw(parts(len(query_times)))
        seen = expected_visibility(rules, query_times, key_times)[:, queries].any(0).any(0).nonzero()
        assert mask.key_range(queries.start, queries.stop) == (seen.min(), seen.max() + 1)

    @given(
        n_slots=st.integers(1, 6),
        now=st.integers(0, 12),
        window=st.none() | st.integers(1, 7),
        keep=st.none() | st.lists(st.booleans(), min_size=13, max_size=13),
    )
    def test_slots_in_any_order(self, n_slots, now, window, keep):
        """A ring of slots: the token of time t in slot t % S, negative where there is none yet."""
        key_times = [now - (now - slot) % n_slots for slot in range(n_slots)]
        of_slots = None if keep is None else [[keep[max(time, 0)] for time in key_times]]
        mask = AttentionMask(
            torch.tensor([now]),
            Keys(torch.tensor(key_times), False),
            window=window,
            keep_BS=None if of_slots is None else torch.tensor(of_slots),
        )
        expected = expected_visibility((True, window, of_slots, None), [now], key_times)
        assert torch.equal(written_out(mask.dense(), 1, 1, n_slots), expected)
        assert mask.key_range(0, 1) == (0, n_slots)
        assert not mask.is_lower_triangle and not mask.hides_nothing

    def test_causality_alone_needs_no_table(self):
        time_T = torch.arange(5)
        for window in (None, 5, 9):
            mask = AttentionMask(time_T, Keys(time_T, True), window=window)
            assert mask.is_lower_triangle and not mask.hides_nothing
            assert mask.key_range(1, 3) == (0, 3)
        assert not AttentionMask(time_T, Keys(time_T, True), window=4).is_lower_triangle
        assert not AttentionMask(time_T[2:], Keys(time_T, True)).is_lower_triangle

    @pytest.mark.parametrize("n_queries, causal", [(1, True), (1, False), (4, False)])
    def test_what_hides_nothing_has_no_table(self, n_queries, causal):
        time_S = torch.arange(4)
        mask = AttentionMask(time_S[4 - n_queries :], Keys(time_S, True), causal=causal)
        assert mask.hides_nothing and mask.dense() is None

    def test_the_table_is_built_once(self):
        time_T = torch.arange(5)
        mask = AttentionMask(time_T, Keys(time_T, True), window=2)
        assert mask.dense() is mask.dense()


class TestDocumentRuns:
    @given(st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=3))
    def test_a_document_is_a_run_of_one_id(self, ids):
        expected = []
        for row in ids:
            runs = [0]
            for before, after in itertools.pairwise(row):
                runs.append(runs[-1] + (before != after))
            expected.append(runs)
        runs = document_runs(torch.tensor(ids), len(ids), 6)
        assert runs.tolist() == expected and runs.dtype == torch.int64

    def test_none(self):
        assert document_runs(None, 2, 6) is None

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
    def test_any_integer(self, dtype):
        assert document_runs(torch.tensor([[3, 3, 1, 3]], dtype=dtype), 1, 4).tolist() == [[0, 0, 1, 2]]

    @pytest.mark.parametrize("mask, shown", [*REFUSED, (torch.ones(B, T, dtype=torch.bool), "torch.bool")])
    def test_refused(self, mask, shown):
        noun = "shape" if mask.dtype in DTYPES[1:] else "dtype"
        shown = str(mask.dtype) if noun == "dtype" else shown
        allowed = "an integer dtype" if noun == "dtype" else f"({B}, {T})"
        pattern = re.escape(f"document_ids: got {noun} {shown}; allowed: {allowed}")
        with pytest.raises(ValueError, match=pattern):
            document_runs(mask, B, T)
        with pytest.raises(ValueError, match=pattern):
            make_rack()(make_ids(), document_ids=mask)
