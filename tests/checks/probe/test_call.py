"""Calls of a model without side effects: decoding, recurrent states, padding ids and errors."""

import types

import pytest
import torch
from torch import nn

from stackwise.checks.probe.call import (
    decoded,
    dtype_of,
    has_fixed_state,
    leaves_state,
    real_inputs,
    reason_of,
    refusals,
)
from stackwise.checks.subject import Subject
from stackwise.subject.spec import ModelSpec
from tests.zoo.cache import Rolling
from tests.zoo.gpt import GPT, spec_of


def subject_of(spec, seed=0):
    return Subject(spec, torch.device("cpu"), seed)


class Counting(GPT):
    """Counts its calls in a buffer, and drops out in every mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def embed(self, input_ids):
        self.calls += 1
        return nn.functional.dropout(super().embed(input_ids), 0.5, training=True)


def test_calls_can_be_repeated():
    spec = spec_of(Counting)
    subject, model = subject_of(spec), spec.create().eval()
    ids = spec.batch(2, 8)
    random = torch.get_rng_state()
    for ask in (
        lambda: subject.call(model, lambda: model(ids)),
        lambda: decoded(subject, model, ids, (4, 1, 3)),
    ):
        one = ask()
        assert torch.equal(one, ask())
        assert one.shape == (2, 8, 61)
        assert not one.requires_grad
    assert model.calls == 0
    assert torch.equal(random, torch.get_rng_state())


def test_decoding_with_fewer_outputs_than_tokens_is_refused():
    spec = spec_of(decode=lambda model, ids, cache: (model(ids).logits[:, -1:], None))
    with pytest.raises(ValueError, match="3 tokens at once gave 1 outputs"):
        decoded(subject_of(spec), spec.create(), spec.batch(1, 4), (1, 3))


def test_states_of_fixed_size():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.recurrence = nn.Embedding(31, 8), nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 31)

        def forward(self, ids, state=None):
            x, state = self.recurrence(self.embedding(ids), state)
            return self.head(x), state

    class Allocated(nn.Module):
        """Memory for 32 tokens, of which each writes its own place, and a counter."""

        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

        def forward(self, ids):
            return self.decode(ids, None)[0]

        def decode(self, ids, cache):
            held, counts = cache or (torch.zeros(len(ids), 32, 8), torch.zeros(len(ids), dtype=torch.long))
            start, end = int(counts.max()), int(counts.max()) + ids.shape[1]
            held[:, start:end] = self.embedding(ids)
            sums = held[:, :end].cumsum(dim=1)[:, start:]
            return self.head(sums), (held, counts + ids.shape[1])

    recurrent = ModelSpec.of(Recurrent, decode=lambda model, ids, state: model(ids, state))
    for spec, fixed in (
        (recurrent, True),
        (spec_of(), False),
        (spec_of(Rolling), True),
        (spec_of(decode=None), False),
        (ModelSpec.of(Allocated, decode=Allocated.decode), False),
    ):
        assert has_fixed_state(subject_of(spec), spec.batch(1, 8)) is fixed


def test_states_that_stay_in_the_model():
    class Keeps(GPT):
        def embed(self, input_ids):
            self.last = super().embed(input_ids)
            return self.last

    for build, leaves in ((Keeps, True), (GPT, False), (Counting, False)):
        assert leaves_state(subject_of(spec_of(build)), spec_of(build).batch(1, 8)) is leaves


@pytest.mark.parametrize("seed", range(4))
def test_inputs_without_padding_ids(seed):
    class Padded(GPT):
        vocab_size = 5

        def __init__(self):
            super().__init__()
            self.embedding.padding_idx = 2
            self.config = types.SimpleNamespace(pad_token_id=3)

    subject = subject_of(spec_of(Padded), seed)
    plain, real = subject.inputs(8, 16), real_inputs(subject, 8, 16)
    assert {2, 3} <= set(plain.unique().tolist())
    assert set(real.unique().tolist()) == {0, 1, 4}
    untouched = (plain != 2) & (plain != 3)
    assert torch.equal(plain[untouched], real[untouched])


def test_custom_batches_and_vectors_are_unchanged(subjects):
    brought = spec_of(make_batch=lambda rows, length, generator: torch.full((rows, length), 2))
    assert (real_inputs(subject_of(brought), 2, 4) == 2).all()
    vectors = subject_of(ModelSpec.of(subjects.encoder))
    assert torch.equal(real_inputs(vectors, 2, 4), vectors.inputs(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_is_that_of_the_first_floating_point_parameter(dtype):
    model = torch.nn.Linear(2, 2).to(dtype)
    model.weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    assert dtype_of(model) == dtype
    assert dtype_of(torch.nn.Identity()) == torch.float32


def test_reason_in_one_line():
    assert reason_of(ValueError("one\n  two")) == "ValueError: one two"
    assert len(reason_of(ValueError("x" * 1000))) < 200


def taken(error):
    """Return the error if `refusals()` catches it."""
    try:
        raise error
    except refusals() as refusal:
        return refusal


@pytest.mark.parametrize("error", [RuntimeError("no"), ValueError("no"), KeyError("no"), AssertionError()])
def test_errors_of_a_model_are_refusals(error):
    assert taken(error) is error


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory"), OSError("no")],
    ids=["cuda", "cpu", "of another kind"],
)
def test_out_of_memory_is_not_a_refusal(error):
    with pytest.raises(type(error)):
        taken(error)


def test_earlier_out_of_memory_does_not_count():
    error = ValueError("no")
    try:
        raise MemoryError
    except MemoryError:
        assert taken(error) is error
