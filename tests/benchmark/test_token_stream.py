"""How models are made to continue a prompt: the same tokens by every way, from the same prompt each time."""

from inspect import signature

import pytest
import torch
from torch import nn

from stackwise.benchmark import model_workload
from stackwise.benchmark.token_stream import empty_cache, of_last, token_stream
from stackwise.model import Rack
from stackwise.subject.spec import ModelSpec

N_NEW = 6


@pytest.fixture
def prepared(subjects):
    def prepare(name, **declared):
        spec = ModelSpec.of(getattr(subjects, name), **declared)
        return spec, spec.create(seed=1).eval(), spec.batch(2, 5, seed=1)

    return prepare


def tokens_of(stream, prompt, n_new=N_NEW):
    columns = []
    stream.run(prompt, n_new, columns.append)
    return torch.stack([column.cpu() for column in columns], dim=1)


@torch.no_grad()
def continued(spec, model, prompt):
    """By a forward pass over everything, for each token."""
    ids = prompt
    for _ in range(N_NEW):
        ids = torch.cat((ids, spec.logits(model, ids)[:, -1:].argmax(-1)), dim=1)
    return ids[:, prompt.shape[1] :]


@pytest.mark.parametrize("name", ["rack", "window_rack", "llama", "gpt2", "x_decoder", "gru", "tiny"])
def test_common_loop(prepared, name):
    spec, model, prompt = prepared(name)
    stream = token_stream(spec, model, "common")
    assert ("no cache" in stream.told) == (spec.decode is None)
    expected = continued(spec, model, prompt)
    for _ in range(2):
        assert torch.equal(tokens_of(stream, prompt), expected)


@pytest.mark.parametrize(
    ("name", "told"), [("rack", "stream()"), ("llama", "generate()"), ("gpt2", "generate()")]
)
def test_own_loop(prepared, name, told):
    spec, model, prompt = prepared(name)
    stream = token_stream(spec, model, "own")
    assert told in stream.told
    expected = continued(spec, model, prompt)
    for _ in range(2):
        assert torch.equal(tokens_of(stream, prompt), expected)


def test_a_token_that_means_the_end_ends_nothing(prepared):
    spec, model, prompt = prepared("llama")
    model.generation_config.eos_token_id = int(continued(spec, model, prompt)[0, 1])
    assert tokens_of(token_stream(spec, model, "own"), prompt).shape == (2, N_NEW)
    assert tokens_of(token_stream(spec, model, "own"), prompt[:1]).shape == (1, N_NEW), "nobody else goes on"
    assert model.generation_config.eos_token_id is not None, "the model's own settings stay"


def test_settings_that_cannot_be_assigned(prepared):
    """Of a model that wraps another, and shows what that one has."""

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        @property
        def generation_config(self):
            return self.inner.generation_config

        def generate(self, *inputs, **more):
            return self.inner.generate(*inputs, **more)

    spec, model, prompt = prepared("llama")
    own = model.generation_config
    own.eos_token_id = end = int(continued(spec, model, prompt)[0, 1])
    assert tokens_of(token_stream(spec, Wrapper(model), "own"), prompt[:1]).shape == (1, N_NEW)
    assert model.generation_config is own
    assert own.eos_token_id == end


def test_tokens_come_one_by_one(prepared):
    """And not all at the end: the model has not run for a token that is yet to come."""
    for name, loop in (("llama", "common"), ("llama", "own"), ("rack", "own"), ("gru", "common")):
        spec, model, prompt = prepared(name)
        passes, seen = [], []
        model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        heads = [m for m in model.modules() if isinstance(m, nn.Linear)]
        heads[-1].register_forward_hook(lambda *_, passes=passes: passes.append(1))

        def on_token(token, seen=seen, passes=passes):
            seen.append(len(passes))

        token_stream(spec, model, loop).run(prompt, 3, on_token)
        assert seen[0] < seen[1] < seen[2], (name, loop)


def test_own_loop_that_is_not_there(prepared):
    spec, model, _ = prepared("gru")
    with pytest.raises(ValueError, match=r"loop: got 'own', but gru has neither stream.*allowed: 'common'"):
        token_stream(spec, model, "own")


def test_own_loop_that_cannot_be_compiled(prepared):
    spec, model, _ = prepared("llama")
    with pytest.raises(ValueError, match="compile: got True; allowed: False"):
        token_stream(spec, model, "own", compiled=True)


def test_stream_is_asked_to_compile(prepared):
    asked = []

    class Streaming(nn.Module):
        def stream(self, prompt, *, max_new_tokens, compile=False):  # noqa: A002
            asked.append((max_new_tokens, compile))
            yield from prompt[:, :max_new_tokens].T

    spec, _, prompt = prepared("gru")
    for compiled in (False, True):
        tokens_of(token_stream(spec, Streaming(), "own", compiled=compiled), prompt, 2)
    assert asked == [(2, False), (2, True)]


@pytest.mark.parametrize(("given", "told"), [(0, "0"), (3, "3"), (9, "more than 6")])
def test_a_stream_of_another_length_is_refused(prepared, given, told):
    """One that ends at a token that means the end would be timed as if it had made all."""

    class Streaming(nn.Module):
        def stream(self, prompt, *, max_new_tokens):
            yield from prompt[:, :1].repeat(1, given).T

    spec, _, prompt = prepared("gru")
    with pytest.raises(RuntimeError, match=f"^stream: the model gave {told} tokens; wanted {N_NEW}$"):
        tokens_of(token_stream(spec, Streaming(), "own"), prompt)


@pytest.mark.parametrize(("given", "told"), [(3, "3"), (9, "more than 6")])
def test_a_generate_of_another_length_is_refused(prepared, given, told):
    spec, model, prompt = prepared("llama")
    own = model.generate
    model.generate = lambda *inputs, generation_config, **more: own(
        *inputs, generation_config=settings_of(generation_config, given), **more
    )
    with pytest.raises(RuntimeError, match=f"^generate: the model gave {told} tokens; wanted {N_NEW}$"):
        tokens_of(token_stream(spec, model, "own"), prompt)


def settings_of(config, length):
    config.max_new_tokens = length
    return config


def test_a_head_wider_than_the_embedding(prepared, subjects):
    """Its last outputs are no tokens: the embedding takes none of them."""

    class Wide(subjects.GRULM):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 60)
            nn.init.constant_(self.head.bias[50:], 1e3)

    spec = ModelSpec.of(Wide, width=50)
    prompt = spec.batch(2, 4)
    assert tokens_of(token_stream(spec, spec.create().eval(), "common"), prompt).max() < 50


def test_room_is_taken_at_once(subjects):
    rack = subjects.rack()
    assert empty_cache(rack, 3, 11).capacity == 11
    assert empty_cache(subjects.llama(), 3, 11) is None


def test_a_method_of_that_name_that_takes_something_else():
    class Named(nn.Module):
        def new_cache(self):
            raise AssertionError("called")

    assert empty_cache(Named(), 3, 11) is None


def test_the_method_is_looked_at_once(prepared, monkeypatch):
    """And not in each run, whose time is taken."""
    spec, model, prompt = prepared("rack")
    looked = []
    monkeypatch.setattr(
        "stackwise.benchmark.token_stream.signature", lambda make: looked.append(make) or signature(make)
    )
    stream = token_stream(spec, model, "common")
    workload = model_workload(spec, "prefill", batch_size=1, seq_len=4)
    assert looked
    looked.clear()
    tokens_of(stream, prompt)
    workload.call()
    assert not looked


class TestOfLast:
    @pytest.mark.parametrize("name", ["rack", "window_rack", "llama", "gpt2"])
    @torch.no_grad()
    def test_the_last_logits_alone(self, prepared, name):
        spec, model, prompt = prepared(name)
        expected = spec.logits(model, prompt)[:, -1:]
        last = of_last(spec, model)
        torch.testing.assert_close(last.logits(model, prompt), expected)
        output, _ = last.decode(model, prompt, empty_cache(model, 2, 5))
        torch.testing.assert_close(getattr(output, "logits", output), expected)

    @pytest.mark.parametrize("in_place", [False, True])
    def test_a_compiled_call_is_not_gone_past(self, prepared, in_place):
        """`hidden` and `head` are those of the model that is not compiled."""
        spec, model, _ = prepared("rack")
        if in_place:
            model.compile(backend="eager")
        else:
            model = torch.compile(model, backend="eager")
        assert of_last(spec, model) is None
        assert empty_cache(model, 3, 11).capacity == 11
        torch._dynamo.reset()

    def test_a_compiled_model_can_be_asked(self):
        class Keeps(nn.Linear):
            def forward(self, x, logits_to_keep=0):
                return super().forward(x)[:, -logits_to_keep:]

        spec = ModelSpec.of(lambda: torch.compile(Keeps(4, 4), backend="eager"))
        assert of_last(spec, spec.create().eval()) is not None
        torch._dynamo.reset()

    @pytest.mark.parametrize("name", ["x_decoder", "gru", "bert"])
    def test_none(self, prepared, name):
        spec, model, _ = prepared(name)
        assert of_last(spec, model) is None

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        ],
        ids=["cuda", "cpu"],
    )
    def test_memory_that_is_too_small_is_no_answer(self, subjects, error):
        spec, model = ModelSpec.of(lambda: subjects.Keeping(error)), subjects.Keeping(error)
        with pytest.raises(type(error)) as raised:
            of_last(spec, model)
        assert raised.value is error
        assert of_last(spec, subjects.Keeping(ValueError("all of them"))) is None

    def test_methods_of_these_names_that_mean_something_else(self, subjects):
        class Named(Rack):
            def hidden(self, *inputs, **more):
                return 2 * super().hidden(*inputs, **more) + 1

            def forward(self, input_ids, cache=None):
                return self.head((self.hidden(input_ids, cache=cache) - 1) / 2)

        rack = subjects.rack()
        rack.__class__ = Named
        spec = ModelSpec.of(lambda: rack)
        assert of_last(spec, spec.create().eval()) is None
