"""The builders: what each argument does to the Rack, and what they refuse."""

import inspect
import math

import pytest
import torch
from torch import nn

from stackwise.config import ArchitectureConfig, BlockConfig, ConfigError, ModelConfig, StackWiseConfig
from stackwise.model import (
    Block,
    Stack,
    create_block_spec,
    create_rack_from_config,
    create_rack_from_specs,
    create_simple_rack,
    create_stack_from_spec,
)
from stackwise.model.attention import Attention
from stackwise.model.kernel import KernelAttention
from stackwise.model.latent import LatentAttention

SMALL = {
    "vocab_size": 31,
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_ff": 48,
    "architecture": {"n_stacks": 2, "blocks_per_stack": 3},
}
SIMPLE = {
    "n_stacks": 2,
    "blocks_per_stack": 3,
    "d_model": 32,
    "d_ff": 48,
    "n_heads": 4,
    "vocab_size": 31,
}
BLOCK = {"d_model": 32, "d_ff": 48, "n_heads": 4}

# Per field of the model: another value, and what the Rack must then be.
EFFECTS = {
    "vocab_size": (
        {"vocab_size": 47},
        lambda rack: rack.embedding.weight.shape == rack.lm_head.weight.shape == (47, 32),
    ),
    "d_model": (
        {"d_model": 64},
        lambda rack: rack.embedding.weight.shape == (31, 64) and every(rack, "attention.head_dim", 16),
    ),
    "n_heads": (
        {"n_heads": 8},
        lambda rack: every(rack, "attention.n_heads", 8) and every(rack, "attention.qkv.out_features", 48),
    ),
    "n_kv_heads": (
        {"n_kv_heads": 1},
        lambda rack: every(rack, "attention.n_kv_heads", 1) and every(rack, "attention.qkv.out_features", 48),
    ),
    "d_ff": (
        {"d_ff": 40},
        lambda rack: (
            every(rack, "feedforward.gate.out_features", 40)
            and every(rack, "feedforward.up.out_features", 40)
            and every(rack, "feedforward.down.in_features", 40)
        ),
    ),
    "attention_type": (
        {"attention_type": "mha", "n_kv_heads": None},
        lambda rack: (
            every(rack, "config.attention_type", "mha")
            and every(rack, "attention.n_kv_heads", 4)
            and every(rack, "attention.qkv.out_features", 96)
        ),
    ),
    "attention_mode": (
        {"attention_mode": "bidirectional"},
        lambda rack: not rack.is_causal and every(rack, "is_causal", False),
    ),
    "sliding_window": ({"sliding_window": 3}, lambda rack: every(rack, "attention.sliding_window", 3)),
    "norm": (
        {"norm": "layernorm"},
        lambda rack: (
            all(isinstance(norm, nn.LayerNorm) for norm in norms_of(rack))
            and isinstance(rack.final_norm, nn.LayerNorm)
        ),
    ),
    "dropout": (
        {"dropout": 0.25},
        lambda rack: every(rack, "attention.dropout", 0.25) and every(rack, "feedforward.dropout", 0.25),
    ),
    "tie_embeddings": (
        {"tie_embeddings": False},
        lambda rack: rack.lm_head.weight is not rack.embedding.weight,
    ),
    "embedding_max_norm": (
        {"embedding_max_norm": 0.5},
        lambda rack: getattr(rack.embedding, "bound", None) == 0.5,
    ),
    "initialization": (
        {"initialization": "zero_out"},
        lambda rack: not any(block.feedforward.down.weight.any() for block in rack.get_blocks()),
    ),
    "mup_base_width": (
        {"initialization": "mup", "mup_base_width": 16},
        lambda rack: rack.mup_base_width == 16 and (rack.final_norm.weight == 0.5).all(),
    ),
    "freeze_up_proj": (
        {"freeze_up_proj": True},
        lambda rack: every(rack, "feedforward.up.weight.requires_grad", False),
    ),
    "use_rope": ({"use_rope": False}, lambda rack: every(rack, "attention.rotary", None)),
    "rope_theta": ({"rope_theta": 50.0}, lambda rack: every(rack, "attention.rotary.theta", 50.0)),
    "rope_scaling": (
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        lambda rack: every(rack, "attention.rotary.scaling.factor", 3.0),
    ),
    "head_dim": (
        {"head_dim": 6},
        lambda rack: every(rack, "attention.head_dim", 6) and every(rack, "attention.qkv.out_features", 48),
    ),
    "latent": (
        {
            "attention_type": "mla",
            "n_kv_heads": None,
            "latent": {
                "kv_lora_rank": 6,
                "q_lora_rank": 5,
                "qk_nope_head_dim": 4,
                "qk_rope_head_dim": 2,
                "v_head_dim": 3,
            },
        },
        lambda rack: (
            every(rack, "attention.kv_down.out_features", 6 + 2)
            and every(rack, "attention.q_down.out_features", 5)
            and every(rack, "attention.kv_up.out_features", 4 * (4 + 3))
        ),
    ),
    "kernel": (
        {
            "attention_type": "kernel",
            "kernel": {"feature_map": "gaussian", "n_features": 10, "bandwidth": 1e9},
        },
        lambda rack: (
            every(rack, "attention.feature_map.kind", "gaussian")
            and every(rack, "attention.feature_map.n_features", 10)
            and all(b.attention.feature_map.frequencies_KFD.abs().max() < 1e-6 for b in rack.get_blocks())
        ),
    ),
    "qk_norm": ({"qk_norm": "width"}, lambda rack: every(rack, "attention.qk_norm", "width")),
    "softcap": ({"softcap": 0.5}, lambda rack: every(rack, "attention.softcap", 0.5)),
    "qkv_bias": (
        {"qkv_bias": True},
        lambda rack: all(b.attention.qkv.bias is not None for b in rack.get_blocks()),
    ),
    "norm_eps": (
        {"norm_eps": 0.1},
        lambda rack: rack.final_norm.eps == 0.1 and all(norm.eps == 0.1 for norm in norms_of(rack)),
    ),
    "norm_position": ({"norm_position": "post"}, lambda rack: every(rack, "norm_first", False)),
    "max_seq_len": ({"max_seq_len": 77}, lambda rack: rack.max_seq_len == 77),
    "n_stacks": (
        {"architecture": {"n_stacks": 5, "blocks_per_stack": 3}},
        lambda rack: [stack.num_blocks for stack in rack.stacks] == [3] * 5,
    ),
    "blocks_per_stack": (
        {"architecture": {"n_stacks": 2, "blocks_per_stack": 5}},
        lambda rack: [stack.num_blocks for stack in rack.stacks] == [5] * 2,
    ),
}
# These keep every shape, so that equal weights must give other logits.
CHANGES_LOGITS = [
    "attention_mode",
    "sliding_window",
    "norm",
    "norm_eps",
    "norm_position",
    "softcap",
    "use_rope",
    "rope_theta",
    "rope_scaling",
]

# Per field of a section of one kind of attention: another value, and what each attention must then be.
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
}
LATENT_EFFECTS = {
    "kv_lora_rank": (13, lambda a: (a.kv_down.out_features, a.kv_up.in_features) == (19, 13)),
    "q_lora_rank": (None, lambda a: a.q_down is None and a.q_up.in_features == 32),
    "qk_nope_head_dim": (5, lambda a: (a.q_up.out_features, a.kv_up.out_features) == (4 * 11, 4 * 13)),
    "qk_rope_head_dim": (2, lambda a: (a.q_up.out_features, a.kv_down.out_features) == (4 * 6, 14)),
    "v_head_dim": (9, lambda a: (a.kv_up.out_features, a.out.in_features) == (4 * 13, 4 * 9)),
}
KERNEL = {"feature_map": "gaussian", "n_features": 256, "bandwidth": 1.0}
KERNEL_EFFECTS = {
    "feature_map": ("favor", lambda a: a.feature_map.kind == "favor"),
    "n_features": (100, lambda a: a.feature_map.n_features == 100),
    # Frequencies are N(0, 1 / b^2), and a wide kernel has low ones.
    "bandwidth": (10.0, lambda a: 0.08 < a.feature_map.frequencies_KFD.std() < 0.12),
}

# Arguments of create_simple_rack that are refused: what the message must contain.
REFUSED = [
    ({"n_stacks": 0}, ["n_stacks", "0", ">= 1"]),
    ({"n_stacks": -1}, ["n_stacks", "-1", ">= 1"]),
    ({"n_stacks": "2"}, ["n_stacks", "'2'", "integer"]),
    ({"n_stacks": 1.5}, ["n_stacks", "1.5", "integer"]),
    ({"n_stacks": True}, ["n_stacks", "True", "integer"]),
    ({"blocks_per_stack": 0}, ["blocks_per_stack", "0", ">= 1"]),
    ({"blocks_per_stack": -3}, ["blocks_per_stack", "-3", ">= 1"]),
    ({"blocks_per_stack": "2"}, ["blocks_per_stack", "'2'", "integer"]),
    ({"blocks_per_stack": 2.0}, ["blocks_per_stack", "2.0", "integer"]),
    ({"vocab_size": 0}, ["vocab_size", "0", ">= 1"]),
    ({"vocab_size": "31"}, ["vocab_size", "'31'", "integer"]),
    ({"vocab_size": 31.5}, ["vocab_size", "31.5", "integer"]),
    ({"d_model": 0}, ["d_model", "0", ">= 1"]),
    ({"d_model": "32"}, ["d_model", "'32'", "integer"]),
    ({"d_model": 30}, ["n_heads", "4", "d_model=30"]),
    ({"d_model": 12}, ["use_rope", "True", "even", "3"]),
    ({"d_ff": 0}, ["d_ff", "0", ">= 1"]),
    ({"d_ff": 48.0}, ["d_ff", "48.0", "integer"]),
    ({"n_heads": 3}, ["n_heads", "3", "d_model=32"]),
    ({"n_heads": 0}, ["n_heads", "0", ">= 1"]),
    ({"n_heads": True}, ["n_heads", "True", "integer"]),
    ({"n_kv_heads": 3}, ["n_kv_heads", "3", "n_heads=4"]),
    ({"n_kv_heads": 8}, ["n_kv_heads", "8", "n_heads=4"]),
    ({"n_kv_heads": 0}, ["n_kv_heads", "0", ">= 1"]),
    ({"n_kv_heads": 2, "attention_type": "mha"}, ["attention_type", "'mha'", "n_kv_heads=2", "4", "gqa"]),
    ({"attention_type": "gqa"}, ["attention_type", "'gqa'", "needs n_kv_heads", "mha"]),
    ({"attention_type": "flash"}, ["attention_type", "'flash'", "'mha', 'gqa', 'mqa', 'mla' or 'kernel'"]),
    ({"attention_mode": "Causal"}, ["attention_mode", "'Causal'", "'causal' or 'bidirectional'"]),
    ({"norm": "batchnorm"}, ["norm", "'batchnorm'", "'rmsnorm' or 'layernorm'"]),
    ({"norm": None}, ["norm", "None", "'rmsnorm' or 'layernorm'"]),
    ({"sliding_window": 0}, ["sliding_window", "0", ">= 1"]),
    ({"sliding_window": 2.5}, ["sliding_window", "2.5", "integer"]),
    ({"sliding_window": [2, 0]}, ["sliding_window", "0"]),
    ({"dropout": 1.0}, ["dropout", "1.0", "< 1"]),
    ({"dropout": -0.1}, ["dropout", "-0.1", ">= 0"]),
    ({"dropout": math.nan}, ["dropout", "nan", "finite number"]),
    ({"dropout": "0.1"}, ["dropout", "'0.1'", "number"]),
    ({"rope_theta": 0.0}, ["rope_theta", "0.0", "> 0"]),
    ({"rope_theta": -1.0}, ["rope_theta", "-1.0", "> 0"]),
    ({"rope_theta": math.nan}, ["rope_theta", "nan", "finite number"]),
    ({"rope_theta": math.inf}, ["rope_theta", "inf", "finite number"]),
    ({"rope_theta": "10000"}, ["rope_theta", "'10000'", "number"]),
    ({"dropot": 0.1}, ["dropot", "did you mean 'dropout'", "sliding_window"]),
    ({"stack_id": 3}, ["stack_id", "unknown", "dropout", "sliding_window"]),
]
SPEC = create_block_spec(32, 48, 4)
# Stacks that create_rack_from_specs refuses for a Rack of width 32.
REFUSED_STACKS = [
    ([], ["stacks", "at least one"]),
    ([{}], ["stack_specs[0]", "n_blocks", "block_spec", "missing"]),
    ([{"n_blocks": 1}], ["stack_specs[0]", "block_spec missing"]),
    ([{"n_blocks": 1, "block_spec": SPEC}, {"block_spec": SPEC}], ["stack_specs[1]", "n_blocks missing"]),
    ([{"n_blocks": 1, "block_spec": SPEC, "depth": 2}], ["stack_specs[0]", "'depth'", "freeze_blocks"]),
    ([{"n_blocks": 1, "block_spec": {**SPEC, "heads": 2}}], ["block_spec", "heads: unknown key", "n_heads"]),
    ([{"n_blocks": 1, "block_spec": {**SPEC, "d_model": 64}}], ["stack_specs[0]", "64", "d_model=32"]),
    (
        [{"n_blocks": 1, "block_spec": {"n_heads": 4, "d_ff": 48}}],
        ["block_spec", "d_model: required key is missing"],
    ),
    ([{"n_blocks": 1, "block_spec": {"d_model": 32, "n_heads": 4}}], ["d_ff"]),
    ([{"n_blocks": 1, "block_spec": {"d_model": 32, "d_ff": 48}}], ["n_heads"]),
    ([{"n_blocks": 1, "block_spec": None}], ["block_spec", "None"]),
    ([{"n_blocks": 1, "block_spec": {**SPEC, "norm": "x"}}], ["norm", "'x'", "'rmsnorm' or 'layernorm'"]),
    ([{"n_blocks": 0, "block_spec": SPEC}], ["n_blocks", "0", ">= 1"]),
    ([{"n_blocks": "2", "block_spec": SPEC}], ["n_blocks", "'2'", ">= 1"]),
    ([{"n_blocks": 1.5, "block_spec": SPEC}], ["n_blocks", "1.5", ">= 1"]),
]


def norms_of(rack):
    return [norm for block in rack.get_blocks() for norm in (block.attention_norm, block.feedforward_norm)]


def every(rack, path, value):
    """Whether the attribute at `path` is `value` in each Block."""
    found = rack.get_blocks()
    for name in path.split("."):
        found = [getattr(thing, name, None) for thing in found]
    return found == [value] * len(found)


def said(build, *args, **kwargs):
    """What a refusal says, with bounds in one form."""
    with pytest.raises(ValueError) as caught:
        build(*args, **kwargs)
    text = str(caught.value).replace("greater than or equal to", ">=")
    return text.replace("greater than", ">").replace("less than", "<")


def config_of(**model):
    return StackWiseConfig.from_dict({"model": {**SMALL, **model}})


@torch.no_grad()
def logits_of(rack):
    ids = torch.arange(14).view(2, 7)
    return rack.eval()(ids)


def widen(rack):
    for name, weight in rack.named_parameters():
        if "norm" not in name:
            nn.init.normal_(weight, std=0.3)
    return rack


def same_weights(rack, other):
    ours, theirs = rack.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


class TestSignatures:
    @pytest.mark.parametrize(
        "builder, names",
        [
            (create_block_spec, ["d_model", "d_ff", "n_heads"]),
            (create_stack_from_spec, ["stack_id", "n_blocks", "block_spec", "freeze_blocks"]),
            (create_rack_from_specs, ["vocab_size", "d_model", "stack_specs", "tie_embeddings"]),
            (
                create_simple_rack,
                ["n_stacks", "blocks_per_stack", "d_model", "d_ff", "n_heads", "vocab_size"],
            ),
            (create_rack_from_config, ["config"]),
        ],
    )
    def test_positional_arguments(self, builder, names):
        assert list(inspect.signature(builder).parameters)[: len(names)] == names


class TestBlockSpec:
    @pytest.mark.parametrize(
        "d_model, n_heads", [(2, 1), (32, 1), (64, 1), (128, 2), (256, 4), (768, 12), (4096, 64)]
    )
    def test_defaults(self, d_model, n_heads):
        assert create_block_spec(d_model) == {"d_model": d_model, "d_ff": 4 * d_model, "n_heads": n_heads}

    def test_given(self):
        spec = create_block_spec(96, 10, 3, attention_mode="bidirectional", n_kv_heads=1)
        assert spec == {
            "d_model": 96,
            "d_ff": 10,
            "n_heads": 3,
            "attention_mode": "bidirectional",
            "n_kv_heads": 1,
        }

    def test_attention_mode_alone(self):
        spec = create_block_spec(d_model=256, attention_mode="bidirectional")
        stack = create_stack_from_spec(0, 1, spec)
        assert not stack.is_causal and stack.get_block(0).config.n_heads == 4

    @pytest.mark.parametrize("d_model", [65, 96, 100, 1000])
    def test_width_without_an_obvious_number_of_heads(self, d_model):
        with pytest.raises(ValueError, match=rf"n_heads: got None; d_model={d_model} is no multiple of 64"):
            create_block_spec(d_model)
        assert create_block_spec(d_model, n_heads=1)["n_heads"] == 1

    @pytest.mark.parametrize("d_model", ["64", None, [64]])
    def test_width_that_is_no_number(self, d_model):
        with pytest.raises(ValueError, match="d_model: got"):
            create_block_spec(d_model)

    def test_unknown_argument(self):
        with pytest.raises(ValueError, match=r"unknown 'heads'; allowed: d_model, d_ff, head_dim"):
            create_block_spec(64, heads=2)

    def test_every_argument_of_a_block(self):
        values = {
            "n_kv_heads": 2,
            "head_dim": 6,
            "attention_type": "gqa",
            "attention_mode": "bidirectional",
            "sliding_window": 5,
            "latent": None,
            "kernel": None,
            "qk_norm": "head",
            "softcap": 3.0,
            "qkv_bias": True,
            "norm": "layernorm",
            "norm_eps": 1e-3,
            "norm_position": "post",
            "dropout": 0.5,
            "freeze_up_proj": True,
            "use_rope": True,
            "rope_theta": 7.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "initialization": "mup",
            "mup_base_width": 16,
        }
        assert set(values) | {"d_model", "d_ff", "n_heads"} == set(BlockConfig.model_fields)
        block = create_stack_from_spec(0, 1, create_block_spec(32, 48, 4, **values)).get_block(0)
        assert isinstance(block.attention_norm, nn.LayerNorm) and block.attention.dropout == 0.5
        assert not block.feedforward.up.weight.requires_grad
        info = block.config.to_dict()
        # A section is given back with all of its keys, as plain values.
        assert info["rope_scaling"].items() >= values["rope_scaling"].items()
        values["rope_scaling"] = info["rope_scaling"]
        assert info == {"d_model": 32, "d_ff": 48, "n_heads": 4, **values} and len(info["rope_scaling"]) == 5

    @pytest.mark.parametrize(
        "options, kind",
        [
            ({}, Attention),
            ({"n_kv_heads": 2, "attention_type": "gqa"}, Attention),
            ({"attention_type": "mqa"}, Attention),
            ({"attention_type": "mla"}, LatentAttention),
            ({"attention_type": "kernel"}, KernelAttention),
            ({"attention_type": "kernel", "n_kv_heads": 2}, KernelAttention),
        ],
    )
    def test_kind_of_attention(self, options, kind):
        for block in (
            Block(**BLOCK, **options),
            create_stack_from_spec(0, 1, create_block_spec(**BLOCK, **options)).get_block(0),
        ):
            assert type(block.attention) is kind
            x_BTC = torch.randn(2, 5, 32)
            assert block(x_BTC).shape == x_BTC.shape


class TestStack:
    def test_blocks_are_separate(self):
        spec = create_block_spec(32)
        before = dict(spec)
        stack = create_stack_from_spec(7, 3, spec)
        assert isinstance(stack, Stack) and stack.stack_id == 7 and stack.num_blocks == 3
        assert len({id(weight) for weight in stack.parameters()}) == 3 * 7
        assert spec == before

    @pytest.mark.parametrize("frozen", [False, True])
    def test_frozen(self, frozen):
        stack = create_stack_from_spec(0, 2, create_block_spec(32), frozen)
        assert all(weight.requires_grad != frozen for weight in stack.parameters())

    @pytest.mark.parametrize("n_blocks", [0, -1, "1", 1.0, True, None])
    def test_number_of_blocks_refused(self, n_blocks):
        with pytest.raises(ValueError, match=f"n_blocks: got {n_blocks!r}; allowed: an integer >= 1"):
            create_stack_from_spec(0, n_blocks, create_block_spec(32))

    def test_empty(self):
        with pytest.raises(ValueError, match="blocks: got none"):
            Stack([])


class TestRackFromSpecs:
    def test_names_and_freezing(self):
        stacks = [
            {"n_blocks": 2, "block_spec": SPEC, "freeze_blocks": True},
            {"n_blocks": 1, "block_spec": SPEC, "stack_id": 9},
        ]
        rack = create_rack_from_specs(31, 32, stacks, False)
        assert [stack.stack_id for stack in rack.stacks] == [0, 9]
        assert [stack.num_blocks for stack in rack.stacks] == [2, 1]
        assert [any(w.requires_grad for w in stack.parameters()) for stack in rack.stacks] == [False, True]
        assert rack.lm_head.weight is not rack.embedding.weight
        assert (rack.vocab_size, rack.d_model, rack.tie_embeddings) == (31, 32, False)

    def test_one_spec_used_twice_gives_two_stacks(self):
        stack = {"n_blocks": 1, "block_spec": SPEC}
        rack = create_rack_from_specs(31, 32, [stack, stack])
        first, second = (set(map(id, stack.parameters())) for stack in rack.stacks)
        assert not first & second and rack.tie_embeddings

    @pytest.mark.parametrize("stacks, parts", REFUSED_STACKS)
    def test_refused(self, stacks, parts):
        text = said(create_rack_from_specs, 31, 32, stacks)
        assert all(part in text for part in parts), text


class TestSimpleRack:
    def test_sizes(self):
        rack = create_simple_rack(2, 3, 32, 48, 4, 31, 2)
        assert [stack.stack_id for stack in rack.stacks] == [0, 1]
        assert [stack.num_blocks for stack in rack.stacks] == [3, 3]
        assert every(rack, "attention.n_kv_heads", 2) and every(rack, "config.attention_type", "gqa")
        assert rack.lm_head.weight is rack.embedding.weight and rack.is_causal

    @pytest.mark.parametrize("n_kv_heads, kind", [(None, "mha"), (4, "mha"), (2, "gqa"), (1, "gqa")])
    def test_attention_type_follows_the_heads(self, n_kv_heads, kind):
        rack = create_simple_rack(**SIMPLE, n_kv_heads=n_kv_heads)
        assert every(rack, "config.attention_type", kind) and every(
            rack, "attention.n_kv_heads", n_kv_heads or 4
        )

    def test_grouped_with_as_many_heads(self):
        torch.manual_seed(1)
        grouped = create_simple_rack(**SIMPLE, n_kv_heads=4, attention_type="gqa")
        torch.manual_seed(1)
        full = create_simple_rack(**SIMPLE)
        assert every(grouped, "config.attention_type", "gqa") and torch.equal(
            logits_of(grouped), logits_of(full)
        )

    def test_a_list_of_windows_is_repeated_over_the_blocks(self):
        rack = create_simple_rack(**SIMPLE | {"n_stacks": 2, "blocks_per_stack": 3}, sliding_window=[2, None])
        windows = [[b.attention.sliding_window for b in stack.blocks] for stack in rack.stacks]
        assert windows == [[2, None, 2], [None, 2, None]]

    @pytest.mark.parametrize("wrong, parts", REFUSED, ids=str)
    def test_refused(self, wrong, parts):
        text = said(create_simple_rack, **{**SIMPLE, **wrong})
        assert all(part in text for part in parts), text

    @pytest.mark.parametrize(
        "wrong, parts",
        [case for case in REFUSED if set(case[0]) <= set(BlockConfig.model_fields)],
        ids=str,
    )
    def test_refused_by_a_block(self, wrong, parts):
        text = said(Block, **{**BLOCK, **wrong})
        assert all(part in text for part in parts), text


class TestRackFromConfig:
    def test_every_field_is_tested(self):
        fields = {*ModelConfig.model_fields, *ArchitectureConfig.model_fields} - {"architecture"}
        assert set(EFFECTS) == fields

    @pytest.mark.parametrize("field", EFFECTS)
    def test_field_has_its_effect(self, field):
        change, holds = EFFECTS[field]
        assert not holds(create_rack_from_config(config_of()))
        changed = config_of(**change)
        for config in (changed, changed.to_dict()):
            assert holds(create_rack_from_config(config))

    @pytest.mark.parametrize(
        "section, base, effects, model",
        [
            ("latent", LATENT, LATENT_EFFECTS, {"attention_type": "mla", "n_kv_heads": None}),
            ("kernel", KERNEL, KERNEL_EFFECTS, {"attention_type": "kernel"}),
        ],
    )
    def test_field_of_a_section_has_its_effect(self, section, base, effects, model):
        assert effects.keys() == base.keys()
        for field, (value, holds) in effects.items():
            for changes, expected in ((base, False), (base | {field: value}, True)):
                rack = create_rack_from_config(config_of(**model, **{section: changes}))
                assert {bool(holds(block.attention)) for block in rack.get_blocks()} == {expected}, field
                assert logits_of(rack).isfinite().all()

    @pytest.mark.parametrize("field", CHANGES_LOGITS)
    def test_field_changes_logits(self, field):
        rack = widen(create_rack_from_config(config_of()))
        changed = create_rack_from_config(config_of(**EFFECTS[field][0]))
        changed.load_state_dict(rack.state_dict())
        assert (logits_of(changed) - logits_of(rack)).abs().max() > 1e-2
        same = create_rack_from_config(config_of())
        same.load_state_dict(rack.state_dict())
        assert torch.equal(logits_of(same), logits_of(rack))

    def test_dropout_changes_training(self):
        ids = torch.arange(14).view(2, 7)
        for dropout in (0.0, 0.25):
            rack = create_rack_from_config(config_of(dropout=dropout)).train()
            assert torch.equal(rack(ids), rack(ids)) == (dropout == 0.0)

    def test_dict_and_configuration_agree(self):
        config = config_of(norm="layernorm", sliding_window=4, tie_embeddings=False)
        before = config.to_dict()
        racks = []
        for argument in (config, config.to_dict(), {"model": config.to_dict()["model"]}):
            torch.manual_seed(3)
            racks.append(create_rack_from_config(argument))
        assert all(same_weights(racks[0], rack) for rack in racks[1:])
        assert all(torch.equal(logits_of(racks[0]), logits_of(rack)) for rack in racks[1:])
        assert config.to_dict() == before

    def test_training_and_data_change_nothing(self):
        config = config_of()
        torch.manual_seed(3)
        rack = create_rack_from_config(config)
        config.training.seed = 99
        config.training.precision = "fp32"
        config.data.shuffle = False
        torch.manual_seed(3)
        assert same_weights(rack, create_rack_from_config(config))

    @pytest.mark.parametrize(
        "windows, expected",
        [
            (5, [[5, 5, 5], [5, 5, 5]]),
            ([5], [[5, 5, 5], [5, 5, 5]]),
            ([5, None], [[5, None, 5], [None, 5, None]]),
            ([1, 2, 3, 4], [[1, 2, 3], [4, 1, 2]]),
            ([1, 2, 3, 4, None, 6, 7, 8], [[1, 2, 3], [4, None, 6]]),
        ],
    )
    def test_windows_are_repeated_over_the_blocks(self, windows, expected):
        rack = create_rack_from_config(config_of(sliding_window=windows))
        found = [[block.attention.sliding_window for block in stack.blocks] for stack in rack.stacks]
        assert found == expected

    def test_blocks_are_those_of_the_configuration(self):
        """Each differs from the model's own keys in nothing but its window."""
        model = config_of(sliding_window=[3, None], qk_norm="head", dropout=0.25).model
        rack = create_rack_from_config({"model": model.to_dict()})
        assert [[block.config for block in stack.blocks] for stack in rack.stacks] == model.blocks()
        shared = {key: value for key, value in model.to_dict().items() if key in BlockConfig.model_fields}
        for block in rack.get_blocks():
            assert block.config.to_dict() == shared | {"sliding_window": block.config.sliding_window}

    def test_number_of_blocks(self):
        mapping = config_of(architecture={"n_stacks": 3, "blocks_per_stack": 2}).to_dict()
        rack = create_rack_from_config(mapping)
        assert len(rack.stacks) == 3 and len(rack.get_blocks()) == 6
        assert len([module for module in rack.modules() if isinstance(module, Block)]) == 6

    @pytest.mark.parametrize(
        "mapping, parts",
        [
            ({"model": {"n_heads": 7}}, ["model.n_heads", "7", "d_model=512"]),
            ({"model": {"d_modle": 7}}, ["model.d_modle", "'d_model'"]),
            ({"model": {"architecture": {"n_stack": 7}}}, ["model.architecture.n_stack", "'n_stacks'"]),
            ({"n_stacks": 2}, ["n_stacks", "unknown", "model"]),
            ({"model": {"d_ff": "48"}}, ["model.d_ff", "'48'", "integer"]),
            ({"model": {"sliding_window": []}}, ["model.sliding_window", "[]", "at least 1"]),
            ({"model": {"max_seq_len": 0}}, ["model.max_seq_len", "0", "greater than or equal to 1"]),
            (None, ["None", "mapping"]),
            ([], ["[]", "mapping"]),
            ("config.yaml", ["'config.yaml'", "mapping"]),
        ],
    )
    def test_refused(self, mapping, parts):
        with pytest.raises(ConfigError) as caught:
            create_rack_from_config(mapping)
        assert all(part in str(caught.value) for part in parts), caught.value

    def test_configuration_that_became_inconsistent(self):
        config = config_of()
        config.training.schedule.warmup_steps = 201
        with pytest.raises(ConfigError, match="max_steps=200"):
            create_rack_from_config(config)
