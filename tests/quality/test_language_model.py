"""A language model: what it can do is tried, and memory that is too small for a trial is no answer."""

import pytest
import torch
from torch import nn

from stackwise.model import create_simple_rack
from stackwise.quality import LanguageModel

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


class Keeping(nn.Module):
    """Raises where it is asked for fewer logits."""

    def __init__(self, error):
        super().__init__()
        self.embedding, self.head, self.error = nn.Embedding(31, 8), nn.Linear(8, 31), error

    def forward(self, ids, logits_to_keep=0):
        if logits_to_keep:
            raise self.error
        return self.head(self.embedding(ids))


@pytest.mark.parametrize("error", NO_MEMORY, ids=["cuda", "cpu"])
def test_memory_for_fewer_logits(error):
    model, ids = LanguageModel(Keeping(error)), torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(type(error)) as raised:
        model.logits(ids, first=2)
    assert raised.value is error


def test_fewer_logits_that_are_refused_are_cut_off():
    model, ids = LanguageModel(Keeping(ValueError("all of them"))), torch.zeros(1, 5, dtype=torch.long)
    assert model.logits(ids, first=2).shape == (1, 3, 31)


def full_for_three(error):
    """A model that keeps a cache, and raises for three sequences at once."""
    rack = create_simple_rack(2, 1, d_model=32, d_ff=64, n_heads=4, vocab_size=61)
    model = LanguageModel(rack)

    def look(_, inputs):
        if len(inputs[0]) == 3:
            raise error

    rack.register_forward_pre_hook(look)
    return model


@pytest.mark.parametrize("error", NO_MEMORY, ids=["cuda", "cpu"])
def test_memory_for_rows_of_a_cache(error):
    model = full_for_three(error)
    with pytest.raises(type(error)) as raised:
        assert model.cache_rows
    assert raised.value is error


def test_a_cache_that_cannot_be_taken_apart_is_not_used():
    model = full_for_three(ValueError("two at most"))
    assert model.cache_rows is None
    assert model.reuse_note == "its cache is not used: ValueError: two at most"
