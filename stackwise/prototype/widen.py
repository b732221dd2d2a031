"""Widening: an architecture so many times as wide, as the rules of muP say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from stackwise.config import LatentConfig, ModelConfig, StackWiseConfig
from stackwise.model.initialization import embedding_std
from stackwise.support.arguments import check_sizes, require

__all__ = [
    "Parametrization",
    "as_mup",
    "as_standard",
    "growing_sizes",
    "n_kv_heads_of",
    "scaled_bound",
    "scaled_latent",
    "whole_base",
    "widened",
]

Parametrization = Literal["mup", "standard"]


def widened(config: StackWiseConfig, factor: int) -> StackWiseConfig:
    """`factor` times the width, by more heads of the same size.

    `d_model`, `n_heads`, `n_kv_heads`, the ranks of latents and `d_ff` grow alike (Yang et al. 2022,
    arXiv:2203.03466, section 4), and `embedding_max_norm` as the length that a row starts with: with their
    square root where entries start alike at all widths, as with muP. The size of a head and all else stay,
    `mup_base_width` too. The one key/value head of `mqa` cannot grow along and stays one.

    Args:
        config: left as it is.
        factor: at least 1.

    Raises:
        ValueError: `factor` is below 1.
    """
    check_sizes(factor=factor)
    model = config.model
    changed = config.to_dict()
    kv = model.n_kv_heads
    changed["model"] |= {
        "d_model": factor * model.d_model,
        "n_heads": factor * model.n_heads,
        "n_kv_heads": kv if kv is None or model.attention_type == "mqa" else factor * kv,
        "d_ff": factor * model.d_ff,
        "latent": scaled_latent(model, {key: factor * rank for key, rank in _ranks(model).items()}),
    }
    changed["model"]["embedding_max_norm"] = scaled_bound(model, changed["model"])
    return StackWiseConfig.from_dict(changed)


def as_mup(config: StackWiseConfig, base_width: int) -> StackWiseConfig:
    """The same architecture in the maximal update parametrisation of a base `base_width` wide.

    `embedding_max_norm` is as many times the length that a row starts with as it was.

    Raises:
        ValueError: the base would have a part of a head, key/value head or rank.
    """
    check_sizes(base_width=base_width)
    changed = config.to_dict()
    changed["model"] |= {"initialization": "mup", "mup_base_width": base_width}
    changed["model"]["embedding_max_norm"] = scaled_bound(config.model, changed["model"])
    made = StackWiseConfig.from_dict(changed)
    misfit = whole_base(made.model)
    if misfit is not None:
        key, size = misfit
        require(
            False,
            "base_width",
            base_width,
            f"a width whose share of {key}={size} is whole; d_model={made.model.d_model} has all of it",
        )
    return made


def as_standard(config: StackWiseConfig) -> StackWiseConfig:
    """The same architecture in the standard parametrisation: `initialization="normal"` in place of "mup".

    `embedding_max_norm` as in `as_mup`.
    """
    if config.model.initialization != "mup":
        return config
    changed = config.to_dict()
    changed["model"] |= {"initialization": "normal", "mup_base_width": None}
    changed["model"]["embedding_max_norm"] = scaled_bound(config.model, changed["model"])
    return StackWiseConfig.from_dict(changed)


def growing_sizes(model: ModelConfig) -> dict[str, int]:
    """What grows with the width in a family of muP beside `d_model` and `d_ff`, by key."""
    sizes = {"n_heads": model.n_heads}
    if model.attention_type != "mla":
        sizes["n_kv_heads"] = n_kv_heads_of(model)
    return sizes | _ranks(model)


def whole_base(model: ModelConfig) -> tuple[str, int] | None:
    """The first size of which the base of a `mup` model would have a part; None: all are whole."""
    base = model.mup_base_width
    assert base is not None, "asked of mup alone"
    return next((item for item in growing_sizes(model).items() if base * item[1] % model.d_model), None)


def n_kv_heads_of(model: ModelConfig) -> int:
    """Key/value heads. Each head of `mla` makes its own of the latent."""
    return 1 if model.attention_type == "mqa" else model.n_kv_heads or model.n_heads


def scaled_bound(model: ModelConfig, changed: Mapping[str, Any]) -> float | None:
    """The key `embedding_max_norm` beside changed keys: as many times the length that a row starts with."""
    if model.embedding_max_norm is None:
        return None
    return model.embedding_max_norm * (_row_length(changed) / _row_length(model.to_dict()))


def scaled_latent(model: ModelConfig, ranks: dict[str, int]) -> dict[str, int | None] | None:
    """The section `latent` with these ranks; what is at its defaults stays unsaid."""
    if ranks == _ranks(model):
        return None if model.latent is None else model.latent.to_dict()
    return {**(model.latent or LatentConfig()).to_dict(), **ranks}


def _row_length(model: Mapping[str, Any]) -> float:
    """Root mean square of the length that a row of the embedding starts with."""
    std = embedding_std(
        model["vocab_size"],
        model["d_model"],
        tied=model["tie_embeddings"],
        kind=model["initialization"],
        base_width=model["mup_base_width"],
    )
    return std * math.sqrt(model["d_model"])


def _ranks(model: ModelConfig) -> dict[str, int]:
    if model.attention_type != "mla":
        return {}
    latent = model.latent or LatentConfig()
    ranks = {"kv_lora_rank": latent.kv_lora_rank}
    return ranks if latent.q_lora_rank is None else ranks | {"q_lora_rank": latent.q_lora_rank}
