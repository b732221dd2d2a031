"""Rows of caches: taken by trial, of whatever models keep."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from stackwise.model import create_simple_rack
from stackwise.quality import LanguageModel, Scorer, TokenRequest
from stackwise.quality.cache_rows import CacheRows


@dataclass
class Kept:
    """Rows in the second dimension, their number, a model, and what has no rows."""

    rows: int
    keys: torch.Tensor
    model: nn.Module
    layers: list = field(default_factory=list)
    length: torch.Tensor = field(default_factory=lambda: torch.tensor(3))
    steps: int = 7


def kept(rows, model=None):
    model = model or nn.Linear(1, 1)
    keys = torch.arange(4.0 * rows).view(4, rows)
    return Kept(rows, keys, model, [{"sums": (torch.arange(rows),)}])


def test_rows_are_taken_and_the_rest_is_copied():
    taking, before = CacheRows(kept(2), kept(3)), kept(5)
    taken = taking.take(before, torch.tensor([4, 0, 4]))
    assert taken.keys.tolist() == before.keys[:, [4, 0, 4]].tolist()
    assert taken.layers[0]["sums"][0].tolist() == [4, 0, 4]
    assert (taken.rows, taken.steps, taken.length.item()) == (3, 7, 3)
    assert taken.model is before.model
    taken.keys.zero_(), taken.length.zero_(), taken.layers.clear()
    assert before.keys.equal(torch.arange(20.0).view(4, 5)) and before.length == 3 and before.layers
    assert before.rows == 5


@pytest.mark.parametrize(
    "two, three, message",
    [
        (5, 6, "no tensor with a row"),
        (None, None, "no tensor with a row"),
        ([torch.zeros(2)], [torch.zeros(3), torch.zeros(3)], "differ in more than their rows"),
        ([torch.zeros(4, 8)], [torch.zeros(6, 8)], r"shape \(4, 8\) for two sequences, \(6, 8\) for three"),
        ([torch.zeros(2, 2)], [torch.zeros(3, 3)], r"shape \(2, 2\)"),
    ],
    ids=["count", "none", "parts", "heads in rows", "two dimensions"],
)
def test_what_has_no_rows(two, three, message):
    with pytest.raises(TypeError, match=message):
        CacheRows(two, three)


def families():
    from transformers import (
        FalconMambaConfig,
        GemmaConfig,
        GPT2Config,
        GPTNeoXConfig,
        MistralConfig,
        Qwen3Config,
    )

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    wide = {**size, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    yield "gpt2", GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64), True
    yield "neox", GPTNeoXConfig(**size, intermediate_size=64, max_position_embeddings=64), True
    yield "mistral, window", MistralConfig(**wide, sliding_window=6, max_position_embeddings=64), True
    yield "gemma", GemmaConfig(**wide, max_position_embeddings=64), True
    yield "qwen3", Qwen3Config(**wide, max_position_embeddings=64), True
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "state_size": 8}
    mamba = FalconMambaConfig(**small, time_step_rank=4)
    yield "mamba", mamba, None  # whether its state can be gone on from with several tokens is its own affair


@pytest.mark.slow
@pytest.mark.parametrize("index", range(6))
def test_models_of_transformers(index):
    from transformers import AutoModelForCausalLM

    name, config, reuses = list(families())[index]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(61, (30,), generator=generator).tolist()
    asked = [TokenRequest(tuple(context), (3, end, 5)) for end in range(4)]
    scorers = [Scorer(model, reuse=reuse) for reuse in (True, False)]
    one, two = (torch.tensor([s.log_probability for s in scorer.score_tokens(asked)]) for scorer in scorers)
    torch.testing.assert_close(one, two, rtol=0, atol=3e-5)
    if reuses is not None:
        assert (scorers[0].model.cache_rows is not None) == reuses, (name, scorers[0].model.reuse_note)


RACKS = {
    "grouped": {"n_kv_heads": 2},
    "window": {"sliding_window": 6},
    "latent": {"attention_type": "mla"},
    "kernel": {"attention_type": "kernel"},
}


@pytest.mark.parametrize("kind", RACKS)
def test_racks(kind):
    torch.manual_seed(0)
    rack = create_simple_rack(2, 1, d_model=32, d_ff=64, n_heads=4, vocab_size=61, **RACKS[kind])
    asked = [TokenRequest(tuple(range(30)), (3, end, 5)) for end in range(4)]
    scorers = [Scorer(rack, reuse=reuse) for reuse in (True, False)]
    one, two = (torch.tensor([s.log_probability for s in scorer.score_tokens(asked)]) for scorer in scorers)
    torch.testing.assert_close(one, two, rtol=0, atol=3e-5)
    assert scorers[0].model.cache_rows is not None, scorers[0].model.reuse_note


def test_a_model_with_few_positions_is_read_plainly():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    model.max_seq_len = 3
    assert LanguageModel(model).reuse_note == "the model keeps no cache"
    assert LanguageModel(model).max_length == 3
    assert LanguageModel(model, reuse=False).reuse_note == "not asked for"
