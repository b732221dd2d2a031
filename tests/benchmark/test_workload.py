"""What a workload does to its model, and the sizes that it refuses."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from stackwise.benchmark import Workload, call_once, measure, model_workload, workload
from stackwise.benchmark.cache_rewind import RewoundCache
from stackwise.benchmark.flops.closed_form import model_flops
from stackwise.benchmark.flops.counted import count_flops
from stackwise.benchmark.flops.peak_rate import PeakRate
from stackwise.benchmark.generation import generate_once, measure_generation
from stackwise.benchmark.timing import measurement
from stackwise.benchmark.timing.graph_replay import graph_replay
from stackwise.benchmark.timing.interleaved import interleave
from stackwise.benchmark.workload import MODES, callable_workload, check_shape, trainer_workload
from stackwise.inference import logits_of
from stackwise.model import create_simple_rack
from stackwise.model.backend import using
from stackwise.spec import ModelSpec
from stackwise.trainer_spec import TrainerSpec


@pytest.fixture
def watched(subjects):
    """A spec, the models that it builds, and what each forward pass saw."""
    built, seen = [], []

    class Watched(subjects.GRULM):
        def __init__(self):
            super().__init__()
            built.append(self)

        def forward(self, ids):
            seen.append((tuple(ids.shape), self.training, torch.is_grad_enabled()))
            return super().forward(ids)

    return ModelSpec(Watched, "watched", "tokens", 50, causal=True, max_length=32), built, seen


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return [name for name in a if torch.equal(a[name], b[name])]


def test_forward_changes_nothing(watched):
    spec, built, seen = watched
    workload = model_workload(spec, "forward", batch_size=3, seq_len=7)
    [model] = built
    before = weights(model)
    assert seen == []
    for _ in range(3):
        workload.call()
    assert seen == [((3, 7), False, False)] * 3
    assert same(before, weights(model)) == list(before)
    assert all(p.grad is None for p in model.parameters())


def test_train_changes_every_weight(watched):
    spec, built, seen = watched
    workload = model_workload(spec, "train", batch_size=3, seq_len=7)
    [model] = built
    states = [weights(model)]
    for _ in range(3):
        workload.call()
        states.append(weights(model))
    assert seen == [((3, 7), True, True)] * 3
    # Of the embedding only the rows of the batch's tokens move, which makes it change all the same.
    for before, after in pairwise(states):
        assert same(before, after) == []
    # Gradients of one step must not be added to those of the next.
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_train_is_the_step_that_the_spec_describes(subjects):
    kept = []

    def optimizer(parameters):
        kept[:] = parameters
        return torch.optim.SGD(kept, lr=0.5)

    spec = ModelSpec.of(subjects.gru, optimizer=optimizer)
    workload = model_workload(spec, "train", batch_size=2, seq_len=5, seed=3)
    model, ids = spec.create(seed=3), spec.batch(2, 5, seed=3)
    for _ in range(2):
        workload.call()
        gradients = torch.autograd.grad(spec.loss_of(model, ids), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    for ours, expected in zip(kept, model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_frozen_weights_are_not_trained(subjects):
    def factory():
        model = subjects.gru()
        model.embedding.requires_grad_(False)
        return model

    kept = []

    def optimizer(parameters):
        kept[:] = parameters
        return torch.optim.SGD(kept, lr=0.5)

    model_workload(ModelSpec.of(factory, optimizer=optimizer), "train", batch_size=2, seq_len=5).call()
    assert len(kept) == len(list(subjects.gru().parameters())) - 1


@pytest.mark.parametrize("as_seen", [list, iter])
def test_an_optimizer_goes_through_its_parameters_twice(subjects, as_seen):
    """As one does that lets only matrices decay; of a generator the second group would be empty."""

    def optimizer(parameters):
        parameters = as_seen(parameters)
        decaying = {"params": [p for p in parameters if p.ndim > 1]}
        others = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
        return torch.optim.AdamW([decaying, others], lr=0.1)

    made = model_workload(ModelSpec.of(subjects.gru, optimizer=optimizer), "train", batch_size=2, seq_len=5)
    before = weights(made.model)
    made.call()
    vectors = [name for name, p in made.model.named_parameters() if p.ndim <= 1]
    assert vectors
    assert same(before, weights(made.model)) == ([] if as_seen is list else vectors)


def test_nothing_to_train_is_refused(subjects):
    spec = ModelSpec.of(lambda: subjects.gru().requires_grad_(False), name="frozen")
    with pytest.raises(
        ValueError, match="model: got 'frozen'; allowed: in mode 'train', a model with a param"
    ):
        model_workload(spec, "train", batch_size=2, seq_len=5)
    model_workload(spec, "forward", batch_size=2, seq_len=5)


@pytest.mark.parametrize("name", ["rack", "llama", "x_decoder", "gru", "encoder"])
@pytest.mark.parametrize(
    ("mode", "tokens"), [("forward", 12), ("train", 12), ("prefill", 12), ("decode", 2), ("generate", 6)]
)
def test_other_models(subjects, name, mode, tokens):
    spec = ModelSpec.of(getattr(subjects, name))
    if (name, mode) == ("encoder", "generate"):
        with pytest.raises(ValueError, match=r"mode: got 'generate'; allowed: .*: encoder takes vectors"):
            model_workload(spec, mode, batch_size=2, seq_len=6, new_tokens=3)
        return
    made = model_workload(spec, mode, batch_size=2, seq_len=6, new_tokens=3)
    made.call()
    made.call()
    assert made.name == f"{name} {mode}"
    assert (made.tokens, made.mode, made.batch_size, made.seq_len) == (tokens, mode, 2, 6)
    assert made.new_tokens == (3 if mode == "generate" else 0)
    assert made.device == torch.device("cpu")


def test_weights_and_inputs_come_from_the_seed(subjects):
    outputs = []
    spec = ModelSpec.of(
        subjects.gru,
        forward=lambda model, ids: outputs.append(model(ids)) or outputs[-1],
        width=50,
        inputs="tokens",
    )
    outputs.clear()
    for seed in (1, 1, 2):
        model_workload(spec, "forward", batch_size=2, seq_len=5, seed=seed).call()
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    check_shape(mode=mode)


@pytest.mark.parametrize("mode", ["Forward", "training", "", None])
def test_other_modes(watched, mode):
    with pytest.raises(ValueError, match=r"mode: got .*; allowed: 'forward', 'train'") as raised:
        model_workload(watched[0], mode, batch_size=1, seq_len=1)
    assert repr(mode) in str(raised.value)
    assert not watched[1], "it is refused before anything is built"


@pytest.mark.parametrize("key", ["batch_size", "seq_len"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None, True])
def test_sizes(watched, key, value):
    sizes = {"batch_size": 2, "seq_len": 3} | {key: value}
    with pytest.raises(ValueError, match=f"{key}: got {value!r}; allowed: an integer >= 1"):
        model_workload(watched[0], "forward", **sizes)
    with pytest.raises(ValueError, match=f"{key}: got"):
        check_shape(**sizes)
    assert not watched[1]


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("dtype", "bf16", "'float32', 'bfloat16', 'float16', 'float64'"),
        ("dtype", torch.bfloat16, "'float32'"),
        ("compile", "fast", "True, False, default, reduce-overhead"),
        ("loop", "mine", "'common', 'own'"),
        ("new_tokens", 0, "an integer >= 1"),
        ("seed", "a", "an integer from 0 to"),
        ("seed", 2**70, "an integer from 0 to"),
        ("seed", -1, "an integer from 0 to"),
        ("device", "meta", "auto, cpu, cuda, cuda:N"),
        ("device", "gpu", "auto, cpu, cuda, cuda:N"),
    ],
)
def test_other_settings(watched, key, value, allowed):
    with pytest.raises(ValueError, match=f"{key}: got {value!r}; allowed: {allowed}"):
        model_workload(watched[0], "forward", batch_size=1, seq_len=1, **{key: value})
    assert not watched[1]


def test_the_common_loop_is_not_compiled(watched):
    # It grows by a token at each step.
    with pytest.raises(ValueError, match="loop: got 'common'; allowed: 'own', where mode is 'generate'"):
        model_workload(watched[0], "generate", batch_size=1, seq_len=1, compile=True)


@pytest.mark.parametrize(("mode", "room"), [("forward", 32), ("decode", 31), ("generate", 27)])
def test_room_for_what_is_to_come(watched, mode, room):
    sizes = {"batch_size": 1, "new_tokens": 5}
    model_workload(watched[0], mode, seq_len=room, **sizes)
    with pytest.raises(ValueError, match=f"seq_len: got {room + 1}.*watched takes at most 32 positions"):
        model_workload(watched[0], mode, seq_len=room + 1, **sizes)


@pytest.mark.parametrize("mode", ["prefill", "decode", "generate"])
def test_a_model_that_is_not_causal_has_no_next_token(subjects, mode):
    spec = ModelSpec.of(subjects.bidirectional_rack)
    with pytest.raises(ValueError, match="allowed: 'forward', 'train': bidirectional_rack is not causal"):
        model_workload(spec, mode, batch_size=1, seq_len=4)


def test_beyond_the_model(watched):
    model_workload(watched[0], "forward", batch_size=1, seq_len=32)
    with pytest.raises(ValueError, match="seq_len: got 33; watched takes at most 32 positions"):
        model_workload(watched[0], "forward", batch_size=1, seq_len=33)


def kept_logits(spec):
    """The spec with a decode that keeps what it was asked and what it said."""
    seen = []

    def decode(model, inputs, cache):
        output, cache = spec.decode(model, inputs, cache)
        seen.append((tuple(inputs.shape), logits_of(output)[:, -1].clone()))
        return output, cache

    return replace(spec, decode=decode), seen


CACHING = ["rack", "window_rack", "llama", "gpt2", "x_decoder"]


@pytest.mark.parametrize("name", CACHING)
def test_prefill_starts_with_nothing(subjects, name):
    spec = ModelSpec.of(getattr(subjects, name))
    watched_spec, seen = kept_logits(spec)
    made = model_workload(watched_spec, "prefill", batch_size=2, seq_len=7, seed=3)
    seen.clear()
    for _ in range(3):
        made.call()
    expected = spec.logits(spec.create(seed=3).eval(), spec.batch(2, 7, seed=3))[:, -1]
    assert [shape for shape, _ in seen] == [(2, 7)] * 3
    for _, logits in seen:
        torch.testing.assert_close(logits, expected)
    assert made.execution()["prefill"].startswith("into an empty cache")


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("name", CACHING)
def test_decode_finds_the_same_context_each_time(subjects, name, prepared):
    spec = ModelSpec.of(getattr(subjects, name))
    watched_spec, seen = kept_logits(spec)
    made = model_workload(watched_spec, "decode", batch_size=2, seq_len=7, seed=3)
    seen.clear()
    for _ in range(4):
        if prepared and made.prepare:
            made.prepare()
        made.call()
    expected = spec.logits(spec.create(seed=3).eval(), spec.batch(2, 8, seed=3))[:, -1]
    assert [shape for shape, _ in seen] == [(2, 1)] * 4
    for _, logits in seen:
        torch.testing.assert_close(logits, expected)
        assert torch.equal(logits, seen[0][1])
    assert made.notes() == ()


class Remembering(nn.Module):
    """A model that keeps what it has seen in itself, and hands on nothing that could be put back."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.seen = nn.Embedding(50, 8), nn.Linear(8, 50), []

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None])

    def step(self, ids, cache):
        self.seen = [*(self.seen if cache else []), self.embedding(ids)]
        return self.head(torch.cat(self.seen, dim=1).mean(1, keepdim=True)), "in the model"


def test_a_context_that_grows_in_the_model_is_told():
    spec = ModelSpec.of(Remembering, causal=True, decode=lambda model, ids, cache: model.step(ids, cache))
    made = model_workload(spec, "decode", batch_size=1, seq_len=6)
    [note] = made.notes()
    assert note.startswith(
        "the same step gives other logits when it is made again: the model keeps more than"
    )
    assert not made.counted, "what a step moves is not what it would move at that context"
    assert note in measure(made, **QUICK).notes


class Continued(NamedTuple):
    """What a model gives that keeps a cache."""

    logits: torch.Tensor
    past_key_values: torch.Tensor


class Summing(nn.Module):
    """A model whose cache is one vector in each row."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, ids, past_key_values=None, use_cache=False):
        sums = self.embedding(ids).cumsum(1)
        sums = sums if past_key_values is None else sums + past_key_values
        return Continued(self.head(sums), sums[:, -1:])


def test_a_compiled_model_keeps_its_cache():
    spec = ModelSpec.of(lambda: torch.compile(Summing(), backend="eager"))
    made = model_workload(spec, "decode", batch_size=1, seq_len=6)
    made.call()
    assert isinstance(made.model, torch._dynamo.OptimizedModule)
    assert made.execution()["decode"].startswith("with a cache")
    assert (made.counted, made.notes()) == (True, ())
    assert model_workload(spec, "train", batch_size=1, seq_len=6).recompute == "none"
    torch._dynamo.reset()


def test_a_context_that_grows_is_another_number(subjects):
    """What a loop does that feeds its cache on, and what ours does not: see the test above."""
    spec = ModelSpec.of(subjects.llama)
    model, ids = spec.create(seed=3).eval(), spec.batch(2, 8, seed=3)
    _, cache = spec.decode(model, ids[:, :-1], None)
    said = [logits_of(spec.decode(model, ids[:, -1:], cache)[0])[:, -1] for _ in range(2)]
    assert (said[0] - said[1]).abs().max() > 1e-4
    assert cache.get_seq_length() == 9


def test_a_cache_is_put_back_outside_of_the_time(subjects, monkeypatch):
    copied, rewind = [], RewoundCache.rewind
    monkeypatch.setattr(RewoundCache, "rewind", lambda self: copied.append(1) or rewind(self))
    made = model_workload(ModelSpec.of(subjects.llama), "decode", batch_size=1, seq_len=4)
    made.prepare()
    before = len(copied)
    made.call()
    assert len(copied) == before, "nothing is left to copy in a call that was prepared"
    made.call()
    assert len(copied) == before + 1, "one that was not prepares itself"


def test_a_cache_that_is_handed_on_needs_no_copy(subjects):
    """Of a model that gives a new one at each step."""

    def decode(model, inputs, cache):
        ids = inputs if cache is None else torch.cat((cache, inputs), dim=1)
        return model(ids)[:, -inputs.shape[1] :], ids

    made = model_workload(ModelSpec.of(subjects.gru, decode=decode), "decode", batch_size=1, seq_len=4)
    assert made.prepare is None
    assert made.execution() == {"decode": "with a cache"}


def test_a_model_without_cache_says_so(watched):
    spec, _, seen = watched
    told = {}
    for mode, shapes in {"prefill": [(3, 7)], "decode": [(3, 8)], "generate": [(3, 7), (3, 8)]}.items():
        made = model_workload(spec, mode, batch_size=3, seq_len=7, new_tokens=2)
        for _ in range(2):
            seen.clear()
            made.call()
            # The second call finds what the first did: nothing has grown.
            assert seen == [(shape, False, False) for shape in shapes]
        told |= made.execution()
    assert all("the model keeps no cache" in text for text in told.values())
    assert set(told) == {"prefill", "decode", "generate"}


@pytest.mark.parametrize("name", ["bfloat16", "float64"])
@pytest.mark.parametrize("mode", ["forward", "train", "decode"])
def test_dtype_of_weights_and_inputs(subjects, mode, name):
    dtype = getattr(torch, name)
    for subject in (subjects.llama, subjects.causal_encoder):
        made = model_workload(ModelSpec.of(subject), mode, batch_size=2, seq_len=4, dtype=name)
        made.call()
        assert {p.dtype for p in made.model.parameters()} == {dtype}


def tables():
    return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))


class TestCompile:
    @pytest.fixture(autouse=True)
    def _eager(self, monkeypatch):
        """What the compiler hands on is run as it is: how it is captured is what these tests are about."""
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("mode", ["forward", "train", "prefill", "decode"])
    def test_modes(self, subjects, mode):
        # The compiler looks classes up by their module, which those of `subjects` do not have.
        spec = ModelSpec.of(subjects.rack if mode in ("prefill", "decode") else tables)
        made = model_workload(spec, mode, batch_size=2, seq_len=4, compile=True)
        made.call()
        assert made.execution()["compile"] == "1 graph"

    def test_no_shape_of_a_sweep_is_left_out(self):
        """The compiler keeps 8 graphs of one code object, and runs more shapes as they are, untold."""
        spec = ModelSpec.of(tables)
        for seq_len in range(4, 14):
            made = model_workload(spec, "forward", batch_size=1, seq_len=seq_len, compile=True)
            assert made.execution()["compile"] == "1 graph", seq_len

    def test_a_compiler_that_is_off_is_told(self):
        with torch._dynamo.config.patch(disable=True):
            made = model_workload(ModelSpec.of(tables), "forward", batch_size=1, seq_len=4, compile=True)
        assert made.execution()["compile"] == "asked for, but no graph was captured"


def test_a_training_step_of_anybodys_loop(subjects):
    steps = []

    def step(model, optimizer, batch):
        loss = model(batch["input_ids"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(tuple(batch["input_ids"].shape))
        return loss.detach()

    spec = TrainerSpec.from_function(step, subjects.gru, name="loop", seq_len=5)
    steps.clear()
    made = trainer_workload(spec, batch_size=3)
    before = weights(made.model)
    made.call()
    assert (made.name, made.tokens, made.mode, steps) == ("loop step", 15, "train", [(3, 5)])
    assert same(before, weights(made.model)) != list(before)
    assert made.utilization(1.0) is None  # it may accumulate, freeze or cast, unknown to anybody
    with pytest.raises(ValueError, match="batch_size: got 0; allowed: an integer >= 1"):
        trainer_workload(spec, batch_size=0)


def test_anything_that_can_be_called():
    calls = []

    def work():
        calls.append("work")

    made = callable_workload(work, tokens=4, prepare=lambda: calls.append("prepare"))
    assert (made.name, made.tokens, made.device) == ("work", 4, torch.device("cpu"))
    assert call_once(made).tokens == 4
    assert calls == ["prepare", "work"]
    assert callable_workload(work, name="other").name == "other"
    with pytest.raises(ValueError, match="call: got 3; allowed: a function that takes no arguments"):
        callable_workload(3)
    with pytest.raises(ValueError, match="tokens: got -1; allowed: an integer >= 0"):
        callable_workload(work, tokens=-1)
    with pytest.raises(ValueError, match="prepare: got 3; allowed: a function without arguments, or None"):
        callable_workload(work, prepare=3)
    assert callable_workload(work, device="auto").device.type in ("cpu", "cuda")


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_a_device_that_no_clock_waits_for(device):
    with pytest.raises(ValueError, match=f"device: got '{device}'; allowed: auto, cpu, cuda, cuda:N"):
        callable_workload(list, device=device)
    with pytest.raises(ValueError, match=f"device: got '{device}'; allowed: cpu, cuda, cuda:N, which are"):
        Workload("mine", list, torch.device(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there(watched):
    with pytest.raises(ValueError, match="device: got 'cuda'; this machine has 0 CUDA devices"):
        model_workload(watched[0], "forward", batch_size=1, seq_len=1, device="cuda")
    with pytest.raises(ValueError, match="device: got 'cuda'; this machine has 0 CUDA devices"):
        callable_workload(list, device="cuda")
    assert not watched[1]


class TestUtilization:
    """A utilisation is of a peak that is known, and of work whose size is."""

    PEAK = PeakRate("here", "measured", {"float32": 1e9}, 1e8, {})
    PUBLISHED = PeakRate("here", "published", {"float32": 1e9, "bfloat16": 16e9}, 1e8, {})

    @pytest.fixture
    def llama(self):
        # Per token: q, k, v, o of 8 x 8; gate, up, down of 8 x 12; head of 8 x 10: 624 products.
        config = LlamaConfig(
            vocab_size=10,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
        return ModelSpec.of(lambda: LlamaForCausalLM(config))

    def test_of_a_measured_peak(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)
        made = model_workload(llama, "forward", batch_size=3, seq_len=5)
        # Of attention 5 x 5 pairs of 8 numbers, twice.
        flops = 3 * (5 * 2 * 624 + 2 * 2 * 5 * 5 * 8)
        assert made.utilization(2.0, "measured").mfu == pytest.approx(flops / 2.0 / 1e9)
        assert made.utilization(2.0, "measured").mbu is None

    def test_of_decoding(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)
        made = model_workload(llama, "decode", batch_size=3, seq_len=5)
        # Weights and three gains of 8; keys and values of 5 tokens read and of one written, 8 numbers each.
        moved = 4 * (624 + 3 * 8) + 4 * 3 * 2 * 8 * (5 + 1)
        assert made.utilization(2.0, "measured").mbu == pytest.approx(moved / 2.0 / 1e8, rel=0.02)

    def test_of_a_training_step_that_recomputes_its_layers(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)

        def recomputing():
            model = llama.create()
            name = "activation_checkpointing_enable"  # or, in transformers of before, the other
            getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
            return model

        # Three forward passes; with recomputation the 544 products of layers and the pairs once more.
        pairs = 3 * 2 * 2 * 5 * 5 * 8
        forward, layers = 3 * 5 * 2 * 624 + pairs, 3 * 5 * 2 * 544 + pairs
        plain = model_workload(llama, "train", batch_size=3, seq_len=5).utilization(2.0, "measured")
        assert plain.mfu == plain.hfu == pytest.approx(3 * forward / 2.0 / 1e9)
        again = model_workload(ModelSpec.of(recomputing), "train", batch_size=3, seq_len=5)
        assert again.recompute == "blocks"
        used = again.utilization(2.0, "measured")
        assert used.mfu == plain.mfu
        assert used.hfu == pytest.approx((3 * forward + layers) / 2.0 / 1e9)

    def test_recomputation_that_nobody_tells_of(self, llama, monkeypatch):
        """A forward that somebody has replaced may compute anything: no number, rather than a wrong one."""
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)

        def replaced():
            model = llama.create()
            model.model.layers[0].forward = model.model.layers[0].forward
            return model

        made = model_workload(ModelSpec.of(replaced), "train", batch_size=1, seq_len=4)
        used = made.utilization(1.0, "measured")
        assert (made.recompute, used.hfu) == (None, None)
        assert used.mfu > 0
        assert "what the backward pass recomputes is not known" in used.notes
        assert model_workload(ModelSpec.of(replaced), "forward", batch_size=1, seq_len=4).recompute == "none"

    def test_floor_of_decoding(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "measured_peak", lambda device, dtype: self.PEAK)
        made = model_workload(llama, "decode", batch_size=3, seq_len=5)
        floor = made.floor("measured")
        assert made.utilization(floor.seconds, "measured").mbu == pytest.approx(1.0)
        assert floor.bound == "memory"
        assert made.floor() is None, "nobody publishes a peak of a CPU"
        assert model_workload(llama, "forward", batch_size=1, seq_len=4).floor("measured") is None
        with pytest.raises(ValueError, match="peak: got 'best'"):
            made.floor("best")

    @pytest.mark.parametrize("mode", ["forward", "train", "decode"])
    def test_the_peak_is_that_of_what_is_computed_in(self, llama, monkeypatch, mode):
        """Under autocast weights are of another dtype than their products."""
        monkeypatch.setattr(workload, "published_peak", lambda device: self.PUBLISHED)

        def cast(function):
            def call(*arguments):
                with torch.autocast("cpu", torch.bfloat16):
                    return function(*arguments)

            return call

        def made(spec, dtype=None):
            return model_workload(spec, mode, batch_size=3, seq_len=5, dtype=dtype)

        half, full = made(llama, "bfloat16"), made(llama)
        under = made(replace(llama, forward=cast(llama.forward), decode=cast(llama.decode)))
        used = {
            name: each.utilization(1.0) for name, each in (("half", half), ("full", full), ("cast", under))
        }
        assert used["full"].mfu == pytest.approx(16 * used["half"].mfu)
        assert used["cast"].mfu == used["half"].mfu
        assert used["cast"].notes == used["half"].notes == ()
        if mode == "decode":
            assert (
                under.floor().compute_seconds == half.floor().compute_seconds < full.floor().compute_seconds
            )

    def test_norms_in_float32_do_not_make_it_that_of_float32(self, monkeypatch):
        monkeypatch.setattr(workload, "published_peak", lambda device: self.PUBLISHED)

        def mixed():
            rack = create_simple_rack(1, 1, d_model=16, d_ff=32, n_heads=2, vocab_size=11).to(torch.bfloat16)
            first = next(rack.parameters())
            assert first.ndim == 1, "a norm's gain"
            first.data = first.data.float()
            return rack

        size = {"batch_size": 2, "seq_len": 8}
        plain = model_workload(
            lambda: create_simple_rack(1, 1, d_model=16, d_ff=32, n_heads=2, vocab_size=11), "forward", **size
        )
        used = model_workload(mixed, "forward", **size).utilization(1.0)
        assert plain.utilization(1.0).mfu == pytest.approx(16 * used.mfu)

    def test_products_in_several_dtypes_are_told(self, llama, monkeypatch):
        monkeypatch.setattr(workload, "published_peak", lambda device: self.PUBLISHED)

        def forward(model, ids):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.model(ids).last_hidden_state
            return model.lm_head(hidden.float())

        made = model_workload(replace(llama, forward=forward), "forward", batch_size=3, seq_len=5)
        # Of the head 80 products of 624 a token, beside those of attention.
        share = 80 / (624 + 2 * 5 * 8)
        told = f"{share:.0%} of the products are not in bfloat16, whose peak rate this is of"
        assert made.utilization(1.0).notes == (told,)

    def test_nobody_publishes_that_of_a_cpu(self, llama):
        made = model_workload(llama, "forward", batch_size=1, seq_len=4)
        assert made.utilization(1.0).mfu is None

    def test_of_unknown_work(self, llama):
        assert callable_workload(list).utilization(1.0) is None
        made = model_workload(llama, "generate", batch_size=1, seq_len=4, new_tokens=2)
        assert made.utilization(1.0) is None
        # All tokens again: nothing is read from a cache.
        made = model_workload(replace(llama, decode=None), "decode", batch_size=1, seq_len=4)
        assert made.utilization(1.0) is None

    def test_another_peak(self, llama):
        with pytest.raises(ValueError, match="peak: got 'best'; allowed: 'published', 'measured'"):
            callable_workload(list).utilization(1.0, "best")


def test_a_workload_of_ones_own():
    workload = Workload("mine", list, torch.device("cpu"))
    assert workload.tokens == 0


class TestExecution:
    """A measurement says how the work was done, as far as the model does."""

    @staticmethod
    def told(model, mode="forward"):
        spec = ModelSpec.of(lambda: model)
        return call_once(model_workload(spec, mode, batch_size=1, seq_len=4)).execution

    @pytest.mark.parametrize("mode", ["forward", "train"])
    def test_of_a_rack(self, mode):
        rack = create_simple_rack(1, 1, 16, 24, 2, 11, softcap=30.0)
        assert self.told(rack, mode) == {"attention": "sliced"}

    def test_of_a_transformers_model(self):
        config = LlamaConfig(
            vocab_size=11,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            attn_implementation="eager",
        )
        assert self.told(LlamaForCausalLM(config)) == {"attention": "eager"}

    def test_of_a_model_that_says_nothing(self):
        assert self.told(nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))) == {}


class TestWorkIsWhatIsCounted:
    """What MFU divides is what a call computes: counted operation by operation, and in closed form."""

    @pytest.fixture(params=["rack", "llama", "gpt2"])
    def spec(self, subjects, request):
        def factory():
            model = getattr(subjects, request.param)()
            if request.param != "rack":
                model.set_attn_implementation("eager")  # whose products are counted one by one
            return model

        with using("math"):
            yield ModelSpec.of(factory, name=request.param)

    @pytest.mark.parametrize("mode", ["forward", "train", "prefill", "decode"])
    def test_modes(self, spec, mode):
        made = model_workload(spec, mode, batch_size=2, seq_len=9)
        counted = count_flops(made.call)
        assert counted.uncounted == ()
        known = model_flops(made.model, batch_size=2, seq_len=9, mode=mode, logits=made.logits)
        assert counted.total == known.model()
        assert made.logits == ("last" if mode == "prefill" else None)

    @pytest.mark.parametrize("loop", ["common", "own"])
    def test_generation(self, spec, loop):
        """Logits of the prompt's last position, then those of one token each."""
        made = model_workload(spec, "generate", batch_size=2, seq_len=9, new_tokens=4, loop=loop)
        steps = [model_flops(made.model, batch_size=2, seq_len=9, mode="prefill")]
        steps += [model_flops(made.model, batch_size=2, seq_len=9 + n, mode="decode") for n in range(3)]
        assert count_flops(made.call).total == sum(step.model() for step in steps)

    @pytest.mark.parametrize("mode", ["prefill", "decode", "generate"])
    def test_without_a_cache(self, spec, mode):
        made = model_workload(replace(spec, decode=None), mode, batch_size=2, seq_len=9, new_tokens=1)
        passed = model_flops(made.model, batch_size=2, seq_len=9 + (mode == "decode"), mode="prefill")
        assert count_flops(made.call).total == passed.model()


def test_a_model_that_cannot_be_asked_for_its_last_logits(subjects, monkeypatch):
    """It computes all of them: that is told, and MFU counts them."""
    asked = []
    monkeypatch.setattr(workload, "utilization", lambda model, **how: asked.append(how["logits"]))
    made = model_workload(ModelSpec.of(subjects.x_decoder), "prefill", batch_size=1, seq_len=4)
    assert made.execution()["prefill"] == "into an empty cache; logits of all positions"
    made.utilization(1.0)
    model_workload(ModelSpec.of(subjects.rack), "prefill", batch_size=1, seq_len=4).utilization(1.0)
    model_workload(ModelSpec.of(subjects.rack), "forward", batch_size=1, seq_len=4).utilization(1.0)
    assert asked == ["all", "last", None]
    made = model_workload(ModelSpec.of(subjects.x_decoder), "generate", batch_size=1, seq_len=4)
    assert made.execution()["generate"].endswith(
        "with the cache of the model; logits of all positions of a pass"
    )


class TestTrainingStaysFinite:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("name", ["rack", "llama", "gru"])
    def test_by_the_default_optimizer(self, subjects, name, dtype):
        made = model_workload(
            ModelSpec.of(getattr(subjects, name)), "train", batch_size=2, seq_len=8, dtype=dtype
        )
        start = weights(made.model)
        for _ in range(5):
            made.call()
        assert all(p.isfinite().all() for p in made.model.parameters())
        moved = max((p.detach() - start[key]).abs().max() for key, p in made.model.named_parameters())
        assert 1e-4 < moved < 0.05
        assert made.notes() == ()
        told = {"optimizer": "AdamW with eps=0.0077, as the dtype has no 1e-08"}
        assert {key: value for key, value in made.execution().items() if key == "optimizer"} == (
            told if dtype == "float16" else {}
        )

    def test_an_optimizer_of_ones_own_is_left_alone_and_told_of(self, subjects):
        spec = ModelSpec.of(subjects.gru, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        made = model_workload(spec, "train", batch_size=2, seq_len=8, dtype="float16")
        found = call_once(made)
        assert "optimizer" not in found.execution
        [note] = found.notes
        assert note.startswith("weights are not finite: embedding.weight")
        assert note.endswith("what was timed is no training")
        assert any("weights are not finite" in each for each in measure(made, **QUICK).notes)

    def test_of_anybodys_loop(self, subjects):
        def step(model, optimizer, batch):
            with torch.no_grad():
                model.embedding.weight[0, 0] = float("inf")
            return model(batch["input_ids"]).mean().detach()

        made = trainer_workload(TrainerSpec.from_function(step, subjects.gru, seq_len=5), batch_size=3)
        assert made.notes() == ()
        assert call_once(made).notes == (
            "weights are not finite: embedding.weight; what was timed is no training",
        )


QUICK = {"min_seconds": 0.0, "min_calls": 2, "warmup_seconds": 0.0}


class TestWhatIsNoWorkload:
    def test_a_model_is_taken_as_by_a_spec(self, subjects):
        for model in (subjects.GRULM, subjects.gru, subjects.gru()):
            made = model_workload(model, "forward", batch_size=1, seq_len=4)
            made.call()
            assert isinstance(made.model, subjects.GRULM)

    def test_what_is_no_model(self):
        with pytest.raises(TypeError, match=r"model: got int; wanted a function .* or a ModelSpec"):
            model_workload(3, "forward", batch_size=1, seq_len=4)

    @pytest.mark.parametrize("take", [measure, call_once, measure_generation, generate_once, graph_replay])
    def test_what_cannot_be_measured(self, subjects, take):
        wrongs = {"the class GRULM": subjects.GRULM, "GRULM": subjects.gru(), "NoneType": None}
        for got, wrong in wrongs.items():
            with pytest.raises(
                TypeError, match=rf"workload: got {got}; wanted a Workload, as of model_workload\("
            ):
                take(wrong)

    def test_what_cannot_be_interleaved(self, subjects):
        with pytest.raises(TypeError, match=r"workloads\['a'\]: got the class GRULM; wanted a Workload"):
            interleave({"a": subjects.GRULM})
        with pytest.raises(TypeError, match="workloads: got list; wanted a mapping of names to workloads"):
            interleave([])


def test_a_peak_of_memory_has_no_copy_of_the_cache(subjects, monkeypatch):
    made = model_workload(ModelSpec.of(subjects.llama), "decode", batch_size=1, seq_len=4)
    asked = []
    watched = replace(made, prepare_alone=lambda: asked.append("alone") or made.prepare_alone())
    monkeypatch.setattr(measurement, "peak_memory_bytes", lambda call, device: asked.append("peak") or call())
    measure(watched, **QUICK)
    assert asked == ["alone", "peak"]


def test_bytes_that_are_held(subjects):
    """A weight that is packed has fewer bytes than its shape and dtype say: a floor leaves it out."""

    class Packed(torch.Tensor):
        pass

    def packed():
        model = subjects.gru()
        model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(Packed))
        return model

    spec = ModelSpec.of(subjects.gru)
    plain, fewer = (
        model_workload(each, "forward", batch_size=1, seq_len=4).held_bytes()
        for each in (spec, replace(spec, build=packed))
    )
    assert plain == sum(p.nbytes for p in subjects.gru().parameters())
    assert fewer == plain - subjects.gru().head.weight.nbytes
    assert callable_workload(list).held_bytes() == 0
