"""Rotary: frequencies of queries and keys, measured from outside and compared with the claim."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from stackwise.checks import check_model
from stackwise.checks.probe.rotation import rotation_of
from stackwise.subject.facts import Facts
from stackwise.subject.rotary import RotaryClaim
from stackwise.subject.spec import ModelSpec
from tests.zoo.facts import (
    Partial,
    Rotating,
    Scaled,
    of,
    rotary_is_missing_in_a_layer,
    rotary_keys_backwards,
    rotary_keys_missing_in_a_layer,
    rotary_part_is_ignored,
    rotary_scaling_is_ignored,
)
from tests.zoo.gpt import GPT, Placed, spec_of


def ask(spec):
    [result] = check_model(spec, checks=["rotary_frequencies"])
    return result


def rotated(vector, frequencies, layout, n_positions=13):
    """Return a vector (D,) rotated at each position (T, D), in the layout "halves" or "pairs"."""
    one, two = vector.chunk(2) if layout == "halves" else (vector[::2], vector[1::2])
    angles = torch.arange(n_positions)[:, None] * frequencies
    x = torch.complex(one, two) * torch.polar(torch.ones_like(angles), angles)
    parts = (x.real, x.imag)
    return torch.cat(parts, dim=-1) if layout == "halves" else torch.stack(parts, dim=-1).flatten(1)


@pytest.mark.parametrize("layout", ["halves", "pairs"])
@pytest.mark.parametrize("theta", [100.0, 1e4, 1e6])
def test_frequencies_are_measured_in_any_layout(layout, theta):
    generator = torch.Generator().manual_seed(0)
    frequencies = RotaryClaim(theta).frequencies(32)
    vectors = rotated(torch.randn(32, generator=generator, dtype=torch.float64), frequencies, layout)
    still = torch.randn(8, generator=generator, dtype=torch.float64).expand(13, 8)

    found = rotation_of(torch.cat((still, vectors), dim=-1)[None])

    assert found.is_pure and found.head_dim == 40
    torch.testing.assert_close(found.frequencies, frequencies, rtol=1e-6, atol=0.0)


def test_factors_of_longrope_are_not_measured_in_a_longer_context():
    claim = RotaryClaim(kind="longrope", factor=4.0, original_length=8, factors=(2.0,) * 4)

    assert ask(replace(of(Rotating), rotary=claim)).status == "not applicable"
    assert ask(replace(of(Rotating), rotary=replace(claim, original_length=32))).status == "failed"


def test_positions_that_are_added_are_no_rotation():
    generator = torch.Generator().manual_seed(0)

    found = rotation_of(torch.randn(1, 13, 8, generator=generator))

    assert not found.is_pure


def test_equal_vectors_are_not_rotated():
    assert not len(rotation_of(torch.ones(1, 13, 8)).frequencies)


@pytest.mark.parametrize("build", [Rotating, Scaled, Partial])
def test_claimed_frequencies_pass(build):
    result = ask(of(build))

    assert result.status == "passed"
    assert result.meaning == f"2 of 2 layers; {build.claim}."


def test_other_frequencies_fail():
    result = ask(rotary_scaling_is_ignored())

    assert (result.status, result.where) == ("failed", "queries of attention 1 of 2")
    assert "is claimed (theta 500000, llama3 scaling by 8)" in result.meaning


def test_other_part_of_a_head_fails():
    D = GPT.width // GPT.n_heads
    result = ask(rotary_part_is_ignored())

    assert result.status == "failed"
    assert result.meaning.startswith(
        f"{D} of the {D} elements of a head are rotated, and {D // 2} are claimed"
    )


def test_each_layer_has_one_of_several_claims():
    other = RotaryClaim(theta=1e6)

    assert ask(ModelSpec.of(Rotating, rotary=(other, RotaryClaim()))).status == "passed"
    assert ask(ModelSpec.of(Rotating, rotary=other)).status == "failed"
    assert spec_of(Rotating, rotary=other).rotary == (other,)


@pytest.mark.parametrize("build", [GPT, Placed])
def test_model_without_a_claim_is_not_compared(build):
    result = ask(spec_of(build))

    assert result.meaning == "needs ModelSpec.rotary, or a configuration that states it"


def test_model_without_rotation_is_not_compared():
    result = ask(spec_of(Placed, max_length=64, rotary=(RotaryClaim(),)))

    assert result.meaning == "needs a layer that rotates queries and keys, and changes nothing else"


class Unrotated(Rotating):
    """The result of the rotation is not used."""

    def rotate(self, x, positions):
        super().rotate(x, positions)
        return x


def test_rotation_that_is_never_applied_fails():
    result = ask(of(Unrotated))

    assert (result.status, result.where) == ("failed", "all 2 layers")
    assert result.meaning == "No layer rotates queries and keys by their positions."


@pytest.mark.parametrize("claim", [10000.0, None, (None,)])
def test_claim_that_is_no_rotary_is_refused(claim):
    with pytest.raises(ValueError, match="rotary: got"):
        ModelSpec.of(Rotating, rotary=claim)


def test_keys_in_the_opposite_direction_fail():
    result = ask(rotary_keys_backwards())

    assert (result.status, result.where) == ("failed", "keys of attention 1 of 2")
    assert result.meaning.startswith("Keys are rotated in the opposite direction of queries")


def test_keys_without_rotation_fail():
    class Mutant(Rotating):
        def rotate(self, x, positions):
            return super().rotate(x, positions) if x.shape[1] == self.n_heads else x

    result = ask(of(Mutant))

    assert (result.status, result.where) == ("failed", "attention 1 of 2")


@pytest.mark.parametrize("build", [rotary_is_missing_in_a_layer, rotary_keys_missing_in_a_layer])
def test_layer_without_rotation_fails_unless_declared(build):
    result = ask(build())

    assert (result.status, result.where) == ("failed", "attention 2 of 2")
    assert result.meaning.startswith("Queries or keys do not depend on the position")

    result = ask(replace(build(), rotary=(RotaryClaim(), None)))

    assert (result.status, result.meaning) == ("passed", "1 of 2 layers; theta 10000.")


class Latent(nn.Module):
    """Two layers whose scores are the sum of a product that is rotated and one that is not."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 32), nn.Linear(32, 17)
        self.layers = nn.ModuleList(nn.Linear(32, 5 * 8) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        hidden = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        angles = torch.arange(ids.shape[1])[:, None] * RotaryClaim().frequencies(8)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            q, k, rotated_q, rotated_k, v = layer(x).chunk(5, dim=-1)
            rotated_q, rotated_k = (
                torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
                for one, two in (rotated_q.chunk(2, dim=-1), rotated_k.chunk(2, dim=-1))
            )
            scores = rotated_q @ rotated_k.mT + q @ k.mT
            y = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
            x = x + nn.functional.pad(y, (0, 24))
        return self.head(x)


def test_sum_of_two_products_is_one_layer():
    result = ask(ModelSpec.of(Latent, rotary=RotaryClaim()))

    assert (result.status, result.meaning) == ("passed", "2 of 2 layers; theta 10000.")


def test_linear_attention_without_rotation_passes():
    class Hybrid(Rotating):
        def softmax(self, scores):
            self.n_calls = getattr(self, "n_calls", 0) + 1
            return scores.softmax(dim=-1) if self.n_calls % 2 else scores.masked_fill(scores.isinf(), 0.0)

        def rotate(self, x, positions):
            self.n_rotations = getattr(self, "n_rotations", 0) + 1
            return super().rotate(x, positions) if self.n_rotations % 4 in (1, 2) else x

    assert ask(of(Hybrid)).status == "passed"


TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])  # eager computes the softmax in float32
def test_layers_without_rotation_in_a_configuration_pass(attention):
    transformers = pytest.importorskip("transformers")
    config = transformers.SmolLM3Config(
        vocab_size=17, pad_token_id=0, num_hidden_layers=2, no_rope_layers=[1, 0], **TINY
    )
    result = ask(
        ModelSpec.of(
            lambda: transformers.SmolLM3ForCausalLM._from_config(config, attn_implementation=attention)
        )
    )

    assert result.status == "passed"
    assert result.meaning.startswith("1 of 2 layers")


def test_claim_of_each_type_of_layer():
    transformers = pytest.importorskip("transformers")
    types = ["sliding_attention", "full_attention"]

    def build(*, is_swapped=False):
        model = transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(vocab_size=17, num_hidden_layers=2, layer_types=types, **TINY)
        )
        if is_swapped:
            stated = model.config.rope_parameters
            model.config.rope_parameters = dict(zip(types, (stated[types[1]], stated[types[0]]), strict=True))
        return model

    result = ask(ModelSpec.of(lambda: build(is_swapped=True)))

    assert ask(ModelSpec.of(build)).status == "passed"
    assert (result.status, result.where) == ("failed", "queries of attention 1 of 2")


def test_configuration_of_transformers_is_the_claim():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=17, max_position_embeddings=32, **sizes)
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}
    spec = ModelSpec.of(config)

    assert spec.rotary == (RotaryClaim(theta=5e4, dim=16, kind="linear", factor=2.0),)
    assert ask(spec).status == "passed"


def test_model_that_ignores_its_configuration_fails():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

    def build():
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=17, max_position_embeddings=32, **sizes)
        )
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}
        return model

    result = ask(ModelSpec.of(build))

    assert result.status == "failed"
    assert "theta 500000" in result.meaning


class Grouped(nn.Module):
    """Attention in one tensor for all heads, with an interleaved layout."""

    def __init__(self):
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(17, 32), nn.Linear(32, 96)
        self.head = nn.Linear(32, 17)

    def forward(self, ids):
        q, k, v = (
            x.unflatten(-1, (4, 8)).transpose(1, 2) for x in self.qkv(self.embedding(ids)).chunk(3, -1)
        )
        angles = torch.arange(ids.shape[1])[:, None] * RotaryClaim(theta=1000.0).frequencies(8)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.promote_types(q.dtype, torch.complex64))
        q, k = (
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for x in (q, k)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(y.transpose(1, 2).flatten(-2))


def test_interleaved_complex_rotation():
    assert ask(ModelSpec.of(Grouped, rotary=RotaryClaim(theta=1000.0))).status == "passed"
    assert ask(ModelSpec.of(Grouped, rotary=RotaryClaim(theta=1010.0))).status == "failed"


def test_other_layout_fails():
    assert ask(ModelSpec.of(Grouped, rotary=RotaryClaim(1000.0, layout="interleaved"))).status == "passed"

    result = ask(ModelSpec.of(Grouped, rotary=RotaryClaim(1000.0, layout="halves")))

    assert result.status == "failed"
    assert result.meaning.startswith("The pairs are interleaved, and halves pairs are claimed")


def test_rotated_values_fail():
    class WithValues(Rotating):
        def split(self, x):
            x = super().split(x)
            self.n_splits = getattr(self, "n_splits", 0) + 1
            positions = torch.arange(x.shape[2]).expand(len(x), -1)
            return x if self.n_splits % 3 else super().rotate(x, positions)

    result = ask(of(WithValues))

    assert (result.status, result.where) == ("failed", "values of attention 1 of 2")


def test_attention_factor_is_part_of_the_scores():
    class Scaled(Rotating):
        def rotate(self, x, positions):
            return 1.2 * super().rotate(x, positions)

    def status(factor):
        rotary = RotaryClaim(attention_factor=factor)
        spec = ModelSpec.of(Scaled, rotary=rotary, facts=Facts(attention_scale=8**-0.5))
        [result] = check_model(spec, checks=["claimed_attention_scale"])
        return result.status

    assert status(1.2) == "passed"
    assert status(1.0) == status(1.44) == "failed"


def test_attention_factor_without_a_scale_is_noted():
    claim = replace(RotaryClaim(), attention_factor=1.5)
    result = ask(replace(of(Rotating), rotary=(claim,)))
    assert (result.status, "The attention factor is not measured" in result.meaning) == ("passed", True)


class Exchanged(nn.Module):
    """Rotary module that returns sin and cos in place of cos and sin."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)[::-1]


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_direction_of_the_rotation_is_that_of_the_configuration(is_exchanged):
    def build():
        config = LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        model = LlamaForCausalLM(config)
        if is_exchanged:
            model.model.rotary_emb = Exchanged(model.model.rotary_emb)
        return model

    result = ask(ModelSpec.of(build))
    assert result.status == ("failed" if is_exchanged else "passed"), result
    assert ("opposite direction" in result.meaning) == is_exchanged
