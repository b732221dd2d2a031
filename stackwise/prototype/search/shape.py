"""Shape: conversion of sampled values to sections of a configuration that meets all its rules.

Values that depend on other values are computed, not sampled: d_model = head_dim * n_heads, n_kv_heads from a
ratio that divides n_heads, d_ff from its ratio to d_model, Blocks over Stacks. Settings without effect are
reset to their defaults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from stackwise.config import ModelConfig, StackWiseConfig

__all__ = ["DEPENDENT_KEYS", "DERIVED_KEYS", "D_FF_MULTIPLE", "base_sizes", "shaped", "shaped_model"]

D_FF_MULTIPLE = 8  # suits hardware, and is small enough to preserve a ratio

DEPENDENT_KEYS = {
    "n_layers": "Blocks in all; as many Stacks as in the base, or the most below that divide it",
    "gqa_ratio": "query heads for each key/value head; the largest divisor of n_heads that is no larger",
    "d_ff_ratio": f"d_ff / d_model; d_ff is the multiple of {D_FF_MULTIPLE} that is nearest",
}
DERIVED_KEYS = {
    "model.d_model": "it is model.head_dim * model.n_heads; search those",
    "model.n_kv_heads": "it follows from gqa_ratio; search that",
}

# Keys of the model that have an effect only with some values of other keys. Otherwise they have their
# defaults.
_RULES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "latent": lambda model: model["attention_type"] == "mla",
    "kernel": lambda model: model["attention_type"] == "kernel",
    "qk_norm": lambda model: model["attention_type"] != "mla",
    "qkv_bias": lambda model: model["attention_type"] != "mla",
    "softcap": lambda model: model["attention_type"] != "kernel",
    "sliding_window": lambda model: model["attention_type"] != "kernel",
    "rope_scaling": lambda model: model["use_rope"],
    "mup_base_width": lambda model: model["initialization"] == "mup",
}


def base_sizes(config: StackWiseConfig) -> dict[str, Any]:
    """Return the values of the dependent keys in a configuration.

    Returns:
        `head_dim`, `n_heads`, `n_layers`, `d_ff_ratio`, and `gqa_ratio`, which is None if heads do not share
        keys and values.
    """
    model = config.model
    groups = model.n_heads // model.n_kv_heads if model.n_kv_heads else None
    return {
        "head_dim": model.head_dim or model.d_model // model.n_heads,
        "n_heads": model.n_heads,
        "n_layers": model.architecture.n_stacks * model.architecture.blocks_per_stack,
        "d_ff_ratio": model.d_ff / model.d_model,
        "gqa_ratio": model.n_heads if model.attention_type == "mqa" else groups,
    }


def shaped(base: StackWiseConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of the base with `values`, by dotted or dependent key.

    Dependent sizes are consistent for all values. A value that is invalid by itself, such as a learning rate
    of 0, is not corrected.
    """
    content = base.to_dict()
    _place_all(content, {key: value for key, value in values.items() if not _is_of_model(key)})
    content["model"] = shaped_model(content["model"], base_sizes(base), values)
    StackWiseConfig.put_away(content)
    return content


def shaped_model(
    base: Mapping[str, Any], sizes: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the section `model` of `shaped`.

    Args:
        base: section `model` of the base as plain values. It is not changed.
        sizes: result of `base_sizes`.
        values: values by key of the space.
    """
    model = copy.deepcopy(dict(base))
    own = {key.removeprefix("model."): value for key, value in values.items() if key.startswith("model.")}
    # Keys inside a section that is null are set after it is known which sections exist.
    waiting = {key: value for key, value in own.items() if _section_is_null(model, key.split("."))}
    _place_all(model, {key: value for key, value in own.items() if key not in waiting})
    _set_widths(model, base, sizes, values)
    _set_depth(model, values)
    _set_attention(model, sizes, values)
    for key, value in waiting.items():
        if key.split(".")[0] not in _RULES or _RULES[key.split(".")[0]](model):
            _place_all(model, {key: value})
    for key, holds in _RULES.items():
        if not holds(model):
            model[key] = ModelConfig.model_fields[key].get_default(call_default_factory=True)
    return model


def _set_widths(
    model: dict[str, Any], base: Mapping[str, Any], sizes: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    if {"model.n_heads", "model.head_dim"} & values.keys():
        head_dim = values.get("model.head_dim", sizes["head_dim"])
        model["d_model"], model["head_dim"] = head_dim * model["n_heads"], None
    if "model.d_ff" not in values and ("d_ff_ratio" in values or model["d_model"] != base["d_model"]):
        ratio = values.get("d_ff_ratio", sizes["d_ff_ratio"])
        steps = max(1, round(ratio * model["d_model"] / D_FF_MULTIPLE))
        model["d_ff"] = steps * D_FF_MULTIPLE


def _set_depth(model: dict[str, Any], values: Mapping[str, Any]) -> None:
    if "n_layers" in values:
        depth, wanted = values["n_layers"], model["architecture"]["n_stacks"]
        n_stacks = _largest_divisor(depth, wanted)
        model["architecture"] = {"n_stacks": n_stacks, "blocks_per_stack": depth // n_stacks}


def _set_attention(model: dict[str, Any], sizes: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    kind, n_heads = model["attention_type"], model["n_heads"]
    ratio = values.get("gqa_ratio", sizes["gqa_ratio"])
    model["n_kv_heads"] = None
    if kind in ("gqa", "kernel") and ratio is not None:
        model["n_kv_heads"] = n_heads // _largest_divisor(n_heads, ratio)
    if kind == "mla":
        size = model["head_dim"] or model["d_model"] // n_heads
        model["head_dim"] = None
        if model["latent"] is None:
            model["latent"] = _latent(size, model["d_model"])


def _latent(head_dim: int, d_model: int) -> dict[str, Any]:
    """Return the sizes of a latent in the proportions of DeepSeek-V2 (arXiv:2405.04434, section 2.1.4)."""
    rope_dim = max(2, head_dim // 4 * 2)
    return {
        "kv_lora_rank": min(4 * head_dim, d_model),
        "q_lora_rank": None,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": head_dim,
    }


def _largest_divisor(number: int, limit: int) -> int:
    return next(part for part in range(min(limit, number), 0, -1) if number % part == 0)


def _is_of_model(key: str) -> bool:
    return key.startswith("model.") or key in DEPENDENT_KEYS


def _section_is_null(content: Mapping[str, Any], path: list[str]) -> bool:
    inner: Any = content
    for part in path[:-1]:
        inner = inner[part]
        if inner is None:
            return True
    return False


def _place_all(content: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set values at their dotted keys. A section that is null starts with its defaults."""
    for key, value in values.items():
        inner, path = content, key.split(".")
        for part in path[:-1]:
            if inner[part] is None:
                inner[part] = {}
            inner = inner[part]
        inner[path[-1]] = copy.deepcopy(value)
