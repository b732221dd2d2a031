"""Cached calls: a cache with any name and in any place is found by comparing logits."""

import types
from typing import NamedTuple

import pytest
import torch
from torch import nn

from stackwise.subject.cached_call import CachedCall, cache_tensors, find_cached_call, names_cache
from stackwise.subject.call_form import CallForm
from stackwise.subject.inference import logits_of
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT


class Layers:
    """Cache object with the keys and values of each layer."""

    def __init__(self, layers):
        self.layers = layers


class Output(NamedTuple):
    logits: torch.Tensor
    memory: object


class Core(GPT):
    """The clean GPT. Subclasses take and return its cache in other ways."""

    def run(self, ids, past=None):
        """Return logits and cache."""
        output = super().forward(ids, cache=past, use_cache=True)
        return output.logits, output.cache


class OtherName(Core):
    def forward(self, ids, store=None, use_cache=False):
        logits, cache = self.run(ids, store)
        return types.SimpleNamespace(logits=logits, store=cache if use_cache else None)


class OtherNameOnReturn(Core):
    def forward(self, ids, kv_before=None):
        logits, cache = self.run(ids, kv_before)
        return {"logits": logits, "kv_after": cache}


class InTuple(Core):
    def forward(self, ids, layers_before=None):
        return self.run(ids, layers_before)


class AsObject(Core):
    def forward(self, ids, memory=None):
        logits, cache = self.run(ids, None if memory is None else memory.layers)
        return Output(logits, Layers(cache))


class PositionalOnly(Core):
    def forward(self, ids, mask=None, past=None, /):
        return self.run(ids, past)


class KeywordOnly(Core):
    def forward(self, ids, *, past=None, return_past=False):
        logits, cache = self.run(ids, past)
        return (logits, cache) if return_past else logits


class AnyNames(Core):
    def forward(self, ids, *, z=None, emit=False):
        logits, cache = self.run(ids, z)
        return (logits, cache) if emit else logits


class Wrapped(Core):
    """The signature has no names."""

    def forward(self, ids, **options):
        output = super().forward(ids, **options)
        return {"logits": output.logits, "cache": output.cache}


class InBatch(Core):
    def forward(self, batch):
        logits, cache = self.run(batch["input_ids"], batch.get("kv"))
        return {"logits": logits, "kv": cache}


class MadeByMethod(Core):
    """The cache is changed in place and not returned."""

    def make_kv_cache(self, batch_size):
        return Layers([None] * batch_size)

    def forward(self, ids, kv=None):
        past = None if kv is None or kv.layers[0] is None else kv.layers
        logits, cache = self.run(ids, past)
        if kv is not None:
            kv.layers = cache
        return logits


class InsideAtPosition(Core):
    """Stores its cache in itself after `setup_caches`. The caller passes the positions."""

    kept = None

    def setup_caches(self, max_batch_size, max_seq_length):
        self.kept = [
            tuple(torch.zeros(max_batch_size, 2, max_seq_length, 8) for _ in range(2))
            for _ in range(self.n_layers)
        ]

    def forward(self, ids, input_pos=None):
        if input_pos is None or self.kept is None:
            return self.run(ids)[0]
        start = int(input_pos[0])
        past = [(k[:, :, :start], v[:, :, :start]) for k, v in self.kept] if start else None
        logits, cache = self.run(ids, past)
        for (k, v), (new_k, new_v) in zip(self.kept, cache, strict=True):
            k[:, :, : new_k.shape[2]], v[:, :, : new_v.shape[2]] = new_k, new_v
        return logits


class InsideAtStart(Core):
    """Stores its cache in itself, and clears it at position 0."""

    def forward(self, ids, start_pos=0):
        logits, self.kept = self.run(ids, self.kept if start_pos else None)
        return logits


class InsideUntilReset(Core):
    kept = None

    def reset_cache(self):
        self.kept = None

    def forward(self, ids, use_cache=False):
        logits, cache = self.run(ids, self.kept if use_cache else None)
        if use_cache:
            self.kept = cache
        return logits


class TakesPosition(Core):
    """Takes its cache and the position of the first new token."""

    offset = 0

    def positions(self, input_ids, past, keep, documents):
        return super().positions(input_ids, self.offset, keep, documents)

    def forward(self, ids, cache=None, start_pos=0):
        self.offset = start_pos
        return self.run(ids, cache)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)
        self.recurrence = nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids, hidden=None):
        x, hidden = self.recurrence(self.embedding(ids), hidden)
        return self.head(x), hidden


WITH_CACHE = {
    OtherName: "store= and use_cache=",
    OtherNameOnReturn: "kv_before=",
    InTuple: "layers_before=",
    AsObject: "memory=",
    PositionalOnly: "past=",
    KeywordOnly: "past= and return_past=",
    AnyNames: "z= and emit=",
    Wrapped: "cache= and use_cache=",
    InBatch: "kv= and use_cache=",
    MadeByMethod: "make_kv_cache() and kv=",
    InsideAtPosition: "setup_caches() and input_pos=",
    InsideAtStart: "start_pos=",
    InsideUntilReset: "reset_cache() and use_cache=",
    TakesPosition: "cache= and start_pos=",
    Recurrent: "hidden=",
}


@pytest.mark.parametrize("build", WITH_CACHE, ids=lambda build: build.__name__)
@torch.no_grad()
def test_cache_is_found(build):
    spec = ModelSpec.of(build)
    assert str(spec.decode) == WITH_CACHE[build]
    assert spec.cache_problem == ""
    model, ids = spec.create().eval(), spec.batch(2, 9, seed=5)
    for _ in range(2):  # the second sequence starts with an empty cache
        cache, outputs = None, []
        for part in torch.split(ids, [4, 1, 1, 1, 1, 1], dim=1):
            output, cache = spec.decode(model, part, cache)
            outputs.append(logits_of(output))
        torch.testing.assert_close(torch.cat(outputs, dim=1), spec.logits(spec.create().eval(), ids))


class NoCache(Core):
    def forward(self, ids):
        return self.run(ids)[0]


class Generating(NoCache):
    def generate(self, ids, count):
        raise NotImplementedError


class CannotGenerate(Generating):
    def can_generate(self):
        return False


class UnknownObject(Core):
    """Takes an object that neither its output nor a method of it provides."""

    def forward(self, ids, kv_cache=None):
        return self.run(ids, None if kv_cache is None else kv_cache.read())[0]


class Refusing(Generating):
    def forward(self, ids, past=None):
        if past is not None:
            raise NotImplementedError("not yet")
        return self.run(ids)


class BothWays(NoCache):
    """Returns a state and takes it, but the state is no cache."""

    def forward(self, ids, state=None):
        logits, _ = self.run(ids)
        return (logits if state is None else logits + state.mean()), logits.mean(dim=1)


@pytest.mark.parametrize(
    ("build", "signs", "reason"),
    [
        (NoCache, "", ""),
        (CannotGenerate, "", ""),
        (BothWays, "", ""),
        (Generating, "generate()", "forward has no parameter for one"),
        (
            UnknownObject,
            "kv_cache=",
            "no part of its output and no cache that its methods make could be passed back",
        ),
        (Refusing, "generate(), past=", "past=: NotImplementedError: not yet"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_missing_cache_has_a_reason(build, signs, reason):
    spec = ModelSpec.of(build)
    assert spec.decode is None
    wanted = f"the model has {signs}, but none of the tried calls continues from a cache: {reason}"
    assert spec.cache_problem == (wanted if signs else "")


def test_declared_absence_of_a_cache_is_no_problem():
    spec = ModelSpec.of(Generating, decode=None)
    assert (spec.decode, spec.cache_problem) == (None, "")


class Shifted(Core):
    def positions(self, input_ids, past, keep, documents):
        return super().positions(input_ids, max(0, past - 1), keep, documents)


class ShiftedCache(Shifted):
    def forward(self, ids, kv_store_cache=None):
        return self.run(ids, kv_store_cache)


class ShiftedBank(Shifted):
    def forward(self, ids, bank=None):
        return self.run(ids, bank)


class Uncounted(Core):
    """Takes positions, but does not count the cached tokens if they are missing."""

    def positions(self, *arguments):
        return super().positions(*arguments) if self.given is None else self.given

    def forward(self, ids, cache=None, position_ids=None):
        T = ids.shape[1]
        self.given = torch.arange(T).expand(len(ids), T) if position_ids is None else position_ids
        return self.run(ids, cache)


@pytest.mark.parametrize(
    ("build", "call", "problem", "check", "status"),
    [
        (ShiftedCache, "kv_store_cache=", "", "cache_decoding", "failed"),
        (ShiftedBank, "None", "calls with bank= give other logits than a full pass", "cache_call", "warned"),
        (Uncounted, "cache=", "", "cache_decoding", "failed"),
    ],
)
def test_cache_with_a_bug_is_reported(subjects, build, call, problem, check, status):
    spec = ModelSpec.of(build)
    assert (str(spec.decode), spec.cache_problem) == (call, problem)
    assert subjects.ask(spec, check).status == status


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("cache", True),
        ("past_key_values", True),
        ("layer_past", True),
        ("kv", True),
        ("kv_cache", True),
        ("use_cache", False),
        ("cache_position", False),
        ("state", False),
        ("backbone", False),
    ],
)
def test_name_of_a_cache_is_recognised(name, likely):
    assert names_cache(name) is likely


def test_call_that_returns_no_cache_is_refused():
    call = CachedCall(CallForm(), parameter="store", part="store")
    with pytest.raises(TypeError, match="store: the model returned no cache at 'store'"):
        call(OtherName(), torch.zeros(1, 2, dtype=torch.long), None)


class EmptyCache(nn.Module):
    """Returns a cache to which it adds nothing."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        logits = self.head(self.embedding(input_ids).cumsum(dim=1))
        return types.SimpleNamespace(logits=logits, past_key_values=types.SimpleNamespace(layers=[]))


@pytest.mark.parametrize("cache", [None, (), False])
def test_placeholder_of_a_cache_is_no_cache(cache):
    class Compatible(EmptyCache):
        def forward(self, input_ids, past_key_values=None, use_cache=False):
            return types.SimpleNamespace(logits=super().forward(input_ids).logits, past_key_values=cache)

    ids = torch.arange(16).view(2, 8)
    assert find_cached_call(Compatible().eval(), ids, CallForm()).call is None


def test_empty_cache_with_a_cache_name_is_returned_to_be_reported():
    ids = torch.arange(16).view(2, 8)
    found = find_cached_call(EmptyCache().eval(), ids, CallForm())
    assert (found.call.parameter, found.call.part) == ("past_key_values", "past_key_values")


def test_one_position_is_too_few_for_a_trial():
    found = find_cached_call(InTuple(), torch.zeros(1, 1, dtype=torch.long), CallForm())
    assert (found.call, found.problem) == (None, "")


def test_cache_tensors_are_found_at_any_depth():
    one, two, three = torch.zeros(2), torch.ones(3), torch.ones(4)
    inner = types.SimpleNamespace(keys=two, count=3, name="x", module=nn.Linear(2, 2))
    cache = [(one, None), {"layer": inner, "length": torch.tensor(5)}, [[three]]]
    assert [id(t) for t in cache_tensors(cache)] == [id(t) for t in (one, two, three)]
    assert list(cache_tensors(7)) == []
    endless = types.SimpleNamespace()
    endless.itself = endless
    assert list(cache_tensors(endless)) == []
