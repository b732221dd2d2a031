"""A Llama of the same size: counted by building it."""

import pytest
from torch import nn

from stackwise.benchmark.llama import LlamaSize, llama_baseline, llama_size
from stackwise.model import create_simple_rack
from stackwise.spec import ModelSpec


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
