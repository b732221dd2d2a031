"""What the shrinks make of a configuration."""

import pytest

from bench.prototype.architectures import ARCHITECTURES, architecture_config
from bench.prototype.shrinks import FACTOR, SHRINKS, chapter, ours, quarter
from stackwise import ConfigError
from stackwise.prototype import create_small_variant


def config_of(name):
    return architecture_config(name, batch_size=2, seq_len=16, steps=4, learning_rate=1e-3, seed=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ours_is_small_and_keeps_the_head(name):
    full, small = config_of(name).model, ours(config_of(name)).model
    assert small.d_model < full.d_model
    assert small.d_model // small.n_heads == full.d_model // full.n_heads
    assert small.attention_type == full.attention_type


def test_quarter_divides_every_size():
    model = quarter(config_of("wide")).model
    assert (model.d_model, model.n_heads, model.n_kv_heads, model.d_ff) == (40, 2, 1, 110)
    assert model.architecture.blocks_per_stack == 2  # a quarter of six Blocks is one; the recipe has two
    assert quarter(config_of("window 8")).model.sliding_window == 8


def test_chapter_forgets_what_is_no_size():
    model = chapter(config_of("mla")).model
    assert (model.d_model, model.n_heads, model.d_ff, model.attention_type) == (32, 2, 88, "mha")
    assert (model.use_rope, model.norm, model.latent) == (False, "layernorm", None)
    assert chapter(config_of("kernel")).to_dict() == chapter(config_of("qk-norm")).to_dict()


@pytest.mark.parametrize("shrink", ["quarter", "chapter"])
def test_two_heads_are_none(shrink):
    with pytest.raises(ConfigError, match=r"model\.n_heads: got 0"):
        SHRINKS[shrink](config_of("two heads of 64"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_what_no_quarter_of_heads_can_be_of_has_notes(name):
    notes = create_small_variant(config_of(name), FACTOR).notes
    assert bool(notes) == (name in ("mqa", "two heads of 64", "wide")), notes


def test_training_is_the_same():
    for shrink in SHRINKS.values():
        assert shrink(config_of("gqa")).training.to_dict() == config_of("gqa").training.to_dict()
