"""Conversions: real ones pass in both directions, and mistakes in a declaration are named."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from stackwise.checks import check_model, first_divergence
from stackwise.model import Rack
from stackwise.model.hf_family import FAMILIES
from stackwise.subject.spec import ModelSpec
from tests.zoo import conversions as zoo


def parity(model, reference, to_reference=None, **declared):
    spec = ModelSpec.of(model, reference=reference, to_reference=to_reference, **declared)
    return {result.check: result for result in check_model(spec, checks=["parity"])}


def statuses(results):
    return {result.status for result in results.values()}


def to_nano(state):
    """Inverse of `to_gpt2`."""
    parts = {theirs: ours for ours, theirs in zoo.NANO_PARTS.items()}
    found = {}
    for name, p in state.items():
        name = name.removeprefix("transformer.")
        if name.startswith("h."):
            _, index, part = name.split(".", 2)
            part, _, kind = part.rpartition(".")
            name, p = (
                f"h.{index}.{parts.get(part, part)}.{kind}",
                p.T if part in parts and kind == "weight" else p,
            )
        if name != "lm_head.weight":
            found[name] = p
    return found


def test_gpt2_and_nano():
    assert statuses(parity(zoo.gpt2, zoo.Nano, to_nano)) == {"passed"}
    assert statuses(parity(zoo.Nano, zoo.gpt2, zoo.to_gpt2)) == {"passed"}


def llama():
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64))


def rack():
    return Rack.from_pretrained(llama())


@pytest.fixture(scope="module")
def names_of_llama():
    """Name in the Rack -> names in Llama, with their rows."""
    return FAMILIES["llama"].correspondence(rack())


def test_llama_and_rack(names_of_llama):
    def to_rack(state):
        return {ours: torch.cat([state[name] for name in parts]) for ours, parts in names_of_llama.items()}

    def to_llama(state):
        return {
            name: part
            for ours, parts in names_of_llama.items()
            for name, part in zip(parts, state[ours].split(list(parts.values())), strict=True)
        }

    assert statuses(parity(llama, rack, to_rack)) == {"passed"}
    assert statuses(parity(rack, llama, to_llama)) == {"passed"}


class Core(nn.Module):
    """Two layers and a buffer."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(19, width), nn.Linear(width, width)
        self.register_buffer("factor", torch.ones(width))
        self.head = nn.Linear(width, 19, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.factor * self.layer(x).tanh().cumsum(dim=1))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Core()

    def forward(self, ids):
        return self.model(ids)


class Renamed(nn.Module):
    """Core with other names, a transposed matrix, and the factor in the layer."""

    def __init__(self):
        super().__init__()
        self.tok, self.head = nn.Embedding(19, 8), nn.Linear(8, 19, bias=False)
        self.w, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("factor", torch.ones(8))

    def activation(self, x):
        return (x @ self.w + self.b).tanh()

    def forward(self, tokens):
        x = self.tok(tokens)
        return self.head(x + self.factor * self.activation(x).cumsum(dim=1))


NAMES = {
    "tok.weight": "embedding.weight",
    "w": lambda state: state["layer.weight"].T,
    "b": "layer.bias",
    "factor": "factor",
    "head.weight": "head.weight",
}


def test_mapping_of_names_and_functions():
    assert statuses(parity(Core, Renamed, NAMES)) == {"passed"}


@pytest.mark.parametrize("model, reference", [(Core, Wrapped), (Wrapped, Core)])
def test_common_prefix_is_matched(model, reference):
    assert statuses(parity(model, reference)) == {"passed"}


def test_reference_with_its_own_calls():
    reference = ModelSpec.of(Renamed, forward=lambda model, ids: model(tokens=ids))
    assert statuses(parity(Core, reference, NAMES)) == {"passed"}


def with_numpy(state):
    with torch.no_grad():
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        arrays["layer.weight"] = arrays["layer.weight"].T.copy()
        names = {**NAMES, "w": "layer.weight"}
        return {new: torch.from_numpy(arrays[old]) for new, old in names.items()}


def test_conversion_without_autograd():
    class Detached(Renamed):
        def activation(self, x):
            return (x.detach() @ self.w + self.b).tanh()

    assert statuses(parity(Core, Renamed, with_numpy)) == {"passed"}
    results = parity(Core, Detached, with_numpy)
    assert results["reference_output"].status == "passed"
    assert results["reference_gradient"].status == "failed"
    assert "embedding.weight" in results["reference_gradient"].where


def test_conversion_of_constants_only_for_inference():
    class Scaled(Core):
        def forward(self, ids):
            x = self.embedding(ids)
            return self.head(x + self.layer(x).cumsum(dim=1) / self.factor)

    class Plain(Core):
        def forward(self, ids):
            x = self.embedding(ids)
            return self.head(x + self.layer(x).cumsum(dim=1))

    def folded(state):
        factor = state["factor"]
        layer = {"layer.weight": state["layer.weight"] / factor[:, None]}
        return {**state, **layer, "layer.bias": state["layer.bias"] / factor}

    results = parity(Scaled, Plain, folded)
    assert statuses(results) == {"passed"}
    assert "because to_reference is not linear" in results["reference_output"].meaning


def test_frozen_reference_is_compared_in_eval_mode():
    class Deployed(Core):
        def forward(self, ids):
            assert not self.training
            return super().forward(ids)

    results = parity(Core, lambda: Deployed().eval().requires_grad_(False))
    assert statuses(results) == {"passed"}
    assert "because the reference is frozen" in results["reference_gradient"].meaning


def test_weight_of_the_reference_without_a_source():
    class Placed(Renamed):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4))

    result = parity(Core, Placed, NAMES)["reference_weights"]
    assert (result.status, result.where) == ("failed", "table is not set")
    table = torch.randn(4)
    results = parity(Core, Placed, {**NAMES, "table": lambda _: table})
    assert results["reference_weights"].status == "warned"
    assert results["reference_output"].status == "passed"
    zeros = parity(Core, Placed, {**NAMES, "table": lambda _: torch.zeros(4)})
    assert statuses(zeros) == {"passed"}


def raising(state):
    return {"tok.weight": state["wte"]}


@pytest.mark.parametrize(
    "to_reference, text",
    [
        (raising, "to_reference: raising raised KeyError: 'wte'"),
        ({"w": raising}, "to_reference['w']: raising raised KeyError: 'wte'"),
        ({"w": "wte"}, "to_reference['w']: got 'wte'; allowed: names of the model: factor, "),
        ({"wte": "head.weight"}, "to_reference: got 'wte'; allowed: names of the reference: w, b, "),
        ({"b": "head.weight"}, "to_reference: b: got shape (19, 8); allowed: (8,)"),
        (lambda state: None, "to_reference: result: got 'NoneType'; allowed: a dict of tensors"),
        (lambda state: {"b": [1.0]}, "to_reference: b: got 'list'; allowed: a tensor"),
        (None, "only the reference has parameters b, tok.weight, w; only the model has embedding.weight, "),
    ],
)
def test_mistake_in_a_conversion_is_named(to_reference, text):
    results = parity(Core, Renamed, to_reference)
    assert statuses(results) == {"error"}
    assert all(text in result.meaning for result in results.values())


def test_error_of_a_conversion_shows_its_line():
    [place] = {result.where for result in parity(Core, Renamed, raising).values()}
    assert place == f"{__file__}:{raising.__code__.co_firstlineno + 1}"


def test_invalid_declarations():
    for name in ("reference", "to_reference"):
        with pytest.raises(ValueError, match=f"^{name}: got 3; allowed: "):
            ModelSpec.of(Core, **{name: 3})


def test_first_divergence_with_other_names():
    model, reference = Core(), Renamed()
    converted = {name: source(model.state_dict()) if callable(source) else model.state_dict()[source]
                 for name, source in NAMES.items()}  # fmt: skip
    reference.load_state_dict(converted)
    ids = torch.arange(12)[None]
    assert first_divergence(model, reference, ids) is None
    with torch.no_grad():
        reference.head.weight += 1
    place = first_divergence(model, reference, ids)
    assert (place.module, place.reference, place.after) == ("head", "head", "embedding")


def test_reference_is_a_function_not_a_model():
    with pytest.raises(ValueError, match="reference: got 'Core'; allowed: a function that builds a model"):
        ModelSpec.of(Core, reference=Core())
