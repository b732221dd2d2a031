"""Shrinks: how a configuration is made small, by us and by those that we are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stackwise import StackWiseConfig
from stackwise.prototype import create_small_variant

__all__ = ["CHAPTER", "FACTOR", "OURS", "QUARTER", "SHRINKS", "chapter", "ours", "quarter"]

OURS, QUARTER, CHAPTER = "ours", "quarter", "chapter"
FACTOR = 4


def ours(config: StackWiseConfig) -> StackWiseConfig:
    """`create_small_variant` with a factor of 4: a quarter of the heads and of the blocks."""
    return create_small_variant(config, FACTOR).config


def quarter(config: StackWiseConfig) -> StackWiseConfig:
    """A quarter of every size: d_model // 4, n_heads // 4, d_ff // 4, n_layers // 4 but 2 at least.

    Key/value heads are divided as well, which is kinder than the recipe that says nothing of them, and all
    other keys stay as they are.

    Raises:
        ConfigError: what comes of it is no model, with zero heads for instance.
    """
    model = config.model
    changed = config.to_dict()
    changed["model"] |= {
        **_quartered(config),
        "n_kv_heads": None if model.n_kv_heads is None else model.n_kv_heads // 4,
    }
    return StackWiseConfig.from_dict(changed)


def chapter(config: StackWiseConfig) -> StackWiseConfig:
    """The same four sizes and nothing else: a plain pre-norm LayerNorm transformer with full attention.

    That is what the recipe builds of every configuration, since its small configuration has only these
    keys. Causal all the same, since without a mask the loss of the next token says nothing.

    Raises:
        ConfigError: as `quarter`.
    """
    changed = config.to_dict()
    changed["model"] = {
        **_quartered(config),
        "vocab_size": config.model.vocab_size,
        "attention_type": "mha",
        "n_kv_heads": None,
        "norm": "layernorm",
        "use_rope": False,
        "tie_embeddings": False,
    }
    return StackWiseConfig.from_dict(changed)


def _quartered(config: StackWiseConfig) -> dict[str, Any]:
    model = config.model
    n_layers = model.architecture.n_stacks * model.architecture.blocks_per_stack
    return {
        "d_model": model.d_model // 4,
        "n_heads": model.n_heads // 4,
        "d_ff": model.d_ff // 4,
        "architecture": {"n_stacks": 1, "blocks_per_stack": max(2, n_layers // 4)},
    }


SHRINKS: dict[str, Callable[[StackWiseConfig], StackWiseConfig]] = {
    OURS: ours,
    QUARTER: quarter,
    CHAPTER: chapter,
}
