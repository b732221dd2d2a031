"""Generation: what the cache gives is what the whole sequence gives, row by row and token for token.

The reference is a Rack without cache, called anew on each row alone after each token, in float64.
"""

import contextlib
import copy
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stackwise.model import create_rack_from_config, create_simple_rack, remove_stack
from stackwise.model.decode import DecodeStep
from stackwise.model.generate import generate, prefill, stream
from stackwise.model.sampling import Sampler
from tests.synchronization import synchronization_fails

VOCAB, NEW = 29, 10
LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
GROUPED = {"attention_type": "gqa", "n_kv_heads": 2}
KINDS = {
    "mha": {"attention_type": "mha", "n_kv_heads": None},
    "gqa": GROUPED,
    "mqa": {"attention_type": "mqa", "n_kv_heads": 1},
    "mla": {"attention_type": "mla", "n_kv_heads": None, "latent": LATENT},
    "mla of low-rank queries": {
        "attention_type": "mla",
        "n_kv_heads": None,
        "latent": {**LATENT, "q_lora_rank": 5},
    },
    "mla with a window": {
        "attention_type": "mla",
        "n_kv_heads": None,
        "latent": LATENT,
        "sliding_window": 3,
        "softcap": 2.0,
    },
    "window of 1": {**GROUPED, "sliding_window": 1},
    "window of 3": {**GROUPED, "sliding_window": 3},
    "window of 7": {**GROUPED, "sliding_window": 7, "softcap": 2.0},
    "window beyond the prompt": {**GROUPED, "sliding_window": 15},
    "window beyond everything": {**GROUPED, "sliding_window": 99},
    "alternating windows": {**GROUPED, "sliding_window": [4, None]},
    "qk_norm of heads": {**GROUPED, "qk_norm": "head", "qkv_bias": True},
    "qk_norm of the width": {**GROUPED, "qk_norm": "width", "norm_position": "post"},
    "softcap": {**GROUPED, "softcap": 1.5},
    "layernorm without rope": {**GROUPED, "norm": "layernorm", "use_rope": False, "tie_embeddings": False},
    "scaled rope": {
        **GROUPED,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
    },
} | {
    kernel: {"attention_type": "kernel", "n_kv_heads": 2, "kernel": {"feature_map": kernel, **keys}}
    for kernel, keys in {
        "favor": {"n_features": 8},
        "gaussian": {"n_features": 8, "bandwidth": 4.0},
        "laplacian": {"n_features": 8, "bandwidth": 4.0},
        "elu": {},
    }.items()
}
DRAWS = {"max_new_tokens": 8, "temperature": 1.5, "top_k": 20, "top_p": 0.95}
# Real tokens of a batch of four; what is not real is other tokens, which must not matter.
REAL = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 0, 0, 0],
        [0, 1, 0, 1, 1, 0, 0, 1, 0],
    ]
).bool()


def make_rack(kind="gqa", **keys):
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_ff": 20, "n_heads": 4}
    architecture = {"n_stacks": 2, "blocks_per_stack": 1}
    rack = create_rack_from_config({"model": {**sizes, "architecture": architecture, **KINDS[kind], **keys}})
    for name, weight in rack.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.4)
    return rack.double().eval()


@torch.no_grad()
def alone(rack, row_T, n=NEW):
    """The n most likely tokens after one row, each from a forward pass over everything before it."""
    sequence = row_T[None]
    for _ in range(n):
        sequence = torch.cat((sequence, rack(sequence)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return sequence[0, len(row_T) :]


@torch.no_grad()
def last_logits(rack, rows, n=1):
    """Of each row alone, the logits at its last n positions: (n, B, V), or (B, V)."""
    logits = torch.stack([rack(row[None])[0, -n:] for row in rows], dim=1)
    return logits if n > 1 else logits[0]


def forced(rows, n=NEW):
    """Any tokens to continue rows by, whatever the Rack says: (n, B), and the rows with them."""
    token_NB = torch.randint(VOCAB, (n, len(rows)))
    return token_NB, [torch.cat((row, token_NB[:, i])) for i, row in enumerate(rows)]


def rows_of(ids_BT, real_BT):
    return [ids[real] for ids, real in zip(ids_BT, real_BT, strict=True)]


def left_padded(rows):
    longest = max(map(len, rows))
    ids, real = torch.full((len(rows), longest), 7), torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], real[i, longest - len(row) :] = row, True
    return ids, real


def relative_error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    """A Rack of each kind, a padded batch, its rows alone, and their continuations."""
    torch.manual_seed(1)
    rack = make_rack(request.param)
    ids_BT = torch.randint(VOCAB, REAL.shape)
    rows = rows_of(ids_BT, REAL)
    expected_BN = torch.stack([alone(rack, row) for row in rows])
    assert len(expected_BN.unique()) >= 5  # a Rack that repeats itself would show nothing
    return rack, ids_BT, rows, expected_BN


@pytest.fixture(params=[False, True], ids=["unpadded", "padded"])
def prompts(request, case):
    """Rows, and the batch of them with its mask."""
    _, ids_BT, rows, _ = case
    return (rows, *left_padded(rows)) if request.param else (list(ids_BT), ids_BT, None)


@pytest.fixture
def rack():
    return make_rack()


@pytest.fixture
def ids():
    return torch.randint(VOCAB, (2, 6))


def spy(rack, monkeypatch):
    """The shapes of what goes through the Stacks, and of what the head reads."""
    bodies, heads = [], []
    rack.get_stack(0).register_forward_pre_hook(lambda _, inputs: bodies.append(tuple(inputs[0].shape[:2])))
    rack.lm_head.register_forward_pre_hook(lambda _, inputs: heads.append(tuple(inputs[0].shape[:2])))
    return bodies, heads


class TestEveryKind:
    def test_each_row_continues_as_it_would_alone(self, case):
        rack, ids_BT, rows, expected_BN = case
        assert torch.equal(rack.generate(rows[0][None], max_new_tokens=NEW)[0, 9:], expected_BN[0])
        together = rack.generate(ids_BT, REAL, max_new_tokens=NEW)
        assert torch.equal(together[:, :9], ids_BT) and torch.equal(together[:, 9:], expected_BN)

    def test_of_a_prompt_of_one_token(self, case):
        rack, ids_BT, *_ = case
        expected = torch.stack([alone(rack, row, 5) for row in ids_BT[:, :1]])
        assert torch.equal(rack.generate(ids_BT[:, :1], max_new_tokens=5)[:, 1:], expected)

    def test_prompts_in_pieces(self, case):
        rack, _, rows, expected_BN = case
        logits_BV = last_logits(rack, rows)
        next_BV = last_logits(rack, [torch.cat((r, e[:1])) for r, e in zip(rows, expected_BN, strict=True)])
        prompt_BT, keep_BT = left_padded(rows)
        for chunk in [None, *range(1, 11)]:
            cache = rack.new_cache(4, 10)
            assert relative_error(prefill(rack, cache, prompt_BT, keep_BT, chunk), logits_BV) < 1e-10
            assert relative_error(DecodeStep(rack, cache)(expected_BN[:, 0]), next_BV) < 1e-10
            assert cache.length == 10

    def test_unpadded_prompts_in_pieces(self, case):
        rack, ids_BT, *_ = case
        logits_BV = last_logits(rack, ids_BT)
        for chunk in range(1, 10):
            assert relative_error(prefill(rack, rack.new_cache(4, 9), ids_BT, None, chunk), logits_BV) < 1e-10

    def test_generating_after_a_prompt_in_pieces(self, case):
        rack, ids_BT, _, expected_BN = case
        together = rack.generate(ids_BT, REAL, max_new_tokens=NEW, prefill_chunk=4)
        assert torch.equal(together[:, 9:], expected_BN)

    def test_in_float32(self, case):
        rack, _, rows, _ = case
        narrow = copy.deepcopy(rack).float()
        prompt_BT, keep_BT = left_padded(rows)
        cache = narrow.new_cache(4, 9 + NEW)
        logits = [prefill(narrow, cache, prompt_BT, keep_BT)]
        decode = DecodeStep(narrow, cache)
        token_NB, rows = forced(rows)
        logits += map(decode, token_NB)
        errors = map(relative_error, logits, last_logits(narrow, rows, NEW + 1))
        assert max(errors) < 1e-5


class TestPositionsOnTheDevice:
    """A CUDA graph repeats what its capture did; nothing that the host computed may be part of that."""

    def test_steps_are_those_that_the_host_counts(self, case, prompts):
        rack, (rows, prompt_BT, keep_BT) = case[0], prompts
        host, device = (rack.new_cache(4, 9 + NEW) for _ in range(2))
        for cache in (host, device):
            prefill(rack, cache, prompt_BT, keep_BT)
        device.count_on_device()
        on_host, on_device = DecodeStep(rack, host), DecodeStep(rack, device)
        token_NB, rows = forced(rows)
        for token_B, expected_BV in zip(token_NB, last_logits(rack, rows, NEW), strict=True):
            assert relative_error(on_host(token_B), expected_BV) < 1e-10
            assert relative_error(on_device(token_B), expected_BV) < 1e-10
        assert host.length == device.length == host.capacity

    def test_a_step_is_undone(self, case, prompts):
        rack, (_, prompt_BT, keep_BT) = case[0], prompts
        cache = rack.new_cache(4, 9 + 6)
        prefill(rack, cache, prompt_BT, keep_BT)
        cache.count_on_device()
        decode = DecodeStep(rack, cache)
        for token_B in torch.randint(VOCAB, (6, 4)):
            length, before = cache.length, cache.snapshot()
            once = decode(token_B)
            for other in ((token_B + 1) % VOCAB, token_B):
                cache.restore(before)
                cache.length = length
                again = decode(other)
            assert torch.equal(again, once)

    def test_a_step_recorded_once_and_repeated(self, case, prompts, cuda_graphs):
        rack, (rows, prompt_BT, keep_BT) = case[0], prompts
        cache = rack.new_cache(4, 9 + NEW)
        prefill(rack, cache, prompt_BT, keep_BT)
        decode = DecodeStep(rack, cache, capture=True)
        token_NB, rows = forced(rows)
        for token_B, expected_BV in zip(token_NB, last_logits(rack, rows, NEW), strict=True):
            assert relative_error(decode(token_B), expected_BV) < 1e-10
        assert cache.length == cache.capacity
        assert [graph.n_replays for graph in cuda_graphs] == [NEW]


class Recording(TorchDispatchMode):
    """What a CUDA graph does, on the CPU: record operations, undo them, and repeat them in place."""

    # Each of these asks the host, or copies from it.
    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "item", "_unique2")

    def __init__(self):
        super().__init__()
        self.operations, self.before, self.n_replays = [], {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert name not in self.forbidden, name
        indices = args[1] if name == "index" else []
        assert not any(index is not None and index.dtype == torch.bool for index in indices), name
        if function._schema.is_mutable:
            self.before.setdefault(args[0].data_ptr(), (args[0], args[0].clone()))
        output = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, output))
        return output

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for tensor, before in self.before.values():
            tensor.copy_(before)

    def replay(self):
        self.n_replays += 1
        for function, args, kwargs, output in self.operations:
            outputs = zip(tree_leaves(output), tree_leaves(function(*args, **kwargs)), strict=True)
            for old, new in outputs:
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def cuda_graphs(monkeypatch):
    graphs = []

    class Stream:
        def wait_stream(self, other):
            pass

    def new_graph():
        graphs.append(Recording())
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: graph)
    return graphs


class TestDecodeStep:
    def test_beyond_the_capacity(self, rack, ids, cuda_graphs):
        for capture, error in ((False, ValueError), (True, AssertionError)):
            cache = rack.new_cache(2, 7)
            prefill(rack, cache, ids)
            decode = DecodeStep(rack, cache, capture=capture)
            decode(ids[:, 0])
            with pytest.raises(error):
                decode(ids[:, 0])

    def test_a_captured_step_has_no_dropout(self, ids, cuda_graphs):
        rack = make_rack(dropout=0.5)
        expected = last_logits(rack, torch.cat((ids, ids[:, :1]), dim=1))
        rack.train()
        cache = rack.new_cache(2, 7)
        prefill(rack, cache, ids)
        assert relative_error(DecodeStep(rack, cache, capture=True)(ids[:, 0]), expected) < 1e-10
        assert all(part.training for part in rack.modules())

    def test_a_step_captured_under_autocast_keeps_no_copy_of_weights(self, ids, cuda_graphs):
        """Autocast frees the copies that it keeps when it ends, which a graph that reads them outlives."""
        rack = make_rack().float()
        with torch.autocast("cpu", torch.bfloat16):
            cache = rack.new_cache(2, 8)
            prefill(rack, cache, ids)
            decode = DecodeStep(rack, cache, capture=True)
            assert decode(ids[:, 0]).any()
            with torch.no_grad():
                rack.lm_head.weight.zero_()
            assert not decode(ids[:, 1]).any()

    def test_a_captured_step_of_stacks_that_are_gone(self, cuda_graphs):
        rack = create_simple_rack(2, 1, d_model=16, d_ff=24, n_heads=2, vocab_size=VOCAB)
        cache, ids = rack.new_cache(2, 8), torch.randint(VOCAB, (2, 6))
        prefill(rack, cache, ids)
        decode = DecodeStep(rack, cache, capture=True)
        decode(ids[:, 0])
        remove_stack(rack, 0)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"cache: got one for Stacks of \[1, 1\] Blocks"):
                decode(ids[:, 0])

    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", KINDS)
    def test_captured_is_launched(self, kind):
        rack = make_rack(kind).cuda()
        ids_BT = torch.randint(VOCAB, REAL.shape)
        prompt_BT, keep_BT = (each.cuda() for each in left_padded(rows_of(ids_BT, REAL)))
        for real_BT in (None, keep_BT):
            captured, launched = (rack.new_cache(4, 9 + NEW) for _ in range(2))
            for cache in (captured, launched):
                prefill(rack, cache, prompt_BT, real_BT)
            steps = DecodeStep(rack, captured), DecodeStep(rack, launched, capture=False)
            assert steps[0].capture
            for token_B in torch.randint(VOCAB, (NEW, 4), device="cuda"):
                logits, expected = (step(token_B) for step in steps)
                assert relative_error(logits, expected) < 1e-10

    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", KINDS)
    def test_on_a_gpu_each_row_continues_as_alone_on_the_cpu(self, kind):
        rack = make_rack(kind)
        ids_BT = torch.randint(VOCAB, REAL.shape)
        expected_BN = torch.stack([alone(rack, row) for row in rows_of(ids_BT, REAL)])
        stop = int(expected_BN[0, 4])
        new_BN = rack.cuda().generate(ids_BT, REAL, max_new_tokens=NEW)[:, 9:]
        assert new_BN.is_cuda and torch.equal(new_BN.cpu(), expected_BN)
        # The host looks only after the next step is under way, and nothing of that is seen.
        stopped = rack.generate(ids_BT[:1], max_new_tokens=NEW, stop_token_ids=stop)[0, 9:].tolist()
        assert stopped == expected_BN[0, : expected_BN[0].tolist().index(stop) + 1].tolist()

    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", ["mha", "gqa", "mla", "window of 3", "softcap"])
    @pytest.mark.parametrize("rows", [1, 2])
    # The compiler says that it splits a softmax.
    @pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning")
    def test_compiled_on_a_gpu_computes_what_the_cpu_computes(self, kind, rows):
        rack, ids = make_rack(kind), torch.randint(VOCAB, (rows, 6))
        expected_BN = rack.generate(ids, max_new_tokens=NEW)
        assert torch.equal(rack.cuda().generate(ids, max_new_tokens=NEW, compile=True).cpu(), expected_BN)

    @pytest.mark.gpu
    def test_no_step_waits_for_the_device(self):
        rack, ids = make_rack().cuda(), torch.randint(VOCAB, (2, 6), device="cuda")
        draws = {"temperature": 1.0, "top_k": 5, "top_p": 0.9}
        for options in ({}, draws, {**draws, "seed": 0}, {"stop_token_ids": range(20)}):
            tokens = rack.stream(ids, max_new_tokens=NEW, **options)
            next(tokens), next(tokens, None)  # prefill and capture may wait
            with synchronization_fails():
                list(tokens)


class TestPadding:
    @settings(derandomize=True, max_examples=25)
    @given(st.data())
    def test_any_mask(self, data):
        torch.manual_seed(data.draw(st.integers(0, 99)))
        rack = make_rack(data.draw(st.sampled_from(list(KINDS))))
        width = data.draw(st.integers(1, 8))
        real = data.draw(
            st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4)
        )
        for row in real:
            row[data.draw(st.integers(0, width - 1))] = True
        real_BT, ids_BT = torch.tensor(real), torch.randint(VOCAB, (len(real), width))
        expected = torch.stack([alone(rack, row, 5) for row in rows_of(ids_BT, real_BT)])
        chunk = data.draw(st.none() | st.integers(1, 9))
        dtype = data.draw(st.sampled_from([torch.bool, torch.int64, torch.uint8]))
        together = rack.generate(ids_BT, real_BT.to(dtype), max_new_tokens=5, prefill_chunk=chunk)
        assert torch.equal(together[:, width:], expected)

    def test_a_mask_of_ones_is_no_mask(self, rack, ids, monkeypatch):
        caches = []
        new_cache = rack.new_cache
        monkeypatch.setattr(
            rack, "new_cache", lambda *a: caches.append(new_cache(*a)) or caches[-1], raising=False
        )
        expected = rack.generate(ids, max_new_tokens=4)
        for real in (torch.ones_like(ids), torch.tensor([[0, 1, 1, 1, 1, 1]] * 2)):
            rack.generate(ids, real, max_new_tokens=4)
        assert torch.equal(rack.generate(ids, torch.ones_like(ids), max_new_tokens=4), expected)
        assert [cache._keep_BS for cache in caches] == [None] * 4
        assert [cache.capacity for cache in caches] == [9, 9, 8, 9]

    def test_prompts_come_back_as_they_were_given(self, rack):
        ids = torch.tensor([[5, 6, 0, 0], [0, 0, 7, 8]])
        given_back = rack.generate(ids, ids != 0, max_new_tokens=3)
        assert torch.equal(given_back[:, :4], ids)

    def test_inputs_are_left_alone(self, rack, ids):
        real = torch.tensor([[0, 1, 1, 0, 1, 0]] * 2)
        copies = ids.clone(), real.clone()
        rack.generate(ids, real, max_new_tokens=3)
        assert torch.equal(ids, copies[0]) and torch.equal(real, copies[1])


class TestLength:
    @pytest.mark.parametrize("n", [1, 2, 7])
    def test_max_new_tokens_is_reached(self, rack, ids, n):
        assert rack.generate(ids, max_new_tokens=n).shape == (2, 6 + n)
        assert len(list(rack.stream(ids, max_new_tokens=n))) == n

    def test_max_seq_len_is_reached_and_not_exceeded(self, ids):
        rack = make_rack(max_seq_len=10)
        assert rack.generate(ids, max_new_tokens=4).shape == (2, 10)
        message = "max_new_tokens: got 5 after a prompt of 6; allowed: 4, to stay within max_seq_len=10"
        with pytest.raises(ValueError, match=re.escape(message)):
            rack.generate(ids, max_new_tokens=5)
        longer = torch.randint(VOCAB, (1, 12))
        with pytest.raises(ValueError, match="got 1 after a prompt of 12; allowed: 0, to stay"):
            rack.generate(longer, max_new_tokens=1)

    def test_columns_of_padding_need_no_room(self, ids):
        rack = make_rack(max_seq_len=8)
        real = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 0, 0, 0, 0, 1]])
        assert rack.generate(ids, real, max_new_tokens=5).shape == (2, 11)
        with pytest.raises(ValueError, match="got 6 after a prompt of 3; allowed: 5, to stay"):
            rack.generate(ids, real, max_new_tokens=6)

    def test_memory_is_taken_once(self, rack, ids, monkeypatch):
        caches = []
        new_cache = rack.new_cache
        monkeypatch.setattr(
            rack, "new_cache", lambda *a: caches.append(new_cache(*a)) or caches[-1], raising=False
        )
        tokens = rack.stream(ids, max_new_tokens=9)
        next(tokens)
        [cache] = caches
        slots = [each for stack in cache.blocks for block in stack for each in block.slots]
        places = [each.data_ptr() for each in slots]
        # Keys and values of 2 heads of size 4 in float64, for 2 rows, 2 Blocks, 6 + 9 - 1 tokens.
        assert cache.nbytes == 2 * 2 * 4 * 8 * 2 * 2 * 14
        assert len(list(tokens)) == 8
        again = [each for stack in cache.blocks for block in stack for each in block.slots]
        assert caches == [cache] and [each.data_ptr() for each in again] == places

    def test_the_head_reads_the_last_position_only(self, rack, ids, monkeypatch):
        bodies, heads = spy(rack, monkeypatch)
        rack.generate(ids, max_new_tokens=4, prefill_chunk=4)
        assert heads == [(2, 1)] * 4
        assert bodies == [(2, 4), (2, 2)] + [(2, 1)] * 3


class TestStops:
    def test_a_row_ends_with_its_stop(self, rack):
        torch.manual_seed(0)
        ids = torch.randint(VOCAB, (6, 5))
        plain = rack.generate(ids, max_new_tokens=20)[:, 5:].tolist()
        n_ended = set()
        for stops in ([], [plain[0][3]], [plain[1][6], plain[2][2]], set(plain[3]), range(VOCAB)):
            ends = [next((i for i, t in enumerate(row) if t in stops), 19) + 1 for row in plain]
            expected = [
                row[:end] + [VOCAB - 1] * (max(ends) - end) for row, end in zip(plain, ends, strict=True)
            ]
            new = rack.generate(ids, max_new_tokens=20, stop_token_ids=stops, pad_token_id=VOCAB - 1)
            assert new[:, 5:].tolist() == expected
            n_ended.add(max(ends))
        assert min(n_ended) == 1 and max(n_ended) == 20

    def test_one_stop_needs_no_list(self, rack, ids):
        row = rack.generate(ids[:1], max_new_tokens=10)[0, 6:].tolist()
        stopped = rack.generate(ids[:1], max_new_tokens=10, stop_token_ids=row[4])[0, 6:].tolist()
        assert stopped == row[: row.index(row[4]) + 1]

    def test_a_stop_as_first_token(self, rack, ids, monkeypatch):
        bodies, _ = spy(rack, monkeypatch)
        first = int(alone(rack, ids[0], 1))
        bodies.clear()
        assert rack.generate(ids[:1], max_new_tokens=9, stop_token_ids=[first])[0, 6:].tolist() == [first]
        assert bodies == [(1, 6)]

    def test_a_stop_in_the_prompt_is_none(self, rack, ids):
        plain = rack.generate(ids, max_new_tokens=6)
        stop = next(t for t in ids[0].tolist() if t not in plain[:, 6:])
        assert torch.equal(rack.generate(ids, max_new_tokens=6, stop_token_ids=[stop]), plain)

    def test_nothing_is_computed_after_all_have_ended(self, rack, ids, monkeypatch):
        row = alone(rack, ids[0]).tolist()
        n = row.index(row[3]) + 1
        bodies, _ = spy(rack, monkeypatch)
        rack.generate(ids[:1], max_new_tokens=NEW, stop_token_ids=[row[3]])
        assert len(bodies) == n

    def test_padding_that_is_a_stop(self, rack, ids):
        """A row that has ended stays so, whatever it is padded with."""
        plain = rack.generate(ids, max_new_tokens=12)[:, 6:].tolist()
        stop = plain[0][0]
        new = rack.generate(ids, max_new_tokens=12, stop_token_ids=[stop], pad_token_id=stop)[:, 6:].tolist()
        assert set(new[0]) == {stop}
        assert new[1] == plain[1][: len(new[1])]


class TestDraws:
    def test_same_seed_same_tokens(self, rack, ids):
        state = torch.get_rng_state()
        first, same, other = (rack.generate(ids, **DRAWS, seed=seed) for seed in (3, 3, 4))
        assert torch.equal(first, same) and not torch.equal(first, other)
        assert torch.equal(torch.get_rng_state(), state)

    def test_without_seed_pytorch_s_own(self, rack, ids):
        torch.manual_seed(8)
        first, second = (rack.generate(ids, **DRAWS) for _ in range(2))
        torch.manual_seed(8)
        assert torch.equal(rack.generate(ids, **DRAWS), first)
        assert not torch.equal(first, second)

    def test_a_seed_is_not_disturbed_by_draws_between(self, rack, ids):
        expected = rack.generate(ids, **DRAWS, seed=3)[:, 6:]
        columns = []
        for column in rack.stream(ids, **DRAWS, seed=3):
            columns.append(column)
            torch.randn(7)
        assert torch.equal(torch.stack(columns, 1), expected)

    def test_what_was_drawn_is_what_goes_on(self, rack, ids):
        generator, sequence = torch.Generator().manual_seed(3), ids
        for _ in range(8):
            token_B = Sampler(1.5, 20, 0.95)(last_logits(rack, sequence), generator)
            sequence = torch.cat((sequence, token_B[:, None]), dim=1)
        assert torch.equal(rack.generate(ids, **DRAWS, seed=3), sequence)

    def test_first_tokens_follow_the_softmax(self, rack):
        row = torch.randint(VOCAB, (1, 6))
        tokens = rack.generate(row.expand(5000, -1), max_new_tokens=1, temperature=2.0, seed=0)[:, 6]
        expected = (last_logits(rack, row)[0] / 2).softmax(-1) * 5000
        likely = expected > 5
        counts = tokens.bincount(minlength=VOCAB)[likely]
        assert ((counts - expected[likely]) ** 2 / expected[likely]).sum() < 70  # of at most 28 degrees

    def test_top_k_of_one_is_greedy(self, rack, ids):
        greedy = rack.generate(ids, max_new_tokens=8)
        assert torch.equal(rack.generate(ids, max_new_tokens=8, temperature=3.0, top_k=1), greedy)
        assert torch.equal(rack.generate(ids, max_new_tokens=8, temperature=3.0, top_p=1e-9), greedy)

    def test_rows_and_steps_draw_for_themselves(self, rack):
        row = torch.randint(VOCAB, (1, 6))
        new = rack.generate(row.expand(50, -1), max_new_tokens=2, temperature=20.0, seed=0)[:, 6:]
        assert len(new[:, 0].unique()) > 10 and not torch.equal(new[:, 0], new[:, 1])


def spoil(rack, row, since):
    """The logits of a row are NaN from this call of the head on, counted from 1."""
    calls = []

    def hook(_, __, output):
        calls.append(None)
        if len(calls) >= since:
            output[row] = np.nan

    rack.lm_head.register_forward_hook(hook)


class TestLogitsThatAreNotFinite:
    @pytest.mark.parametrize("options", [{}, DRAWS, {"temperature": 1.0, "stop_token_ids": [0]}], ids=str)
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_yield_no_token(self, ids, value, options):
        rack = make_rack()
        rack.final_norm.weight.data[:] = value
        with pytest.raises(FloatingPointError, match=r"^logits: NaN or infinite in row 0, 1 of the batch"):
            rack.generate(ids, **{"max_new_tokens": 4, **options})

    @pytest.mark.parametrize("options", [{}, {"stop_token_ids": []}, DRAWS], ids=str)
    def test_end_a_stream_where_they_are(self, rack, ids, options):
        spoil(rack, row=1, since=3)
        columns = []
        with pytest.raises(FloatingPointError, match="in row 1 of the batch"):
            columns.extend(rack.stream(ids, **{**options, "max_new_tokens": 5}))
        assert len(columns) == 2

    def test_do_not_matter_in_a_row_that_has_ended(self, rack, ids):
        expected = rack.generate(ids, max_new_tokens=6)[:, 6:].tolist()
        end, stop = next((n, token) for n, token in enumerate(expected[0]) if token not in expected[1])
        spoil(rack, row=0, since=end + 2)
        new = rack.generate(ids, max_new_tokens=6, stop_token_ids=stop)[:, 6:].tolist()
        assert new == [expected[0][: end + 1] + [0] * (5 - end), expected[1]]

    @pytest.mark.gpu
    @pytest.mark.parametrize("options", [{}, {"stop_token_ids": VOCAB - 1}], ids=str)
    def test_are_told_at_the_end_where_a_look_would_wait(self, ids, options):
        rack = make_rack().cuda()
        rack.final_norm.weight.data[:] = np.nan
        columns = []
        with pytest.raises(FloatingPointError, match="in row 0, 1 of the batch"):
            columns.extend(rack.stream(ids, max_new_tokens=4, **options))
        assert len(columns) == 4


class TestStream:
    def test_is_generate_column_by_column(self, rack, ids):
        options = {"max_new_tokens": 8, "temperature": 1.0, "seed": 1, "stop_token_ids": range(5)}
        columns = list(rack.stream(ids, **options))
        assert all(column.shape == (2,) and column.dtype == torch.int64 for column in columns)
        assert torch.equal(torch.stack(columns, 1), rack.generate(ids, **options)[:, 6:])

    def test_computes_no_more_than_was_asked_for(self, rack, ids, monkeypatch):
        bodies, _ = spy(rack, monkeypatch)
        tokens = rack.stream(ids, max_new_tokens=4, prefill_chunk=3)
        assert len(bodies) == 0
        for n in (2, 3, 4, 5):
            next(tokens)
            assert len(bodies) == n
        with pytest.raises(StopIteration):
            next(tokens)
        assert len(bodies) == 5

    def test_errors_come_with_the_call(self, rack, ids):
        with pytest.raises(ValueError, match="max_new_tokens"):
            rack.stream(ids, max_new_tokens=0)
        with pytest.raises(ValueError, match="allowed: 0 to 28"):
            rack.stream(ids + VOCAB, max_new_tokens=1)
        with pytest.raises(ValueError, match="top_p"):
            rack.stream(ids, max_new_tokens=1, temperature=1.0, top_p=2.0)

    def test_streams_take_turns(self, ids):
        """Also with training: were the first to end to put its mode back, the other would drop."""
        rack = make_rack(dropout=0.5)
        first, second = ids[:1], ids[1:]
        expected = alone(rack, ids[0], 4).tolist(), alone(rack, ids[1], 7).tolist()
        rack.train()
        streams = rack.stream(first, max_new_tokens=4), rack.stream(second, max_new_tokens=7)
        got = [], []
        for _ in range(7):
            for tokens, to in zip(streams, got, strict=True):
                to.extend(int(token) for token in [next(tokens, None)] if token is not None)
                torch.nn.functional.dropout(torch.ones(3))
        assert got == expected

    def test_between_columns_the_rack_trains_as_ever(self, ids):
        rack = make_rack(dropout=0.5).train()
        tokens = rack.stream(ids, max_new_tokens=5)
        for _ in range(2):
            next(tokens)
            assert all(part.training for part in rack.modules())
            assert torch.is_grad_enabled() and rack(ids).requires_grad
        tokens.close()
        assert all(part.training for part in rack.modules())

    def test_weights_that_train_between_columns_are_used(self, rack, ids):
        tokens = rack.stream(ids, max_new_tokens=3)
        next(tokens)
        with torch.no_grad():
            rack.embedding.weight.zero_()
        assert next(tokens).tolist() == [0, 0]


class TestModes:
    def test_dropout_is_off_and_modes_are_put_back(self, ids):
        rack = make_rack(dropout=0.5)
        expected = rack.generate(ids, max_new_tokens=6)
        rack.train()
        rack.get_stack(0).eval()
        before = {name: part.training for name, part in rack.named_modules()}
        assert len(set(before.values())) == 2
        assert torch.equal(rack.generate(ids, max_new_tokens=6), expected)
        assert {name: part.training for name, part in rack.named_modules()} == before

    @pytest.mark.parametrize("call", [1, 3])
    def test_modes_are_put_back_after_an_exception(self, rack, ids, call):
        calls = []

        def fail(*_):
            calls.append(None)
            if len(calls) == call:
                raise RuntimeError("in the middle")

        rack.train()
        rack.get_stack(1).eval()
        before = [part.training for part in rack.modules()]
        rack.get_stack(1).register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            rack.generate(ids, max_new_tokens=6)
        assert [part.training for part in rack.modules()] == before

    def test_no_graph_is_kept(self, rack, ids):
        logits = []
        rack.lm_head.register_forward_hook(lambda _, __, output: logits.append(output))
        rack.train()
        tokens = rack.generate(ids, max_new_tokens=3, temperature=1.0)
        assert len(logits) == 3 and not any(each.requires_grad for each in logits)
        assert not tokens.requires_grad and torch.is_grad_enabled()
        cache = rack.new_cache(2, 7)
        assert not prefill(rack, cache, ids).requires_grad
        assert not DecodeStep(rack, cache)(ids[:, 0]).requires_grad
        # What comes back may be trained on.
        rack(tokens).sum().backward()

    def test_under_autocast(self, ids):
        rack = make_rack().float()
        with torch.autocast("cpu", torch.bfloat16):
            assert rack.generate(ids, max_new_tokens=5).shape == (2, 11)

    @pytest.mark.parametrize("kind", KINDS)
    def test_in_bfloat16(self, kind, ids):
        rack = make_rack(kind).bfloat16()
        tokens = rack.generate(ids, max_new_tokens=5, temperature=1.0)
        assert tokens.shape == (2, 11)
        cache = rack.new_cache(2, 6)
        logits = prefill(rack, cache, ids, chunk=4)
        assert logits.dtype == torch.bfloat16
        assert relative_error(logits, last_logits(rack, ids)) < 0.05


class TestInputs:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
    def test_integers_of_any_size(self, rack, ids, dtype):
        tokens = rack.generate(ids.to(dtype), max_new_tokens=4)
        assert tokens.dtype == torch.int64
        assert torch.equal(tokens, rack.generate(ids, max_new_tokens=4))

    @pytest.mark.parametrize(
        "ids, message",
        [
            (
                torch.zeros(2, 0, dtype=torch.int64),
                "input_ids: got (2, 0); allowed: at least one row of one token",
            ),
            (torch.zeros(0, 2, dtype=torch.int64), "input_ids: got (0, 2); allowed: at least one row"),
            (torch.zeros(3, dtype=torch.int64), "input_ids: got (3,); allowed: a shape (batch, positions)"),
            (torch.zeros(1, 1, 3, dtype=torch.int64), "input_ids: got (1, 1, 3); allowed: a shape"),
            (torch.zeros(1, 3), "input_ids: got torch.float32; allowed: an integer dtype"),
            (torch.ones(1, 3, dtype=torch.bool), "input_ids: got torch.bool; allowed: an integer dtype"),
            (torch.tensor([[1, -1]]), "input_ids: got -1; allowed: 0 to 28"),
            (torch.tensor([[1, 29]]), "input_ids: got 29; allowed: 0 to 28"),
            ([[1, 2]], "input_ids: got 'list'; allowed: a tensor of integers"),
        ],
    )
    def test_prompts_refused(self, rack, ids, message):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            rack.generate(ids, max_new_tokens=2)

    @pytest.mark.parametrize(
        "mask, message",
        [
            (torch.ones(2, 6), "attention_mask: got dtype torch.float32"),
            (torch.ones(2, 5).bool(), "attention_mask: got shape (2, 5); allowed: (2, 6)"),
            (
                torch.ones(2, 6).bool() & torch.tensor([[True], [False]]),
                "attention_mask: row 1 has no real token",
            ),
        ],
    )
    def test_masks_refused(self, rack, ids, mask, message):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            rack.generate(ids, mask, max_new_tokens=2)

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"max_new_tokens": 0}, "max_new_tokens: got 0; allowed: an integer >= 1"),
            ({"max_new_tokens": 2.0}, "max_new_tokens: got 2.0"),
            ({"prefill_chunk": 0}, "prefill_chunk: got 0; allowed: an integer >= 1"),
            ({"seed": -1}, "seed: got -1; allowed: an integer >= 0"),
            ({"seed": 1.0}, "seed: got 1.0"),
            ({"seed": 2**64}, f"seed: got {2**64}; allowed: an integer below 2**64"),
            ({"stop_token_ids": [3, VOCAB]}, "stop_token_ids: got 29; allowed: integers from 0 to 28"),
            ({"stop_token_ids": -1}, "stop_token_ids: got -1; allowed: integers from 0 to 28"),
            ({"stop_token_ids": [3.0]}, "stop_token_ids: got 3.0"),
            ({"stop_token_ids": [True]}, "stop_token_ids: got True"),
            ({"stop_token_ids": "3"}, "stop_token_ids: got '3'"),
            ({"pad_token_id": VOCAB}, "pad_token_id: got 29; allowed: integers from 0 to 28"),
            ({"pad_token_id": None}, "pad_token_id: got None"),
            ({"temperature": -0.1}, "temperature: got -0.1"),
            ({"top_k": 3}, "top_k: got 3; allowed: None at temperature=0"),
        ],
    )
    def test_options_refused(self, rack, ids, options, message):
        for function in (generate, stream):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                function(rack, ids, **{"max_new_tokens": 2, **options})

    def test_unknown_options_refused(self, rack, ids):
        for function in (rack.generate, rack.stream):
            with pytest.raises(TypeError, match="num_beams"):
                function(ids, max_new_tokens=2, num_beams=4)
        with pytest.raises(TypeError, match="max_new_tokens"):
            rack.generate(ids)

    def test_a_bidirectional_rack_is_refused(self, ids):
        rack = make_rack(attention_mode="bidirectional")
        with pytest.raises(ValueError, match="bidirectional"):
            rack.generate(ids, max_new_tokens=2)
        with pytest.raises(ValueError, match="bidirectional"):
            rack.stream(ids, max_new_tokens=2)


@pytest.mark.parametrize(
    "stop", [np.int64(3), torch.tensor(3), [np.int64(3)], torch.tensor([3]), (3,), {3}], ids=str
)
def test_a_stop_may_be_any_kind_of_integer(stop):
    rack = make_rack("gqa")
    prompt = torch.zeros(1, 3, dtype=torch.int64)
    plain = generate(rack, prompt, max_new_tokens=4, stop_token_ids=3)
    assert generate(rack, prompt, max_new_tokens=4, stop_token_ids=stop).equal(plain)


@pytest.mark.parametrize("stop", [None, 1.5, [1.5], ["3"], [None], True, [True], -1, [VOCAB]], ids=str)
def test_what_is_no_token_cannot_stop(stop):
    with pytest.raises(ValueError, match="stop_token_ids: got"):
        generate(
            make_rack("gqa"), torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=4, stop_token_ids=stop
        )
