"""The closed form counts what a built Rack has."""

import pytest
import torch

from stackwise.config import StackWiseConfig
from stackwise.model import create_rack_from_config
from stackwise.prototype.search.parameter_count import parameter_count

BASE = {
    "vocab_size": 17,
    "d_model": 24,
    "d_ff": 40,
    "n_heads": 4,
    "n_kv_heads": 2,
    "architecture": {"n_stacks": 2, "blocks_per_stack": 3},
}
LATENT = {
    "kv_lora_rank": 7,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
KINDS = {
    "gqa": {},
    "untied": {"tie_embeddings": False},
    "layernorm": {"norm": "layernorm"},
    "post": {"norm_position": "post"},
    "mha": {"attention_type": "mha", "n_kv_heads": None},
    "mqa": {"attention_type": "mqa", "n_kv_heads": None},
    "head_dim": {"head_dim": 10},
    "qkv_bias": {"qkv_bias": True},
    "qk_norm of heads": {"qk_norm": "head"},
    "qk_norm of width": {"qk_norm": "width", "qkv_bias": True, "head_dim": 8},
    "kernel": {"attention_type": "kernel", "kernel": {"n_features": 16}},
    "latent": {"attention_type": "mla", "n_kv_heads": None, "latent": LATENT},
    "latent of queries": {
        "attention_type": "mla",
        "n_kv_heads": None,
        "latent": LATENT | {"q_lora_rank": 9},
    },
    "windows": {"sliding_window": [4, None]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_is_that_of_the_rack(kind):
    config = StackWiseConfig.from_dict({"model": BASE | KINDS[kind]})
    with torch.device("meta"):
        rack = create_rack_from_config(config)
    assert parameter_count(config.model) == rack.get_parameter_count()


def test_default_latent():
    config = StackWiseConfig.from_dict(
        {"model": BASE | {"attention_type": "mla", "n_kv_heads": None, "latent": {}, "d_model": 32}}
    )
    with torch.device("meta"):
        rack = create_rack_from_config(config)
    assert parameter_count(config.model) == rack.get_parameter_count()
