"""ModelSpec: attributes inferred from a model, the calls that it makes, and its errors."""

import pickle
import re
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

# The CPU generator takes a seed modulo 2**32.
SEEDS = st.integers(0, 2**32 - 1)


def state_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same_state(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def spec_of(**changes):
    fields = {"build": lambda: nn.Linear(3, 3), "name": "linear", "inputs": "vectors", "width": 3}
    return ModelSpec(**fields | changes)


# Inferred attributes


def given_output(output):
    return output


def attribute(output):
    return output.logits


# Name: (inputs, width, causal, longest sequence, assumed, output -> logits).
KNOWN = {
    "rack": ("tokens", 61, True, None, ("padding_sides",), given_output),
    "bidirectional_rack": ("tokens", 61, False, None, ("padding_sides",), given_output),
    "llama": ("tokens", 97, True, 64, ("padding_sides",), attribute),
    "gpt2": ("tokens", 97, True, 64, ("padding_sides",), attribute),
    "bert": ("tokens", 97, False, 64, ("padding_sides",), attribute),
    "x_decoder": ("tokens", 80, True, 64, ("padding_sides",), given_output),
    "x_encoder": ("tokens", 80, False, 64, ("padding_sides",), given_output),
    "gru": ("tokens", 50, True, None, ("causal",), given_output),
    "conv": ("tokens", 50, True, None, ("causal",), given_output),
    "in_dict": ("tokens", 29, True, None, ("causal",), lambda output: output["logits"]),
    "in_tuple": ("tokens", 29, True, None, ("causal",), lambda output: output[0]),
    "in_object": ("tokens", 29, True, None, ("causal",), attribute),
    "encoder": ("vectors", 16, None, None, ("padding_sides",), given_output),
}


@pytest.mark.parametrize("name", KNOWN)
def test_attributes_are_inferred(subjects, name):
    factory = getattr(subjects, name)
    spec = ModelSpec.of(factory)
    found = (spec.inputs, spec.width, spec.causal, spec.max_length, spec.assumed)
    assert found == KNOWN[name][:5]
    assert (spec.name, spec.trained) == (factory.__name__, False)
    kind = "token ids, vocabulary" if spec.inputs == "tokens" else "vectors of width"
    assert f"takes {kind} {spec.width}" in spec.notes
    assert ("assumed" in spec.notes) == ("causal" in spec.assumed)


@pytest.mark.parametrize("name", KNOWN)
@torch.no_grad()
def test_logits_are_those_of_a_direct_call(subjects, name):
    spec = ModelSpec.of(getattr(subjects, name))
    inputs = spec.batch(3, 7, seed=5)
    logits = spec.logits(spec.create(seed=3).eval(), inputs)
    torch.manual_seed(3)
    direct = KNOWN[name][5](getattr(subjects, name)().eval()(inputs))
    assert logits.shape == (3, 7, spec.width)
    torch.testing.assert_close(logits, direct, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["rack", "llama", "x_decoder", "gru", "encoder", "causal_encoder"])
def test_loss_gives_gradients(subjects, name):
    subject = getattr(subjects, name)
    spec = subject() if name == "causal_encoder" else ModelSpec.of(subject)
    model = spec.create().train()
    spec.loss_of(model, spec.batch(2, 6)).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


class PositionFirst(nn.Module):
    """The first embedding is of positions, not of tokens."""

    def __init__(self, n_places, d_out=50, **attributes):
        super().__init__()
        self.places = nn.Embedding(n_places, 8)
        self.tokens = nn.Embedding(50, 8)
        self.head = nn.Linear(8, d_out)
        self.__dict__.update(attributes)

    def forward(self, ids):
        return self.head(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))


@pytest.mark.parametrize(
    ("n_places", "changes", "seq_len"),
    [
        *((n, {}, min(n, 16)) for n in (4, 16, 20, 200)),
        *((n, {"d_out": 7}, 16) for n in (16, 200)),
        *((n, {"max_seq_len": n}, None) for n in (1, 3, 5, 20)),
    ],
)
def test_embedding_of_positions_is_no_vocabulary(n_places, changes, seq_len):
    spec = ModelSpec.of(lambda: PositionFirst(n_places, **changes))
    assert (spec.inputs, spec.width, spec.max_length) == ("tokens", 50, changes.get("max_seq_len"))
    assert spec.seq_len == seq_len if seq_len else spec.seq_len <= n_places
    spec.logits(spec.create(), spec.batch(2, spec.seq_len))


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("name", ["causal", "is_causal"])
def test_causality_is_the_claim_of_the_model(name, claim):
    spec = ModelSpec.of(lambda: PositionFirst(20, **{name: claim}))
    assert spec.causal is claim
    assert f"{name}={claim}" in spec.notes


def test_assumption_ends_with_a_declaration():
    spec = ModelSpec.of(lambda: PositionFirst(20))
    assert (spec.causal, spec.assumed) == (True, ("causal",))
    assert ModelSpec.of(spec, causal=True).assumed == ()
    assert ModelSpec.of(spec, tolerance=1e-3).assumed == ("causal",)
    assert ModelSpec.of(lambda: PositionFirst(20), causal=True).assumed == ()


class TimeFirst(nn.Module):
    """Reads (positions, batch) by default, as torch's layers do."""

    def __init__(self):
        super().__init__()
        self.embedding, self.core = nn.Embedding(19, 16), nn.GRU(16, 19)

    def forward(self, ids, batch_first=False):
        assert not batch_first
        return self.core(self.embedding(ids))[0]


class TransposesInside(TimeFirst):
    """Reads (batch, positions); the attribute configures its inner layer only."""

    batch_first = False

    def forward(self, ids):
        return super().forward(ids.T).transpose(0, 1)


@pytest.mark.parametrize(("factory", "is_transposed"), [(TimeFirst, True), (TransposesInside, False)])
def test_batch_first_of_forward(factory, is_transposed):
    spec = ModelSpec.of(factory)
    assert ("batch_first=False" in spec.notes) == is_transposed
    model, ids = spec.create().eval(), spec.batch(3, 5)
    with torch.no_grad():
        torch.testing.assert_close(spec.logits(model, ids)[:1], spec.logits(model, ids[:1]))


@pytest.mark.parametrize("kind", ["encoder", "gru"])
def test_layers_with_positions_first_are_transposed(kind):
    def factory():
        if kind == "gru":
            return nn.GRU(16, 16)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)

    spec = ModelSpec.of(factory, inputs="vectors", width=16)
    assert "batch_first=False" in spec.notes
    model, vectors = spec.create().eval(), spec.batch(3, 5)
    with torch.no_grad():
        direct = model(vectors.transpose(0, 1))
        direct = direct[0] if kind == "gru" else direct
        torch.testing.assert_close(spec.logits(model, vectors), direct.transpose(0, 1))
    [result] = check_model(spec, checks=["batch_invariance"])
    assert result.status == "passed"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_vectors_are_cast_to_the_dtype_of_the_model(subjects, dtype):
    spec = ModelSpec.of(lambda: subjects.encoder().to(dtype))
    assert (spec.inputs, spec.width) == ("vectors", 16)
    model = spec.create()
    assert spec.logits(model, spec.batch(2, 4)).dtype == dtype
    assert spec.loss_of(model, spec.batch(2, 4)).isfinite()


class Limited(nn.Module):
    """Takes `n_places` positions. It or its configuration has an attribute such as block_size."""

    def __init__(self, name, value, *, on_model=False, n_places=10_000):
        super().__init__()
        self.n_places = n_places
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        if not on_model:
            self.config = types.SimpleNamespace()
        setattr(self if on_model else self.config, name, value)

    def forward(self, ids):
        assert ids.shape[1] <= self.n_places, "too long"
        return self.head(self.embedding(ids).cumsum(1))


@pytest.mark.parametrize("on_model", [False, True])
@pytest.mark.parametrize("name", ["block_size", "n_positions", "n_ctx", "context_length", "max_len"])
@pytest.mark.parametrize("limit", [6, 24])
def test_longest_sequence_has_many_names(name, on_model, limit):
    spec = ModelSpec.of(lambda: Limited(name, limit, on_model=on_model, n_places=limit))
    assert spec.max_length == limit and f"at most {limit} positions" in spec.notes
    assert spec.seq_len <= limit


@pytest.mark.parametrize(
    ("n_reserved", "padding_idx", "limit"),
    [(0, None, 12), (1, None, 12), (1, 0, 11), (2, 1, 10), (3, 2, 9), (4, 2, 12)],
)
def test_reserved_rows_of_a_position_table_are_no_positions(n_reserved, padding_idx, limit):
    """Only a table with a padding_idx reserves rows: those up to it."""

    class Reserving(nn.Module):
        max_length = 12

        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(20, 8), nn.Embedding(12, 8, padding_idx=padding_idx)
            self.head = nn.Linear(8, 20)

        def forward(self, input_ids):
            places = n_reserved + torch.arange(input_ids.shape[1])
            return self.head(self.tokens(input_ids) + self.places(places))

    assert ModelSpec.of(Reserving, seq_len=8).max_length == limit


@pytest.mark.parametrize(("limit", "status"), [(6, "not applicable"), (48, "passed")])
def test_checks_stay_within_the_longest_sequence(few_compositions, limit, status):
    spec = ModelSpec.of(lambda: Limited("block_size", limit, n_places=limit))
    causality, long_sequences = check_model(spec, checks=["causality", "long_sequences"])
    assert (causality.status, long_sequences.status) == ("passed", status)


@pytest.mark.parametrize("value", [4, True, 0, None, "16"])
def test_setting_that_does_not_limit_is_no_limit(value):
    spec = ModelSpec.of(lambda: Limited("block_size", value))
    assert (spec.max_length, spec.seq_len) == (None, 16)


class Tuple(nn.Module):
    """Returns the named outputs in their order, and a loss if there are labels. "V" are the logits."""

    def __init__(self, order, d=64, V=100):
        super().__init__()
        self.order = order
        self.places, self.tokens = nn.Embedding(64, d), nn.Embedding(V, d)
        self.head, self.other = nn.Linear(d, V), nn.Linear(d, 7)

    def forward(self, ids, labels=None):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(x)
        found = {"hidden": x, "V": logits, "other": self.other(x), None: None, "pooled": x.mean(1)}
        outputs = [found[name] for name in self.order]
        if labels is not None:
            outputs.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
        return tuple(outputs)


@pytest.mark.parametrize(
    "order",
    [("hidden", "V"), ("V", "hidden"), (None, "V"), ("other", "hidden", "V"), ("pooled", "V"), ("V",)],
)
@pytest.mark.parametrize("sizes", [{}, {"V": 50}, {"d": 16}, {"d": 100, "V": 80}])
def test_logits_in_a_tuple_have_the_width_of_the_vocabulary(order, sizes):
    spec = ModelSpec.of(lambda: Tuple(order, **sizes))
    assert (spec.inputs, spec.width) == ("tokens", sizes.get("V", 100))
    model, ids = spec.create(), spec.batch(2, 6)
    place = order.index("V")
    torch.testing.assert_close(spec.logits(model, ids), model(ids)[place], rtol=0, atol=0)
    assert (f"logits at [{place}]" in spec.notes) == (place > 0)
    others = len({"hidden", "other"} & set(order))
    assert (f"uses output [{place}]; {others} more may be logits" in spec.notes) == (others > 0)
    torch.testing.assert_close(spec.labelled_loss(model, ids, ids), model(ids, ids)[-1])


def test_logits_without_a_vocabulary_are_the_first_output():
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
def test_logits_of_an_output(output):
    assert logits_of(output) is LOGITS


NO_LOGITS = [None, 3.0, {}, {"out": LOGITS}, (), [], ("a", LOGITS), {"logits": 1}]


@pytest.mark.parametrize("output", [*NO_LOGITS, types.SimpleNamespace(logits=None)])
def test_output_without_logits_is_refused(output):
    with pytest.raises(TypeError, match=f"output: got {type(output).__name__}; wanted a tensor"):
        logits_of(output)


def test_unused_arguments_are_noted(subjects):
    class Unusual(subjects.GRULM):
        def forward(self, letters, memory=None, mask=None, scale=1.0):
            return scale * super().forward(letters)

    assert "not used: memory= (declare" in ModelSpec.of(Unusual).notes


@pytest.mark.parametrize("name", ["llama", "gpt2", "rack", "gru"])
def test_usual_arguments_are_not_noted(subjects, name):
    assert "not used" not in ModelSpec.of(getattr(subjects, name)).notes


# Causality of models of transformers


def small(kind, **settings):
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
def test_causality_depends_on_a_setting(kind, name, off, on):
    spec = ModelSpec.of(lambda: small(kind, **{name: off}))
    assert spec.causal is False
    assert f"not causal, as configured: {name}={off!r}" in spec.notes
    assert ModelSpec.of(lambda: small(kind, **{name: on})).causal is True


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_removed_mask_is_a_bug_and_no_setting(kind):
    def factory():
        model = small(kind)
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
        return model

    spec = ModelSpec.of(factory)
    assert spec.causal is True
    assert check_model(spec, checks=["causality"])[0].status == "failed"


def test_causality_of_language_models_that_are_no_decoders():
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=32)
    assert ModelSpec.of(lambda: BertLMHeadModel(config)).causal is False


# Declared attributes


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(23, 8), nn.Linear(8, 8)

    def forward(self, inputs):
        return self.layer(inputs if inputs.is_floating_point() else self.embedding(inputs))


DECLARED = {"name": "mine", "causal": False, "max_length": 9, "seq_len": 5, "trained": True, "notes": "said"}


@pytest.mark.parametrize(
    ("subject", "declared", "inferred"),
    [
        ("llama", DECLARED, {"inputs": "tokens", "width": 97}),
        ("gru", {"width": 40}, {"inputs": "tokens"}),  # the vocabulary is padded
        (Either, {}, {"inputs": "tokens"}),
        (Either, {"inputs": "vectors"}, {"width": 8}),
        ("rack", {"causal": None}, {}),
        ("llama", {"max_length": None}, {}),
        (lambda: Limited("block_size", 4), {"max_length": 4}, {}),
    ],
)
def test_declared_attributes_take_precedence(subjects, subject, declared, inferred):
    spec = ModelSpec.of(getattr(subjects, subject) if isinstance(subject, str) else subject, **declared)
    expected = declared | inferred
    assert {name: getattr(spec, name) for name in expected} == expected
    if spec.inputs == "tokens":
        assert int(spec.batch(50, 4).max()) < spec.width


def test_only_undeclared_attributes_are_tried():
    seen = []

    class Watched(PositionFirst):
        def forward(self, ids):
            seen.append((tuple(ids.shape), int(ids.max()) < 5))
            return super().forward(ids)

    ModelSpec.of(lambda: Watched(64), inputs="tokens", width=5, seq_len=7)
    assert set(seen) == {((2, 7), True)}


def test_declared_forward_is_tried(subjects):
    class Masked(subjects.TinyLM):
        def forward(self, ids, keep):
            return super().forward(ids * keep)

    def forward(model, ids):
        return model(ids, torch.ones_like(ids))

    with pytest.raises(InferenceError):
        ModelSpec.of(Masked)
    spec = ModelSpec.of(Masked, forward=forward)
    assert (spec.inputs, spec.width, spec.forward.function) == ("tokens", 29, forward)


def test_declaration_on_a_spec_changes_a_copy(subjects):
    spec = subjects.causal_encoder()
    assert ModelSpec.of(lambda: spec) is ModelSpec.of(spec) is spec
    for subject in (spec, lambda: spec):
        changed = ModelSpec.of(subject, tolerance=0.5, trained=True)
        assert (changed.tolerance, changed.trained, changed.causal) == (0.5, True, True)
    assert (spec.tolerance, spec.trained) == (1e-5, False)


@pytest.mark.parametrize(
    ("name", "hint"), [("casual", "did you mean causal="), ("batch_size", "allowed: .*make_batch, ")]
)
def test_undefined_attribute_is_refused(subjects, name, hint):
    for subject in (subjects.gru, subjects.causal_encoder):
        with pytest.raises(TypeError, match=f"{name}: unknown field of ModelSpec; {hint}"):
            ModelSpec.of(subject, **{name: 3})


FLAGS = ["causal", "per_position", "trained", "tied", "positionless", "never_waits"]
TUPLES = ["padding_sides", "unused", "frozen", "assumed"]
FUNCTIONS = ["forward", "masked", "decode", "loss", "optimizer", "make_batch", "at_width", "reference"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"inputs": "ids"}, "inputs: got 'ids'; allowed: 'tokens', 'vectors'"),
        ({"width": 0}, "width: got 0"),
        ({"width": "100"}, "width: got '100'"),
        ({"width": 2.0}, "width: got 2.0"),
        ({"seq_len": 0}, "seq_len: got 0"),
        ({"max_length": 0}, "max_length: got 0"),
        ({"tolerance": 0.0}, "tolerance: got 0.0"),
        ({"tolerance": float("nan")}, "tolerance: got nan"),
        *(({name: "no"}, f"{name}: got 'no'; allowed: True, False") for name in FLAGS),
        ({"causal": 1}, "causal: got 1; allowed: True, False or None"),
        *(({name: "left"}, f"{name}: got 'left'; allowed: a tuple of") for name in TUPLES),
        ({"padding_sides": ("up",)}, r"padding_sides: got \('up',\); allowed: a tuple of 'right', 'left'"),
        *(({"window": window}, "window: got .*; allowed: ") for window in ("4", 0, True, (1,), (-1, 0))),
        *(({name: 3}, f"{name}: got 3; allowed: a function") for name in FUNCTIONS),
        ({"name": 3}, "name: got 3; allowed: a string"),
    ],
)
def test_invalid_attribute_is_refused(subjects, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.of(subjects.gru, **changes)
    fields = {"build": nn.Identity, "name": "same", "inputs": "vectors", "width": 3}
    with pytest.raises(ValueError, match=message):
        ModelSpec(**fields | changes)


@pytest.mark.parametrize("made", [{"ids": torch.zeros(2, 4)}, (torch.zeros(2, 4),), None])
def test_batch_that_is_no_tensor_is_refused(subjects, made):
    message = f"make_batch: got {type(made).__name__}; allowed: a function that returns a tensor"
    with pytest.raises(ValueError, match=message):
        ModelSpec.of(subjects.gru, make_batch=lambda b, t, generator: made)
    with pytest.raises(ValueError, match=message):
        spec_of(make_batch=lambda b, t, generator: made).batch(2, 4)


# Factories and modules


def test_module_class_is_a_factory(subjects):
    assert ModelSpec.of(subjects.GRULM).name == "GRULM"


@pytest.mark.parametrize("name", ["gru", "llama", pytest.param("rack", marks=pytest.mark.slow)])
def test_module_is_never_changed(subjects, name):
    module = getattr(subjects, name)()
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


def test_training_changes_the_copy_of_a_module(subjects):
    module, trained = subjects.gru(), []

    def optimizer(parameters):
        trained.extend(parameters)
        return torch.optim.SGD(trained, lr=1.0)

    stability_run(ModelSpec.of(module, optimizer=optimizer), steps=1, batch_size=2)
    assert not torch.equal(trained[0], next(module.parameters()))


def test_copies_of_a_module_have_equal_weights_in_separate_memory(subjects):
    module = subjects.gru()
    spec = ModelSpec.of(module)
    models = [module, spec.create(seed=0), spec.create(seed=1)]
    assert all(same_state(each.state_dict(), module.state_dict()) for each in models)
    pointers = [p.data_ptr() for m in models for p in m.parameters()]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("kind", ["module", "wrapper", "storage", "declared"])
def test_model_shared_by_a_factory_is_copied(subjects, kind):
    shared = subjects.gru()
    before = state_of(shared)

    def with_its_memory():
        other = subjects.gru()
        for name, p in shared.named_parameters():
            other.get_parameter(name).data = p.data
        return other

    factory = {
        "module": lambda: shared,
        "wrapper": lambda: nn.Sequential(shared, nn.Linear(50, 50)),
        "storage": with_its_memory,
        "declared": lambda: ModelSpec.of(lambda: shared),
    }[kind]
    spec = ModelSpec.of(factory)
    assert spec.notes.endswith("; its models share tensors, so each is a copy")
    check_model(spec, checks=["causality", "gradient_exact", "initialized", "trainable"])
    assert same_state(state_of(shared), before)
    assert all(p.dtype == torch.float32 and p.grad is None for p in shared.parameters())
    places = [p.data_ptr() for m in (shared, spec.create(), spec.create()) for p in m.parameters()]
    assert len(set(places)) == len(places)


def test_new_models_are_not_copied(subjects):
    spec = ModelSpec.of(subjects.gru)
    assert spec.build is subjects.gru and "copy" not in spec.notes
    first = next(iter(spec.create(seed=0).parameters()))
    assert not torch.equal(first, next(iter(spec.create(seed=1).parameters())))


def test_table_shared_by_all_models_is_copied(subjects):
    table = torch.arange(5.0)

    def factory():
        model = subjects.gru()
        model.register_buffer("table", table)
        return model

    spec = ModelSpec.of(factory)
    one, other = spec.create(seed=0), spec.create(seed=1)
    assert len({each.table.data_ptr() for each in (one, other)} | {table.data_ptr()}) == 3
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


@pytest.mark.parametrize("kind", ["factory", "module", "spec"])
def test_inference_keeps_the_random_state(subjects, kind):
    subject = {"factory": subjects.gru, "module": subjects.gru(), "spec": ModelSpec.of(subjects.gru)}[kind]
    before = torch.get_rng_state()
    ModelSpec.of(subject)
    assert torch.equal(torch.get_rng_state(), before)


def test_inference_builds_two_models_and_uses_none_later(subjects):
    built = []

    class Counting(subjects.GRULM):
        def __init__(self):
            super().__init__()
            built.append(self)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, ids):
            self.calls += 1
            return super().forward(ids)

    spec = ModelSpec.of(Counting)
    assert (len(built), spec.build) == (2, Counting)
    assert spec.create().calls == 0
    module = Counting()
    ModelSpec.of(module)
    assert module.calls == 0


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
def test_optimizer_gets_a_list(train):
    """A list can be iterated twice: once for the parameters with weight decay, once for the others."""
    kinds = []

    def optimizer(parameters):
        kinds.append(type(parameters))
        return torch.optim.SGD(parameters, lr=0.1)

    train(ModelSpec.of(ZeroHead, causal=True, optimizer=optimizer, at_width=lambda factor: ZeroHead()))
    assert set(kinds) == {list}


def test_spec_with_defaults_can_be_pickled():
    spec = ModelSpec(build=nn.Identity, name="same", inputs="vectors", width=3)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    inputs = spec.batch(1, 2)
    assert torch.equal(again.forward(again.create(), inputs), inputs)
    [group] = again.optimizer([nn.Parameter(torch.ones(1))]).param_groups
    assert group["lr"] == 1e-3


# Subjects that are refused


def raises(error):
    def factory():
        raise error

    return factory


def needs_width(width, depth=2):
    raise AssertionError("called without its argument")


def once(*made):
    made = iter(made)
    return lambda: next(made)


def downloads():
    urllib.request.urlopen("http://localhost:1/weights")


def wraps_a_download():
    try:
        downloads()
    except OSError as error:
        raise RuntimeError("cannot load weights") from error


def names_weights_of_a_hub():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("nobody/has-such-a-model")


NETWORK = "(?s:.*) tried to download something: build"
LOOP = types.SimpleNamespace(model=nn.Linear(2, 2), optimizer=None, step=None)


@pytest.mark.parametrize(
    ("subject", "error", "message"),
    [
        (needs_width, TypeError, "needs_width: missing a required argument: 'width'; wanted a function that"),
        (raises(LookupError("no weights")), FactoryError, r"^model: factory raised .*: .*no weights.?$"),
        (raises(SystemExit("no weights")), FactoryError, r"^model: factory raised .*: .*no weights.?$"),
        (raises(KeyboardInterrupt()), KeyboardInterrupt, None),
        (lambda: nn.Linear(3), FactoryError, r"model: <lambda> raised TypeError: .*out_features"),
        (raises(FileNotFoundError("no file")), FactoryError, "raised FileNotFoundError: no file$"),
        (downloads, FactoryError, f"model: downloads raised .*{NETWORK}"),
        (wraps_a_download, FactoryError, f"model: wraps_a_download raised .*{NETWORK}"),
        (names_weights_of_a_hub, FactoryError, f"model: names_weights_of_a_hub raised OSError: {NETWORK}"),
        (once(nn.Linear(2, 2)), FactoryError, "StopIteration.*on its second call"),
        (once(nn.Linear(2, 2), None), TypeError, "called again, the function returned NoneType"),
        (lambda: LOOP, TypeError, "a training loop is checked with TrainerSpec"),
    ],
)
def test_factory_error_names_the_factory_and_the_cause(monkeypatch, subject, error, message):
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: raises(ConnectionRefusedError())())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(error, match=message) as raised:
        ModelSpec.of(subject)
    if error is FactoryError:
        assert isinstance(raised.value, ValueError) and raised.value.__cause__ is not None


def test_factory_without_a_visible_signature_is_called():
    class Hidden:
        __signature__ = "none"

        def __call__(self):
            return nn.Linear(3, 3)

    assert ModelSpec.of(Hidden(), inputs="vectors").width == 3


@pytest.mark.parametrize("made", [None, 3, "model", {"model": 1}, [nn.Linear(2, 2)]])
def test_subject_that_is_no_model_is_refused(made):
    for subject in (made, lambda: made):
        with pytest.raises(TypeError, match=f"got {type(made).__name__}; wanted an nn.Module"):
            ModelSpec.of(subject)


def test_factory_that_returns_a_class_is_refused():
    with pytest.raises(TypeError, match="got type; wanted"):
        ModelSpec.of(lambda: nn.Linear)


def test_build_that_returns_no_module_is_refused():
    with pytest.raises(TypeError, match=r"linear: build\(\) returned int; wanted an nn.Module"):
        spec_of(build=lambda: 3).create()


def layers(head=nn.Linear, table_on="cpu"):
    model = nn.Sequential(nn.Embedding(10, 8), head(8, 10) if head is nn.Linear else head(10))
    model.register_buffer("table", torch.zeros(3, device=table_on))
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layers().to("meta"), "0.weight is on the meta device"),
        (lambda: layers(table_on="meta"), "table is on the meta device"),
        (lambda: layers(nn.LazyLinear), "1.weight has no shape yet"),
        (torch.inference_mode()(layers), "0.weight was created in inference_mode"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_weights_without_values_are_refused(build, message):
    def unready():
        return build()

    with pytest.raises(FactoryError, match=f"unready: {message}"):
        ModelSpec.of(unready)
    with pytest.raises(FactoryError, match=f"Sequential: {message}"):
        ModelSpec.of(build())


class Fussy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(23, 8)

    def forward(self, ids, *, cache):
        return self.embedding(ids)


class Wordy(Fussy):
    def forward(self, ids):
        raise RuntimeError("consequently " * 40)


@pytest.mark.parametrize(
    ("factory", "tried"),
    [
        (Fussy, r"ids \(2, 16\), ids \(2, 8\), ids \(2, 4\): TypeError: .*cache"),
        (Wordy, r"  ids \(2, 16\), ids \(2, 8\), ids \(2, 4\): RuntimeError:( consequently){5,12} \.\.\.\n"),
        (nn.Identity, "nothing"),
        (lambda: nn.Bilinear(5, 5, 5), "nothing"),
    ],
    ids=["fussy", "wordy", "identity", "bilinear"],
)
def test_calls_that_were_tried_are_listed(factory, tried):
    with pytest.raises(ValueError, match="Declare inputs= and width=, or make_batch=") as raised:
        ModelSpec.of(factory)
    assert isinstance(raised.value, InferenceError)
    assert len(re.findall(tried, f"{raised.value}\n")) == 1


# Batches, models and losses


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


def test_batch_of_tokens_is_uniform_and_of_vectors_normal():
    ids = spec_of(inputs="tokens", width=7).batch(32, 16)
    assert ids.dtype == torch.int64
    assert ids.unique().tolist() == list(range(7))
    vectors = spec_of(width=32).batch(32, 16)
    assert vectors.shape == (32, 16, 32)
    assert abs(vectors.mean().item()) < 0.03
    assert abs(vectors.std().item() - 1) < 0.03


def test_batch_of_make_batch_is_seeded():
    def make(batch_size, seq_len, generator):
        return torch.randint(3, (batch_size, seq_len), generator=generator) + 100

    spec = spec_of(inputs="tokens", make_batch=make)
    assert torch.equal(spec.batch(2, 30, seed=4), spec.batch(2, 30, seed=4))
    assert not torch.equal(spec.batch(2, 30, seed=4), spec.batch(2, 30, seed=5))
    assert spec.batch(2, 30).unique().tolist() == [100, 101, 102]


def test_batch_beyond_the_longest_sequence_is_refused(subjects):
    spec = ModelSpec.of(subjects.llama)
    assert spec.batch(1, 64).shape == (1, 64)
    with pytest.raises(ValueError, match="seq_len: got 65; llama takes at most 64 positions"):
        spec.batch(1, 65)


@given(seed=SEEDS, other=SEEDS)
def test_create_is_reproducible_and_keeps_the_random_state(seed, other):
    spec = spec_of()
    torch.manual_seed(other)
    first = spec.create(seed=seed)
    drawn = torch.rand(3)
    torch.manual_seed(other)
    assert torch.equal(torch.rand(3), drawn)
    second = spec.create(seed=seed)
    assert first.weight.data_ptr() != second.weight.data_ptr()
    assert same_state(first.state_dict(), second.state_dict())
    if seed != other:
        assert not same_state(spec.create(seed=other).state_dict(), first.state_dict())


def cross_entropy(logits, labels):
    logits = logits.double()
    chosen = logits.gather(-1, labels[..., None])[..., 0]
    return (logits.exp().sum(-1).log() - chosen).mean()


def next_token(logits, ids):
    return cross_entropy(logits[:, :-1], ids[:, 1:])


@pytest.mark.parametrize(
    ("name", "changes", "formula"),
    [
        ("gru", {}, next_token),
        ("in_object", {}, next_token),
        ("gru", {"causal": False}, cross_entropy),
        ("encoder", {}, lambda output, _: (output - torch.arange(output.shape[-1]).sin()).square().mean()),
        ("gru", {"loss": lambda model, ids: torch.tensor(42.0)}, lambda logits, ids: torch.tensor(42.0)),
    ],
)
@torch.no_grad()
def test_loss_is_that_of_the_next_token_or_of_the_input(subjects, name, changes, formula):
    spec = ModelSpec.of(getattr(subjects, name), **changes)
    model, inputs = spec.create().eval(), spec.batch(3, 6)
    logits = spec.logits(model, inputs)
    assert spec.loss_of(model, inputs).item() == pytest.approx(formula(logits, inputs).item(), rel=1e-5)


# Calls of other packages


class NanoGPT(nn.Module):
    """The loss of `targets` flattens them with `view`. Without targets, only the last logits are returned."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)

    def forward(self, idx, targets=None):
        logits = self.head(self.embed(idx).cumsum(1).tanh())
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.view(-1, 97), targets.view(-1), ignore_index=-1)


class Recurrent(nn.Module):
    """A recurrent model that is called by keyword, with a mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)
        self.core = nn.GRU(8, 8, batch_first=True)

    def forward(self, *, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        return self.head(self.core(x if attention_mask is None else x * attention_mask[..., None])[0])


def check(spec):
    check_model(spec)


def measure_speed(spec):
    limits = {"min_calls": 1, "min_seconds": 0.0, "warmup_seconds": 0.0}
    for mode in ("forward", "train", "prefill", "decode"):
        measure(model_workload(spec, mode, batch_size=2, seq_len=8), **limits)
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


@pytest.mark.parametrize("build", [NanoGPT, Recurrent, "gpt2", "llama", "rack97"])
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
def test_model_gets_contiguous_tensors_of_int64(subjects, build, probe):
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
