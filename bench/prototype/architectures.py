"""Architectures: Racks of about one size that differ in what an architecture is chosen for."""

from __future__ import annotations

from typing import Any

from stackwise import StackWiseConfig

__all__ = ["ARCHITECTURES", "BASE", "architecture_config"]

BASE = "gqa"

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 128,
    "d_ff": 352,
    "n_heads": 8,
    "n_kv_heads": 4,
    "attention_type": "gqa",
    "architecture": {"n_stacks": 2, "blocks_per_stack": 4},
}
_MHA: dict[str, Any] = {"attention_type": "mha", "n_kv_heads": None}
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}

# Name: what of the base is another. Several change the amount of computation, several only its kind. A
# quarter of their sizes is whole, or nearly; not so the heads of "mqa" and of "two heads of 64".
ARCHITECTURES: dict[str, dict[str, Any]] = {
    BASE: {},
    "mha": _MHA,
    "mqa": {"attention_type": "mqa", "n_kv_heads": None},
    "mla": {"attention_type": "mla", "n_kv_heads": None, "latent": _LATENT},
    "kernel": {"attention_type": "kernel", "kernel": {"feature_map": "elu"}},
    "four heads of 32": {**_MHA, "n_heads": 4},
    "two heads of 64": {**_MHA, "n_heads": 2},
    "window 8": {"sliding_window": 8},
    "window 8, every second": {"sliding_window": [8, None]},
    "qk-norm": {"qk_norm": "head"},
    "post-norm": {"norm_position": "post"},
    "no rope": {"use_rope": False},
    "untied": {"tie_embeddings": False},
    "d_ff / 4": {"d_ff": 88},
    "d_ff x 2": {"d_ff": 704},
    "deep": {"d_model": 96, "d_ff": 264, "architecture": {"n_stacks": 4, "blocks_per_stack": 4}},
    "wide": {"d_model": 160, "d_ff": 440, "architecture": {"n_stacks": 2, "blocks_per_stack": 3}},
}


def architecture_config(
    name: str, *, batch_size: int, seq_len: int, steps: int, learning_rate: float, seed: int
) -> StackWiseConfig:
    """One of `ARCHITECTURES` at its full size, to be trained on the documentation that every CPython carries.

    Args:
        name: of the architecture.
        batch_size: rows of a step.
        seq_len: T.
        steps: of the optimizer.
        learning_rate: at its peak.
        seed: of weights and of the order of batches.
    """
    return StackWiseConfig.from_dict(
        {
            "model": {**_BASE, **ARCHITECTURES[name]},
            "training": {
                "batch_size": batch_size,
                "seq_len": seq_len,
                "max_steps": steps,
                "precision": "fp32",
                "device": "cpu",
                "seed": seed,
                "log_interval": 100,
                "optimizer": {"lr": learning_rate},
            },
            "data": {"validation_fraction": 0.1},
        }
    )
