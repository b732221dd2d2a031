"""Caches: wrong ones fail, correct ones of many kinds pass, and the limit of a cache is checked."""

import pytest
import torch
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec
from tests.zoo.cache import (
    Fused,
    Rolling,
    padded_rows_share_a_position,
    parts_without_causality,
    position_is_counted_by_the_model,
    position_is_not_moved_on,
    rolling,
)
from tests.zoo.gpt import GPT, Encoder, Placed, placed, spec_of

CHECKS = ("cache_decoding", "cache_independence", "cache_call", "cache_limit")


@pytest.fixture(autouse=True)
def _few_variations(only_variations):
    """Explore the variations that matter here: less than a second."""
    only_variations({"cache_parts", "turns", "padded_rows", "later_tokens", "history"})


def answers(model, *checks):
    return {result.check: result for result in check_model(model, checks=checks)}


class OneByOne(GPT):
    def forward(self, input_ids, cache=None, **rest):
        if cache is not None and input_ids.shape[1] > 1:
            raise NotImplementedError("one token at a time")
        return super().forward(input_ids, cache=cache, **rest)


class LastOutputOnly(GPT):
    """Several tokens after a cache give the output of the last one."""

    def forward(self, input_ids, cache=None, **rest):
        output = super().forward(input_ids, cache=cache, **rest)
        if cache is not None:
            output.logits = output.logits[:, -1:]
        return output


class Recurrent(nn.Module):
    """Recurrent state as the cache."""

    restarts = False

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.recurrence = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 31)

    def forward(self, ids, state=None):
        if self.restarts and ids.shape[1] > 1:
            state = None
        x, state = self.recurrence(self.embedding(ids), state)
        return self.head(x), state


class RecurrentPrompt(Recurrent):
    """Several tokens are always a prompt: the state restarts."""

    restarts = True


def recurrent(build=Recurrent):
    return ModelSpec.of(build, decode=lambda model, ids, state: model(ids, state))


HEALTHY = {
    "learned positions": placed,
    "rolling cache": rolling,
    "fused attention": lambda: spec_of(Fused),
    "single tokens only": lambda: spec_of(OneByOne),
    "last output only": lambda: spec_of(LastOutputOnly),
    "recurrent state": recurrent,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_cache_passes(name):
    results = answers(HEALTHY[name](), "cache_decoding", "cache_independence", "cache_call")
    assert {result.status for result in results.values()} == {"passed"}
    assert results["cache_decoding"].value <= results["cache_decoding"].limit


@pytest.mark.parametrize("name", ["window_rack", "llama", "gpt2", "x_decoder"])
def test_published_cache_passes(subjects, name):
    results = answers(getattr(subjects, name), "cache_decoding", "cache_independence", "cache_call")
    assert {result.status for result in results.values()} == {"passed"}


class WideWindowCut(Rolling):
    """Only a sequence beyond 15 positions shows that the cache is too short."""

    window, kept = 15, 13


def wide_window_cut():
    return spec_of(WideWindowCut, masked=None, padding_sides=())


# Model -> the checks that fail.
BUGS = {
    position_is_not_moved_on: ["cache_decoding"],
    parts_without_causality: ["cache_decoding"],
    wide_window_cut: ["cache_decoding"],
    position_is_counted_by_the_model: ["cache_independence"],
    padded_rows_share_a_position: ["padding_amount"],
}


@pytest.mark.parametrize("make", BUGS)
def test_wrong_cache_fails(make):
    results = answers(make(), "cache_decoding", "cache_independence", "padding_amount")
    assert sorted(check for check, result in results.items() if result.status == "failed") == BUGS[make]


class Sparse(GPT):
    """Attention to the three best scores. Scores below zero are equal."""

    def softmax(self, scores):
        hidden = scores.isneginf()
        chosen = scores.relu().masked_fill(hidden, -torch.inf).topk(min(3, scores.shape[-1]), dim=-1)
        keep = torch.zeros_like(hidden).scatter(-1, chosen.indices, True)
        return super().softmax(scores.masked_fill(~keep, -torch.inf))


def test_state_that_starts_again_for_several_tokens_fails():
    results = answers(recurrent(RecurrentPrompt), "cache_decoding")
    assert results["cache_decoding"].status == "failed"


def test_order_of_equal_scores_warns():
    results = answers(spec_of(Sparse), "causality", "cache_decoding")
    assert "warned" in {result.status for result in results.values()}
    assert "failed" not in {result.status for result in results.values()}


def test_model_that_is_not_causal_is_no_defect_of_the_cache():
    class Scaled(GPT):
        def embed(self, input_ids):
            return super().embed(input_ids) * (1 + 0.1 * input_ids.shape[1])

    results = answers(spec_of(Scaled), "causality", "cache_decoding")
    assert results["causality"].status == "failed"
    assert results["cache_decoding"].status == "not applicable"
    assert "causality" in results["cache_decoding"].meaning


def test_out_of_memory_is_an_error():
    class Full(GPT):
        def forward(self, input_ids, cache=None, **rest):
            if cache is not None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(input_ids, cache=cache, **rest)

    result = answers(spec_of(Full), "cache_decoding")["cache_decoding"]
    assert (result.status, result.meaning) == ("error", "OutOfMemoryError: CUDA out of memory")


def test_cache_inside_the_model_is_decoded_but_not_in_turns():
    class Inside(GPT):
        def step(self, ids, count):
            self.kept = None if not count else self.kept
            output = self(ids, cache=self.kept, use_cache=True)
            self.kept = output.cache
            return output, count + ids.shape[1]

    spec = spec_of(Inside, decode=lambda model, ids, count: model.step(ids, count or 0))
    results = answers(spec, "cache_decoding", "cache_independence")
    assert results["cache_decoding"].status == "passed"
    assert results["cache_independence"].status == "not applicable"
    assert "in a module" in results["cache_independence"].meaning


LIMIT = 8


class TableOfPositions(Placed):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(LIMIT, self.width)


class Clamped(Placed):
    def place(self, input_ids, past, keep, documents):
        positions = super().place(input_ids, past, keep, documents)
        return positions.clamp(max=LIMIT - 2) if past else positions


class Wrapped(TableOfPositions):
    """Correct up to the limit, then from position 0 again."""

    def place(self, input_ids, past, keep, documents):
        positions = super().place(input_ids, past, keep, documents)
        return positions % LIMIT if past else positions


class FullEarly(Placed):
    error = IndexError

    def place(self, input_ids, past, keep, documents):
        if past >= LIMIT - 1:
            raise self.error("the cache is full")
        return super().place(input_ids, past, keep, documents)


class StatesItsLimit(FullEarly):
    error = ValueError


@pytest.mark.parametrize(
    "build, status, place, part",
    [
        (TableOfPositions, "passed", "", "beyond it: IndexError"),
        (GPT, "passed", "", "beyond it, as the whole sequence does"),
        (Clamped, "failed", "around max_length=8", "differ"),
        (Wrapped, "failed", "beyond max_length=8", "IndexError"),
        (FullEarly, "warned", "within max_length=8", "the cache is full"),
        (StatesItsLimit, "passed", "", "within max_length=8: ValueError: the cache is full"),
    ],
)
def test_limit_of_a_cache(subjects, build, status, place, part):
    result = subjects.ask(spec_of(build, max_length=LIMIT), "cache_limit")
    assert (result.status, result.where) == (status, place)
    assert part in result.meaning


@pytest.mark.parametrize(
    "spec, check, reason",
    [
        (spec_of(decode=None), CHECKS, "decode"),
        (spec_of(Encoder, causal=False), CHECKS, "causal"),
        (spec_of(causal=None), CHECKS, "causal"),
        (spec_of(), ["cache_limit"], "needs max_length"),
        (spec_of(max_length=4096), ["cache_limit"], "this one is 4096"),
    ],
    ids=["no decode", "encoder", "no claim", "no limit", "large limit"],
)
def test_check_of_a_cache_does_not_apply(spec, check, reason):
    for result in answers(spec, *check).values():
        assert result.status == "not applicable"
        assert reason in result.meaning


def test_cache_that_no_check_can_use_warns():
    class Generating(GPT):
        def forward(self, input_ids):
            return super().forward(input_ids)

        def generate(self, input_ids, count):
            raise NotImplementedError

    results = answers(ModelSpec.of(Generating), *CHECKS)
    assert [check for check, result in results.items() if result.status == "warned"] == ["cache_call"]
    assert "generate()" in results["cache_call"].meaning
    assert "decode=None" in results["cache_call"].advice
    declared = answers(ModelSpec.of(Generating, decode=None), "cache_call")
    assert declared["cache_call"].status == "not applicable"


class ShiftedState(nn.Module):
    """Mixes each token with the one before it. The state of a step has no axis for the token."""

    has_token_axis = False

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)

    def forward(self, input_ids, state=None, use_cache=False):
        x = self.embedding(input_ids)
        if state is not None and x.shape[1] == 1:
            before = state[:, None] if self.has_token_axis else state
        else:
            first = torch.zeros_like(x[:, :1]) if state is None else state[:, None]
            before = torch.cat([first, x[:, :-1]], dim=1)
        logits = self.head((x + 0.5 * before).tanh())
        return {"logits": logits, "state": x[:, -1]} if use_cache else {"logits": logits}


def test_cache_for_one_row_only():
    result = answers(ModelSpec.of(ShiftedState, causal=True), "cache_call")["cache_call"]
    assert result.status == "failed"
    assert "several rows give logits (2, 2, 31) for inputs (2, 1)" in result.meaning
    healthy = type("WithTokenAxis", (ShiftedState,), {"has_token_axis": True})
    assert answers(ModelSpec.of(healthy, causal=True), "cache_call")["cache_call"].status == "passed"


def test_cache_that_refuses_several_rows_does_not_fail():
    class Refuses(ShiftedState):
        def forward(self, input_ids, state=None, use_cache=False):
            if state is not None and len(input_ids) > 1:
                raise ValueError("one row only")
            return super().forward(input_ids, state, use_cache)

    result = answers(ModelSpec.of(Refuses, causal=True), "cache_call")["cache_call"]
    assert result.status == "warned"
