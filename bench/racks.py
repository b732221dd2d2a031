"""The Racks of our throughput suites: each in a size for two CPU cores and in one for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from bench.peer_models import Shape
from stackwise import ModelSpec, create_simple_rack

SMALL = Shape(384, 6, 6, 2, 1024)
LARGE = Shape(2048, 16, 16, 4, 5632, vocab_size=32000)

# That MFU and MBU are parts of: of a CPU nothing is published.
PEAK = "published" if torch.cuda.is_available() else "measured"

# What each kind of attention is to a Rack; of grouped queries the shape says how many groups.
ATTENTION: dict[str, dict[str, Any]] = {
    "mha": {"attention_type": "mha"},
    "gqa": {"attention_type": "gqa"},
    "mqa": {"attention_type": "mqa"},
    "mla": {"attention_type": "mla"},
    "window": {"attention_type": "gqa", "sliding_window": 256},
    "favor": {"attention_type": "kernel", "kernel": {"feature_map": "favor", "n_features": 64}},
    "elu": {"attention_type": "kernel", "kernel": {"feature_map": "elu"}},
}


def rack_of(shape: Shape, attention: str = "gqa", **options: Any) -> ModelSpec:
    """A Rack of such a shape; `options` are keys of ModelConfig."""
    kind = ATTENTION[attention]
    groups = {"n_kv_heads": shape.n_kv_heads} if kind["attention_type"] == "gqa" else {}

    def build() -> Any:
        return create_simple_rack(
            1,
            shape.n_layers,
            d_model=shape.d_model,
            d_ff=shape.d_ff,
            n_heads=shape.n_heads,
            vocab_size=shape.vocab_size,
            **{**groups, **kind, **options},
        )

    return ModelSpec.of(build, name=f"rack-{attention}")


def sizes(small: list[dict[str, int]], large: list[dict[str, int]]) -> list[ParameterSet]:
    """(shape, size) parameters of a test; the large shape is for `--gpu` alone."""

    def parameter(shape: Shape, name: str, size: dict[str, int], **options: Any) -> ParameterSet:
        told = "-".join(f"{key}{value}" for key, value in size.items())
        return pytest.param(shape, size, id=f"{name}-{told}", **options)

    return [
        *(parameter(SMALL, "small", size) for size in small),
        *(parameter(LARGE, "large", size, marks=pytest.mark.gpu) for size in large),
    ]
