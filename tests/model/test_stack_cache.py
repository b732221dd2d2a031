"""The StackCache against recomputation: a hit is what the Rack would compute now, whatever was done to it."""

import copy
import importlib
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import stackwise.model.content_hash as content_hash
from stackwise.model import backend, create_simple_rack
from stackwise.model.attention import Attention
from stackwise.model.block import Block
from stackwise.model.rack import Rack
from stackwise.model.stack_cache import StackCache
from tests.forked import HANG_SECONDS

VOCAB, WIDTH, LARGE_BUDGET = 13, 16, 10**8
ENTRY = 2 * 5 * WIDTH * 4  # bytes of the hidden states of two rows of five tokens
KINDS = {
    "gqa": {"n_kv_heads": 2, "sliding_window": 3},
    "mla": {"attention_type": "mla"},
    "kernel": {"attention_type": "kernel"},
}
PLACES = pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])


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


class Gain(Block):
    gain = 1.0

    def forward(self, x_BTC, *args, **options):
        return super().forward(x_BTC, *args, **options) * self.gain


EDITED = {
    "body": """
class Own(Block):
    def forward(self, x_BTC, *args, **options):
        return super().forward(x_BTC, *args, **options) * {by}
""",
    "default": """
class Own(Block):
    def forward(self, x_BTC, *args, by={by}, **options):
        return super().forward(x_BTC, *args, **options) * by
""",
    "decorated": """
class Own(Block):
    @torch.no_grad()
    def forward(self, x_BTC, *args, **options):
        return super().forward(x_BTC, *args, **options) * {by}
""",
    "class": """
class Scale:
    def __call__(self, x_BTC):
        return x_BTC * {by}

class Own(Block):
    def forward(self, x_BTC, *args, **options):
        return Scale()(super().forward(x_BTC, *args, **options))
""",
    "partial": """
class Own(Block):
    scale = functools.partialmethod(lambda self, x_BTC: x_BTC * {by})

    def forward(self, x_BTC, *args, **options):
        return self.scale(super().forward(x_BTC, *args, **options))
""",
}
EDITED_IMPORTS = "import functools\n\nimport torch\n\nfrom stackwise.model.block import Block\n"


def scaled_class(by):
    class Own(Block):
        def forward(self, x_BTC, *args, **options):
            return super().forward(x_BTC, *args, **options) * by

    return Own


def scaled_class_by_default(by):
    class Own(Block):
        def forward(self, x_BTC, *args, by=by, **options):
            return super().forward(x_BTC, *args, **options) * by

    return Own


def class_of_a_function(by):
    def forward(self, x_BTC, *args, **options):
        return Block.forward(self, x_BTC, *args, **options) * by

    return type("Own", (Block,), {"forward": forward, "__module__": __name__})


class Dropping(Block):
    def forward(self, x_BTC, *args, **options):
        return F.dropout(super().forward(x_BTC, *args, **options), 0.5, self.training)


class Chancy(Block):
    def forward(self, x_BTC, *args, **options):
        return super().forward(x_BTC, *args, **options) * (random.random() if self.training else 1)


class OwnAttention(Attention):
    pass


class Positioned(Rack):
    """Learned positions, as in GPT-2."""

    def embed(self, input_ids):
        return super().embed(input_ids) + self.position.weight[: input_ids.shape[1]]


def make_rack_of(kind):
    """A Rack whose first Block is of another class."""
    rack = make_rack()
    rack.get_stack(0).get_block(0).__class__ = kind
    return rack


@pytest.fixture
def make_cache(tmp_path):
    return lambda on_disk, budget=LARGE_BUDGET: StackCache(budget, tmp_path / "cache" if on_disk else None)


class TestPrefix:
    @PLACES
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_the_forward_pass(self, kind, on_disk, make_cache):
        rack, cache, ids = make_rack(**KINDS[kind]), make_cache(on_disk), make_ids()
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

    @PLACES
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_dtypes(self, dtype, on_disk, make_cache):
        rack, cache = make_rack().to(dtype), make_cache(on_disk)
        results = [cache.prefix(rack, make_ids(), 2) for _ in range(2)]
        assert counts(cache) == (1, 1)
        for result in results:
            assert result.dtype == dtype
            assert torch.equal(result, computed(rack, make_ids(), 2))

    @PLACES
    def test_result_is_the_callers_own(self, on_disk, make_cache):
        rack, cache = make_rack(), make_cache(on_disk)
        for _ in range(3):
            result = cache.prefix(rack, make_ids(), 2)
            assert not result.requires_grad
            assert torch.equal(result, computed(rack, make_ids(), 2))
            result.zero_()
        assert counts(cache) == (2, 1)

    @PLACES
    def test_trains_what_is_above(self, on_disk, make_cache):
        rack, twin = make_rack(), make_rack()
        cache = make_cache(on_disk)
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

    def test_ids_of_either_integer_type(self, make_cache):
        rack, cache = make_rack(), make_cache(False)
        assert torch.equal(cache.prefix(rack, make_ids().int(), 1), cache.prefix(rack, make_ids(), 1))
        assert counts(cache) == (1, 1)

    @PLACES
    def test_inside_and_outside_of_inference_mode(self, on_disk, make_cache):
        rack, cache = make_rack(), make_cache(on_disk)
        with torch.inference_mode():
            first = cache.prefix(rack, make_ids(), 2).clone()
        rack.get_stack(2).unfreeze()
        rack.forward_from_stack(cache.prefix(rack, make_ids(), 2), 2).sum().backward()
        assert torch.equal(first, computed(rack, make_ids(), 2))
        assert counts(cache) == (1, 1)


class TestKey:
    """What must not be taken for the same."""

    @pytest.mark.parametrize(
        "other",
        [
            {"ids": make_ids(1)},
            {"ids": make_ids().T.contiguous()},
            {"n_stacks": 2},
            {"mask": torch.tensor([[0, 1, 1, 1, 1]] * 2)},
            {"documents": torch.tensor([[0, 0, 1, 1, 1]] * 2)},
            {"rack": make_rack(seed=1)},
            {"rack": make_rack().double()},
            {"rack": make_rack(sliding_window=2)},
            {"rack": make_rack(rope_theta=10.0)},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_argument(self, other, make_cache):
        cache, rack = make_cache(False), make_rack()
        case = {"rack": rack, "ids": make_ids(), "n_stacks": 1, "mask": None, "documents": None}
        for each in (case, case | other):
            result = cache.prefix(*each.values())
            assert torch.equal(result, computed(*each.values()))
        assert counts(cache) == (0, 2)

    def test_autocast(self, make_cache):
        cache, rack = make_cache(False), make_rack()
        results = []
        for _ in range(2):
            results.append(cache.prefix(rack, make_ids(), 2))
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype):
                    results.append(cache.prefix(rack, make_ids(), 2))
                    assert torch.equal(results[-1], computed(rack, make_ids(), 2))
        assert counts(cache) == (3, 3)
        assert not torch.equal(results[0], results[1])

    def test_version_of_torch_and_class_of_the_rack(self, make_cache, monkeypatch):
        cache, rack = make_cache(False), make_rack()
        cache.prefix(rack, make_ids(), 2)
        monkeypatch.setattr(torch, "__version__", "2.99")
        cache.prefix(rack, make_ids(), 2)
        rack.__class__ = type("Other", (Rack,), {"__module__": __name__})
        monkeypatch.setitem(sys.modules, __name__, sys.modules[type(self).__module__])
        cache.prefix(rack, make_ids(), 2)
        assert counts(cache) == (0, 3)

    def test_attribute_of_a_class_from_elsewhere(self, make_cache, monkeypatch):
        cache, rack = make_cache(False), make_rack_of(Gain)
        for gain in (1.0, 2.0, 2.0):
            monkeypatch.setattr(Gain, "gain", gain)
            assert torch.equal(cache.prefix(rack, make_ids(), 1), computed(rack, make_ids(), 1))
        assert counts(cache) == (1, 2)

    def test_choice_of_attention_kernels(self, make_cache, monkeypatch):
        monkeypatch.setattr(backend, "_tuned", {})
        cache, rack, ids = make_cache(False), make_rack(), make_ids()
        cache.prefix(rack, ids, 1)
        for forced in (backend.using("sliced"), sdpa_kernel(SDPBackend.MATH)):
            with forced:
                assert torch.equal(cache.prefix(rack, ids, 1), computed(rack, ids, 1))
        assert counts(cache) == (0, 3)
        with backend.tuning():
            cache.prefix(rack, ids, 1)  # not kept: how it began is not how it would be computed now
            cache.prefix(rack, ids, 1)
            cache.prefix(rack, ids, 1)
        assert counts(cache) == (1, 5)
        cache.prefix(rack, ids, 1)
        monkeypatch.setattr(backend, "_tuned", {})
        cache.prefix(rack, ids, 1)
        assert counts(cache) == (2, 6)

    @pytest.mark.parametrize("kind", ["gqa", "mla"])
    def test_kernels_tuned_for_other_shapes(self, kind, make_cache, monkeypatch):
        monkeypatch.setattr(backend, "_tuned", {})
        cache, rack, ids = make_cache(False), make_rack(**KINDS[kind]), make_ids()
        cache.prefix(rack, ids, 1)
        with backend.tuning():
            computed(make_rack(n_stacks=1, head_dim=6), ids, 1)
            computed(rack, make_ids(shape=(2, 6)), 1)
        assert len(backend._tuned) == 2
        cache.prefix(rack, ids, 1)
        assert counts(cache) == (1, 1)
        with backend.tuning():
            computed(rack, ids, 1)
        cache.prefix(rack, ids, 1)
        assert counts(cache) == (1, 2)

    def test_kernels_tuned_for_whatever_a_class_from_elsewhere_attends_with(self, make_cache, monkeypatch):
        monkeypatch.setattr(backend, "_tuned", {})
        cache, rack, ids = make_cache(False), make_rack_of(Gain), make_ids()
        cache.prefix(rack, ids, 1)
        with backend.tuning():
            computed(make_rack(n_stacks=1, head_dim=6), ids, 1)
        cache.prefix(rack, ids, 1)
        cache.prefix(rack, ids, 1)
        assert counts(cache) == (1, 2)

    def test_kernel_that_ran_last_for_other_lengths(self, make_cache):
        cache, rack = make_cache(False), make_rack(sliding_window=3)
        attention = rack.get_stack(0).get_block(0).attention
        attention.__class__ = OwnAttention
        ran = []
        for T in (8, 1100, 8, 1100):
            ids = make_ids(shape=(1, T))
            assert torch.equal(cache.prefix(rack, ids, 1), computed(rack, ids, 1))
            ran.append(attention.backend)
        assert ran == ["sdpa", "sliced"] * 2
        assert counts(cache) == (2, 2)

    def test_what_is_above_the_prefix_is_not_in_it(self, make_cache):
        cache, rack = make_cache(False), make_rack(tie_embeddings=False)
        cache.prefix(rack, make_ids(), 2)
        with torch.no_grad():
            for part in (rack.get_stack(2), rack.lm_head, rack.final_norm):
                for p in part.parameters():
                    p.add_(1)
        rack.get_stack(2).unfreeze()
        assert torch.equal(cache.prefix(rack, make_ids(), 2), computed(rack, make_ids(), 2))
        assert counts(cache) == (1, 1)

    @pytest.mark.parametrize("kind", [Dropping, Chancy])
    def test_what_is_drawn_is_not_kept(self, kind, make_cache):
        cache, rack = make_cache(False), make_rack_of(kind)
        first, second = (cache.prefix(rack, make_ids(), 1) for _ in range(2))
        assert not torch.equal(first, second)
        rack.eval()
        for _ in range(2):
            assert torch.equal(cache.prefix(rack, make_ids(), 1), computed(rack, make_ids(), 1))
        assert counts(cache) == (1, 3)

    @PLACES
    @pytest.mark.parametrize("make", [scaled_class, scaled_class_by_default, class_of_a_function])
    def test_classes_that_a_function_made(self, make, on_disk, make_cache):
        cache = make_cache(on_disk)
        kinds = [make(by) for by in (1.0, 3.0)]
        for rack in [make_rack_of(kind) for kind in (*kinds, *kinds)]:
            assert torch.equal(cache.prefix(rack, make_ids(), 1), computed(rack, make_ids(), 1))
        assert counts(cache) == (2, 2)

    @PLACES
    @pytest.mark.parametrize("asked_before", [True, False])
    @pytest.mark.parametrize("edited", EDITED)
    def test_edited_code(self, edited, asked_before, on_disk, make_cache, tmp_path, monkeypatch):
        """What was imported runs, whatever the file says when the prefix is asked for."""
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        file, cache, ids = tmp_path / "edited_block.py", make_cache(on_disk), make_ids()
        file.write_text(EDITED_IMPORTS + EDITED[edited].format(by=1.0))
        module = importlib.import_module("edited_block")
        try:
            rack = make_rack_of(module.Own)
            if asked_before:
                cache.prefix(rack, ids, 1)
            file.write_text(EDITED_IMPORTS + EDITED[edited].format(by=3.0))
            old = cache.prefix(rack, ids, 1)
            rack = make_rack_of(importlib.reload(module).Own)
            new = cache.prefix(rack, ids, 1)
            assert torch.equal(new, computed(rack, ids, 1))
            assert not torch.equal(new, old)
            assert torch.equal(cache.prefix(rack, ids, 1), new)
            assert counts(cache) == (1 + asked_before, 2)
        finally:
            del sys.modules["edited_block"]

    def test_change_while_it_is_computed_is_not_kept(self, make_cache, monkeypatch):
        cache, rack = make_cache(False), make_rack()
        forward, weight = Rack.forward_from_stack, rack.get_stack(0).get_block(0).feedforward.up.weight
        kept = weight.clone()

        def written_to(*arguments):
            weight.data.mul_(2)
            return forward(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Rack, "forward_from_stack", written_to)
            wrong = cache.prefix(rack, make_ids(), 1)
        weight.data.copy_(kept)
        right = cache.prefix(rack, make_ids(), 1)
        assert torch.equal(right, computed(rack, make_ids(), 1))
        assert not torch.equal(right, wrong)
        assert counts(cache) == (0, 2)


EDITS = {
    "data": lambda w: w.data.mul_(1.5),
    "no bump": lambda w: w.detach().numpy().__imul__(-1),
    "one number": lambda w: w.data.view(-1)[-1].add_(0.5),
    "storage": lambda w: w.untyped_storage().copy_((w.detach() + 1).untyped_storage()),
    "new storage": lambda w: setattr(w, "data", w.data.flip(0)),
    "restore": None,
    "nothing": lambda w: None,
}


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(EDITS)), st.integers(0, 99), st.integers(0, 2), st.integers(1, 2)),
        min_size=1,
        max_size=10,
    ),
    on_disk=st.booleans(),
    budget=st.sampled_from([ENTRY, 3 * ENTRY, LARGE_BUDGET]),
    quick=st.booleans(),
)
@settings(deadline=None, max_examples=20, derandomize=True)
def test_a_hit_is_always_what_would_be_computed(steps, on_disk, budget, quick):
    rack = make_rack(2)
    original = copy.deepcopy(rack.state_dict())
    prefix = [*rack.embedding.parameters(), *rack.stacks.parameters()]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(content_hash, "_LARGE", 0 if quick else 2**20)
        cache = StackCache(budget, directory if on_disk else None)
        for edit, number, seed, n_stacks in steps:
            if edit == "restore":
                rack.load_state_dict(original)
            else:
                EDITS[edit](prefix[number % len(prefix)])
            ids = make_ids(seed)
            for _ in range(2):
                assert torch.equal(cache.prefix(rack, ids, n_stacks), computed(rack, ids, n_stacks))
            assert cache.statistics.bytes <= budget
        hits, misses = counts(cache)
        assert hits + misses == 2 * len(steps)
        if not on_disk:
            assert hits >= len(steps)


class TestRefusals:
    def test_training_prefix(self, make_cache):
        rack, cache = make_rack(), make_cache(False)
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

    def test_buffer_that_trains(self, make_cache):
        rack = make_rack(attention_type="kernel")
        rack.get_stack(0).get_block(0).attention.feature_map.frequencies_KFD.requires_grad_(True)
        with pytest.raises(ValueError, match=r"frequencies_KFD that trains"):
            make_cache(False).prefix(rack, make_ids(), 1)

    def test_tensor_that_trains_and_is_no_parameter(self, make_cache):
        rack, cache = make_rack_of(Gain), make_cache(False)
        rack.get_stack(0).get_block(0).gain = torch.ones(1, requires_grad=True)
        with pytest.raises(ValueError, match=r"hidden states with a gradient'; allowed: a prefix that is fr"):
            cache.prefix(rack, make_ids(), 1)
        assert cache.statistics.entries == 0

    def test_rack_that_computes_its_prefix_in_its_own_way(self, make_cache):
        rack, cache = make_rack(), make_cache(False)
        cache.prefix(rack, make_ids(), 1)
        rack.__class__, rack.position = Positioned, nn.Embedding(5, WIDTH)
        with pytest.raises(
            ValueError, match=r"rack: got 'another embed in Positioned'; allowed: Rack\.embed"
        ):
            cache.prefix(rack, make_ids(), 1)
        rack = make_rack()
        rack.forward_from_stack = lambda *given: Rack.forward_from_stack(rack, *given)
        with pytest.raises(ValueError, match=r"another forward_from_stack in Rack"):
            cache.prefix(rack, make_ids(), 1)
        assert counts(cache) == (0, 1)

    def test_dropout(self, make_cache):
        rack, cache = make_rack(dropout=0.5), make_cache(False)
        with pytest.raises(ValueError, match=r"dropout=0\.5'; allowed: eval mode, or no dropout"):
            cache.prefix(rack, make_ids(), 1)
        rack.get_stack(0).eval()
        cache.prefix(rack, make_ids(), 1)
        with pytest.raises(ValueError, match=r"stacks\.1.*dropout"):
            cache.prefix(rack, make_ids(), 2)
        assert counts(cache) == (0, 1)

    def test_dropout_of_torch(self, make_cache):
        rack, cache = make_rack(), make_cache(False)
        rack.get_stack(0).extra = torch.nn.Dropout(0.1)
        with pytest.raises(ValueError, match=r"stacks\.0\.extra with dropout=0\.1"):
            cache.prefix(rack, make_ids(), 1)

    @pytest.mark.parametrize("n_stacks", [0, 4, -1, 1.0])
    def test_number_of_stacks(self, n_stacks, make_cache):
        with pytest.raises(ValueError, match="n_stacks: got"):
            make_cache(False).prefix(make_rack(), make_ids(), n_stacks)

    @pytest.mark.parametrize("budget", [0, -1, 1.5])
    def test_budget(self, budget):
        with pytest.raises(ValueError, match="byte_budget: got"):
            StackCache(budget)

    def test_inputs_that_the_rack_refuses_are_refused_before_and_after_a_hit(self, make_cache):
        rack, cache, ids = make_rack(), make_cache(False), make_ids()
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
        assert counts(cache) == (1, 1)


class TestBudget:
    @PLACES
    def test_least_recently_used_goes_first(self, on_disk, make_cache):
        rack, cache = make_rack(), make_cache(on_disk)
        cache.prefix(rack, make_ids(0), 1)
        size = cache.statistics.bytes
        assert size >= ENTRY
        cache = make_cache(on_disk, 3 * size + 1)
        for seed in (0, 1, 2):
            cache.prefix(rack, make_ids(seed), 1)
        cache.prefix(rack, make_ids(0), 1)
        cache.prefix(rack, make_ids(3), 1)
        cache.prefix(rack, make_ids(4), 1)
        assert cache.statistics.evictions == 2
        assert (cache.statistics.entries, cache.statistics.bytes) == (3, 3 * size)
        hits = []
        for seed in (0, 3, 4):
            before = cache.statistics.hits
            cache.prefix(rack, make_ids(seed), 1)
            hits.append(cache.statistics.hits - before)
        assert hits == [1, 1, 1]

    @PLACES
    def test_entry_that_is_too_large_is_returned_and_not_kept(self, on_disk, make_cache):
        rack, cache = make_rack(), make_cache(on_disk, 3 * ENTRY)
        cache.prefix(rack, make_ids(), 1)
        large = make_ids(0, (4, 20))
        for _ in range(2):
            assert torch.equal(cache.prefix(rack, large, 1), computed(rack, large, 1))
        cache.prefix(rack, make_ids(), 1)
        assert counts(cache) == (1, 3)
        assert (cache.statistics.entries, cache.statistics.evictions) == (1, 0)

    @PLACES
    def test_what_another_was_quicker_to_keep_is_kept_once(self, on_disk, make_cache, monkeypatch):
        cache = make_cache(on_disk, 2 * ENTRY)
        monkeypatch.setattr(cache._entries, "get", lambda key: None)
        for _ in range(2):
            cache.prefix(make_rack(), make_ids(), 1)
        assert counts(cache) == (0, 2)
        assert (cache.statistics.entries, cache.statistics.evictions) == (1, 0)
        cache = make_cache(on_disk, 2 * ENTRY)
        monkeypatch.setattr(cache._entries, "get", lambda key: None)
        for seed in (0, 0, 1):
            cache.prefix(make_rack(), make_ids(seed), 1)
        assert ENTRY <= cache.statistics.bytes <= 2 * ENTRY
        assert cache.statistics.evictions == int(on_disk)

    def test_bytes_in_memory_are_those_of_the_tensors(self, make_cache):
        cache = make_cache(False, ENTRY)
        for seed in (0, 1):
            cache.prefix(make_rack(), make_ids(seed), 1)
            assert (cache.statistics.entries, cache.statistics.bytes) == (1, ENTRY)
        assert cache.statistics.evictions == 1

    def test_bytes_on_disk_are_those_of_the_files(self, make_cache, tmp_path):
        cache = make_cache(True)
        for seed in (0, 1):
            cache.prefix(make_rack(), make_ids(seed), 1)
        sizes = [path.stat().st_size for path in (tmp_path / "cache").glob("*.safetensors")]
        assert len(sizes) == 2
        assert cache.statistics.bytes == sum(sizes)


OTHER_PROCESS = """
import sys, torch
sys.path.insert(0, {folder!r})
from test_stack_cache import StackCache, computed, counts, make_ids, make_rack
rack, cache = make_rack(), StackCache(10**8, {directory!r})
assert torch.equal(cache.prefix(rack, make_ids(), 2), computed(rack, make_ids(), 2))
assert counts(cache) == ({hits}, {misses}), cache.statistics
# Last, as there is no way back to the state before.
for i, precision in enumerate(("medium", "high", "highest"), 1):
    torch.set_float32_matmul_precision(precision)
    cache.prefix(rack, make_ids(), 2)
    assert counts(cache) == ({hits}, {misses} + i), cache.statistics
"""


def flip(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-1],
    "cut in the header": lambda content: content[:20],
    "longer": lambda content: content + b"\0",
    "first number": lambda content: flip(content, -ENTRY),
    "last number": lambda content: flip(content, -1),
    "header": lambda content: flip(content, 12),
    "dtype": lambda content: content.replace(b'"F32"', b'"I32"'),
    "name": lambda content: content.replace(b'"hidden"', b'"hidder"'),
    "digest": lambda content: content.replace(b'"digest"', b'"digesu"'),
    "noise": lambda content: b"\xff" * len(content),
}


class TestDirectory:
    def files(self, tmp_path):
        return sorted((tmp_path / "cache").glob("*.safetensors"))

    def test_outlives_the_object(self, make_cache):
        rack = make_rack()
        make_cache(True).prefix(rack, make_ids(), 2)
        again = make_cache(True)
        assert torch.equal(again.prefix(rack, make_ids(), 2), computed(rack, make_ids(), 2))
        assert counts(again) == (1, 0)

    @pytest.mark.slow
    def test_outlives_the_process_but_not_its_precision(self, make_cache, tmp_path):
        def other(hits, misses):
            code = OTHER_PROCESS.format(
                folder=str(Path(__file__).parent), directory=str(tmp_path / "cache"), hits=hits, misses=misses
            )
            subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)

        other(0, 1)
        cache, rack = make_cache(True), make_rack()
        # The other process may have computed with more threads.
        torch.testing.assert_close(cache.prefix(rack, make_ids(), 2), computed(rack, make_ids(), 2))
        assert counts(cache) == (1, 0)

    @pytest.mark.parametrize(
        "before, after, held",
        [(None, None, (0, 1)), ("1", "1", (1, 0)), ("1", "2", (0, 1)), ("1", None, (0, 1))],
    )
    def test_classes_of_ones_own_outlive_the_process_by_their_version(
        self, before, after, held, tmp_path, monkeypatch
    ):
        rack = make_rack_of(Gain)
        StackCache(LARGE_BUDGET, tmp_path, code_version=before).prefix(rack, make_ids(), 1)
        monkeypatch.setattr(content_hash, "_process", "another")
        cache = StackCache(LARGE_BUDGET, tmp_path, code_version=after)
        assert torch.equal(cache.prefix(rack, make_ids(), 1), computed(rack, make_ids(), 1))
        assert counts(cache) == held

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_file_is_not_taken(self, damage, make_cache, tmp_path):
        rack, cache = make_rack(), make_cache(True)
        cache.prefix(rack, make_ids(), 2)
        (file,) = self.files(tmp_path)
        content = file.read_bytes()
        file.write_bytes(DAMAGES[damage](content))
        assert torch.equal(cache.prefix(rack, make_ids(), 2), computed(rack, make_ids(), 2))
        assert counts(cache) == (0, 2)
        assert len(file.read_bytes()) == len(content)
        assert torch.equal(cache.prefix(rack, make_ids(), 2), computed(rack, make_ids(), 2))
        assert counts(cache) == (1, 2)

    def test_file_under_the_name_of_another_is_not_taken(self, make_cache, tmp_path):
        rack, cache = make_rack(), make_cache(True)
        cache.prefix(rack, make_ids(0), 2)
        (first,) = self.files(tmp_path)
        cache.prefix(rack, make_ids(1), 2)
        (second,) = set(self.files(tmp_path)) - {first}
        second.write_bytes(first.read_bytes())
        assert torch.equal(cache.prefix(rack, make_ids(1), 2), computed(rack, make_ids(1), 2))
        assert counts(cache) == (0, 3)

    def test_half_written_file_is_not_taken_and_goes(self, make_cache, tmp_path):
        rack, cache = make_rack(), make_cache(True)
        cache.prefix(rack, make_ids(0), 2)
        (file,) = self.files(tmp_path)
        partial = file.with_name(f".{'0' * 64}.safetensors.4711.0123abcd")
        file.rename(partial)
        strangers = [tmp_path / "cache" / name for name in ("notes.partial", "weights.safetensors", "a.txt")]
        for stranger in strangers:
            stranger.write_bytes(b"x" * 100)
        assert cache.statistics.bytes == 0
        cache.prefix(rack, make_ids(0), 2)
        assert counts(cache) == (0, 2)
        assert not partial.exists()
        assert all(stranger.exists() for stranger in strangers)

    def test_failed_write_leaves_no_entry(self, make_cache, tmp_path, monkeypatch):
        rack, cache = make_rack(), make_cache(True)

        def full(descriptor):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("stackwise.model.stack_cache.os.fsync", full)
            with pytest.raises(OSError, match="No space left"):
                cache.prefix(rack, make_ids(), 2)
        assert self.files(tmp_path) == []
        cache.prefix(rack, make_ids(), 2)
        assert counts(cache) == (0, 2)
        assert len(list((tmp_path / "cache").iterdir())) == 2  # the entry and the lock

    def test_many_at_once(self, tmp_path):
        """Locks belong to open files, so that caches in threads exclude each other as processes do."""
        budget, racks, inputs = (
            4 * ENTRY,
            [make_rack(2, seed) for seed in (0, 1)],
            [make_ids(i) for i in range(4)],
        )
        expected = [[computed(rack, ids, 1) for ids in inputs] for rack in racks]
        wrong, seen = [], []

        def work(first):
            cache = StackCache(budget, tmp_path)
            for i in range(first, first + 24):
                result = cache.prefix(racks[i % 2], inputs[i // 2 % 4], 1)
                if not torch.equal(result, expected[i % 2][i // 2 % 4]):
                    wrong.append(i)
                seen.append(cache.statistics)

        threads = [threading.Thread(target=work, args=(3 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(seen) == 96
        assert max(each.bytes for each in seen) <= budget
        assert sum(each.evictions for each in seen) > 0
        assert len(list(tmp_path.iterdir())) == seen[-1].entries + 1, "entries and the lock"
