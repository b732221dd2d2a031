"""Widening: wider versions of an architecture by the rules of muP."""

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
    """Return the configuration with `factor` times the width, by more heads of the same size.

    `d_model`, `n_heads`, `n_kv_heads`, the ranks of latents and `d_ff` grow by the same factor (Yang et al.
    2022, arXiv:2203.03466, section 4). `embedding_max_norm` grows with the initial length of a row, which is
    the square root of the factor if entries have the same initial size at all widths, as in muP. The size of
    a head and all other settings are unchanged, including `mup_base_width`. The one key/value head of `mqa`
    stays one.

    Args:
        config: configuration. It is not changed.
        factor: width factor, at least 1.

    Raises:
        ValueError: `factor` is below 1.
    """
    check_sizes(factor=factor)
    model = config.model
    kv = model.n_kv_heads
    return _changed(
        config,
        d_model=factor * model.d_model,
        n_heads=factor * model.n_heads,
        n_kv_heads=kv if kv is None or model.attention_type == "mqa" else factor * kv,
        d_ff=factor * model.d_ff,
        latent=scaled_latent(model, {key: factor * rank for key, rank in _ranks(model).items()}),
    )


def as_mup(config: StackWiseConfig, base_width: int) -> StackWiseConfig:
    """Return the architecture in the maximal update parametrization with the base width `base_width`.

    The ratio of `embedding_max_norm` to the initial length of a row is unchanged.

    Raises:
        ValueError: the base would have a fraction of a head, key/value head or rank.
    """
    check_sizes(base_width=base_width)
    made = _changed(config, initialization="mup", mup_base_width=base_width)
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
    """Return the architecture in the standard parametrization: `initialization="normal"` instead of "mup".

    `embedding_max_norm` is scaled as in `as_mup`.
    """
    if config.model.initialization != "mup":
        return config
    return _changed(config, initialization="normal", mup_base_width=None)


def growing_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the sizes that grow with the width in muP, in addition to `d_model` and `d_ff`, by key."""
    sizes = {"n_heads": model.n_heads}
    if model.attention_type != "mla":
        sizes["n_kv_heads"] = n_kv_heads_of(model)
    return sizes | _ranks(model)


def whole_base(model: ModelConfig) -> tuple[str, int] | None:
    """Return the first size that is not an integer in the base of a `mup` model. None: all are integers."""
    base = model.mup_base_width
    assert base is not None, "asked of mup alone"
    return next((item for item in growing_sizes(model).items() if base * item[1] % model.d_model), None)


def n_kv_heads_of(model: ModelConfig) -> int:
    """Return the number of key/value heads. Each head of `mla` computes its own from the latent."""
    return 1 if model.attention_type == "mqa" else model.n_kv_heads or model.n_heads


def scaled_bound(model: ModelConfig, changed: Mapping[str, Any]) -> float | None:
    """Return `embedding_max_norm` for changed keys, with the same ratio to the initial length of a row."""
    if model.embedding_max_norm is None:
        return None
    return model.embedding_max_norm * (_row_length(changed) / _row_length(model.to_dict()))


def scaled_latent(model: ModelConfig, ranks: dict[str, int]) -> dict[str, int | None] | None:
    """Return the section `latent` with these ranks. A section of defaults is omitted."""
    if ranks == _ranks(model):
        return None if model.latent is None else model.latent.to_dict()
    return {**(model.latent or LatentConfig()).to_dict(), **ranks}


def _changed(config: StackWiseConfig, **keys: Any) -> StackWiseConfig:
    """Return the configuration with other keys of the model, and `embedding_max_norm` scaled with them."""
    changed = config.to_dict()
    changed["model"] |= keys
    changed["model"]["embedding_max_norm"] = scaled_bound(config.model, changed["model"])
    return StackWiseConfig.from_dict(changed)


def _row_length(model: Mapping[str, Any]) -> float:
    """Return the root mean square of the initial length of an embedding row."""
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
