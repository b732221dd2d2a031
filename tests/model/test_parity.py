"""Attention against transformers' own modules with the same weights, for each family whose attention differs.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

from inspect import signature

import numpy as np
import pytest
import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from stackwise.config import BlockConfig
from stackwise.model.attention import Attention
from stackwise.model.block import Block
from stackwise.model.cache import RackCache
from stackwise.model.layout import Layout

B, T = 2, 23
# Rows padded on the left and on the right.
KEEP = torch.stack([torch.arange(T) >= 6, torch.arange(T) < T - 4])


def random_sizes(seed):
    rng = np.random.default_rng(seed)
    n_kv_heads = int(rng.integers(1, 4))
    n_heads = n_kv_heads * int(rng.integers(1, 4))
    return {
        "hidden_size": n_heads * int(rng.integers(2, 6)),
        "intermediate_size": int(rng.integers(5, 30)),
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": 2 * int(rng.integers(1, 7)),
        "num_hidden_layers": 2,
        "vocab_size": 11,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rng.choice([50.0, 10_000.0, 5e5]))},
        "attn_implementation": "eager",
        "pad_token_id": None,
    }


def config_of(module, name, seed, **options):
    return getattr(module, f"{name}Config")(**{**random_sizes(seed), **options})


def randomized(module):
    """Weights such that softmax prefers some keys clearly, and no norm is the identity."""
    for name, weight in module.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
        else:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
    return module.eval()


def keys_of(config, **options):
    kv = config.num_key_value_heads
    return {
        "d_model": config.hidden_size,
        "d_ff": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": kv,
        "attention_type": "gqa",
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope_theta": config.rope_parameters["rope_theta"],
        "norm_eps": config.rms_norm_eps,
        **options,
    }


def copy_attention(ours, theirs):
    """Every weight of theirs, q, k and v as one."""
    state = dict(theirs.state_dict())
    for kind in ("weight", "bias"):
        if f"q_proj.{kind}" in state:
            state[f"qkv.{kind}"] = torch.cat([state.pop(f"{name}_proj.{kind}") for name in "qkv"])
    state["out.weight"] = state.pop("o_proj.weight")
    ours.load_state_dict(state)


def inputs(module, name, config, keep_BT=None, window=None):
    """Hidden states, and what transformers' attention wants beside them."""
    x_BTC = torch.randn(B, T, config.hidden_size)
    make_mask = create_causal_mask if window is None else create_sliding_window_causal_mask
    cache = "cache" if "cache" in signature(make_mask).parameters else "past_key_values"
    mask = make_mask(config=config, inputs_embeds=x_BTC, attention_mask=keep_BT, **{cache: None})
    positions = torch.arange(T).expand(B, T) if keep_BT is None else (keep_BT.cumsum(1) - 1).clamp(min=0)
    rotated = getattr(module, f"{name}RotaryEmbedding")(config)(x_BTC, positions)
    return x_BTC, {"position_embeddings": rotated, "attention_mask": mask}


def cached(attention, x_BTC, keep_BT, sizes):
    new_cache = attention.new_cache(B, T, x_BTC.dtype, x_BTC.device)
    cache = RackCache([[new_cache]], B, T, x_BTC.device)
    outputs = []
    for size in sizes:
        part = slice(cache.length, cache.length + size)
        layout = cache.layout(x_BTC[:, part], None if keep_BT is None else keep_BT[:, part])
        outputs.append(attention(x_BTC[:, part], layout, new_cache))
        cache.advance(size)
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def check_equal(module, name, config, *, keep_BT=None, window=None, **options):
    """Ours and theirs, whole and through a cache."""
    layer_type = "full_attention" if window is None else "sliding_attention"
    layer = (getattr(config, "layer_types", None) or [layer_type]).index(layer_type)
    theirs = randomized(getattr(module, f"{name}Attention")(config, layer_idx=layer))
    ours = Attention(BlockConfig.from_dict(keys_of(config, sliding_window=window, **options))).eval()
    copy_attention(ours, theirs)
    x_BTC, beside = inputs(module, name, config, keep_BT, window)
    expected, _ = theirs(x_BTC, **beside)
    real = torch.ones(B, T, dtype=torch.bool) if keep_BT is None else keep_BT
    limit = 1e-5 * expected[real].abs().max()
    assert (ours(x_BTC, Layout(x_BTC, keep_BT)) - expected)[real].abs().max() < limit
    for sizes in ([1] * T, [9, 1, 1, 12]):
        assert (cached(ours, x_BTC, keep_BT, sizes) - expected)[real].abs().max() < limit


PADDED = pytest.mark.parametrize("keep_BT", [None, KEEP], ids=["whole", "padded"])
SEEDED = pytest.mark.parametrize("seed", range(3))


@SEEDED
@PADDED
def test_llama(seed, keep_BT):
    check_equal(llama, "Llama", config_of(llama, "Llama", seed), keep_BT=keep_BT)


@SEEDED
def test_llama_with_scaled_positions(seed):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    theta = random_sizes(seed)["rope_parameters"]["rope_theta"]
    config = config_of(llama, "Llama", seed, rope_parameters={**scaling, "rope_theta": theta})
    check_equal(llama, "Llama", config, rope_scaling=scaling)


@pytest.mark.parametrize("seed", [0, 1])
@PADDED
@pytest.mark.parametrize("window", [1, 2, 5, T, T + 7])
def test_mistral_with_a_window(seed, keep_BT, window):
    config = config_of(mistral, "Mistral", seed, sliding_window=window)
    check_equal(mistral, "Mistral", config, keep_BT=keep_BT, window=window)


@SEEDED
@PADDED
def test_qwen3_with_normalised_heads(seed, keep_BT):
    config = config_of(qwen3, "Qwen3", seed)
    check_equal(qwen3, "Qwen3", config, keep_BT=keep_BT, qk_norm="head")


@SEEDED
@PADDED
def test_qwen2_with_biases(seed, keep_BT):
    config = config_of(qwen2, "Qwen2", seed)
    check_equal(qwen2, "Qwen2", config, keep_BT=keep_BT, qkv_bias=True)


@SEEDED
@PADDED
def test_olmo2_with_normalised_widths(seed, keep_BT):
    config = config_of(olmo2, "Olmo2", seed)
    check_equal(olmo2, "Olmo2", config, keep_BT=keep_BT, qk_norm="width")


@SEEDED
@PADDED
@torch.no_grad()
def test_olmo2_layer_with_norms_behind(seed, keep_BT):
    config = config_of(olmo2, "Olmo2", seed)
    theirs = randomized(olmo2.Olmo2DecoderLayer(config, layer_idx=0))
    ours = Block(**keys_of(config, qk_norm="width", norm_position="post")).eval()
    copy_attention(ours.attention, theirs.self_attn)
    ours.attention_norm.load_state_dict(theirs.post_attention_layernorm.state_dict())
    ours.feedforward_norm.load_state_dict(theirs.post_feedforward_layernorm.state_dict())
    for name in ("gate", "up", "down"):
        getattr(ours.feedforward, name).weight.copy_(getattr(theirs.mlp, f"{name}_proj").weight)
    x_BTC, beside = inputs(olmo2, "Olmo2", config, keep_BT)
    expected = theirs(x_BTC, **beside)
    real = torch.ones(B, T, dtype=torch.bool) if keep_BT is None else keep_BT
    error = (ours(x_BTC, layout=Layout(x_BTC, keep_BT)) - expected)[real].abs().max()
    assert error < 1e-5 * expected[real].abs().max()


@SEEDED
@PADDED
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_gemma2_with_soft_caps(seed, keep_BT, window, softcap):
    # Its scale is a key of its own; ours is that of the head.
    config = config_of(gemma2, "Gemma2", seed, attn_logit_softcapping=softcap, sliding_window=window or 4096)
    config.query_pre_attn_scalar = config.head_dim
    check_equal(gemma2, "Gemma2", config, keep_BT=keep_BT, window=window, softcap=softcap)


@SEEDED
@torch.no_grad()
def test_gemma2_with_a_scale_of_its_own(seed):
    # The scale belongs to the queries, so it can be had in their weights.
    config = config_of(gemma2, "Gemma2", seed, attn_logit_softcapping=2.0, query_pre_attn_scalar=3)
    theirs = randomized(gemma2.Gemma2Attention(config, layer_idx=1))
    ours = Attention(BlockConfig.from_dict(keys_of(config, softcap=2.0))).eval()
    copy_attention(ours, theirs)
    ours.qkv.weight[: config.num_attention_heads * config.head_dim] *= (config.head_dim / 3) ** 0.5
    x_BTC, beside = inputs(gemma2, "Gemma2", config)
    expected, _ = theirs(x_BTC, **beside)
    assert (ours(x_BTC, Layout(x_BTC)) - expected).abs().max() < 1e-5 * expected.abs().max()
