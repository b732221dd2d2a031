"""Rotary: the frequencies of each scaling, compared with those of transformers."""

import pytest
import torch

from stackwise.subject.rotary import RotaryClaim, rotary_in

transformers = pytest.importorskip("transformers")
SCALINGS = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048},
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0, "original_max_position_embeddings": 2048}
    | {"attention_factor": 1.25},
    {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 2048}
    | {"short_factor": [1 + i / 8 for i in range(32)], "long_factor": [4.0] * 32},
    {"rope_type": "longrope", "rope_theta": 2e4, "original_max_position_embeddings": 2048, "factor": 16.0}
    | {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32},
]


def config_of(parameters, **given):
    return transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters=parameters,
        **given,
    )


@pytest.mark.parametrize(
    "parameters", SCALINGS, ids=lambda each: f"{each['rope_type']}-{each['rope_theta']:g}"
)
def test_frequencies_are_those_of_transformers(parameters):
    config = config_of(parameters)
    [claim] = rotary_in(config)
    model = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)

    torch.testing.assert_close(claim.frequencies(64).float(), model.inv_freq, rtol=1e-5, atol=0.0)
    assert (claim.attention_factor or 1.0) == pytest.approx(model.attention_scaling, rel=1e-9)


def test_part_of_a_head():
    claim = RotaryClaim(dim=16)

    torch.testing.assert_close(claim.frequencies(64), RotaryClaim().frequencies(16))


def test_types_of_layers_have_claims_of_their_own():
    config = transformers.Gemma3TextConfig(head_dim=16)

    assert {claim.theta for claim in rotary_in(config)} == {1e4, 1e6}


def test_layers_with_head_sizes_of_their_own():
    rotary = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        head_dim=8,
        global_head_dim=16,
        rope_parameters={"sliding_attention": rotary, "full_attention": rotary},
    )

    assert {claim.dim for claim in rotary_in(config)} == {8, 16}


@pytest.mark.parametrize("config", [None, object(), {"rope_parameters": {}}])
def test_no_configuration_is_no_claim(config):
    assert rotary_in(config) == ()


def test_unknown_scaling_is_no_claim():
    assert rotary_in(config_of({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"theta": 0.0}, "theta: got 0"),
        ({"kind": "ntk"}, "kind: got 'ntk'"),
        ({"dim": 7}, "dim: got 7"),
        ({"dim": 0}, "dim: got 0"),
        ({"dim": -2}, "dim: got -2"),
        ({"layout": ""}, "layout: got ''"),
        ({"layout": "pairs"}, "layout: got 'pairs'"),
        ({"factor": 2.0}, "factor: got 2.0"),
        ({"kind": "longrope"}, r"factors: got \(\)"),
        ({"factors": (1.0, 2.0)}, r"factors: got \(1.0, 2.0\)"),
        ({"kind": "longrope", "factors": (1.0, 0.0)}, "factors: got 0.0"),
        ({"theta": 1.0, "kind": "yarn"}, "theta: got 1.0"),
        ({"factor": float("inf")}, "factor: got inf"),
        ({"original_length": 0}, "original_length: got 0"),
    ],
)
def test_wrong_values_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        RotaryClaim(**given)


def test_text():
    assert str(RotaryClaim()) == "theta 10000"
    assert str(RotaryClaim(5e5, 64, "llama3", 8.0)) == "theta 500000, 64 elements, llama3 scaling by 8"
