"""Small variants: the same kind of architecture, never empty, and honest about what was lost."""

import copy
import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from stackwise.config import StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.model.initialization import learning_rate_multipliers
from stackwise.prototype import SmallVariant, create_small_variant, widened
from stackwise.prototype.widen import as_mup, as_standard
from stackwise.training import ArchitectureTrainer
from stackwise.training.scope import plan_phases

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
    # Of 7 / 4 heads the nearest is 2, and the depth shrinks 3.5 times as well.
    ((448, 7, 7, 896, 1, 28), 4, (128, 2, 2, 256, 1, 8)),
    # Three heads, half as many again as 12 / 6, keep three for each key/value head.
    ((768, 12, 4, 3072, 1, 12), 6, (192, 3, 1, 768, 1, 3)),
    # Two heads for a key/value head: width and depth shrink four times, and there are two Blocks for Stacks.
    ((256, 8, 4, 512, 8, 1), 3, (64, 2, 1, 128, 2, 1)),
]
# Architectures and factors of which something cannot be kept: words of the notes that say so.
NOTED = [
    ((64, 2, 1, 256, 2, 2), 4, ["1 instead of 2", "width: d_model 32 instead of 64 / 4, with 1 of 2 heads"]),
    ((96, 12, 4, 96, 1, 8), 6, ["width: d_model 24 instead of 96 / 6", "depth: 2 Blocks instead of 8 / 6"]),
    ((64, 8, 2, 256, 1, 3), 2, ["depth: 2 Blocks instead of 3 / 2", "depth to width: a Block for every 16 "]),
    ((64, 8, 8, 256, 1, 1), 4, ["depth: 1 Blocks instead of 1 / 4"]),
    ((64, 4, 4, 1, 1, 4), 4, ["d_ff: 1 instead of 0.25"]),
    ((64, 4, 4, 62, 1, 4), 4, ["d_ff: 16 instead of 15.5"]),
    ((256, 8, 4, 512, 8, 1), 3, ["n_stacks: 2 instead of 8"]),
]
KEPT = [((512, 16, 4, 2048, 2, 8), 4), ((512, 8, 2, 2048, 2, 4), 1), ((768, 12, 4, 3072, 1, 12), 4)]


def config_of(sizes, *, training=None, **model):
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
            },
            "training": training or {},
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
def configs(draw, kinds=("mha", "gqa", "mqa", "mla", "kernel")):
    n_kv_heads = draw(st.integers(1, 12))
    n_heads = n_kv_heads * draw(st.integers(1, 8))
    use_rope = draw(st.booleans())
    head_dim = draw(st.integers(1, 16)) * (2 if use_rope else 1)
    kind = draw(st.sampled_from(kinds))
    own_head_dim = kind != "mla" and draw(st.booleans())
    window = st.none() | st.integers(1, 100)
    windows = window | st.lists(window, min_size=1, max_size=4)
    keys = {
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
        "max_seq_len": draw(st.none() | st.integers(1, 1000)),
        "initialization": draw(st.sampled_from(["normal", "kaiming", "small", "zero_out"])),
        "training": {"seq_len": draw(st.integers(1, 1000))},
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
    return config_of(sizes, **keys)


def windows_of(config):
    return [block.sliding_window for stack in config.model.blocks() for block in stack]


def parameters_of(config):
    with torch.device("meta"):
        return create_rack_from_config(config).get_parameter_count()


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

    @settings(max_examples=15)
    @given(configs(), factors)
    def test_fewer_parameters(self, config, factor):
        """Unless there is one head, and no third Block."""
        assume(factor > 1 and (config.model.n_heads > 1 or depth_of(config) > 2))
        assert parameters_of(create_small_variant(config, factor).config) < parameters_of(config)

    @given(configs(), factors)
    def test_heads_are_the_configured_share(self, config, factor):
        """None is fewer times off, but for one that keeps the ratio of heads, at most half as much again."""
        n_heads, exact = (
            create_small_variant(config, factor).config.model.n_heads,
            config.model.n_heads / factor,
        )
        ratio = config.model.n_heads // kv_heads_of(config.model)
        off = [abs(math.log(n / exact)) for n in range(1, config.model.n_heads + 1)]
        keeps = n_heads % ratio == 0 and off[n_heads - 1] <= math.log(1.5) + 1e-9
        assert keeps or off[n_heads - 1] <= min(off) + 1e-9

    @given(configs(), factors)
    def test_depth_shrinks_as_the_width(self, config, factor):
        """At least two Blocks, so that something is composed, and whole Stacks."""
        small = create_small_variant(config, factor).config
        times = config.model.d_model / small.model.d_model if config.model.n_heads >= factor else factor
        exact, n_stacks = depth_of(config) / times, small.model.architecture.n_stacks
        assert depth_of(small) >= min(2, depth_of(config))
        assert abs(depth_of(small) - max(exact, min(2, depth_of(config)))) <= max(1, n_stacks / 2 + 0.5)

    @given(configs(), factors)
    def test_stacks_stay_where_each_has_a_block(self, config, factor):
        variant = create_small_variant(config, factor)
        ours, theirs = variant.config.model.architecture, config.model.architecture
        assert ours.n_stacks == theirs.n_stacks or (
            ours.n_stacks < theirs.n_stacks and ours.blocks_per_stack == 1
        )
        assert (ours.n_stacks != theirs.n_stacks) == any("n_stacks" in note for note in variant.notes)

    @pytest.mark.parametrize("n_heads, factor", [(1, 4), (2, 4), (3, 4), (4, 4), (7, 8), (8, 1000)])
    def test_one_head_is_left(self, n_heads, factor):
        config = config_of((16 * n_heads, n_heads, 1, 64, 2, 4))
        small = create_small_variant(config, factor).config.model
        assert (small.n_heads, small.n_kv_heads, small.d_model) == (1, 1, 16)

    @given(configs())
    def test_factor_one_is_the_identity(self, config):
        variant = create_small_variant(config, 1)
        assert (variant.config, variant.target, variant.notes) == (config, config, ())


class TestKept:
    @given(configs(), factors)
    def test_kinds(self, config, factor):
        small = create_small_variant(config, factor).config
        resized = {"d_model", "n_heads", "n_kv_heads", "d_ff", "architecture", "latent", "sliding_window"}
        ours, theirs = small.to_dict(), config.to_dict()
        assert {key for key in theirs["model"] if ours["model"][key] != theirs["model"][key]} <= resized
        assert ours["training"] == theirs["training"] and ours["data"] == theirs["data"]

    @given(configs(), factors)
    def test_head_size(self, config, factor):
        small, model = create_small_variant(config, factor).config.model, config.model
        assert small.head_dim == model.head_dim
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            default = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}[key]
            sizes = [default if each.latent is None else getattr(each.latent, key) for each in (small, model)]
            assert sizes[0] == sizes[1]
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
        assert abs(variant.config.model.d_ff - max(1, exact)) <= 0.5 + 1e-9
        kept = (
            config.model.d_ff * variant.config.model.d_model
            == variant.config.model.d_ff * config.model.d_model
        )
        assert kept != any("d_ff" in note for note in variant.notes)

    @given(configs(["mla"]), factors)
    def test_ranks_of_latents(self, config, factor):
        variant = create_small_variant(config, factor)
        whole, share = config.model.latent, variant.config.model.d_model / config.model.d_model
        kv, q = (512, None) if whole is None else (whole.kv_lora_rank, whole.q_lora_rank)
        ours = variant.config.model.latent
        ours = (512, None) if ours is None else (ours.kv_lora_rank, ours.q_lora_rank)
        assert (ours[1] is None) == (q is None)
        for key, before, after in (("kv_lora_rank", kv, ours[0]), ("q_lora_rank", q, ours[1])):
            if before is not None:
                assert abs(after - max(1, before * share)) <= 0.5 + 1e-9
                exact = math.isclose(after, before * share)
                assert exact != any(note.startswith(key) for note in variant.notes)

    @given(configs(), factors)
    def test_ratio_of_heads(self, config, factor):
        variant = create_small_variant(config, factor)

        def ratio(model):
            return model.n_heads // kv_heads_of(model)

        kept = ratio(variant.config.model) == ratio(config.model)
        assert kept != any("query heads" in note for note in variant.notes)

    @given(configs(), factors, st.none() | st.integers(1, 1000))
    def test_original_is_left_alone(self, config, factor, seq_len):
        before = copy.deepcopy(config)
        variant = create_small_variant(config, factor, seq_len=seq_len)
        for made in (variant.config, variant.target):
            made.training.optimizer.betas.append(0.5)
        assert config == before

    @pytest.mark.parametrize("kind", ["normal", "kaiming", "small"])
    def test_law_of_initialisation(self, kind):
        """What scales with depth follows the depth that there is: 0.02 / sqrt(2 n_blocks) and its like."""
        config = config_of((256, 8, 8, 512, 2, 8), initialization=kind, vocab_size=16)
        variant = create_small_variant(config, 4)
        fan_in = 64
        std = {"normal": 0.02, "kaiming": math.sqrt(1 / fan_in), "small": math.sqrt(2 / (5 * 64))}[kind]
        torch.manual_seed(0)
        out = create_rack_from_config(variant.config).stacks[0].blocks[0].attention.out.weight
        assert depth_of(variant.config) == 4
        assert out.std().item() == pytest.approx(std / math.sqrt(2 * 4), rel=0.05)


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
        assert exact != any(note.startswith("depth: ") for note in variant.notes)

    @given(configs(), factors)
    def test_width(self, config, factor):
        variant = create_small_variant(config, factor)
        exact = variant.config.model.d_model * factor == config.model.d_model
        assert exact != any(note.startswith("width") for note in variant.notes)

    @given(configs(), factors)
    def test_aspect(self, config, factor):
        variant = create_small_variant(config, factor)
        ours, theirs = ((each.model.d_model, depth_of(each)) for each in (variant.config, config))
        kept = ours[0] * theirs[1] == theirs[0] * ours[1]
        assert kept != any("depth to width" in note for note in variant.notes)

    @given(configs(), factors)
    def test_windows(self, config, factor):
        """Each has its share of the Blocks, or a note says what it has."""
        variant = create_small_variant(config, factor)
        ours, theirs = Counter(windows_of(variant.config)), Counter(windows_of(config))
        assert ours.keys() <= theirs.keys()
        if len(theirs) <= ours.total():
            assert ours.keys() == theirs.keys()
        for window, count in theirs.items():
            shown = "null" if window is None else str(window)
            noted = [
                n
                for n in variant.notes
                if n.startswith((f"sliding_window: {shown} in", "sliding_window: no"))
            ]
            noted = [n for n in noted if f" {shown} " in n]
            kept = ours[window] * theirs.total() == count * ours.total()
            assert kept != bool(noted)

    @pytest.mark.parametrize(
        "pattern, blocks, factor, small",
        [
            ([16, None], 8, 2, [16, None, 16, None]),
            ([16] * 5 + [None], 12, 2, [16] * 5 + [None]),
            ([16] * 5 + [None], 12, 4, [16, 16, None]),
            ([16] * 5 + [None], 12, 8, [16, None]),
            ([None] + [16] * 5, 12, 4, [None, 16, 16]),
            ([4, 8, 16, None], 16, 4, [4, 8, 16, None]),
            ([4, 4, 8, None], 8, 4, [4, 8]),
            (16, 8, 4, [16, 16]),
        ],
    )
    def test_a_pattern_survives(self, pattern, blocks, factor, small):
        config = config_of((64, 16, 4, 64, 1, blocks), sliding_window=pattern)
        assert windows_of(create_small_variant(config, factor).config) == small

    def test_what_of_a_pattern_is_noted(self):
        config = config_of((64, 16, 4, 64, 1, 12), sliding_window=[16] * 5 + [None])
        assert create_small_variant(config, 4).notes == (
            "sliding_window: 16 in 2 of 3 Blocks instead of 10 of 12",
            "sliding_window: null in 1 of 3 Blocks instead of 2 of 12",
        )
        config = config_of((64, 16, 4, 64, 1, 8), sliding_window=[4, 4, 8, None])
        assert (
            "sliding_window: no Block with null is left, which 2 of 8 had"
            in create_small_variant(config).notes
        )

    def test_is_a_value(self):
        variant = create_small_variant(config_of(TABLE[0][0]))
        assert isinstance(variant, SmallVariant) and isinstance(variant.notes, tuple)
        with pytest.raises(AttributeError):
            variant.notes = ()


class TestLength:
    @given(configs(), factors, st.integers(1, 2000))
    # A window that no Block has loses nothing.
    @example(config_of((16, 1, 1, 16, 1, 1), sliding_window=[None, 1], training={"seq_len": 2}), 1, 1)
    def test_ratios(self, config, factor, seq_len):
        variant = create_small_variant(config, factor, seq_len=seq_len)
        same = create_small_variant(config, factor).config
        share = seq_len / config.training.seq_len
        variant.config.validate()
        assert variant.config.training.seq_len == seq_len
        pairs = set(zip(windows_of(same), windows_of(variant.config), strict=True))
        pairs |= {(config.model.max_seq_len, variant.config.model.max_seq_len)}
        for before, after in pairs:
            assert (before is None) == (after is None)
            if before is not None:
                assert abs(after - max(1, before * share)) <= 0.5 + 1e-9
        inexact = {
            before
            for before, after in pairs
            if before is not None and not math.isclose(after, before * share)
        }
        noted = [n for n in variant.notes if "tokens instead of" in n or n.startswith("max_seq_len")]
        assert bool(inexact) == bool(noted)

    def test_numbers(self):
        config = config_of((64, 4, 4, 64, 1, 4), sliding_window=[100, None], max_seq_len=1024)
        variant = create_small_variant(config, 2, seq_len=128)
        assert (variant.config.model.sliding_window, variant.config.model.max_seq_len) == ([25, None], 256)
        assert variant.notes == ()
        assert create_small_variant(config, 2, seq_len=100).notes == (
            "sliding_window: 20 of 100 tokens instead of 100 of 512",
        )

    def test_stretched_frequencies(self):
        scaling = {"rope_type": "llama3", "factor": 8.0}
        config = config_of((64, 4, 4, 64, 1, 4), rope_scaling=scaling)
        (note,) = create_small_variant(config, 2, seq_len=128).notes
        assert "rows of 128 tokens instead of 512" in note and "original_max_position_embeddings=8192" in note
        assert create_small_variant(config, 2).notes == ()


class TestWhatSpeaksOfStacks:
    def test_settings_of_stacks_that_are_no_more(self):
        training = {"optimizer": {"per_stack": {0: {"lr": 1e-3}, 3: {"lr": 1e-4}, 5: {"weight_decay": 0.0}}}}
        config = config_of((64, 4, 4, 64, 6, 1), training=training)
        variant = create_small_variant(config, 2)
        assert list(variant.config.training.optimizer.per_stack) == [0]
        assert "training.optimizer.per_stack: Stacks 3, 5 are no more" in variant.notes

    @pytest.mark.parametrize("architecture, left", [("stackwise", 2), ("blockwise", 3)])
    def test_a_suffix_leaves_a_unit(self, architecture, left):
        training = {"training_architecture": architecture, "scope": {"suffix": 6}}
        config = config_of((64, 4, 4, 64, 2, 8), training=training)
        variant = create_small_variant(config, 4)
        assert variant.config.training.scope.suffix == left
        assert any(f"training.scope.suffix: {left} instead of 6" in note for note in variant.notes)
        depth = variant.config.model.architecture
        assert plan_phases([depth.blocks_per_stack] * depth.n_stacks, variant.config.training)


class TestMup:
    @given(configs(), factors)
    def test_is_a_family_or_refused(self, config, factor):
        sizes = [config.model.d_model, config.model.n_heads, config.model.d_ff]
        latent = config.model.latent
        if config.model.attention_type == "mla":
            sizes += [512] if latent is None else [latent.kv_lora_rank, latent.q_lora_rank]
        else:
            sizes.append(kv_heads_of(config.model))
        if any(size % factor for size in sizes):
            with pytest.raises(
                ValueError, match=r"^factor: got|^model\.attention_type: got 'mqa'; allowed: with mup"
            ):
                create_small_variant(config, factor, mup=True)
            return
        variant = create_small_variant(config, factor, mup=True)
        small, target = variant.config.model, variant.target.model
        assert small.initialization == target.initialization == "mup"
        assert (
            small.mup_base_width == target.mup_base_width == small.d_model == config.model.d_model // factor
        )
        assert {**variant.target.to_dict()["model"], "initialization": None, "mup_base_width": None} == {
            **config.to_dict()["model"],
            "initialization": None,
            "mup_base_width": None,
        }
        # What makes a Rack refuses a base with part of a head or rank.
        with torch.device("meta"):
            rates = learning_rate_multipliers(create_rack_from_config(variant.target), small.d_model)
        assert set(rates.values()) == ({1.0, 1 / factor} if factor > 1 else {1.0})

    @given(configs(), st.integers(1, 6))
    def test_widened_is_the_way_back(self, config, factor):
        wide = widened(config, factor)
        assume(config.model.attention_type != "mqa" or factor == 1)
        small = create_small_variant(wide, factor, mup=True).config.model
        ours, theirs = sizes_of(create_small_variant(wide, factor).config), sizes_of(config)
        assert ours[:4] == theirs[:4] and (small.d_model, small.n_heads) == theirs[:2]
        if config.model.attention_type == "mla" and factor > 1:
            kv, q = (512, None) if config.model.latent is None else (6, 5)
            assert (small.latent.kv_lora_rank, small.latent.q_lora_rank) == (kv, q)
        wide.validate()

    def test_mqa_widens_by_its_queries(self):
        wide = widened(config_of((64, 4, 1, 64, 1, 2), attention_type="mqa"), 3).model
        assert (wide.d_model, wide.n_heads, wide.n_kv_heads, wide.d_ff) == (192, 12, 1, 192)

    def test_depth_is_noted(self):
        config = config_of((256, 8, 4, 512, 2, 4))
        (note,) = create_small_variant(config, 2, mup=True).notes
        assert "learning rate" in note and "from 4 to 8 Blocks by experience" in note
        assert create_small_variant(config, 1, mup=True).notes == ()

    def test_the_reason_is_named(self):
        config = config_of((512, 8, 2, 2048, 2, 4))
        text = r"factor: got 4; .* divides all of d_model=512, d_ff=2048, n_heads=8, n_kv_heads=2: 1, 2"
        with pytest.raises(ValueError, match=text):
            create_small_variant(config, 4, mup=True)
        config = config_of((512, 8, 1, 2048, 2, 4), attention_type="mqa")
        with pytest.raises(
            ValueError, match=r"model\.attention_type: got 'mqa'; allowed: with mup=True .*'gqa'"
        ):
            create_small_variant(config, 4, mup=True)

    def test_a_feed_forward_width_that_does_not_divide_is_refused(self):
        config = config_of((512, 8, 4, 1366, 2, 4))
        text = r"factor: got 4; .* divides all of d_model=512, d_ff=1366, n_heads=8, n_kv_heads=4: 1, 2$"
        with pytest.raises(ValueError, match=text):
            create_small_variant(config, 4, mup=True)
        assert create_small_variant(config, 2, mup=True).config.model.d_ff == 683

    def test_an_original_of_mup_keeps_its_base(self):
        config = config_of((256, 8, 4, 512, 2, 4), initialization="mup", mup_base_width=64)
        variant = create_small_variant(config, 2)
        assert (variant.config.model.mup_base_width, variant.notes) == (64, ())

    def test_an_original_of_mup_whose_base_would_be_split(self):
        config = config_of((256, 8, 2, 512, 2, 4), initialization="mup", mup_base_width=128)
        variant = create_small_variant(config, 4)
        model = variant.config.model
        assert (model.d_model, model.n_heads, model.n_kv_heads, model.mup_base_width) == (64, 2, 1, 128)
        # Nothing is made narrower, so that a base with a part of a head is what it was.
        config = config_of((6, 1, 1, 16, 1, 1), initialization="mup", mup_base_width=3)
        variant = create_small_variant(config, 1)
        assert (variant.config, variant.notes) == (config, ())
        config = config_of((96, 6, 3, 96, 1, 6), initialization="mup", mup_base_width=32)
        variant = create_small_variant(config, 2)
        model = variant.config.model
        assert model.mup_base_width == 32 or any("mup_base_width" in note for note in variant.notes)
        create_rack_from_config(variant.config)

    @pytest.mark.parametrize("mup", [False, True])
    @pytest.mark.parametrize("tied", [False, True])
    def test_a_bound_on_embeddings_is_as_many_times_what_rows_start_with(self, tied, mup):
        keys = {"vocab_size": 512, "tie_embeddings": tied, "embedding_max_norm": 0.3}
        config = config_of((256, 8, 8, 64, 1, 4), **keys)

        def times(config):
            torch.manual_seed(0)
            lengths = create_rack_from_config(config).embedding.weight.norm(dim=-1)
            return config.model.embedding_max_norm / lengths.mean().item()

        variant = create_small_variant(config, 4, mup=mup)
        family = as_mup(config, 128)
        made = [variant.config, variant.target, widened(config, 2), family, as_standard(family)]
        made += [widened(family, 2), create_small_variant(family, 4).config]
        for each in made:
            assert times(each) == pytest.approx(times(config), rel=0.02)
        wider = variant.target.model.embedding_max_norm / variant.config.model.embedding_max_norm
        if mup or not tied:
            assert wider == pytest.approx(2)
        else:  # 0.02 at 64, ln(1 + 0.03 * 512) / 256 at 256
            assert wider == pytest.approx(2 * math.log1p(0.03 * 512) / 256 / 0.02)

    def test_the_output_of_a_wider_member_is_that_of_the_base_on_average(self):
        """Table 8 by hand: logits are multiplied by base / width, which the final norm's gain does here."""
        config = config_of((64, 4, 4, 128, 1, 2), vocab_size=32, tie_embeddings=False)
        wide = create_small_variant(widened(config, 4), 4, mup=True)
        torch.manual_seed(0)
        racks = [create_rack_from_config(each) for each in (wide.config, wide.target)]
        x = torch.randn(4, 16, 64), torch.randn(4, 16, 256)
        with torch.no_grad():
            # A normed x has mean square 1; over C of a head N(0, s) the variance of a logit is C s^2 gain^2.
            for rack, hidden, multiplier in zip(racks, x, (1.0, 0.25), strict=True):
                logits = rack.head(hidden)
                std = math.sqrt(hidden.shape[-1]) * racks[0].lm_head.weight.std().item() * multiplier
                assert logits.std().item() == pytest.approx(std, rel=0.1)
                assert (rack.final_norm.weight == multiplier).all()


class TestRefused:
    @pytest.mark.parametrize("factor", [0, -1, -100])
    def test_factor(self, factor):
        with pytest.raises(ValueError, match=rf"factor: got {factor}; allowed: an integer >= 1"):
            create_small_variant(config_of(TABLE[0][0]), factor)

    @pytest.mark.parametrize("seq_len", [0, -1, 2.0])
    def test_seq_len(self, seq_len):
        with pytest.raises(ValueError, match=rf"seq_len: got {seq_len}; allowed: an integer >= 1"):
            create_small_variant(config_of(TABLE[0][0]), seq_len=seq_len)

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
