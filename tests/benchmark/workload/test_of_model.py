"""What a workload does to its model, and the sizes that it refuses."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import nn

from stackwise.benchmark import call_once, measure, model_workload
from stackwise.benchmark.cache_rewind import RewoundCache
from stackwise.benchmark.flops.closed_form import model_flops
from stackwise.benchmark.flops.counted import count_flops
from stackwise.benchmark.timing import measurement
from stackwise.benchmark.workload import MODES, callable_workload, check_shape, trainer_workload, workload
from stackwise.model.backend import using
from stackwise.subject.inference import logits_of
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there(watched):
    with pytest.raises(ValueError, match="device: got 'cuda'; allowed: cpu, because"):
        model_workload(watched[0], "forward", batch_size=1, seq_len=1, device="cuda")
    with pytest.raises(ValueError, match="device: got 'cuda'; allowed: cpu, because"):
        callable_workload(list, device="cuda")
    assert not watched[1]


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


def test_a_peak_of_memory_has_no_copy_of_the_cache(subjects, monkeypatch):
    made = model_workload(ModelSpec.of(subjects.llama), "decode", batch_size=1, seq_len=4)
    asked = []
    watched = replace(made, prepare_alone=lambda: asked.append("alone") or made.prepare_alone())
    monkeypatch.setattr(measurement, "peak_memory_bytes", lambda call, device: asked.append("peak") or call())
    measure(watched, **QUICK)
    assert asked == ["alone", "peak"]
