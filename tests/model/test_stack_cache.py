"""StackCache: a hit equals the computation, any change of the prefix's weights removes its entries."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from stackwise.model import create_simple_rack
from stackwise.model.stack_cache import StackCache

VOCAB, WIDTH, LARGE_BUDGET = 13, 16, 10**8
ENTRY = 2 * 5 * WIDTH * 4  # bytes of the hidden states of two rows of five tokens
KINDS = {
    "gqa": {"n_kv_heads": 2, "sliding_window": 3},
    "mla": {"attention_type": "mla"},
    "kernel": {"attention_type": "kernel"},
}


def make_rack(n_stacks=3, seed=0, **block):
    torch.manual_seed(seed)
    rack = create_simple_rack(n_stacks, 1, WIDTH, 24, 4, VOCAB, **block)
    with torch.no_grad():
        for p in rack.parameters():
            p.mul_(4)
    rack.freeze()
    return rack


def make_ids(seed=0, shape=(2, 5)):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def computed(rack, ids, n_stacks, *masks):
    return rack.forward_from_stack(rack.embed(ids), 0, n_stacks, *masks)


def counts(cache):
    return cache.statistics.hits, cache.statistics.misses


class TestPrefix:
    @pytest.mark.parametrize("kind", KINDS)
    def test_equals_the_forward_pass(self, kind):
        rack, cache, ids = make_rack(**KINDS[kind]), StackCache(LARGE_BUDGET), make_ids()
        mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
        documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
        cases = [
            (n, *masks) for n in (1, 2, 3) for masks in [(), (mask,), (None, documents), (mask, documents)]
        ]
        expected = [computed(rack, ids, *case) for case in cases]
        for _ in range(2):
            for case, wanted in zip(cases, expected, strict=True):
                assert torch.equal(cache.prefix(rack, ids, *case), wanted)
        assert counts(cache) == (len(cases), len(cases))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_dtypes(self, dtype):
        rack, cache = make_rack().to(dtype), StackCache(LARGE_BUDGET)
        results = [cache.prefix(rack, make_ids(), 2) for _ in range(2)]
        assert counts(cache) == (1, 1)
        for result in results:
            assert result.dtype == dtype
            assert torch.equal(result, computed(rack, make_ids(), 2))

    def test_caller_may_modify_the_result(self):
        rack, cache = make_rack(), StackCache(LARGE_BUDGET)
        for _ in range(3):
            result = cache.prefix(rack, make_ids(), 2)
            assert not result.requires_grad
            assert torch.equal(result, computed(rack, make_ids(), 2))
            result.zero_()
        assert counts(cache) == (2, 1)

    def test_training_of_later_stacks_keeps_the_entries(self):
        rack, twin, cache = make_rack(), make_rack(), StackCache(LARGE_BUDGET)
        for each in (rack, twin):
            each.get_stack(2).unfreeze()
        optimizers = [
            torch.optim.AdamW(each.get_stack(2).parameters(), lr=0.1, fused=True) for each in (rack, twin)
        ]
        for step in range(4):
            ids = make_ids(step % 2)
            hidden = [cache.prefix(rack, ids, 2), computed(twin, ids, 2)]
            losses = []
            for each, optimizer, x in zip((rack, twin), optimizers, hidden, strict=True):
                logits = each.head(each.forward_from_stack(x, 2))
                losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            assert losses[0].item() == losses[1].item()
        assert counts(cache) == (2, 2)

    def test_inside_and_outside_of_inference_mode(self):
        rack, cache = make_rack(), StackCache(LARGE_BUDGET)
        with torch.inference_mode():
            first = cache.prefix(rack, make_ids(), 2).clone()
        rack.get_stack(2).unfreeze()
        rack.forward_from_stack(cache.prefix(rack, make_ids(), 2), 2).sum().backward()
        assert torch.equal(first, computed(rack, make_ids(), 2))
        assert counts(cache) == (1, 1)


class TestMisses:
    @pytest.mark.parametrize(
        "other",
        [
            {"ids": make_ids(1)},
            {"ids": make_ids().T.contiguous()},
            {"n_stacks": 2},
            {"mask": torch.tensor([[0, 1, 1, 1, 1]] * 2)},
            {"documents": torch.tensor([[0, 0, 1, 1, 1]] * 2)},
            {"rack": make_rack(seed=1)},
            {"rack": copy.deepcopy(make_rack())},
            {"rack": make_rack(sliding_window=2)},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_other_argument(self, other):
        cache, rack = StackCache(LARGE_BUDGET), make_rack()
        case = {"rack": rack, "ids": make_ids(), "n_stacks": 1, "mask": None, "documents": None}
        for each in (case, case | other):
            result = cache.prefix(*each.values())
            assert torch.equal(result, computed(*each.values()))
        assert counts(cache) == (0, 2)

    def test_autocast(self):
        cache, rack = StackCache(LARGE_BUDGET), make_rack()
        results = []
        for _ in range(2):
            results.append(cache.prefix(rack, make_ids(), 2))
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype):
                    results.append(cache.prefix(rack, make_ids(), 2))
                    assert torch.equal(results[-1], computed(rack, make_ids(), 2))
        assert counts(cache) == (3, 3)
        assert not torch.equal(results[0], results[1])

    def test_cast_of_the_rack(self):
        cache, rack = StackCache(LARGE_BUDGET), make_rack()
        for dtype in (torch.float32, torch.float64, torch.float32):
            rack.to(dtype)
            assert cache.prefix(rack, make_ids(), 1).dtype == dtype
        assert counts(cache) == (0, 3)

    def test_weights_of_inference_mode(self):
        """torch counts no versions of these tensors, so that a write to them would not be seen."""
        with torch.inference_mode():
            cache, rack = StackCache(LARGE_BUDGET), make_rack()
            for _ in range(2):
                assert torch.equal(cache.prefix(rack, make_ids(), 1), computed(rack, make_ids(), 1))
                rack.embedding.weight.mul_(2)
        assert counts(cache) == (0, 2)

    def test_clear_after_a_write_that_torch_does_not_count(self):
        cache, rack = StackCache(LARGE_BUDGET), make_rack()
        cache.prefix(rack, make_ids(), 1)
        rack.embedding.weight.data.mul_(2)
        cache.clear()
        assert (cache.statistics.entries, cache.statistics.bytes) == (0, 0)
        assert torch.equal(cache.prefix(rack, make_ids(), 1), computed(rack, make_ids(), 1))


EDITS = {
    "in place": lambda w: w.mul_(1.5),
    "one number": lambda w: w.view(-1)[-1].add_(0.5),
    "other storage": lambda w: setattr(w, "data", w.data.flip(0)),
    "load": None,
    "nothing": lambda w: None,
}


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(EDITS)), st.integers(0, 99), st.integers(0, 2), st.integers(1, 2)),
        min_size=1,
        max_size=10,
    ),
    budget=st.sampled_from([ENTRY, 3 * ENTRY, LARGE_BUDGET]),
)
@settings(deadline=None, max_examples=20, derandomize=True)
def test_a_hit_equals_the_computation_after_any_edits(steps, budget):
    rack, cache = make_rack(2), StackCache(budget)
    original = copy.deepcopy(rack.state_dict())
    prefix = [*rack.embedding.parameters(), *rack.stacks.parameters()]
    for edit, number, seed, n_stacks in steps:
        if edit == "load":
            rack.load_state_dict(original)
        else:
            with torch.no_grad():
                EDITS[edit](prefix[number % len(prefix)])
        ids = make_ids(seed)
        for _ in range(2):
            assert torch.equal(cache.prefix(rack, ids, n_stacks), computed(rack, ids, n_stacks))
        assert cache.statistics.bytes <= budget
    hits, misses = counts(cache)
    assert hits + misses == 2 * len(steps)
    assert hits >= len(steps)


class TestRefusals:
    def test_training_prefix(self):
        rack, cache = make_rack(), StackCache(LARGE_BUDGET)
        rack.get_stack(1).get_block(0).feedforward.down.weight.requires_grad_(True)
        cache.prefix(rack, make_ids(), 1)
        name = (
            r"stacks\.1\.blocks\.0\.feedforward\.down\.weight that trains'; allowed: a prefix that is frozen"
        )
        with pytest.raises(ValueError, match=name):
            cache.prefix(rack, make_ids(), 2)
        rack.embedding.requires_grad_(True)
        with pytest.raises(ValueError, match=r"embedding\.weight that trains"):
            cache.prefix(rack, make_ids(), 1)
        assert counts(cache) == (0, 1)

    def test_training_buffer(self):
        rack = make_rack(attention_type="kernel")
        rack.get_stack(0).get_block(0).attention.feature_map.frequencies_KFD.requires_grad_(True)
        with pytest.raises(ValueError, match=r"frequencies_KFD that trains"):
            StackCache(LARGE_BUDGET).prefix(rack, make_ids(), 1)

    def test_dropout(self):
        rack, cache = make_rack(dropout=0.5), StackCache(LARGE_BUDGET)
        with pytest.raises(ValueError, match=r"dropout=0\.5'; allowed: eval mode, or no dropout"):
            cache.prefix(rack, make_ids(), 1)
        rack.get_stack(0).eval()
        cache.prefix(rack, make_ids(), 1)
        with pytest.raises(ValueError, match=r"stacks\.1.*dropout"):
            cache.prefix(rack, make_ids(), 2)
        assert counts(cache) == (0, 1)

    def test_dropout_of_torch(self):
        rack = make_rack()
        rack.get_stack(0).extra = torch.nn.Dropout(0.1)
        with pytest.raises(ValueError, match=r"stacks\.0\.extra with dropout=0\.1"):
            StackCache(LARGE_BUDGET).prefix(rack, make_ids(), 1)

    @pytest.mark.parametrize("n_stacks", [0, 4, -1, 1.0])
    def test_number_of_stacks(self, n_stacks):
        with pytest.raises(ValueError, match="n_stacks: got"):
            StackCache(LARGE_BUDGET).prefix(make_rack(), make_ids(), n_stacks)

    @pytest.mark.parametrize("budget", [0, -1, 1.5])
    def test_budget(self, budget):
        with pytest.raises(ValueError, match="byte_budget: got"):
            StackCache(budget)

    def test_wrong_inputs_before_and_after_a_hit(self):
        rack, cache, ids = make_rack(), StackCache(LARGE_BUDGET), make_ids()
        refused = [
            (ids[0],),
            (ids.float(),),
            (ids, torch.ones(2, 5)),
            (ids, torch.ones(2, 4, dtype=torch.long)),
            (ids, None, torch.ones(2, 5)),
            (ids, None, torch.ones(5, 2, dtype=torch.long)),
        ]
        for _ in range(2):
            for first, *masks in refused:
                with pytest.raises(ValueError, match="got"):
                    cache.prefix(rack, first, 1, *masks)
            cache.prefix(rack, ids, 1)
        assert cache.statistics.hits == 1


class TestBudget:
    def test_least_recently_used_goes_first(self):
        rack, cache = make_rack(), StackCache(3 * ENTRY + 1)
        for seed in (0, 1, 2, 0, 3, 4):
            cache.prefix(rack, make_ids(seed), 1)
        assert cache.statistics.evictions == 2
        assert (cache.statistics.entries, cache.statistics.bytes) == (3, 3 * ENTRY)
        before = cache.statistics.hits
        for seed in (0, 3, 4):
            cache.prefix(rack, make_ids(seed), 1)
        assert cache.statistics.hits == before + 3

    def test_too_large_entry_is_returned_and_not_stored(self):
        rack, cache = make_rack(), StackCache(3 * ENTRY)
        cache.prefix(rack, make_ids(), 1)
        large = make_ids(0, (4, 20))
        for _ in range(2):
            assert torch.equal(cache.prefix(rack, large, 1), computed(rack, large, 1))
        cache.prefix(rack, make_ids(), 1)
        assert counts(cache) == (1, 3)
        assert (cache.statistics.entries, cache.statistics.evictions) == (1, 0)
