"""A Llama of the same size: counted by building it."""

import pytest
import torch
from torch import nn

from stackwise.benchmark.llama import LlamaSize, llama_baseline, llama_size
from stackwise.model import create_block_spec, create_rack_from_specs, create_simple_rack
from stackwise.subject.spec import ModelSpec


def count(model):
    return sum(p.numel() for p in model.parameters())


def rack(**changes):
    sizes = {"d_model": 64, "d_ff": 160, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 101}
    return create_simple_rack(1, 3, **sizes | changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": False}, {"d_ff": 333}, {"sliding_window": [8, None, None]}],
    ids=["tied", "untied", "odd", "a window here and there"],
)
def test_a_model_of_known_sizes(changes):
    spec = llama_baseline(lambda: rack(**changes))
    model, like = spec.create(), rack(**changes)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers) == (64, 3)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.vocab_size == spec.width == 101
    assert config.intermediate_size == changes.get("d_ff", 160)
    assert count(model) == count(like)


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_as_long_as_the_vocabulary_are_no_second_table(tied):
    sizes = {"d_ff": 64, "vocab_size": 64, "d_model": 64, "tie_embeddings": tied}
    assert llama_baseline(lambda: rack(**sizes)).create().config.tie_word_embeddings is tied


OTHER_LAYERS = {
    "softmax": {"n_kv_heads": 2, "attention_type": "gqa"},
    "latent": {
        "attention_type": "mla",
        "latent": {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    },
    "kernel": {"attention_type": "kernel", "kernel": {"n_features": 8}},
}


@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_one_layer_that_no_llama_has(kind):
    """Then the sizes are of the usual shape, with as many parameters."""
    blocks = [create_block_spec(64, 160, 4, **OTHER_LAYERS[each]) for each in ("softmax", kind)]
    stacks = [{"n_blocks": n, "block_spec": block} for n, block in zip((2, 1), blocks, strict=True)]
    model = create_rack_from_specs(101, 64, stacks)
    size = llama_size(model, vocab_size=101)
    same = (size.d_model, size.n_layers, size.n_heads, size.n_kv_heads) == (64, 3, 4, 2)
    assert same == (kind == "softmax")
    assert kind == "softmax" or size.n_kv_heads == size.n_heads
    assert abs(size.n_parameters - count(model)) <= 3 * size.d_model * size.n_layers / 2


class TestDtype:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32])
    def test_is_that_of_the_model(self, dtype):
        spec = llama_baseline(lambda: rack().to(dtype))
        model = spec.create()
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        # As transformers has it in any dtype: in bfloat16 positions would not be told apart.
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert spec.logits(model, spec.batch(1, 6)).dtype == dtype

    def test_is_that_of_most_weights(self):
        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(31, 64, dtype=torch.bfloat16)
                self.head = nn.Linear(64, 31, bias=False, dtype=torch.bfloat16)
                self.gain = nn.Parameter(torch.ones(64))
                self.scale = nn.Parameter(torch.ones(9000).to(torch.float8_e4m3fn), requires_grad=False)

            def forward(self, ids):
                return self.head((self.embedding(ids) * self.gain).bfloat16())

        spec = llama_baseline(Mixed)
        assert {p.dtype for p in spec.create().parameters()} == {torch.bfloat16}


def test_a_model_that_reads_ahead(subjects):
    """A Llama does not, which is told."""
    assert "causal, which" not in llama_baseline(subjects.grouped_rack).notes
    spec = llama_baseline(subjects.bidirectional_rack)
    assert spec.causal
    assert spec.notes.endswith("; it is causal, which bidirectional_rack is not")


@pytest.mark.parametrize("name", ["gru", "tiny", "x_decoder", "llama", "gpt2"])
def test_as_many_parameters(subjects, name):
    factory = getattr(subjects, name)
    spec = llama_baseline(factory, name="base")
    model = spec.create()
    # Half of what one more of the feed-forward part would add.
    step = 3 * model.config.hidden_size * model.config.num_hidden_layers / 2
    assert abs(count(model) - count(factory())) <= step
    assert spec.name == "base"
    assert spec.causal
    spec.logits(model, spec.batch(2, 6))


@pytest.mark.parametrize(
    "size", [LlamaSize(61, 48, 3, 4, 2, 77, tied) for tied in (True, False)], ids=["tied", "untied"]
)
def test_number_of_parameters(size):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=48,
            intermediate_size=77,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=size.tied,
        )
    )
    assert size.n_parameters == count(model)


def test_usual_shape_of_a_large_one():
    """Of 124M parameters GPT-2 has 12 layers of 768."""

    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(nn.Embedding(50257, 768, device="meta").weight)
            self.rest = nn.Parameter(nn.Embedding(85_000_000, 1, device="meta").weight)

    size = llama_size(Opaque(), vocab_size=50257)
    assert size.tied
    assert 640 <= size.d_model <= 896
    assert 10 <= size.n_layers <= 16
    assert size.n_parameters == pytest.approx(50257 * 768 + 85e6, rel=1e-3)


def test_too_small_for_any():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    with pytest.raises(ValueError, match="like: got '63 parameters'; allowed: at least"):
        llama_baseline(lambda: model)


def test_a_model_of_vectors(subjects):
    with pytest.raises(ValueError, match="like: got 'causal_encoder'; allowed: a model that takes tokens"):
        llama_baseline(ModelSpec.of(subjects.causal_encoder))
