"""SlotCache, StateCache and RackCache: what they keep, for how long, and in how much memory.

Shapes: B batch, H heads, T tokens of a pass, S slots, D size, C model width.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stackwise.config import BlockConfig
from stackwise.model import append_stack, create_simple_rack, prepend_stack, remove_stack
from stackwise.model.block import create_attention
from stackwise.model.cache import RackCache, SlotCache, StateCache
from stackwise.model.layout import Layout

CPU = torch.device("cpu")
B, H, D, C = 2, 3, 2, 8
ATTENTION = {
    "mha": {"attention_type": "mha"},
    "gqa": {"attention_type": "gqa", "n_kv_heads": 2},
    "mla": {
        "attention_type": "mla",
        "latent": {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4},
    },
    "kernel": {"attention_type": "kernel", "kernel": {"n_features": 8}},
}


def make_attention(kind, **options):
    keys = {"d_model": C, "d_ff": 1, "n_heads": 4, **ATTENTION[kind], **options}
    attention = create_attention(BlockConfig.from_dict({"head_dim": None, **keys})).double().eval()
    for name, weight in attention.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.5)
    return attention


def make_rack(**options):
    rack = create_simple_rack(1, 2, d_model=C, d_ff=12, n_heads=2, vocab_size=13, **options).double().eval()
    with torch.no_grad():
        for weight in rack.parameters():
            weight.mul_(5)
    return rack


def history(n_tokens):
    """(B, H, T, D), every number another one."""
    n_numbers = B * H * n_tokens * D
    return torch.randperm(n_numbers).double().view(B, H, n_tokens, D)


def sorted_by_first(x_HSD):
    return torch.stack([x_SD[x_SD[:, 0].argsort()] for x_SD in x_HSD])


def check_sight(layout, tensors, keys, window, *truth):
    """Each query of the pass sees exactly the last `window` tokens up to its own, in whatever order."""
    mask = layout.mask(causal=True, window=window, keys=keys)
    table = mask.dense()
    for t, time in enumerate(layout.time_T.tolist()):
        first = 0 if window is None else max(0, time - window + 1)
        for found, real in zip(tensors, truth, strict=True):
            seen = found if table is None else found[:, :, table[0, 0, min(t, table.shape[2] - 1)]]
            for b in range(B):
                expected = real[b, :, first : time + 1]
                assert torch.equal(sorted_by_first(seen[b]), sorted_by_first(expected))


class TestSlotCache:
    @settings(max_examples=150, derandomize=True)
    @given(
        sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8),
        window=st.none() | st.integers(1, 12),
        on_device=st.booleans(),
        spare=st.integers(0, 3),
    )
    def test_sees_the_last_window_of_tokens(self, sizes, window, on_device, spare):
        n_tokens = sum(sizes)
        keys_BHTD, values_BHTD = history(n_tokens), -history(n_tokens)
        cache = SlotCache(B, n_tokens + spare, window, [(H, D), (H, D)], torch.float64, CPU)
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            at = torch.tensor(start) if on_device and size == 1 else start
            layout = Layout(torch.empty(B, size, C), start=at)
            tensors, keys = cache.append(layout, keys_BHTD[:, :, part], values_BHTD[:, :, part])
            check_sight(layout, tensors, keys, window, keys_BHTD, values_BHTD)
            start += size

    @pytest.mark.parametrize(
        "window, capacity, n_slots", [(4, 10, 4), (10, 10, 10), (11, 10, 10), (None, 10, 10)]
    )
    def test_holds_as_many_as_can_be_seen(self, window, capacity, n_slots):
        cache = SlotCache(B, capacity, window, [(H, D), (1, 5)], torch.bfloat16, CPU)
        assert [slots.shape for slots in cache.slots] == [(B, H, n_slots, D), (B, 1, n_slots, 5)]
        assert cache.nbytes == B * n_slots * (H * D + 5) * 2
        assert cache.rolling == (n_slots < capacity)

    def test_token_t_is_in_slot_t_mod_s(self):
        real = history(11)
        for sizes in ([1] * 11, [11], [2, 7, 2], [4, 4, 3], [3, 5, 1, 1, 1]):
            cache, start = SlotCache(B, 20, 4, [(H, D)], torch.float64, CPU), 0
            for size in sizes:
                part = slice(start, start + size)
                cache.append(Layout(torch.empty(B, size, C), start=start), real[:, :, part])
                start += size
            for t in range(7, 11):
                assert torch.equal(cache.slots[0][:, :, t % 4], real[:, :, t])

    def test_memory_is_taken_once(self):
        real = history(30)
        cache = SlotCache(B, 30, 8, [(H, D)], torch.float64, CPU)
        place, nbytes, start = cache.slots[0].data_ptr(), cache.nbytes, 0
        for size in (5, 3, 1, 1, 12, 1):
            layout = Layout(torch.empty(B, size, C), start=start)
            cache.append(layout, real[:, :, start : start + size])
            start += size
            assert (cache.slots[0].data_ptr(), cache.nbytes) == (place, nbytes)

    def test_what_was_returned_first_is_what_came(self):
        # Nothing to look back to: no copy, and no rounding to the dtype of the cache.
        new = torch.randn(B, H, 5, D)
        cache = SlotCache(B, 8, None, [(H, D)], torch.bfloat16, CPU)
        (found,), keys = cache.append(Layout(torch.empty(B, 5, C)), new)
        assert keys is None and found is new

    def test_on_the_device_only_one_token_at_a_time(self):
        cache = SlotCache(B, 8, None, [(H, D)], torch.float64, CPU)
        with pytest.raises(AssertionError, match="one token at a time"):
            cache.append(Layout(torch.empty(B, 2, C), start=torch.tensor(3)), history(2))


def pass_through(attention, cache, x_BTC, sizes, mask_BT=None):
    outputs = []
    for size in sizes:
        part = slice(cache.length, cache.length + size)
        layout = cache.layout(x_BTC[:, part], None if mask_BT is None else mask_BT[:, part])
        outputs.append(attention(x_BTC[:, part], layout, cache.blocks[0][0]))
        cache.advance(size)
    return torch.cat(outputs, dim=1)


def new_cache(attention, n_rows, capacity, dtype=torch.float64):
    return RackCache([[attention.new_cache(n_rows, capacity, dtype, CPU)]], n_rows, capacity, CPU)


WINDOWED = [
    (kind, window) for kind in ATTENTION for window in (None, 1, 4, 50) if kind != "kernel" or not window
]


class TestAttentionThroughACache:
    @pytest.mark.parametrize("softcap", [None, 1.5])
    @pytest.mark.parametrize("kind, window", WINDOWED)
    @torch.no_grad()
    def test_a_start_on_the_device_is_a_start(self, kind, window, softcap):
        if kind == "kernel" and softcap:
            return
        attention = make_attention(kind, sliding_window=window, softcap=softcap)
        x = torch.randn(2, 15, C, dtype=torch.float64)
        expected = attention(x, Layout(x))
        cache = attention.new_cache(2, 20, torch.float64, CPU)
        prompt = attention(x[:, :3], Layout(x[:, :3]), cache)
        torch.testing.assert_close(prompt, expected[:, :3])
        for t in range(3, 15):
            token = x[:, t : t + 1]
            y = attention(token, Layout(token, start=torch.tensor(t)), cache)
            torch.testing.assert_close(y, expected[:, t : t + 1])

    @pytest.mark.parametrize("on_device", [False, True])
    @pytest.mark.parametrize("kind, window", WINDOWED)
    @torch.no_grad()
    def test_left_padding_in_the_ring(self, kind, window, on_device):
        attention = make_attention(kind, sliding_window=window)
        x = torch.randn(3, 24, C, dtype=torch.float64)
        n_padding = [0, 3, 7]
        mask = torch.arange(24) >= torch.tensor(n_padding)[:, None]
        cache = new_cache(attention, 3, 24)
        y = pass_through(attention, cache, x, [5, 4], mask)
        for t in range(9, 24):
            layout = cache.layout(x[:, t : t + 1], mask[:, t : t + 1])
            if on_device:
                layout = Layout(x[:, t : t + 1], start=torch.tensor(t), keep_BS=layout.keep_BS)
            y = torch.cat((y, attention(x[:, t : t + 1], layout, cache.blocks[0][0])), dim=1)
            cache.advance(1)
        for row, n in enumerate(n_padding):
            alone = x[row : row + 1, n:]
            torch.testing.assert_close(y[row : row + 1, n:], attention(alone, Layout(alone)))

    @pytest.mark.parametrize("kind", ATTENTION)
    @pytest.mark.parametrize(
        "weights, kept",
        [
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float64, torch.float32),
            (torch.float64, torch.float64),
        ],
    )
    @torch.no_grad()
    def test_a_cache_of_another_dtype(self, kind, weights, kept):
        attention = make_attention(kind, **({} if kind == "kernel" else {"sliding_window": 5})).to(weights)
        x = torch.randn(2, 20, C).to(weights)
        expected = attention(x, Layout(x))
        for sizes in ([1] * 20, [6, 1, 3, 9, 1]):
            y = pass_through(attention, new_cache(attention, 2, 20, kept), x, sizes)
            assert y.dtype == weights
            limit = 1e-9 if kept == torch.float64 else 0.03
            assert (y - expected).abs().max() < limit * expected.abs().max()

    @pytest.mark.parametrize("kind", ATTENTION)
    @torch.no_grad()
    def test_autocast(self, kind):
        attention = make_attention(kind).float()
        x = torch.randn(2, 12, C)
        with torch.autocast("cpu", torch.bfloat16):
            expected = attention(x, Layout(x))
            y = pass_through(attention, new_cache(attention, 2, 12, torch.float32), x, [5, 1, 1, 4, 1])
        assert (y - expected).abs().max() < 0.03 * expected.abs().max()


class TestStateCache:
    def test_size(self):
        sums = [torch.zeros(2, 3), torch.zeros(5, dtype=torch.float64)]
        assert StateCache(sums).nbytes == 2 * 3 * 4 + 5 * 8


class TestRackCache:
    def test_capacity(self):
        rack, ids = make_rack(), torch.randint(13, (2, 6))
        cache = rack.new_cache(2, 6)
        with torch.no_grad():
            rack(ids[:, :4], cache=cache)
            with pytest.raises(ValueError, match=r"input_ids: got 3 tokens after 4; allowed: 6 in all"):
                rack(ids[:, :3], cache=cache)
            assert cache.length == 4
            last = rack(ids[:, 4:], cache=cache)
            assert cache.length == 6
            torch.testing.assert_close(last, rack(ids)[:, 4:])
            with pytest.raises(ValueError, match=r"input_ids: got 1 tokens after 6; allowed: 6 in all"):
                rack(ids[:, :1], cache=cache)

    def test_a_block_or_stack_is_told_where_its_tokens_stand(self):
        """A cache does not know how many tokens it holds: they would be written over."""
        rack, x_BTC = make_rack(), torch.randn(1, 4, C, dtype=torch.float64)
        stack, caches = rack.get_stack(0), rack.new_cache(1, 8).blocks[0]
        with pytest.raises(ValueError, match="cache: got 'one without a layout'; allowed: one beside"):
            stack.get_block(0)(x_BTC, cache=caches[0])
        with pytest.raises(ValueError, match="caches: got 'some without a layout'; allowed: those beside"):
            stack(x_BTC, caches=caches)

    def test_another_rack_than_it_was_made_for(self):
        rack, ids = create_simple_rack(2, 1, C, 12, 2, 13), torch.randint(13, (2, 3))
        cache = rack.new_cache(2, 6)
        rack(ids, cache=cache)
        remove_stack(rack, 1)
        with pytest.raises(ValueError, match=r"cache: got one for Stacks of \[1, 1\] Blocks; .* for \[1\]"):
            rack(ids, cache=cache)

    @torch.no_grad()
    def test_a_stack_that_was_exchanged(self):
        rack, ids = create_simple_rack(2, 1, C, 12, 2, 13), torch.randint(13, (2, 3))
        cache, empty = rack.new_cache(2, 6), rack.new_cache(2, 6)
        expected = rack(ids, cache=cache)
        stack = remove_stack(rack, 1)
        append_stack(rack, create_simple_rack(1, 1, C, 12, 2, 13).get_stack(0))
        with pytest.raises(ValueError, match="cache: got one for Blocks of which some were exchanged; allow"):
            rack(ids, cache=cache)
        remove_stack(rack, 1)
        prepend_stack(rack, stack)
        with pytest.raises(ValueError, match="exchanged"):  # the same ones, in another order
            rack(ids, cache=cache)
        append_stack(rack, remove_stack(rack, 0))
        rack(ids, cache=cache)
        # An empty one is for whatever fills it, a copy for one.
        assert torch.equal(copy.deepcopy(rack)(ids, cache=empty), expected)
        with pytest.raises(ValueError, match="exchanged"):
            rack(ids, cache=empty)

    @torch.no_grad()
    def test_copies_go_on(self):
        rack, ids = make_rack(), torch.randint(13, (2, 6))
        cache = rack.new_cache(2, 6)
        rack(ids[:, :4], cache=cache)
        alone, read = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        twin, beside = copy.deepcopy((rack, cache))
        other_rack, other = pickle.loads(pickle.dumps((rack, cache)))
        expected = rack(ids[:, 4:], cache=cache)
        for its_rack, its in ((rack, alone), (rack, read), (twin, beside), (other_rack, other)):
            assert torch.equal(its_rack(ids[:, 4:], cache=its), expected)
        with pytest.raises(ValueError, match="exchanged"):  # a copy, too, is for one Rack
            make_rack()(ids[:, 4:], cache=alone)

    def test_keeps_no_block_alive(self):
        rack = make_rack()
        cache, block = rack.new_cache(2, 6), weakref.ref(rack.get_stack(0).get_block(0))
        del rack
        gc.collect()
        assert block() is None
        assert cache.length == 0

    @torch.no_grad()
    def test_a_compiled_rack_takes_one(self):
        rack, ids = make_rack(), torch.randint(13, (2, 6))
        compiled, cache = torch.compile(rack, backend="eager", fullgraph=True), rack.new_cache(2, 6)
        parts = [compiled(ids[:, :4], cache=cache), compiled(ids[:, 4:], cache=cache)]
        torch.testing.assert_close(torch.cat(parts, dim=1), rack(ids))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_keys_and_values_are_floating_point_numbers(self, dtype):
        with pytest.raises(ValueError, match=f"dtype: got {dtype}; allowed: a floating-point dtype"):
            make_rack().new_cache(2, 6, dtype)

    @pytest.mark.parametrize("n_rows", [1, 3])
    def test_batch_size(self, n_rows):
        rack = make_rack()
        cache = rack.new_cache(2, 6)
        with pytest.raises(ValueError, match=rf"input_ids: got {n_rows} rows; allowed: 2, as in the cache"):
            rack(torch.randint(13, (n_rows, 2)), cache=cache)

    @pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(2, 9, dtype=torch.bool)])
    def test_a_mask_is_of_the_tokens_of_the_pass(self, mask):
        rack = make_rack()
        cache = rack.new_cache(2, 9)
        rack(torch.randint(13, (2, 6)), cache=cache)
        with pytest.raises(ValueError, match="attention_mask: got"):
            rack(torch.randint(13, (2, 3)), mask, cache=cache)

    def test_bytes(self):
        # Two Blocks, keys and values of two heads of size 4; bfloat16 on request.
        assert make_rack().new_cache(3, 10).nbytes == 2 * 2 * 3 * 10 * 8 * 8
        assert make_rack().new_cache(3, 10, torch.bfloat16).nbytes == 2 * 2 * 3 * 10 * 8 * 2
        assert make_rack(sliding_window=4).new_cache(3, 10).nbytes == 2 * 2 * 3 * 4 * 8 * 8

    @pytest.mark.parametrize(
        "options, allowed",
        [
            ({}, True),
            ({"sliding_window": 20}, True),
            ({"sliding_window": 4}, False),
            ({"sliding_window": [None, 4]}, False),
            ({"attention_type": "kernel"}, False),
        ],
        ids=str,
    )
    @torch.no_grad()
    def test_a_pass_that_failed_is_made_again_where_it_left_nothing(self, options, allowed):
        rack, ids = make_rack(**options), torch.randint(13, (2, 16))
        cache = rack.new_cache(2, 16)
        rack(ids[:, :10], cache=cache)

        def fail(*_):
            raise MemoryError("in the middle")

        hook = rack.get_stack(0).get_block(1).feedforward.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            rack(ids[:, 10:], torch.tensor([1, 0, 1, 0, 1, 1]).expand(2, -1), cache=cache)
        hook.remove()
        if allowed:
            parts = [rack(ids[:, 10:12], cache=cache), rack(ids[:, 12:], cache=cache)]
            torch.testing.assert_close(torch.cat(parts, dim=1), rack(ids)[:, 10:])
        else:
            with pytest.raises(ValueError, match=r"cache: got one in which a pass failed after 10 tokens"):
                rack(ids[:, 10:], cache=cache)

    @torch.no_grad()
    def test_a_pass_that_is_counted_by_the_caller_did_not_fail(self):
        rack, ids = make_rack(sliding_window=4), torch.randint(13, (2, 12))
        cache = rack.new_cache(2, 12)
        parts = []
        for t in range(12):
            x_B1C = rack.embed(ids[:, t : t + 1])
            layout = cache.layout(x_B1C, None)
            parts.append(rack.head(rack.follow(x_B1C, layout, cache.blocks)))
            cache.length += 1
        torch.testing.assert_close(torch.cat(parts, dim=1), rack(ids))

    @pytest.mark.parametrize("window", [None, 3])
    @torch.no_grad()
    def test_a_mask_may_come_late_and_stop(self, window):
        # Rows: padded in the first pass, in the second only, never.
        rack, ids = make_rack(sliding_window=window), torch.randint(13, (3, 12))
        mask = torch.ones(3, 12, dtype=torch.long)
        mask[1, 5:7] = 0
        expected = rack(ids, mask)
        cache = rack.new_cache(3, 12)
        parts = [
            rack(ids[:, :5], cache=cache),
            rack(ids[:, 5:8], mask[:, 5:8], cache=cache),
            rack(ids[:, 8:9], cache=cache),
            rack(ids[:, 9:], cache=cache),
        ]
        real = mask.bool()
        torch.testing.assert_close(torch.cat(parts, dim=1)[real], expected[real])


@pytest.mark.parametrize("options", [{}, {"attention_type": "kernel"}], ids=str)
def test_a_cache_keeps_no_graph(options):
    """Else every pass outside no_grad would hold on to all passes before it."""
    rack = create_simple_rack(1, 1, 16, 24, 2, 11, **options)
    cache = rack.new_cache(1, 8)
    rack(torch.zeros(1, 4, dtype=torch.int64), cache=cache).sum().backward()
    rack(torch.zeros(1, 4, dtype=torch.int64), cache=cache).sum().backward()
    block = cache.blocks[0][0]
    kept = block.sums if isinstance(block, StateCache) else block.slots
    assert not any(each.requires_grad for each in kept)


@pytest.mark.parametrize("sizes", [[4, 4], [1] * 8, [3, 1, 4]], ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_gradients_of_a_pass_behind_a_cache(window, sizes):
    """With respect to its own tokens, what came before being constant."""
    torch.manual_seed(0)
    config = BlockConfig(d_model=8, d_ff=8, n_heads=2, sliding_window=window)
    attention = create_attention(config).double()
    x = torch.randn(1, 8, 8, dtype=torch.float64)
    cache = attention.new_cache(1, 8, torch.float64, torch.device("cpu"))
    start = 0
    for size in sizes:
        part = x[:, start : start + size].clone().requires_grad_()
        y = attention(part, Layout(part, start=start), cache)
        (ours,) = torch.autograd.grad(y.square().sum(), part)
        whole = torch.cat((x[:, :start], part), dim=1)
        y = attention(whole, Layout(whole))[:, start:]
        (expected,) = torch.autograd.grad(y.square().sum(), part)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)
        start += size
