"""What ModelSpec sees of a model from outside, how it drives it, and what it says when it cannot."""

import pickle
import types
import urllib.request

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from stackwise.benchmark import measure, model_workload
from stackwise.benchmark.generation import generate_once
from stackwise.checks import check_model
from stackwise.prototype import ArchitecturePrototype
from stackwise.prototype.spec_training import SpecTraining
from stackwise.quality import LanguageModel, Scorer, TokenRequest
from stackwise.stability import stability_run
from stackwise.stability.faults import CorruptSample
from stackwise.stability.lengths import length_sweep
from stackwise.subject.inference import InferenceError, logits_of
from stackwise.subject.spec import FactoryError, ModelSpec

# Factory: inputs, width, causal, longest sequence.
KNOWN = {
    "rack": ("tokens", 61, True, None),
    "bidirectional_rack": ("tokens", 61, False, None),
    "llama": ("tokens", 97, True, 64),
    "gpt2": ("tokens", 97, True, 64),
    "bert": ("tokens", 97, False, 64),
    "x_decoder": ("tokens", 80, True, 64),
    "x_encoder": ("tokens", 80, False, 64),
    "gru": ("tokens", 50, True, None),
    "conv": ("tokens", 50, True, None),
    "in_dict": ("tokens", 29, True, None),
    "in_tuple": ("tokens", 29, True, None),
    "in_object": ("tokens", 29, True, None),
    "encoder": ("vectors", 16, None, None),
}

# The CPU generator takes a seed modulo 2**32.
SEEDS = st.integers(0, 2**32 - 1)


class PositionFirst(nn.Module):
    """Its first embedding is of places, not of tokens."""

    def __init__(self, n_places, vocab_size=50, d_out=None):
        super().__init__()
        self.places = nn.Embedding(n_places, 8)
        self.tokens = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, d_out or vocab_size)

    def forward(self, ids):
        return self.head(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))


class Same(nn.Module):
    """No layer of it says how it wants to be called."""

    def forward(self, x):
        return x


class Flat(nn.Module):
    """Takes ids, but returns one vector for all positions."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(23, 8)

    def forward(self, ids):
        return self.embedding(ids).mean(1)


class Fussy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(23, 8)

    def forward(self, ids, *, cache):
        return self.embedding(ids)


def state_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same_state(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def spec_of(**changes):
    fields = {"build": lambda: nn.Linear(3, 3), "name": "linear", "inputs": "vectors", "width": 3}
    return ModelSpec(**fields | changes)


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_inferred(subjects, name):
    factory = getattr(subjects, name)
    spec = ModelSpec.of(factory)
    assert (spec.inputs, spec.width, spec.causal, spec.max_length) == KNOWN[name]
    assert spec.name == factory.__name__
    kind = "token ids, vocabulary" if spec.inputs == "tokens" else "vectors of width"
    assert f"takes {kind} {spec.width}" in spec.notes
    assert not spec.trained


@pytest.mark.parametrize("name", KNOWN)
def test_inferred_spec_drives_the_model(subjects, name):
    spec = ModelSpec.of(getattr(subjects, name))
    inputs = spec.batch(3, 7, seed=5)
    model = spec.create(seed=3).eval()
    torch.manual_seed(3)
    twin = getattr(subjects, name)().eval()
    unwrap = {
        "in_dict": lambda output: output["logits"],
        "in_tuple": lambda output: output[0],
        **dict.fromkeys(["in_object", "llama", "gpt2", "bert"], lambda output: output.logits),
    }
    with torch.no_grad():
        logits, direct = spec.logits(model, inputs), unwrap.get(name, lambda output: output)(twin(inputs))
    assert logits.shape == (3, 7, spec.width)
    torch.testing.assert_close(logits, direct, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["rack", "llama", "x_decoder", "gru", "encoder", "causal_encoder"])
def test_spec_can_train(subjects, name):
    subject = getattr(subjects, name)
    spec = subject() if name == "causal_encoder" else ModelSpec.of(subject)
    model = spec.create().train()
    spec.loss_of(model, spec.batch(2, 6)).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_spec_with_its_defaults_can_be_sent_to_a_process():
    spec = ModelSpec(build=nn.Identity, name="same", inputs="vectors", width=3)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    inputs = spec.batch(1, 2)
    assert torch.equal(again.forward(again.create(), inputs), inputs)
    [group] = again.optimizer([nn.Parameter(torch.ones(1))]).param_groups
    assert group["lr"] == 1e-3


def test_module_class_is_a_factory(subjects):
    assert ModelSpec.of(subjects.GRULM).name == "GRULM"


def test_function_that_returns_a_spec(subjects):
    spec = subjects.causal_encoder()
    assert ModelSpec.of(lambda: spec) is spec
    assert ModelSpec.of(spec) is spec
    changed = ModelSpec.of(lambda: spec, tolerance=0.5, trained=True)
    assert (changed.tolerance, changed.trained, changed.causal) == (0.5, True, True)
    assert spec.tolerance == 1e-5


@pytest.mark.parametrize("name", ["gru", "llama", pytest.param("rack", marks=pytest.mark.slow)])
def test_module_is_never_changed(subjects, name):
    module = getattr(subjects, name)()
    # A caller's module may be anywhere: here in train mode, with one frozen weight.
    first = next(module.parameters()).requires_grad_(False)
    before, training = state_of(module), module.training
    spec = ModelSpec.of(module)
    check_model(spec)
    stability_run(spec, steps=2, batch_size=2)
    model_workload(spec, "train", batch_size=2, seq_len=4).call()
    assert same_state(module.state_dict(), before)
    assert module.training == training
    assert all(p.grad is None for p in module.parameters())
    assert not first.requires_grad
    assert not any(m._forward_hooks for m in module.modules())
    assert spec.name == type(module).__name__


def test_training_a_copy_really_changes_it(subjects):
    module = subjects.gru()
    spec = ModelSpec.of(module)
    trained = []

    def optimizer(parameters):
        trained.extend(parameters)
        return torch.optim.SGD(trained, lr=1.0)

    stability_run(ModelSpec.of(spec, optimizer=optimizer), steps=1, batch_size=2)
    assert not torch.equal(trained[0], next(module.parameters()))


class ZeroHead(nn.Module):
    """Its embedding gets a gradient once the head has moved."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        return self.head(self.embedding(ids))


@pytest.mark.parametrize(
    "train",
    [
        lambda spec: stability_run(spec, steps=1, batch_size=2, seq_len=4),
        lambda spec: model_workload(spec, "train", batch_size=1, seq_len=4),
        lambda spec: SpecTraining(spec, batch_size=1, seq_len=4),
        lambda spec: check_model(spec, checks=["gradient_flow"]),
        lambda spec: check_model(spec, checks=["width_independence"]),
    ],
    ids=["stability run", "workload", "prototype", "gradients", "width"],
)
def test_an_optimizer_gets_a_list(train):
    """As torch.optim does, so that it may be gone through twice: once for what decays, once for the rest."""
    kinds = []

    def optimizer(parameters):
        kinds.append(type(parameters))
        return torch.optim.SGD(parameters, lr=0.1)

    train(ModelSpec.of(ZeroHead, causal=True, optimizer=optimizer, at_width=lambda factor: ZeroHead()))
    assert set(kinds) == {list}


def test_module_gives_equal_weights_in_separate_memory(subjects):
    module = subjects.gru()
    spec = ModelSpec.of(module)
    one, two = spec.create(seed=0), spec.create(seed=1)
    assert same_state(one.state_dict(), module.state_dict())
    assert same_state(two.state_dict(), module.state_dict())
    pointers = [p.data_ptr() for m in (module, one, two) for p in m.parameters()]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("n_places", [4, 16, 20, 200])
def test_first_embedding_of_places(n_places):
    spec = ModelSpec.of(lambda: PositionFirst(n_places))
    assert (spec.inputs, spec.width) == ("tokens", 50)
    assert spec.seq_len == min(n_places, 16)
    spec.logits(spec.create(), spec.batch(2, spec.seq_len))


@pytest.mark.parametrize("limit", [1, 3, 5, 20])
def test_trial_stays_within_the_longest_sequence(limit):
    def factory():
        model = PositionFirst(limit)
        model.max_seq_len = limit
        return model

    spec = ModelSpec.of(factory)
    assert (spec.width, spec.max_length) == (50, limit)
    assert spec.seq_len <= limit


@pytest.mark.parametrize("n_places", [16, 200])
def test_vocabulary_of_outputs_that_are_no_logits(n_places):
    spec = ModelSpec.of(lambda: PositionFirst(n_places, d_out=7))
    assert (spec.inputs, spec.width) == ("tokens", 50)


def test_declared_attributes_win(subjects):
    def forward(model, inputs):
        return model(inputs).logits

    spec = ModelSpec.of(
        subjects.llama,
        name="mine",
        causal=False,
        max_length=9,
        seq_len=5,
        trained=True,
        forward=forward,
        notes="said",
    )
    assert (spec.name, spec.causal, spec.max_length) == ("mine", False, 9)
    assert (spec.seq_len, spec.trained, spec.forward.function, spec.notes) == (5, True, forward, "said")
    assert (spec.inputs, spec.width) == ("tokens", 97)


def test_declared_width_wins(subjects):
    # Fewer ids than the embedding has rows, as where the vocabulary is padded.
    spec = ModelSpec.of(subjects.gru, width=40)
    assert (spec.inputs, spec.width) == ("tokens", 40)
    assert int(spec.batch(50, 9).max()) < 40


def test_declared_inputs_win():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(23, 8)
            self.layer = nn.Linear(8, 8)

        def forward(self, inputs):
            return self.layer(inputs if inputs.is_floating_point() else self.embedding(inputs))

    assert ModelSpec.of(Either).inputs == "tokens"
    spec = ModelSpec.of(Either, inputs="vectors")
    assert (spec.inputs, spec.width) == ("vectors", 8)


def test_declared_nothing_is_not_inferred(subjects):
    assert ModelSpec.of(subjects.rack, causal=None).causal is None
    assert ModelSpec.of(subjects.llama, max_length=None).max_length is None


def test_only_what_is_not_declared_is_tried():
    seen = []

    class Watched(PositionFirst):
        def forward(self, ids):
            seen.append((tuple(ids.shape), int(ids.max()) < 5))
            return super().forward(ids)

    ModelSpec.of(lambda: Watched(64), inputs="tokens", width=5, seq_len=7)
    assert seen == [((2, 7), True)]


def test_declared_forward_is_tried(subjects):
    class Masked(subjects.TinyLM):
        def forward(self, ids, keep):
            return super().forward(ids * keep)

    with pytest.raises(InferenceError):
        ModelSpec.of(Masked)
    spec = ModelSpec.of(Masked, forward=lambda model, ids: model(ids, torch.ones_like(ids)))
    assert (spec.inputs, spec.width) == ("tokens", 29)


def test_declaring_what_does_not_exist(subjects):
    with pytest.raises(TypeError, match="vocab"):
        ModelSpec.of(subjects.gru, vocab=50)


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("name", ["causal", "is_causal"])
def test_what_the_model_says_of_itself(subjects, name, claim):
    def factory():
        model = subjects.gru()
        setattr(model, name, claim)
        return model

    spec = ModelSpec.of(factory)
    assert spec.causal is claim
    assert f"{name}={claim}" in spec.notes


def test_an_assumption_is_noted(subjects):
    assert "assumed" in ModelSpec.of(subjects.gru).notes
    assert "assumed" not in ModelSpec.of(subjects.rack).notes


def test_factory_that_needs_arguments():
    called = []

    def factory(width, depth=2):
        called.append(width)
        return nn.Linear(width, width)

    message = r"model: factory: missing a required argument: 'width'; wanted a function that takes no arg"
    with pytest.raises(TypeError, match=message):
        ModelSpec.of(factory)
    assert not called
    assert ModelSpec.of(lambda: factory(3), inputs="vectors").width == 3


def test_factory_whose_signature_cannot_be_seen():
    class Hidden:
        __signature__ = "none"

        def __call__(self):
            return nn.Linear(3, 3)

    assert ModelSpec.of(Hidden(), inputs="vectors").width == 3


@pytest.mark.parametrize("error", [LookupError("no weights here"), SystemExit("no weights here")])
def test_factory_that_raises(error):
    def factory():
        raise error

    with pytest.raises(FactoryError, match=r"^model: factory raised .*: .*no weights here.?$") as raised:
        ModelSpec.of(factory)
    assert raised.value.__cause__ is error
    assert isinstance(raised.value, ValueError)


def test_a_type_error_inside_a_factory_is_not_taken_for_its_own():
    def factory():
        return nn.Linear(3)

    with pytest.raises(FactoryError, match=r"model: factory raised TypeError: .*out_features"):
        ModelSpec.of(factory)


def test_factory_that_wants_the_network(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionRefusedError("no route")

    def download():
        urllib.request.urlopen("http://localhost:1/weights")

    def wrapped():
        try:
            download()
        except OSError as error:
            raise RuntimeError("cannot load weights") from error

    monkeypatch.setattr("socket.create_connection", refuse)

    def unrelated():
        raise FileNotFoundError("no such file")

    with pytest.raises(FactoryError, match=r"model: unrelated raised FileNotFoundError: no such file$"):
        ModelSpec.of(unrelated)
    for factory in (download, wrapped):
        with pytest.raises(
            FactoryError, match=rf"model: {factory.__name__} raised .* wants the network: build"
        ):
            ModelSpec.of(factory)


def test_factory_that_names_weights_of_a_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def factory():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained("nobody/has-such-a-model")

    with pytest.raises(
        FactoryError, match=r"model: factory raised OSError: (?s:.*) wants the network: build"
    ):
        ModelSpec.of(factory)


def test_an_interrupt_is_no_error_of_the_factory():
    def factory():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ModelSpec.of(factory)


@pytest.mark.parametrize("made", [None, 3, "model", [nn.Linear(2, 2)], nn.Linear])
def test_factory_that_returns_something_else(made):
    with pytest.raises(TypeError, match=f"got {type(made).__name__}; wanted an nn.Module"):
        ModelSpec.of(lambda: made)


def test_a_training_loop_is_referred_to_trainer_specs():
    loop = types.SimpleNamespace(model=nn.Linear(2, 2), optimizer=None, step=None)
    with pytest.raises(TypeError, match="a training loop is checked with TrainerSpec"):
        ModelSpec.of(lambda: loop)


@pytest.mark.parametrize("subject", [None, 3, "model", {"model": 1}])
def test_subject_that_is_something_else(subject):
    with pytest.raises(TypeError, match=f"got {type(subject).__name__}; wanted"):
        ModelSpec.of(subject)


def test_build_that_returns_no_module():
    with pytest.raises(TypeError, match=r"linear: build\(\) returned int; wanted an nn.Module"):
        spec_of(build=lambda: 3).create()


@pytest.mark.parametrize(
    "factory, tried",
    [
        (Fussy, r"ids \(2, 16\), ids \(2, 8\), ids \(2, 4\): TypeError: .*cache"),
        (Same, "nothing"),
        (lambda: nn.Bilinear(5, 5, 5), "nothing"),
    ],
    ids=["fussy", "same", "bilinear"],
)
def test_model_that_cannot_be_called(factory, tried):
    with pytest.raises(InferenceError, match="Declare inputs= and width=, or make_batch=") as raised:
        ModelSpec.of(factory)
    raised.match(tried)


def test_errors_of_a_trial_are_cut_at_a_word():
    class Wordy(Flat):
        def forward(self, ids):
            raise RuntimeError("consequently " * 40)

    with pytest.raises(InferenceError) as raised:
        ModelSpec.of(Wordy)
    told = str(raised.value).splitlines()[1]
    assert told.startswith("  ids (2, 16), ids (2, 8), ids (2, 4): RuntimeError: consequently")
    assert told.endswith(" consequently ...") and len(told) < 240
    assert str(raised.value).count("RuntimeError") == 1


def test_inference_error_is_a_value_error():
    assert issubclass(InferenceError, ValueError)


@given(seed=SEEDS, other=SEEDS, rows=st.integers(1, 4), length=st.integers(1, 9))
@example(seed=0, other=1, rows=1, length=1)
def test_batch_is_a_function_of_the_seed(seed, other, rows, length):
    for spec in (spec_of(inputs="tokens", width=1 << 30), spec_of()):
        torch.manual_seed(other)
        first = spec.batch(rows, length, seed=seed)
        state = torch.get_rng_state()
        assert torch.equal(spec.batch(rows, length, seed=seed), first)
        assert torch.equal(torch.get_rng_state(), state)
        assert first.shape[:2] == (rows, length)
        if other != seed:
            assert not torch.equal(spec.batch(rows, length, seed=other), first)


def test_token_batches_use_the_whole_vocabulary():
    ids = spec_of(inputs="tokens", width=7).batch(32, 16)
    assert ids.dtype == torch.int64
    assert ids.unique().tolist() == list(range(7))


def test_vector_batches_are_standard_normal():
    vectors = spec_of(width=32).batch(32, 16)
    assert vectors.shape == (32, 16, 32)
    assert abs(vectors.mean().item()) < 0.03
    assert abs(vectors.std().item() - 1) < 0.03


def test_batches_that_the_model_brings():
    def make(batch_size, seq_len, generator):
        return torch.randint(3, (batch_size, seq_len), generator=generator) + 100

    spec = spec_of(inputs="tokens", make_batch=make)
    assert torch.equal(spec.batch(2, 30, seed=4), spec.batch(2, 30, seed=4))
    assert not torch.equal(spec.batch(2, 30, seed=4), spec.batch(2, 30, seed=5))
    assert spec.batch(2, 30).unique().tolist() == [100, 101, 102]


def test_batch_beyond_the_longest_sequence(subjects):
    spec = ModelSpec.of(subjects.llama)
    assert spec.batch(1, 64).shape == (1, 64)
    with pytest.raises(ValueError, match="seq_len: got 65; llama takes at most 64 positions"):
        spec.batch(1, 65)


@given(seed=SEEDS, other=SEEDS)
def test_create_is_reproducible_and_leaves_the_random_state(seed, other):
    spec = spec_of()
    torch.manual_seed(other)
    first = spec.create(seed=seed)
    drawn = torch.rand(3)
    torch.manual_seed(other)
    assert torch.equal(torch.rand(3), drawn)
    second = spec.create(seed=seed)
    assert same_state(first.state_dict(), second.state_dict())
    if seed != other:
        assert not same_state(spec.create(seed=other).state_dict(), first.state_dict())


def test_create_gives_fresh_models():
    spec = spec_of()
    one, two = spec.create(), spec.create()
    assert one is not two
    assert one.weight.data_ptr() != two.weight.data_ptr()


@pytest.mark.parametrize("kind", ["factory", "module", "spec"])
def test_of_leaves_the_random_state(subjects, kind):
    subject = {"factory": subjects.gru, "module": subjects.gru(), "spec": ModelSpec.of(subjects.gru)}[kind]
    before = torch.get_rng_state()
    ModelSpec.of(subject)
    assert torch.equal(torch.get_rng_state(), before)


def test_of_builds_twice(subjects):
    built = []

    def factory():
        built.append(1)
        return subjects.gru()

    spec = ModelSpec.of(factory)
    assert len(built) == 2
    assert spec.build is factory


def test_of_leaves_no_model_behind(subjects):
    # What is tried is thrown away: what is created later must not have gone through the trial.
    class Counting(subjects.GRULM):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids):
            self.calls += 1
            return super().forward(ids)

    spec = ModelSpec.of(Counting)
    assert spec.create().calls == 0
    module = Counting()
    ModelSpec.of(module)
    assert module.calls == 0


def cross_entropy(logits, labels):
    logits = logits.double()
    chosen = logits.gather(-1, labels[..., None])[..., 0]
    return (logits.exp().sum(-1).log() - chosen).mean().item()


@pytest.mark.parametrize("name", ["gru", "in_object"])
def test_loss_of_a_causal_model_is_that_of_the_next_token(subjects, name):
    spec = ModelSpec.of(getattr(subjects, name))
    model, ids = spec.create(), spec.batch(3, 6)
    with torch.no_grad():
        loss, logits = spec.loss_of(model, ids).item(), spec.logits(model, ids)
    assert loss == pytest.approx(cross_entropy(logits[:, :-1], ids[:, 1:]), rel=1e-5)
    assert loss != pytest.approx(cross_entropy(logits, ids), rel=1e-3)


def test_loss_of_other_models(subjects):
    spec = ModelSpec.of(subjects.gru, causal=False)
    model, ids = spec.create(), spec.batch(3, 6)
    with torch.no_grad():
        assert spec.loss_of(model, ids).item() == pytest.approx(cross_entropy(model(ids), ids), rel=1e-5)
    spec = spec_of()
    model, vectors = spec.create(), spec.batch(3, 6)
    with torch.no_grad():
        expected = float((model(vectors).numpy() ** 2).mean())
        assert spec.loss_of(model, vectors).item() == pytest.approx(expected, rel=1e-5)


def test_loss_that_the_model_brings():
    spec = spec_of(loss=lambda model, inputs: model(inputs).sum() * 0 + 42.0)
    assert spec.loss_of(spec.create(), spec.batch(1, 2)).item() == 42.0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"inputs": "ids"}, "inputs: got 'ids'; allowed: 'tokens', 'vectors'"),
        ({"width": 0}, "width: got 0"),
        ({"width": 2.0}, "width: got 2.0"),
        ({"seq_len": 0}, "seq_len: got 0"),
        ({"max_length": 0}, "max_length: got 0"),
        ({"tolerance": 0.0}, "tolerance: got 0.0"),
        ({"tolerance": float("nan")}, "tolerance: got nan"),
        ({"build": nn.Linear(2, 2).weight}, "build: got "),
    ],
)
def test_values_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        spec_of(**changes)


@pytest.mark.parametrize("kind", ["encoder", "gru"])
def test_layers_that_put_positions_first(kind):
    def factory():
        if kind == "gru":
            return nn.GRU(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    spec = ModelSpec.of(factory, inputs="vectors", width=16)
    assert "batch_first=False" in spec.notes
    model, vectors = spec.create().eval(), spec.batch(3, 5)
    with torch.no_grad():
        direct = model(vectors.transpose(0, 1))
        direct = direct[0] if kind == "gru" else direct
        torch.testing.assert_close(spec.logits(model, vectors), direct.transpose(0, 1))
    assert {r.check: r.status for r in check_model(spec)}["batch_invariance"] == "passed"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_vectors_are_cast_to_the_models_own_type(subjects, dtype):
    spec = ModelSpec.of(lambda: subjects.encoder().to(dtype))
    assert (spec.inputs, spec.width) == ("vectors", 16)
    model = spec.create()
    assert spec.logits(model, spec.batch(2, 4)).dtype == dtype
    assert spec.loss_of(model, spec.batch(2, 4)).isfinite()


def test_declaring_on_a_spec_changes_a_copy():
    spec = spec_of()
    assert ModelSpec.of(spec, tolerance=0.1, causal=True).tolerance == 0.1
    assert (spec.tolerance, spec.causal) == (1e-5, None)


LOGITS = torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        types.SimpleNamespace(logits=LOGITS),
        {"logits": LOGITS},
        {"loss": 1, "logits": LOGITS},
        (LOGITS, None),
        [LOGITS],
    ],
)
def test_where_logits_are_found(output):
    assert logits_of(output) is LOGITS


@pytest.mark.parametrize(
    "output",
    [
        None,
        3.0,
        {},
        {"out": LOGITS},
        (),
        [],
        ("a", LOGITS),
        types.SimpleNamespace(logits=None),
        {"logits": 1},
    ],
)
def test_outputs_without_logits(output):
    with pytest.raises(TypeError, match=f"output: got {type(output).__name__}; wanted a tensor"):
        logits_of(output)


def small(kind, **settings):
    """A model of transformers; what its sizes are called depends on its type."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "xlnet":
        sizes = {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
    elif kind != "xlm":
        sizes |= {"intermediate_size": 32, "max_position_embeddings": 32}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | settings))


@pytest.mark.parametrize(
    "kind, name, off, on",
    [
        ("roberta", "is_decoder", False, True),
        ("rembert", "is_decoder", False, True),
        ("xlnet", "attn_type", "bi", "uni"),
        ("xlm", "causal", False, True),
    ],
)
def test_a_setting_that_makes_it_causal(kind, name, off, on):
    spec = ModelSpec.of(lambda: small(kind, **{name: off}))
    assert spec.causal is False
    assert f"not causal, as configured: {name}={off!r}" in spec.notes
    assert ModelSpec.of(lambda: small(kind, **{name: on})).causal is True


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_mask_that_is_gone_is_no_setting(kind):
    def factory():
        model = small(kind)
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
        return model

    spec = ModelSpec.of(factory)
    assert spec.causal is True
    assert check_model(spec, checks=["causality"])[0].status == "failed"


def test_encoder_decoder_claims_nothing():
    from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertLMHeadModel

    sizes = {"vocab_size": 50, "d_model": 16, "max_position_embeddings": 32}
    layers = {
        f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")
    }
    config = BartConfig(**sizes, **layers, encoder_ffn_dim=32, decoder_ffn_dim=32)
    assert ModelSpec.of(lambda: BartForConditionalGeneration(config)).causal is None
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    assert ModelSpec.of(lambda: BertLMHeadModel(config)).causal is False


class Wrapped(nn.Module):
    """A head of its own on a backbone that others have too."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(50, 50)

    def forward(self, ids):
        return self.head(self.backbone(ids))


class TestSharedWeights:
    @pytest.mark.parametrize("kind", ["module", "wrapper", "storage", "declared"])
    def test_a_callers_model_is_copied(self, subjects, kind):
        shared = subjects.gru()
        before = state_of(shared)

        def with_its_memory():
            other = subjects.gru()
            for name, p in shared.named_parameters():
                other.get_parameter(name).data = p.data
            return other

        factory = {
            "module": lambda: shared,
            "wrapper": lambda: Wrapped(shared),
            "storage": with_its_memory,
            "declared": lambda: ModelSpec.of(lambda: shared),
        }[kind]
        spec = ModelSpec.of(factory)
        assert spec.notes.endswith("; its models share tensors, so each is a copy")
        check_model(spec, checks=["causality", "gradient_exact", "initialized", "trainable"])
        assert same_state(state_of(shared), before)
        assert all(p.dtype == torch.float32 and p.grad is None for p in shared.parameters())
        created = [spec.create(), spec.create()]
        places = [p.data_ptr() for m in (shared, *created) for p in m.parameters()]
        assert len(set(places)) == len(places)

    def test_fresh_models_are_left_as_the_factory_makes_them(self, subjects):
        spec = ModelSpec.of(subjects.gru)
        assert spec.build is subjects.gru and "copy" not in spec.notes
        first = next(iter(spec.create(seed=0).parameters()))
        assert not torch.equal(first, next(iter(spec.create(seed=1).parameters())))

    def test_a_table_that_all_models_share_is_copied_and_weights_stay_seeded(self, subjects):
        table = torch.arange(5.0)

        def factory():
            model = subjects.gru()
            model.register_buffer("table", table)
            return model

        spec = ModelSpec.of(factory)
        one, other = spec.create(seed=0), spec.create(seed=1)
        assert len({each.table.data_ptr() for each in (one, other)} | {table.data_ptr()}) == 3
        assert not torch.equal(next(one.parameters()), next(other.parameters()))

    def test_a_factory_that_works_once(self, subjects):
        models = iter([subjects.gru()])
        with pytest.raises(FactoryError, match=r"StopIteration.*second time"):
            ModelSpec.of(lambda: next(models))

    def test_a_factory_that_returns_a_model_once(self, subjects):
        made = iter([subjects.gru(), None])
        with pytest.raises(TypeError, match="called again, the function returned NoneType"):
            ModelSpec.of(lambda: next(made))


def meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))


def meta_buffer():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
    model[1].register_buffer("table", torch.zeros(3, device="meta"))
    return model


def lazy():
    return nn.Sequential(nn.Embedding(10, 8), nn.LazyLinear(10))


def inferred():
    with torch.inference_mode():
        return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))


@pytest.mark.parametrize(
    "factory, told",
    [
        (meta, "meta: 0.weight is on the meta device"),
        (meta_buffer, "meta_buffer: 1.table is on the meta device"),
        (lazy, "lazy: 1.weight has no shape yet"),
        (inferred, "inferred: 0.weight was created in inference_mode"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_weights_that_cannot_be_run(factory, told):
    with pytest.raises(FactoryError, match=told):
        ModelSpec.of(factory)
    with pytest.raises(FactoryError, match=told.partition(": ")[2]):
        ModelSpec.of(factory())


class Limited(nn.Module):
    """Takes `n_places` positions, if it counts them; its configuration says a number of whatever it is."""

    def __init__(self, name, value, *, on_model=False, n_places=24, counts=True):
        super().__init__()
        self.n_places, self.counts = n_places, counts
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        setattr(
            self if on_model else self.__dict__.setdefault("config", types.SimpleNamespace()), name, value
        )

    def forward(self, ids):
        assert not self.counts or ids.shape[1] <= self.n_places, "too long"
        return self.head(self.embedding(ids).cumsum(1))


@pytest.mark.parametrize("on_model", [False, True])
@pytest.mark.parametrize("name", ["block_size", "n_positions", "n_ctx", "context_length", "max_len"])
@pytest.mark.parametrize("limit", [6, 24])
def test_the_longest_sequence_by_its_other_names(name, on_model, limit):
    spec = ModelSpec.of(lambda: Limited(name, limit, on_model=on_model, n_places=limit))
    assert spec.max_length == limit and f"at most {limit} positions" in spec.notes
    assert spec.seq_len <= limit
    assert {r.status for r in check_model(spec, checks=["causality", "causality_far"])} == {
        "passed",
        "not applicable",
    }


@pytest.mark.parametrize("value", [4, True, 0, None, "16"])
def test_a_setting_that_is_no_limit(value):
    spec = ModelSpec.of(lambda: Limited("block_size", value, counts=False))
    assert (spec.max_length, spec.seq_len) == (None, 16)


def test_a_declared_limit_is_not_tried():
    assert ModelSpec.of(lambda: Limited("block_size", 4, counts=False), max_length=4).max_length == 4


def test_what_was_assumed():
    spec = ModelSpec.of(lambda: PositionFirst(20))
    assert (spec.causal, spec.assumed) == (True, ("causal",))
    assert ModelSpec.of(spec, causal=True).assumed == ()
    assert ModelSpec.of(spec, tolerance=1e-3).assumed == ("causal",)
    assert ModelSpec.of(lambda: PositionFirst(20), causal=True).assumed == ()


@pytest.mark.parametrize(
    "name, assumed", [("llama", ()), ("bert", ()), ("x_decoder", ()), ("gru", ("causal",))]
)
def test_what_is_seen_is_not_assumed(subjects, name, assumed):
    assert ModelSpec.of(getattr(subjects, name)).assumed == assumed


class TestSeveralOutputs:
    """Which output of a tuple is judged."""

    class Model(nn.Module):
        """Sizes in the order of the outputs; "V" are the logits."""

        def __init__(self, order, n_places=64, d=64, V=100):
            super().__init__()
            self.order = order
            self.places, self.tokens = nn.Embedding(n_places, d), nn.Embedding(V, d)
            self.head, self.other = nn.Linear(d, V), nn.Linear(d, 7)

        def forward(self, ids, labels=None):
            x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
            logits = self.head(x)
            found = {"hidden": x, "V": logits, "other": self.other(x), None: None, "pooled": x.mean(1)}
            outputs = [found[name] for name in self.order]
            if labels is not None:
                outputs.append(
                    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
                )
            return tuple(outputs)

    @pytest.mark.parametrize(
        "order",
        [("hidden", "V"), ("V", "hidden"), (None, "V"), ("other", "hidden", "V"), ("pooled", "V"), ("V",)],
    )
    @pytest.mark.parametrize("sizes", [{}, {"V": 50}, {"d": 16}, {"d": 100, "V": 80}])
    def test_the_vocabulary_decides(self, order, sizes):
        spec = ModelSpec.of(lambda: self.Model(order, **sizes))
        assert (spec.inputs, spec.width) == ("tokens", sizes.get("V", 100))
        model, ids = spec.create(), spec.batch(2, 6)
        place = order.index("V")
        torch.testing.assert_close(spec.logits(model, ids), model(ids)[place], rtol=0, atol=0)
        assert (f"logits at [{place}]" in spec.notes) == (place > 0)
        others = len([name for name in order if name in ("hidden", "other")])
        assert (f"uses output [{place}]; {others} more may be logits" in spec.notes) == (others > 0)
        torch.testing.assert_close(spec.labelled_loss(model, ids, ids), model(ids, ids)[-1])

    def test_without_a_vocabulary_it_is_the_first(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.other = nn.Linear(5, 7), nn.Linear(5, 5)

            def forward(self, x):
                return self.one(x), self.other(x)

        spec = ModelSpec.of(Two)
        assert (spec.inputs, spec.width) == ("vectors", 5)
        assert spec.logits(spec.create(), spec.batch(1, 3)).shape[-1] == 7
        assert "uses output [0]; 1 more may be logits" in spec.notes


class NanoGPT(nn.Module):
    """As nanoGPT: the loss of `targets` flattens them with `view`; without targets one position answers."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)

    def forward(self, idx, targets=None):
        logits = self.head(self.embed(idx).cumsum(1).tanh())
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.view(-1, 97), targets.view(-1), ignore_index=-1)


class SequenceFirst(nn.Module):
    """A recurrent model that is called by keyword, with a mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.core, self.head = (
            nn.Embedding(97, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 97),
        )

    def forward(self, *, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        return self.head(self.core(x if attention_mask is None else x * attention_mask[..., None])[0])


def check(spec):
    check_model(spec, suite="full")


def measure_speed(spec):
    for mode in ("forward", "train", "prefill", "decode"):
        measure(
            model_workload(spec, mode, batch_size=2, seq_len=8),
            min_calls=1,
            min_seconds=0.0,
            warmup_seconds=0.0,
        )
    generate_once(model_workload(spec, "generate", batch_size=2, seq_len=8, new_tokens=3))


def sweep_lengths(spec):
    length_sweep(spec, (4, 6), steps=2, memory=False)


def train_with_faults(spec):
    stability_run(spec, steps=6, seq_len=8, faults=[CorruptSample(5)])


def score_quality(spec):
    scorer = Scorer(LanguageModel(spec))
    scorer.score_tokens([TokenRequest((1, 2, 3, 4), (5,) * n) for n in (1, 2, 3)])


def train_prototype(spec):
    ArchitecturePrototype(spec, data=[torch.randint(97, (12, 2)).T[:, :9] for _ in range(2)]).run(2)


@pytest.mark.parametrize("build", [NanoGPT, SequenceFirst, "gpt2", "llama", "rack97"])
@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(check, marks=pytest.mark.slow),
        measure_speed,
        sweep_lengths,
        train_with_faults,
        score_quality,
        train_prototype,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_probes_pass_tensors_as_a_training_loop_does(subjects, build, probe):
    """Tensors reach a model contiguous, ids and labels in int64."""
    make = {"rack97": lambda: subjects.rack(vocab_size=97)}.get(build) or getattr(subjects, str(build), build)
    refused = []

    def examine(module, arguments, keywords):
        for name, value in [*enumerate(arguments), *keywords.items()]:
            if isinstance(value, torch.Tensor) and not value.is_contiguous():
                refused.append(f"{name}: strides {value.stride()} of {tuple(value.shape)}")
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int16, torch.uint8):
                refused.append(f"{name}: {value.dtype}")

    def examined():
        model = make()
        model.register_forward_pre_hook(examine, with_kwargs=True)
        return model

    probe(ModelSpec.of(examined, causal=True))
    assert refused == []


class UnusualNames(nn.Module):
    """Its memory has a name that no library uses."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, letters, memory=None, mask=None, scale=1.0):
        return scale * self.head(self.embedding(letters))


def test_unused_arguments_are_noted():
    assert "not used: memory= (declare" in ModelSpec.of(UnusualNames).notes


@pytest.mark.parametrize("name", ["llama", "gpt2", "rack", "gru"])
def test_usual_arguments_are_not_noted(subjects, name):
    assert "not used" not in ModelSpec.of(getattr(subjects, name)).notes
