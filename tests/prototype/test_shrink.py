"""Small variants: the same kind of architecture, never empty, and honest about what was lost."""

import copy
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from stackwise.config import StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.prototype import SmallVariant, create_small_variant
from stackwise.training import ArchitectureTrainer

# Per architecture (d_model, n_heads, n_kv_heads, d_ff, n_stacks, blocks_per_stack) and factor: the variant.
TABLE = [
    ((512, 8, 2, 2048, 2, 4), 4, (128, 2, 1, 512, 2, 1)),
    ((512, 8, 2, 2048, 2, 4), 2, (256, 4, 1, 1024, 2, 2)),
    ((512, 8, 2, 2048, 2, 4), 1, (512, 8, 2, 2048, 2, 4)),
    ((64, 2, 1, 256, 4, 6), 4, (32, 1, 1, 128, 4, 2)),
    ((64, 1, 1, 256, 1, 1), 4, (64, 1, 1, 256, 1, 1)),
    ((768, 12, 4, 3072, 1, 12), 4, (192, 3, 1, 768, 1, 3)),
    ((768, 12, 12, 2048, 12, 1), 4, (192, 3, 3, 512, 3, 1)),
    ((512, 8, 8, 1024, 2, 8), 100, (64, 1, 1, 128, 2, 1)),
]
# Architectures and factors of which something cannot be kept: a word of the note that says so.
NOTED = [
    ((64, 2, 1, 256, 2, 2), 4, ["1 instead of 2", "width"]),
    ((96, 12, 4, 96, 1, 8), 6, ["2 instead of 3", "depth"]),
    ((64, 8, 2, 256, 1, 3), 2, ["depth"]),
    ((64, 8, 8, 256, 1, 1), 4, ["depth"]),
    ((64, 4, 4, 1, 1, 4), 4, ["d_ff"]),
]
KEPT = [((512, 16, 4, 2048, 2, 8), 4), ((512, 8, 2, 2048, 2, 4), 1), ((768, 12, 4, 3072, 1, 12), 4)]


def config_of(sizes, **model):
    d_model, n_heads, n_kv_heads, d_ff, n_stacks, blocks_per_stack = sizes
    return StackWiseConfig.from_dict(
        {
            "model": {
                "d_model": d_model,
                "n_heads": n_heads,
                "n_kv_heads": n_kv_heads,
                "d_ff": d_ff,
                "architecture": {"n_stacks": n_stacks, "blocks_per_stack": blocks_per_stack},
                **model,
            }
        }
    )


def sizes_of(config):
    model, depth = config.model, config.model.architecture
    return (
        model.d_model,
        model.n_heads,
        model.n_kv_heads,
        model.d_ff,
        depth.n_stacks,
        depth.blocks_per_stack,
    )


def depth_of(config):
    return config.model.architecture.n_stacks * config.model.architecture.blocks_per_stack


def kv_heads_of(model):
    """Key/value heads; multi-query attention has one, in latent attention each head has its own."""
    return 1 if model.attention_type == "mqa" else model.n_kv_heads or model.n_heads


@st.composite
def configs(draw):
    n_kv_heads = draw(st.integers(1, 12))
    n_heads = n_kv_heads * draw(st.integers(1, 8))
    use_rope = draw(st.booleans())
    head_dim = draw(st.integers(1, 16)) * (2 if use_rope else 1)
    kind = draw(st.sampled_from(["mha", "gqa", "mqa", "mla", "kernel"]))
    own_head_dim = kind != "mla" and draw(st.booleans())
    window = st.none() | st.integers(1, 100)
    windows = window | st.lists(window, min_size=1, max_size=4)
    kinds = {
        "attention_type": kind,
        "attention_mode": draw(st.sampled_from(["causal", "bidirectional"])),
        "head_dim": head_dim if own_head_dim else None,
        "latent": {"kv_lora_rank": 6, "q_lora_rank": 5} if kind == "mla" and draw(st.booleans()) else None,
        "kernel": {"feature_map": "elu"} if kind == "kernel" else None,
        "sliding_window": None if kind == "kernel" else draw(windows),
        "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "dropout": draw(st.floats(0.0, 0.9)),
        "tie_embeddings": draw(st.booleans()),
        "freeze_up_proj": draw(st.booleans()),
        "use_rope": use_rope,
        "vocab_size": draw(st.integers(1, 300)),
    }
    kv = {
        "mha": st.sampled_from([None, n_heads]),
        "gqa": st.just(n_kv_heads),
        "mqa": st.sampled_from([None, 1]),
        "mla": st.none(),
        "kernel": st.sampled_from([None, n_kv_heads]),
    }
    sizes = (
        draw(st.integers(1, 1000)) if own_head_dim else n_heads * head_dim,
        n_heads,
        draw(kv[kind]),
        draw(st.integers(1, 4096)),
        draw(st.integers(1, 8)),
        draw(st.integers(1, 12)),
    )
    return config_of(sizes, **kinds)


def windows_of(config):
    return {block.sliding_window for stack in config.model.blocks() for block in stack}


factors = st.integers(1, 130)


class TestSizes:
    @pytest.mark.parametrize("sizes, factor, small", TABLE)
    def test_table(self, sizes, factor, small):
        assert sizes_of(create_small_variant(config_of(sizes), factor).config) == small

    def test_default_factor(self):
        config = config_of((512, 8, 2, 2048, 2, 4))
        assert create_small_variant(config) == create_small_variant(config, 4)

    @given(configs(), factors)
    def test_nothing_reaches_zero_and_the_rack_is_built(self, config, factor):
        small = create_small_variant(config, factor).config
        small.validate()
        model = small.model
        assert all(size is None or size >= 1 for size in sizes_of(small))
        with torch.device("meta"):
            rack = create_rack_from_config(small)
        assert sum(stack.num_blocks for stack in rack.stacks) == depth_of(small)
        attentions = [stack.get_block(0).attention for stack in rack.stacks]
        assert {attention.n_heads for attention in attentions} == {model.n_heads}
        if model.attention_type != "mla":
            assert {attention.n_kv_heads for attention in attentions} == {kv_heads_of(model)}

    @given(configs(), factors)
    def test_nothing_grows(self, config, factor):
        small = create_small_variant(config, factor).config
        pairs = zip(sizes_of(small), sizes_of(config), strict=True)
        assert all(ours is None or theirs is None or ours <= theirs for ours, theirs in pairs)

    @given(configs(), factors)
    def test_heads_are_the_configured_share(self, config, factor):
        small = create_small_variant(config, factor).config
        assert small.model.n_heads == max(1, config.model.n_heads // factor)

    @given(configs(), factors)
    def test_depth_is_the_configured_share(self, config, factor):
        """At least two blocks, so that something is composed, and whole Stacks."""
        small, exact = create_small_variant(config, factor).config, depth_of(config) / factor
        n_stacks = small.model.architecture.n_stacks
        assert abs(depth_of(small) - max(exact, min(2, depth_of(config)))) <= max(1, n_stacks / 2 + 0.5)

    @pytest.mark.parametrize("n_heads, factor", [(1, 4), (2, 4), (3, 4), (4, 4), (7, 8), (8, 1000)])
    def test_one_head_is_left(self, n_heads, factor):
        config = config_of((16 * n_heads, n_heads, 1, 64, 2, 4))
        small = create_small_variant(config, factor).config.model
        assert (small.n_heads, small.n_kv_heads, small.d_model) == (1, 1, 16)

    @given(configs())
    def test_factor_one_changes_no_size(self, config):
        variant = create_small_variant(config, 1)
        ours, theirs = sizes_of(variant.config), sizes_of(config)
        assert ours[:2] + ours[3:] == theirs[:2] + theirs[3:]
        assert (ours[2] or ours[1]) == (theirs[2] or theirs[1])
        assert variant.notes == ()


class TestKept:
    @given(configs(), factors)
    def test_kinds(self, config, factor):
        small = create_small_variant(config, factor).config
        resized = {"d_model", "n_heads", "n_kv_heads", "d_ff", "architecture"}
        ours, theirs = small.to_dict(), config.to_dict()
        assert {key for key in theirs["model"] if ours["model"][key] != theirs["model"][key]} <= resized
        assert ours["training"] == theirs["training"] and ours["data"] == theirs["data"]

    @given(configs(), factors)
    def test_head_size(self, config, factor):
        small, model = create_small_variant(config, factor).config.model, config.model
        assert small.head_dim == model.head_dim
        exact = model.d_model / model.n_heads * small.n_heads
        if model.head_dim is None:
            assert small.d_model == exact
        else:
            # The width is no multiple of anything; nearest, and at least 1.
            assert small.d_model == 1 or abs(small.d_model - exact) <= 0.5

    @given(configs(), factors)
    @example(config_of((64, 4, 4, 1, 1, 4)), 4)
    def test_feed_forward_ratio(self, config, factor):
        """Within rounding to whole units, or a note says that it could not be."""
        variant = create_small_variant(config, factor)
        exact = config.model.d_ff / config.model.d_model * variant.config.model.d_model
        kept = abs(variant.config.model.d_ff - exact) <= 0.5 + 1e-9
        assert kept or any("d_ff" in note or "feed-forward" in note for note in variant.notes)

    @given(configs(), factors)
    def test_ratio_of_heads(self, config, factor):
        variant = create_small_variant(config, factor)

        def ratio(model):
            return model.n_heads // kv_heads_of(model)

        kept = ratio(variant.config.model) == ratio(config.model)
        assert kept != any("query heads" in note for note in variant.notes)

    @given(configs(), factors)
    def test_original_is_left_alone(self, config, factor):
        before = copy.deepcopy(config)
        small = create_small_variant(config, factor).config
        small.training.optimizer.betas.append(0.5)
        assert config == before


class TestNotes:
    @pytest.mark.parametrize("sizes, factor, words", NOTED)
    def test_what_was_lost(self, sizes, factor, words):
        notes = create_small_variant(config_of(sizes), factor).notes
        assert [word for word in words if not any(word in note for note in notes)] == []

    @pytest.mark.parametrize("sizes, factor", KEPT)
    def test_nothing_was_lost(self, sizes, factor):
        assert create_small_variant(config_of(sizes), factor).notes == ()

    @given(configs(), factors)
    def test_depth(self, config, factor):
        variant = create_small_variant(config, factor)
        exact = math.isclose(depth_of(variant.config) * factor, depth_of(config))
        assert exact != any("depth" in note for note in variant.notes)

    @given(configs(), factors)
    def test_width(self, config, factor):
        noted = any("width" in note for note in create_small_variant(config, factor).notes)
        assert noted or config.model.n_heads >= factor
        assert not noted or config.model.n_heads % factor

    @given(configs(), factors)
    def test_windows(self, config, factor):
        """A pattern of windows that is longer than the depth that is left loses some of them."""
        variant = create_small_variant(config, factor)
        kept = windows_of(variant.config) == windows_of(config)
        assert kept != any("sliding_window" in note for note in variant.notes)

    def test_the_only_block_that_saw_everything(self):
        config = config_of((64, 16, 4, 64, 1, 12), sliding_window=[16] * 5 + [None])
        assert windows_of(create_small_variant(config, 2).config) == {16, None}
        (note,) = create_small_variant(config, 4).notes
        assert "sliding_window" in note and "null" in note

    def test_is_a_value(self):
        variant = create_small_variant(config_of(TABLE[0][0]))
        assert isinstance(variant, SmallVariant) and isinstance(variant.notes, tuple)
        with pytest.raises(AttributeError):
            variant.notes = ()


class TestRefused:
    @pytest.mark.parametrize("factor", [0, -1, -100])
    def test_factor(self, factor):
        with pytest.raises(ValueError, match=rf"factor: got {factor}; allowed: an integer >= 1"):
            create_small_variant(config_of(TABLE[0][0]), factor)

    @pytest.mark.parametrize("factor", [1.5, 2.0, "4", None])
    def test_factor_that_is_no_integer(self, factor):
        with pytest.raises(ValueError, match=r"factor: got .*; allowed: an integer >= 1"):
            create_small_variant(config_of(TABLE[0][0]), factor)


class TestUse:
    def test_takes_token_ids_and_trains(self):
        config = config_of((64, 8, 2, 128, 2, 4), vocab_size=19)
        small = create_small_variant(config).config
        small.training.max_steps, small.training.precision = 20, "fp32"
        small.training.device, small.training.schedule.kind = "cpu", "constant"
        small.training.optimizer.lr = 1e-2
        rack = create_rack_from_config(small)
        ids = torch.arange(18).view(2, 9) % 19
        assert rack(ids).shape == (2, 9, 19)
        result = ArchitectureTrainer(small, progress=False).train_architecture(rack, [ids])
        assert result["records"][0].loss == pytest.approx(math.log(19), abs=0.1)
        assert result["records"][-1].loss < 1.5
        assert result["blocks_per_stack"] == [1, 1]

    def test_is_smaller(self):
        config = config_of((512, 8, 2, 2048, 2, 4))
        counts = []
        for each in (config, create_small_variant(config).config):
            with torch.device("meta"):
                counts.append(create_rack_from_config(each).get_parameter_count())
        assert counts[0] > 20 * counts[1]
