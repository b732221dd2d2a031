"""The Rack against published models, and what it promises about causality, freezing and tying."""

import copy
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from stackwise.model import (
    Block,
    Rack,
    Stack,
    create_block_spec,
    create_rack_from_specs,
    create_simple_rack,
)

# n_heads, n_kv_heads, theta
PUBLISHED = [(4, 4, 10_000.0), (4, 2, 10_000.0), (4, 1, 10_000.0), (2, 1, 500_000.0)]
# stacks, blocks per stack, d_model, d_ff, n_heads, n_kv_heads, vocabulary, tied
SIZES = [
    (1, 1, 16, 20, 2, 2, 11, True),
    (1, 1, 16, 20, 2, 2, 11, False),
    (2, 3, 24, 50, 6, 2, 37, True),
    (3, 1, 24, 50, 6, 1, 37, False),
]

MODES = list(itertools.product(["causal", "bidirectional"], repeat=2))


def widen(rack):
    """Weights wide enough that every visible token moves the logits."""
    for name, weight in rack.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return rack.eval()


def make_rack(n_stacks=2, blocks_per_stack=1, d_model=32, d_ff=48, n_heads=4, vocab_size=31, **kwargs):
    return create_simple_rack(n_stacks, blocks_per_stack, d_model, d_ff, n_heads, vocab_size, **kwargs)


def mixed_rack(*modes, **block):
    spec = create_block_spec(32, 48, 4, **block)
    stacks = [{"n_blocks": 2, "block_spec": {**spec, "attention_mode": mode}} for mode in modes]
    return create_rack_from_specs(31, 32, stacks)


@torch.no_grad()
def logits_of(rack, ids, mask=None):
    return rack(ids, mask)


def published_model(n_heads, n_kv_heads, theta, tied, window=None):
    sizes = {
        "vocab_size": 37,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        "attn_implementation": "eager",
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if window is None:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, mean=1.0, std=0.3)
    return model.eval()


def load_published(rack, model):
    theirs = model.state_dict()
    ours = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "lm_head.weight": theirs["lm_head.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
    }
    places = [(s, b) for s, stack in enumerate(rack.stacks) for b in range(stack.num_blocks)]
    for layer, (s, b) in enumerate(places):
        to, of = f"stacks.{s}.blocks.{b}.", f"model.layers.{layer}."
        ours[f"{to}attention.qkv.weight"] = torch.cat(
            [theirs[f"{of}self_attn.{part}_proj.weight"] for part in "qkv"]
        )
        ours[f"{to}attention.out.weight"] = theirs[f"{of}self_attn.o_proj.weight"]
        ours[f"{to}attention_norm.weight"] = theirs[f"{of}input_layernorm.weight"]
        ours[f"{to}feedforward_norm.weight"] = theirs[f"{of}post_attention_layernorm.weight"]
        for part in ("gate", "up", "down"):
            ours[f"{to}feedforward.{part}.weight"] = theirs[f"{of}mlp.{part}_proj.weight"]
    rack.load_state_dict(ours)
    return rack.eval()


def relative_error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


class TestPublishedModels:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("n_heads, n_kv_heads, theta", PUBLISHED)
    def test_llama(self, n_heads, n_kv_heads, theta, tied):
        model = published_model(n_heads, n_kv_heads, theta, tied)
        rack = make_rack(
            1, 3, 32, 48, n_heads, 37, n_kv_heads=n_kv_heads, rope_theta=theta, tie_embeddings=tied
        )
        load_published(rack, model)
        ids = torch.randint(37, (2, 19))
        with torch.no_grad():
            expected = model(ids).logits
        assert relative_error(logits_of(rack, ids), expected) < 1e-5
        # Were one head to read another head's keys, this would show it.
        if n_kv_heads > 1:
            qkv = rack.get_stack(0).get_block(0).attention.qkv.weight
            with torch.no_grad():
                qkv.copy_(torch.cat([qkv[:32], qkv[32:].roll(32 // n_heads, 0)]))
            assert relative_error(logits_of(rack, ids), expected) > 1e-2

    def test_llama_with_padding(self):
        model = published_model(4, 2, 10_000.0, tied=True)
        rack = load_published(make_rack(3, 1, vocab_size=37, n_kv_heads=2), model)
        ids, mask = torch.randint(37, (2, 12)), torch.ones(2, 12, dtype=torch.long)
        mask[0, :4] = mask[1, :1] = 0
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
        real = mask.bool()
        assert relative_error(logits_of(rack, ids, mask)[real], expected[real]) < 1e-5

    @pytest.mark.parametrize("window", [1, 2, 5, 11, 12, 30])
    def test_mistral(self, window):
        model = published_model(4, 2, 10_000.0, tied=False, window=window)
        rack = make_rack(1, 3, vocab_size=37, n_kv_heads=2, sliding_window=window, tie_embeddings=False)
        load_published(rack, model)
        ids = torch.randint(37, (2, 12))
        with torch.no_grad():
            expected = model(ids).logits
        assert relative_error(logits_of(rack, ids), expected) < 1e-5


VARIANTS = [
    {},
    {"softcap": 2.0},
    {"qk_norm": "head", "qkv_bias": True},
    {"qk_norm": "width", "norm_position": "post"},
    {"head_dim": 6},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "use_rope": True},
    {"attention_type": "mqa", "n_kv_heads": None},
]


@st.composite
def causal_racks(draw):
    n_kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    n_heads = n_kv_heads * group
    torch.manual_seed(draw(st.integers(0, 2**32)))
    options = {
        "n_stacks": draw(st.integers(1, 2)),
        "blocks_per_stack": draw(st.integers(1, 2)),
        # Of a width of 2, LayerNorm leaves a sign.
        "d_model": n_heads * draw(st.sampled_from([4, 10])),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "sliding_window": draw(st.none() | st.integers(1, 10)),
        "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "use_rope": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.5])),
    }
    rack = make_rack(**options | draw(st.sampled_from(VARIANTS)))
    # In float32, LayerNorm over a few channels can turn rounding into 1e-4.
    return widen(rack).double()


class TestProperties:
    @given(rack=causal_racks(), n_tokens=st.integers(2, 9), data=st.data())
    def test_causality(self, rack, n_tokens, data):
        assert rack.is_causal
        first = data.draw(st.integers(1, n_tokens - 1))
        ids = torch.randint(31, (2, n_tokens))
        other = ids.clone()
        other[:, first:] = (ids[:, first:] + torch.randint(1, 31, (2, n_tokens - first))) % 31
        before, after = logits_of(rack, ids), logits_of(rack, other)
        scale = before.abs().max()
        assert (after[:, :first] - before[:, :first]).abs().max() <= 1e-9 * scale
        assert (after[:, first] - before[:, first]).abs().max() > 1e-5 * scale

    @given(rack=causal_racks(), n_rows=st.integers(2, 5), n_tokens=st.integers(1, 9))
    def test_rows_do_not_see_each_other(self, rack, n_rows, n_tokens):
        ids = torch.randint(31, (n_rows, n_tokens))
        together = logits_of(rack, ids)
        alone = torch.cat([logits_of(rack, row[None]) for row in ids])
        assert relative_error(alone, together) < 1e-9
        order = torch.randperm(n_rows)
        assert relative_error(logits_of(rack, ids[order]), together[order]) < 1e-9

    @given(rack=causal_racks(), n_tokens=st.integers(2, 9))
    def test_a_prefix_is_enough(self, rack, n_tokens):
        ids = torch.randint(31, (2, n_tokens))
        together = logits_of(rack, ids)
        for length in range(1, n_tokens):
            assert relative_error(logits_of(rack, ids[:, :length]), together[:, :length]) < 1e-9


KINDS = [
    {},
    {"n_kv_heads": 2, "sliding_window": 3},
    {"attention_type": "mqa", "qk_norm": "head", "softcap": 2.0},
    {"attention_mode": "bidirectional"},
    {"attention_mode": "bidirectional", "sliding_window": 2, "softcap": 2.0},
    {"use_rope": False, "norm_position": "post"},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "head_dim": 6},
    {
        "attention_type": "mla",
        "latent": {
            "kv_lora_rank": 8,
            "q_lora_rank": 6,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    },
    {"attention_type": "kernel", "kernel": {"feature_map": "elu"}},
    {"attention_type": "kernel", "kernel": {"feature_map": "favor", "n_features": 16}},
]


class TestDocuments:
    """A row packed of several documents is each of them alone."""

    @pytest.mark.parametrize("block", KINDS, ids=str)
    def test_packed_equals_separate(self, block):
        rack = widen(make_rack(2, 2, **block)).double()
        # Two documents may have one id: what counts is where it changes.
        lengths, names = [[3, 1, 4, 2], [5, 5]], [[7, 2, 7, 0], [1, 3]]
        ids = torch.randint(31, (2, 10))
        documents = torch.stack(
            [
                torch.tensor(row).repeat_interleave(torch.tensor(length))
                for row, length in zip(names, lengths, strict=True)
            ]
        )
        with torch.no_grad():
            packed = rack(ids, document_ids=documents)
            for b, row in enumerate(lengths):
                for alone, expected in zip(ids[b].split(row), packed[b].split(row), strict=True):
                    assert relative_error(rack(alone[None])[0], expected) < 1e-9
            assert relative_error(rack(ids), packed) > 1e-2

    @pytest.mark.parametrize("block", KINDS[:5], ids=str)
    def test_padded_and_packed(self, block):
        """A mask and documents are combined: padding is in no document's sight."""
        rack = widen(make_rack(1, 2, **block)).double()
        ids = torch.randint(31, (1, 9))
        documents = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
        mask = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 0]])
        with torch.no_grad():
            packed = rack(ids, mask, documents)[0]
            for part in (slice(1, 4), slice(6, 8)):
                assert relative_error(rack(ids[:, part])[0], packed[part]) < 1e-9
            other = torch.where(mask.bool(), ids, (ids + 1) % 31)
            assert torch.equal(rack(other, mask, documents)[0][mask[0] != 0], packed[mask[0] != 0])

    def test_one_document_is_none(self):
        rack, ids = widen(make_rack()).double(), torch.randint(31, (2, 6))
        with torch.no_grad():
            assert relative_error(rack(ids, document_ids=torch.full_like(ids, 9)), rack(ids)) < 1e-9

    def test_parts_of_a_rack(self):
        rack, ids = widen(make_rack(3, 1)), torch.randint(31, (2, 7))
        documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [4, 4, 4, 4, 4, 4, 5]])
        with torch.no_grad():
            x = rack.forward_from_stack(rack.embed(ids), 0, 1, None, documents)
            x = rack.forward_from_stack(x, 1, None, None, documents)
            assert torch.equal(rack.head(x), rack(ids, document_ids=documents))

    def test_gradients_stay_within_a_document(self):
        rack = widen(make_rack(1, 2, tie_embeddings=False))
        x = rack.embed(torch.randint(31, (1, 6))).detach().requires_grad_()
        documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
        rack.forward_from_stack(x, 0, None, None, documents)[0, 4].sum().backward()
        reached = x.grad[0].abs().amax(-1) > 0
        assert reached.tolist() == [False, False, False, True, True, False]

    @pytest.mark.parametrize(
        "documents, text",
        [
            (torch.zeros(2, 5), "dtype torch.float32; allowed: an integer dtype"),
            (torch.zeros(2, 5, dtype=torch.bool), "dtype torch.bool; allowed: an integer dtype"),
            (torch.zeros(2, 4, dtype=torch.long), "shape (2, 4); allowed: (2, 5)"),
            (torch.zeros(5, dtype=torch.long), "shape (5,); allowed: (2, 5)"),
        ],
    )
    def test_refused(self, documents, text):
        with pytest.raises(ValueError, match=re.escape(f"document_ids: got {text}")):
            make_rack()(torch.zeros(2, 5, dtype=torch.long), document_ids=documents)

    def test_refused_beside_a_cache(self):
        rack, ids = make_rack(), torch.zeros(1, 3, dtype=torch.long)
        with pytest.raises(ValueError, match=r"document_ids: got .some.; allowed: None"):
            rack(ids, document_ids=ids, cache=rack.new_cache(1, 8))

    def test_refused_where_a_row_is_one_sum(self):
        rack = make_rack(attention_type="kernel", attention_mode="bidirectional")
        ids = torch.zeros(1, 3, dtype=torch.long)
        with pytest.raises(ValueError, match=r"document_ids: .*allowed: None"):
            rack(ids, document_ids=ids)


class TestMixedStacks:
    @pytest.mark.parametrize("modes", MODES)
    def test_is_causal_says_whether_it_leaks(self, modes):
        rack = widen(mixed_rack(*modes))
        ids = torch.randint(31, (2, 9))
        other = ids.clone()
        other[:, -1] = (ids[:, -1] + 1) % 31
        leak = (logits_of(rack, other) - logits_of(rack, ids))[:, :-1].abs().max()
        assert [stack.is_causal for stack in rack.stacks] == [mode == "causal" for mode in modes]
        assert rack.is_causal == (modes == ("causal", "causal"))
        assert leak <= 1e-6 if rack.is_causal else leak > 1e-2

    def test_one_bidirectional_block_is_enough(self):
        blocks = [Block(16, 16, 2, attention_mode=mode) for mode in ("causal", "bidirectional", "causal")]
        rack = Rack([Stack(blocks)], 31, 16)
        assert [block.is_causal for block in blocks] == [True, False, True]
        assert not rack.is_causal and not rack.get_stack(0).is_causal

    def test_stacks_of_different_make(self):
        stacks = [
            {"n_blocks": 1, "block_spec": create_block_spec(32, 40, 4)},
            {
                "n_blocks": 2,
                "block_spec": create_block_spec(
                    32, 24, 8, n_kv_heads=2, attention_type="gqa", rope_theta=50.0
                ),
            },
            {"n_blocks": 1, "block_spec": create_block_spec(32, 8, 2, norm="layernorm", sliding_window=3)},
        ]
        rack = widen(create_rack_from_specs(31, 32, stacks))
        ids = torch.randint(31, (2, 9))
        x = rack.embedding.weight[ids]
        for block in rack.get_blocks():
            x = block(x)
        x = F.layer_norm(x, (32,), rack.final_norm.weight, eps=1e-6)
        torch.testing.assert_close(rack(ids), x @ rack.embedding.weight.T)

    def test_final_norm_is_that_of_the_last_block(self):
        blocks = [Block(16, 16, 2, norm_eps=eps) for eps in (1e-3, 0.25)]
        rack = Rack([Stack(blocks)], 31, 16)
        assert rack.final_norm.eps == 0.25


class TestParts:
    def test_any_cut_gives_the_same_logits(self):
        rack, ids = widen(make_rack(3, 2)), torch.randint(31, (2, 7))
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        with torch.no_grad():
            expected = rack(ids, mask)
            for cut in range(4):
                x = rack.forward_from_stack(rack.embed(ids), 0, cut, mask)
                x = rack.forward_from_stack(x, cut, None, mask)
                assert torch.equal(rack.head(x), expected)
            x = rack.embed(ids)
            for index in range(3):
                x = rack.forward_from_stack(x, index, index + 1, mask)
            assert torch.equal(rack.head(x), expected)
            assert not torch.allclose(
                rack.head(rack.forward_from_stack(rack.embed(ids), 1, None, mask)), expected
            )

    def test_any_cut_of_a_stack(self):
        stack = make_rack(1, 4).get_stack(0)
        x = torch.randn(2, 7, 32)
        mask = torch.ones(2, 7, dtype=torch.bool)
        mask[1, 5:] = False
        with torch.no_grad():
            expected = stack(x, mask)
            for cut in range(5):
                half = stack.forward_from_block(x, 0, cut, mask)
                assert torch.equal(stack.forward_from_block(half, cut, None, mask), expected)

    def test_accessors(self):
        rack = make_rack(3, 2)
        assert [rack.get_stack(i) for i in range(3)] == rack.get_stacks() == list(rack.stacks)
        assert rack.get_blocks() == [block for stack in rack.stacks for block in stack.blocks]
        assert rack.blocks_per_stack == [2, 2, 2]
        assert rack.get_stack(-1) is rack.stacks[2]
        with pytest.raises(IndexError):
            rack.get_stack(3)
        with pytest.raises(IndexError):
            rack.get_stack(0).get_block(2)

    @pytest.mark.parametrize("longest", [0, -1, 1.5, "8", True])
    def test_longest_sequence_refused(self, longest):
        stacks = [Stack([Block(16, 16, 2)])]
        with pytest.raises(ValueError, match=rf"max_seq_len: got {longest!r}; allowed: an integer >= 1"):
            Rack(stacks, 31, 16, max_seq_len=longest)
        assert (
            Rack(stacks, 31, 16).max_seq_len is None and Rack(stacks, 31, 16, max_seq_len=8).max_seq_len == 8
        )

    def test_width_of_another_rack_is_refused(self):
        stacks = [Stack([Block(16, 16, 2), Block(24, 16, 2)], stack_id=5)]
        with pytest.raises(ValueError, match="d_model: got 16, but stack 5 has width 24"):
            Rack(stacks, 31, 16)

    @pytest.mark.parametrize("shape", [(7,), (), (2, 7, 1)])
    def test_token_ids_of_another_shape(self, shape):
        with pytest.raises(ValueError, match=r"input_ids: got shape .*; allowed: \(batch, positions\)"):
            make_rack()(torch.zeros(shape, dtype=torch.long))


class TestCounts:
    @pytest.mark.parametrize("size", SIZES)
    def test_by_hand(self, size):
        n_stacks, blocks_per_stack, C, d_ff, H, K, V, tied = size
        rack = make_rack(*size[:5], V, n_kv_heads=K, tie_embeddings=tied)
        head_dim = C // H
        attention = C * C + 2 * C * K * head_dim + C * C
        block = attention + 3 * C * d_ff + 2 * C
        total = (1 if tied else 2) * V * C + n_stacks * blocks_per_stack * block + C
        assert rack.get_parameter_count() == rack.get_trainable_parameter_count() == total
        assert rack.get_stack(0).get_parameter_count() == blocks_per_stack * block
        assert rack.get_stack(0).get_block(0).get_parameter_count() == block

    def test_frozen_up_projection(self):
        rack = make_rack(2, 3, 24, 50, 6, 37, n_kv_heads=2, freeze_up_proj=True)
        assert rack.get_parameter_count() - rack.get_trainable_parameter_count() == 6 * 24 * 50
        stack = rack.get_stack(0)
        assert stack.get_parameter_count() - stack.get_trainable_parameter_count() == 3 * 24 * 50
        block = stack.get_block(0)
        assert block.get_parameter_count() - block.get_trainable_parameter_count() == 24 * 50
        rack.freeze()
        assert rack.get_trainable_parameter_count() == stack.get_trainable_parameter_count() == 0


class TestTying:
    def assert_tied(self, rack):
        assert rack.lm_head.weight is rack.embedding.weight
        assert sum(p is rack.embedding.weight for p in rack.parameters()) == 1

    def test_shared(self):
        self.assert_tied(make_rack())
        rack = make_rack(tie_embeddings=False)
        assert rack.lm_head.weight is not rack.embedding.weight
        assert rack.lm_head.weight.data_ptr() != rack.embedding.weight.data_ptr()

    @pytest.mark.parametrize(
        "change",
        [
            copy.deepcopy,
            lambda rack: rack.to(torch.float64),
            lambda rack: rack.bfloat16(),
            lambda rack: rack.train(),
        ],
        ids=["deepcopy", "float64", "bfloat16", "train"],
    )
    def test_stays_shared(self, change):
        rack = change(make_rack())
        self.assert_tied(rack)
        with torch.no_grad():
            rack.embedding.weight.fill_(0.5)
        assert (rack.lm_head.weight == 0.5).all()

    def test_a_copy_shares_nothing_with_its_original(self):
        rack = make_rack()
        other = copy.deepcopy(rack)
        ids = torch.randint(31, (1, 5))
        assert torch.equal(logits_of(rack, ids), logits_of(other, ids))
        before = logits_of(rack, ids)
        with torch.no_grad():
            for weight in other.parameters():
                weight.add_(1.0)
        assert torch.equal(logits_of(rack, ids), before)

    @pytest.mark.parametrize("tied", [True, False])
    def test_weights_of_another_rack(self, tied):
        rack, other = (widen(make_rack(tie_embeddings=tied)) for _ in range(2))
        ids = torch.randint(31, (1, 5))
        assert not torch.allclose(logits_of(rack, ids), logits_of(other, ids))
        other.load_state_dict(rack.state_dict())
        assert torch.equal(logits_of(rack, ids), logits_of(other, ids))
        if tied:
            self.assert_tied(other)

    def test_gradient_comes_from_both_uses(self):
        rack = widen(make_rack()).double()
        untied = widen(make_rack(tie_embeddings=False)).double()
        untied.load_state_dict(rack.state_dict())
        ids = torch.randint(31, (2, 6))
        for model in (rack, untied):
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        expected = untied.embedding.weight.grad + untied.lm_head.weight.grad
        torch.testing.assert_close(rack.embedding.weight.grad, expected)


def step(rack, lr=0.1):
    """One step of an optimizer that is given every parameter, with a weight decay that moves them all."""
    ids = torch.randint(31, (4, 9))
    optimizer = torch.optim.AdamW(rack.parameters(), lr=lr, weight_decay=0.1)
    before = {name: weight.detach().clone() for name, weight in rack.named_parameters()}
    F.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    return {name for name, weight in rack.named_parameters() if not torch.equal(weight, before[name])}


def names_of(rack, prefix="", suffix=""):
    names = {name for name, _ in rack.named_parameters()}
    return {name for name in names if name.startswith(prefix) and name.endswith(suffix)}


class TestFreezing:
    def test_everything_trains(self):
        rack = make_rack()
        assert step(rack) == names_of(rack)

    def test_frozen_stack(self):
        rack = make_rack(3, 2)
        rack.get_stack(1).freeze()
        assert step(rack) == names_of(rack) - names_of(rack, "stacks.1.")
        rack.get_stack(1).unfreeze()
        assert step(rack) == names_of(rack)

    def test_gradients_pass_through_a_frozen_stack(self):
        rack, reference = (widen(make_rack(3, 1)) for _ in range(2))
        reference.load_state_dict(rack.state_dict())
        rack.get_stack(1).freeze()
        ids = torch.randint(31, (2, 6))
        for model in (rack, reference):
            model(ids).logsumexp(-1).sum().backward()
        grads = dict(reference.named_parameters())
        for name, weight in rack.named_parameters():
            if name.startswith("stacks.1."):
                assert weight.grad is None
            else:
                torch.testing.assert_close(weight.grad, grads[name].grad)

    def test_frozen_from_the_start(self):
        spec = create_block_spec(32, 48, 4)
        stacks = [{"n_blocks": 1, "block_spec": spec, "freeze_blocks": frozen} for frozen in (True, False)]
        rack = create_rack_from_specs(31, 32, stacks)
        assert step(rack) == names_of(rack) - names_of(rack, "stacks.0.")

    def test_frozen_block(self):
        rack = make_rack(2, 2)
        block = rack.get_stack(1).get_block(0)
        block.freeze()
        assert step(rack) == names_of(rack) - names_of(rack, "stacks.1.blocks.0.")
        block.unfreeze()
        assert step(rack) == names_of(rack)

    def test_everything_frozen(self):
        rack = make_rack()
        rack.freeze()
        assert not any(weight.requires_grad for weight in rack.parameters())
        rack.unfreeze()
        assert step(rack) == names_of(rack)

    def test_frozen_up_projection(self):
        rack = make_rack(freeze_up_proj=True)
        ups = names_of(rack, suffix="feedforward.up.weight")
        gates = names_of(rack, suffix="feedforward.gate.weight")
        assert len(ups) == len(gates) == 2
        for refreeze in (
            lambda: None,
            lambda: (rack.freeze(), rack.unfreeze()),
            lambda: [(stack.freeze(), stack.unfreeze()) for stack in rack.stacks],
            lambda: [(block.freeze(), block.unfreeze()) for block in rack.get_blocks()],
        ):
            refreeze()
            changed = step(rack)
            assert changed == names_of(rack) - ups and gates <= changed

    def test_a_copy_stays_frozen(self):
        rack = make_rack(freeze_up_proj=True)
        rack.get_stack(0).freeze()
        other = copy.deepcopy(rack)
        assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in rack.parameters()]


class TestTraining:
    @pytest.mark.parametrize(
        "block", [{}, {"freeze_up_proj": True}, {"norm": "layernorm", "tie_embeddings": False}]
    )
    def test_learns_a_repeating_sequence(self, block):
        rack = make_rack(n_kv_heads=2, **block).train()
        ids = torch.randperm(31)[:5].repeat(6)[None].expand(2, -1)
        optimizer = torch.optim.AdamW(rack.parameters(), lr=1e-2, weight_decay=0.0)
        losses = []
        for _ in range(60):
            loss = F.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[0] > 3.0 and losses[-1] < 0.5
