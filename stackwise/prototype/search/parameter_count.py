"""Number of parameters of a Rack in closed form, before it is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stackwise.config import LatentConfig, ModelConfig

__all__ = ["count_of", "parameter_count"]


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of a Rack with this configuration. A tied weight counts once.

    It is equal to `Rack.get_parameter_count` of the built Rack. For the plain types, with width C, vocabulary
    V, L blocks, H heads of size D, K key/value heads, and width F of the feed-forward network, it is V C + L
    (2 C (H + K) D + 3 C F + 2 C) + C. A separate head adds V C.
    """
    return count_of(model.to_dict())


def count_of(model: Mapping[str, Any]) -> int:
    """Return the same number from plain values of a valid `ModelConfig`, in a hundredth of the time."""
    width, depth = model["d_model"], model["architecture"]
    ends = model["vocab_size"] * width * (1 if model["tie_embeddings"] else 2) + width
    attention = _latent_attention(model) if model["attention_type"] == "mla" else _attention(model)
    block = attention + 3 * width * model["d_ff"] + 2 * width
    return int(ends + depth["n_stacks"] * depth["blocks_per_stack"] * block)


def _attention(model: Mapping[str, Any]) -> int:
    width, heads = model["d_model"], model["n_heads"]
    kv_heads = 1 if model["attention_type"] == "mqa" else model["n_kv_heads"] or heads
    size = model["head_dim"] or width // heads
    found = 2 * width * (heads + kv_heads) * size
    if model["qkv_bias"]:
        found += (heads + 2 * kv_heads) * size
    if model["qk_norm"] is not None:
        found += 2 * size if model["qk_norm"] == "head" else (heads + kv_heads) * size
    return int(found)


def _latent_attention(model: Mapping[str, Any]) -> int:
    latent = LatentConfig().to_dict() | (model["latent"] or {})
    width, heads, rank = model["d_model"], model["n_heads"], latent["kv_lora_rank"]
    rope_dim, q_rank = latent["qk_rope_head_dim"], latent["q_lora_rank"]
    queries = heads * (latent["qk_nope_head_dim"] + rope_dim)
    found = width * queries if q_rank is None else q_rank * (width + queries + 1)
    found += width * (rank + rope_dim) + rank
    found += rank * heads * (latent["qk_nope_head_dim"] + latent["v_head_dim"])
    return int(found + heads * latent["v_head_dim"] * width)
