"""A language model: what it can do is tried, and memory that is too small for a trial is no answer."""

import pytest
import torch

from stackwise.model import create_simple_rack
from stackwise.quality import LanguageModel

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["cuda", "cpu"])
def test_memory_for_fewer_logits(error, subjects):
    model, ids = LanguageModel(subjects.Keeping(error)), torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(type(error)) as raised:
        model.logits(ids, first=2)
    assert raised.value is error


def test_fewer_logits_that_are_refused_are_cut_off(subjects):
    model = LanguageModel(subjects.Keeping(ValueError("all of them")))
    ids = torch.zeros(1, 5, dtype=torch.long)
    assert model.logits(ids, first=2).shape == (1, 3, 31)


def test_a_compiled_model_is_asked_for_fewer_logits(subjects):
    llama = subjects.llama()
    asked = []
    llama.lm_head.register_forward_hook(lambda module, inputs, output: asked.append(output.shape[1]))
    model = LanguageModel(torch.compile(llama, backend="eager"))
    model.logits(torch.zeros(1, 6, dtype=torch.long), first=4)
    assert asked[-1] == 2


def full_for(n, error):
    """A model that keeps a cache, and raises for `n` sequences at once."""
    rack = create_simple_rack(2, 1, d_model=32, d_ff=64, n_heads=4, vocab_size=61)
    model = LanguageModel(rack)

    def look(_, inputs):
        if len(inputs[0]) == n:
            raise error

    rack.register_forward_pre_hook(look)
    return model


@pytest.mark.parametrize("error", NO_MEMORY, ids=["cuda", "cpu"])
def test_memory_for_rows_of_a_cache(error):
    for n, what in ((3, "cache_rows"), (2, "keeps_cache")):
        model = full_for(n, error)
        with pytest.raises(type(error)) as raised:
            getattr(model, what)
        assert raised.value is error


def test_a_cache_that_cannot_be_taken_apart_is_not_used():
    model = full_for(3, ValueError("two at most"))
    assert model.cache_rows is None
    assert model.reuse_note == "its cache is not used: ValueError: two at most"
    assert model.keeps_cache  # for what is written, whose rows need not be taken


def test_a_cache_behind_which_nothing_can_be_read_is_not_kept():
    model = full_for(2, ValueError("one at most"))
    assert not model.keeps_cache and model.cache_rows is None
    assert model.reuse_note == "its cache is not used: ValueError: one at most"


class Shifted(torch.nn.Module):
    """Logits of a Rack, and what is added to them."""

    def __init__(self, added):
        super().__init__()
        torch.manual_seed(0)
        self.rack = create_simple_rack(2, 1, d_model=32, d_ff=64, n_heads=4, vocab_size=61, max_seq_len=64)
        self.added = added

    def forward(self, ids):
        return self.rack(ids) + self.added


def test_a_model_that_gives_no_numbers_is_refused_as_such():
    with pytest.raises(ValueError, match="Shifted: outputs: got NaN; allowed: logits"):
        LanguageModel(Shifted(float("nan")))


def test_an_id_that_is_never_written_may_have_a_logit_of_minus_infinity():
    never = torch.zeros(61)
    never[60] = -float("inf")
    model = LanguageModel(Shifted(never))
    assert model.logits(torch.zeros(1, 3, dtype=torch.long))[0, 0, 60] == -float("inf")


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [([5, 6], 7, {5, 6}), (5, 7, {5}), (None, 7, {7}), (None, None, set())],
)
def test_what_ends_a_text(generation, config, ends):
    model = Shifted(0.0)
    model.generation_config = type("Config", (), {"eos_token_id": generation})()
    model.config = type("Config", (), {"eos_token_id": config})()
    assert LanguageModel(model).eos_token_ids == ends
