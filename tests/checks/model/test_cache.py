"""Caches: what goes wrong while decoding is caught and placed, sound caches of many kinds stay silent."""

import pytest
import torch
from torch import nn

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec
from tests.zoo.cache import Fused, Rolling
from tests.zoo.gpt import GPT, Encoder, Placed, gpt, placed, spec_of, windowed

CHECKS = ["cache_decoding", "cache_chunks", "cache_independence", "cache_padding", "cache_limit"]
WAY = (6, *(1,) * 6)


class AllAtZero(Placed):
    def place(self, input_ids, past, keep, documents):
        return super().place(input_ids, 0, keep, documents)


class SeesAhead(Fused):
    """Several tokens after a cache see each other."""

    def fused(self, q, k, v, visible):
        if q.shape[2] == k.shape[2]:
            return super().fused(q, k, v, visible)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class CountedByTheModel(Placed):
    def place(self, input_ids, past, keep, documents):
        past = self.counted if past else 0
        self.counted = past + input_ids.shape[1]
        return super().place(input_ids, past, keep, documents)


class SharedPosition(Placed):
    def place(self, input_ids, past, keep, documents):
        return super().place(input_ids, past, None if past else keep, documents)


@torch.no_grad()
def gaps(spec, way=WAY):
    """How far each position is from the whole, over the spread, in float64."""
    model, ids = spec.create().eval().double(), spec.batch(2, sum(way))
    whole, cache, end, parts = spec.logits(model, ids), None, 0, []
    for size in way:
        output, cache = spec.decode(model, ids[:, end : end + size], cache)
        parts.append(output.logits)
        end += size
    gap = (torch.cat(parts, dim=1) - whole).abs().amax(dim=(0, 2))
    return (gap / (whole - whole[:1, :1]).abs().max()).tolist()


def rolling():
    return spec_of(Rolling, masked=None, padding_sides=())


@pytest.mark.parametrize("make", [gpt, placed, windowed, rolling, lambda: spec_of(Fused)])
@pytest.mark.parametrize("check", CHECKS[:3])
def test_sound(subjects, make, check):
    assert max(gaps(make())) < 1e-12
    result = subjects.ask(make(), check)
    assert result.status == "passed"
    assert result.value <= result.limit


@pytest.mark.parametrize("make", [gpt, placed, windowed])
def test_sound_beside_padding(subjects, make):
    assert subjects.ask(make(), "cache_padding").status == "passed"


@pytest.mark.parametrize("name", ["rack", "window_rack", "grouped_rack", "llama", "gpt2", "x_decoder"])
@pytest.mark.parametrize("check", CHECKS)
def test_of_others(subjects, name, check):
    result = subjects.ask(getattr(subjects, name), check)
    reasons = {
        "cache_chunks": "12 tokens" if name != "x_decoder" else "outputs",
        "cache_padding": "needs decode: (model, inputs, cache, keep)",
        "cache_limit": "needs max_length",
    }
    if result.status == "not applicable":
        assert reasons[check] in result.meaning, result
        assert check == "cache_limit" or name == "x_decoder"
    else:
        assert result.status == "passed", result


def test_positions_that_stay_at_zero(subjects):
    gap = gaps(spec_of(AllAtZero))
    assert max(gap[:6]) < 1e-12 < 1e-3 < min(gap[6:])
    result = subjects.ask(spec_of(AllAtZero), "cache_decoding")
    assert (result.status, result.limit) == ("failed", 1e-6)
    assert result.value >= max(gap) * 0.99
    assert result.where in (
        "from position 6 on, in parts of 6, 1, 1, 1, ... (7 parts)",
        "from position 1 on, in parts of 1, 1, 1, 1",
    )


def test_parts_that_see_ahead(subjects):
    assert max(gaps(spec_of(SeesAhead))) < 1e-12
    assert max(gaps(spec_of(SeesAhead), (6, 6))) > 1e-3
    assert subjects.ask(spec_of(SeesAhead), "cache_decoding").status == "passed"
    result = subjects.ask(spec_of(SeesAhead), "cache_chunks")
    assert result.status == "failed"
    assert result.where.startswith("from position ")


def test_parts_that_are_refused(subjects):
    class OneByOne(GPT):
        def forward(self, input_ids, cache=None, **rest):
            if cache is not None and input_ids.shape[1] > 1:
                raise NotImplementedError("one token at a time")
            return super().forward(input_ids, cache=cache, **rest)

    assert subjects.ask(spec_of(OneByOne), "cache_decoding").status == "passed"
    result = subjects.ask(spec_of(OneByOne), "cache_chunks")
    assert result.status == "not applicable"
    assert "NotImplementedError: one token at a time" in result.meaning


def test_memory_that_is_too_small_for_parts_is_no_answer():
    class Full(GPT):
        def forward(self, input_ids, cache=None, **rest):
            if cache is not None and input_ids.shape[1] > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(input_ids, cache=cache, **rest)

    (result,) = check_model(spec_of(Full), checks=["cache_chunks"])
    assert (result.status, result.meaning) == ("error", "OutOfMemoryError: CUDA out of memory")


def test_outputs_of_the_last_token_alone_are_no_parts(subjects):
    class LastOnly(GPT):
        def forward(self, input_ids, cache=None, **rest):
            output = super().forward(input_ids, cache=cache, **rest)
            if cache is not None:
                output.logits = output.logits[:, -1:]
            return output

    result = subjects.ask(spec_of(LastOnly), "cache_chunks")
    assert result.status == "not applicable"
    assert "6 tokens at once gave 1 outputs" in result.meaning


class Recurrent(nn.Module):
    """A running state; where several tokens come it starts anew."""

    restarts = True

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.recurrence = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 31)

    def forward(self, ids, state=None):
        if state is not None and ids.shape[1] > 1 and self.restarts:
            state = None
        x, state = self.recurrence(self.embedding(ids), state)
        return self.head(x), state


class Continues(Recurrent):
    restarts = False


def recurrent_spec(build):
    return ModelSpec.of(build, decode=lambda model, ids, state: model(ids, state))


def test_state_that_starts_anew_is_no_certain_defect(subjects):
    assert subjects.ask(recurrent_spec(Continues), "cache_chunks").status == "passed"
    result = subjects.ask(recurrent_spec(Recurrent), "cache_chunks")
    assert (result.status, result.limit) == ("warned", 1e-6)
    assert result.value > 1e-3
    assert subjects.ask(recurrent_spec(Recurrent), "cache_decoding").status == "passed"


def test_choice_between_equals_is_no_certain_defect(subjects):
    class Sparse(GPT):
        """Sees the three best; those below zero are equally good."""

        def softmax(self, scores):
            hidden = scores.isneginf()
            chosen = scores.relu().masked_fill(hidden, -torch.inf).topk(min(3, scores.shape[-1]), dim=-1)
            keep = torch.zeros_like(hidden).scatter(-1, chosen.indices, True)
            return super().softmax(scores.masked_fill(~keep, -torch.inf))

    assert max(gaps(spec_of(Sparse))) > 1e-3
    result = subjects.ask(spec_of(Sparse), "cache_decoding")
    assert result.status == "warned"
    assert "equal scores" in result.advice


def test_lengths_that_differ_are_not_blamed_on_the_cache(subjects):
    class Scaled(GPT):
        def embed(self, input_ids):
            return super().embed(input_ids) * (1 + 0.1 * input_ids.shape[1])

    result = subjects.ask(spec_of(Scaled), "cache_decoding")
    assert result.status == "not applicable"
    assert "causality" in result.meaning


def test_sequences_that_share_a_counter(subjects):
    assert max(gaps(spec_of(CountedByTheModel))) < 1e-12
    assert subjects.ask(spec_of(CountedByTheModel), "cache_decoding").status == "passed"
    result = subjects.ask(spec_of(CountedByTheModel), "cache_independence")
    assert (result.status, result.limit) == ("failed", 1e-8)
    assert "counter" in result.advice


def test_cache_inside_the_model(subjects):
    class Inside(GPT):
        def step(self, ids, count):
            self.kept = None if not count else self.kept
            output = self(ids, cache=self.kept, use_cache=True)
            self.kept = output.cache
            return output, count + ids.shape[1]

    spec = spec_of(Inside, decode=lambda model, ids, count: model.step(ids, count or 0))
    assert subjects.ask(spec, "cache_decoding").status == "passed"
    result = subjects.ask(spec, "cache_independence")
    assert result.status == "not applicable"
    assert "in itself" in result.meaning


def test_padded_prompts_that_share_a_position(subjects):
    assert subjects.ask(spec_of(SharedPosition), "cache_decoding").status == "passed"
    result = subjects.ask(spec_of(SharedPosition), "cache_padding")
    assert (result.status, result.limit) == ("failed", 1e-6)
    assert result.where.startswith(("row 1 (padded by 3)", "row 2 (padded by 8)"))
    assert result.where.endswith("new token 0")


def test_padded_prompts_that_are_wrong_at_once(subjects):
    class Ignored(GPT):
        def visible(self, T, past, keep, documents):
            return super().visible(T, past, None, documents)

    assert "in the prompt" in subjects.ask(spec_of(Ignored), "cache_padding").where


@pytest.mark.parametrize("limit", [8, 64])
def test_longest_sequence(subjects, limit):
    class Clamped(Placed):
        def place(self, input_ids, past, keep, documents):
            positions = super().place(input_ids, past, keep, documents)
            return positions.clamp(max=limit - 2) if past else positions

    class Wrapped(Placed):
        """Right up to the limit, and on from the beginning after it."""

        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(limit, self.width)

        def place(self, input_ids, past, keep, documents):
            positions = super().place(input_ids, past, keep, documents)
            return positions % limit if past else positions

    class Exact(Placed):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(limit, self.width)

    class Early(Placed):
        def place(self, input_ids, past, keep, documents):
            if past >= limit - 1:
                raise ValueError("the cache is full")
            return super().place(input_ids, past, keep, documents)

    def ask(build):
        return subjects.ask(spec_of(build, max_length=limit), "cache_limit")

    assert (ask(Exact).status, ask(Exact).meaning[:21]) == ("passed", "beyond it: IndexError")
    assert ask(GPT).meaning == "beyond it, as the whole sequence does"
    result = ask(Clamped)
    assert (result.status, result.where) == ("failed", f"around max_length={limit}")
    result = ask(Wrapped)
    assert (result.status, result.where) == ("failed", f"beyond max_length={limit}")
    assert "IndexError" in result.meaning
    result = ask(Early)
    assert (result.status, result.where) == ("warned", f"within max_length={limit}")
    assert "the cache is full" in result.meaning


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "spec, reason",
    [
        (spec_of(decode=None), "needs decode"),
        (spec_of(Encoder, causal=False), "causal=True"),
        (spec_of(causal=None), "causal=True"),
        (spec_of(seq_len=2), "at least 3 positions"),
    ],
)
def test_what_cannot_be_asked(subjects, check, spec, reason):
    result = subjects.ask(spec, check)
    assert result.status == "not applicable"
    assert reason in result.meaning


def test_generating_model_without_a_cache_warns(subjects):
    class Generating(GPT):
        def forward(self, input_ids):
            return super().forward(input_ids)

        def generate(self, input_ids, count):
            raise NotImplementedError

    spec = ModelSpec.of(Generating)
    results = {check: subjects.ask(spec, check) for check in CHECKS}
    assert {check for check in CHECKS if results[check].status == "warned"} == {"cache_decoding"}
    assert "generate()" in results["cache_decoding"].meaning
    assert "decode=None" in results["cache_decoding"].advice
    assert "(see cache_decoding)" in results["cache_chunks"].meaning
    declared = ModelSpec.of(Generating, decode=None)
    assert subjects.ask(declared, "cache_decoding").status == "not applicable"


def test_what_single_checks_need(subjects):
    without = spec_of(decode=lambda model, ids, cache: spec_of().decode(model, ids, cache))
    assert "keep" in subjects.ask(without, "cache_padding").meaning
    assert "'left'" in subjects.ask(spec_of(padding_sides=("right",)), "cache_padding").meaning
    assert "needs max_length" in subjects.ask(spec_of(), "cache_limit").meaning
    assert "this one is 4096" in subjects.ask(spec_of(max_length=4096), "cache_limit").meaning


def test_a_window_is_rolled_over(subjects):
    """The sequence is longer than the window, or nothing would be forgotten."""

    class Short(Rolling):
        window, kept = 15, 13

    spec = spec_of(Short, masked=None, padding_sides=())
    assert max(gaps(spec)) < 1e-12
    assert subjects.ask(spec, "cache_decoding").status == "failed"
