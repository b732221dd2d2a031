"""Capabilities: what is seen of models of others, that the calls found are right, and what is not claimed."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.subject.inference import logits_of
from stackwise.subject.spec import ModelSpec

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True))


def mistral():
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=8, use_cache=False)
    return MambaForCausalLM(config)


def litgpt():
    # Its own requirements hold it back from being one of ours: `make peers` installs it.
    from litgpt.config import Config
    from litgpt.model import GPT

    return GPT(Config(n_layer=2, n_head=4, n_embd=32, block_size=64, vocab_size=61, padded_vocab_size=61))


# name -> (whether it takes a mask, sides, what else; the window, whether tied)
SEEN = {
    llama: (("right", "left"), {"decode", "labelled_loss"}, None, True),
    mistral: (("right", "left"), {"decode", "labelled_loss"}, 7, False),
    mixtral: (("right", "left"), {"decode", "labelled_loss", "auxiliary_loss"}, None, False),
    mamba: (("right",), {"decode", "labelled_loss"}, None, None),
    litgpt: (None, {"decode"}, None, None),
    "gpt2": (("right", "left"), {"decode", "labelled_loss"}, None, True),
    "bert": (("right", "left"), {"labelled_loss"}, None, True),
    "rack": (("right", "left"), {"decode", "packed"}, None, True),
    "window_rack": (("right", "left"), {"decode", "packed"}, 5, True),
    "bidirectional_rack": (("right", "left"), {"packed"}, None, True),
    "x_decoder": (("right",), {"decode"}, None, None),
    "x_encoder": (("right",), set(), None, None),
    "encoder": (("right",), set(), None, None),
    "tiny": (None, set(), None, None),
    "gru": (None, set(), None, None),
}
OTHERS = ("packed", "decode", "labelled_loss", "auxiliary_loss")


def of(subjects, name):
    if name is litgpt:  # a skip inside of a factory would be an error of the factory
        pytest.importorskip("litgpt")
    return ModelSpec.of(getattr(subjects, name) if isinstance(name, str) else name)


@pytest.mark.parametrize("name", SEEN, ids=lambda name: name if isinstance(name, str) else name.__name__)
def test_what_is_seen(subjects, name):
    sides, others, window, tied = SEEN[name]
    spec = of(subjects, name)
    assert (spec.masked is not None) == (sides is not None)
    assert sides is None or spec.padding_sides == sides
    assert {other for other in OTHERS if getattr(spec, other) is not None} == others
    assert spec.window == window
    if tied is not None:
        assert spec.tied is tied


@pytest.mark.parametrize("name", [llama, mistral, mixtral, mamba, litgpt, "gpt2", "rack", "x_decoder"])
@torch.no_grad()
def test_decoding_is_right(subjects, name):
    spec = of(subjects, name)
    model, ids = spec.create().eval(), spec.batch(2, 10)
    outputs, cache = [], None
    for part in torch.split(ids, [4, 1, 1, 1, 1, 1, 1], dim=1):
        output, cache = spec.decode(model, part, cache)
        outputs.append(logits_of(output))
    # Last, since a model that keeps its own cache may go on using it.
    torch.testing.assert_close(torch.cat(outputs, dim=1), spec.logits(spec.create().eval(), ids))


@pytest.mark.parametrize("name", [llama, mistral, "gpt2", "rack", "bert", "x_encoder", "encoder"])
@torch.no_grad()
def test_masks_hide(subjects, name):
    spec = of(subjects, name)
    model, inputs, other = spec.create().eval(), spec.batch(2, 8), spec.batch(2, 8, seed=1)
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[1, 5:] = False
    mixed = inputs.clone()
    mixed[~keep] = other[~keep]

    def real(some):
        output = spec.masked(model, some, keep)
        return getattr(output, "logits", output)[keep]

    torch.testing.assert_close(real(inputs), real(mixed))
    mixed[0] = other[0]
    assert not torch.allclose(real(inputs), real(mixed))


class Averages(nn.Module):
    """Reads its real tokens alone; a mask means what `real` makes of it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.head = nn.Linear(8, 31)

    def average(self, ids, keep):
        x = self.embedding(ids)
        keep = torch.ones_like(ids) if keep is None else keep
        return self.head(x + F.normalize((x * keep[..., None]).sum(dim=1, keepdim=True), dim=-1))


class TrueIsReal(Averages):
    def forward(self, ids, mask=None):
        return self.average(ids, mask)


class TrueIsPadding(Averages):
    def forward(self, ids, mask=None):
        return self.average(ids, None if mask is None else ~mask)


class KeyPadding(Averages):
    def forward(self, ids, key_padding_mask=None):
        return self.average(ids, None if key_padding_mask is None else ~key_padding_mask)


class Unread(Averages):
    def forward(self, ids, mask=None):
        return self.average(ids, None)


@pytest.mark.parametrize("build", [TrueIsReal, TrueIsPadding, KeyPadding])
@torch.no_grad()
def test_which_way_round_a_mask_is(build):
    spec = ModelSpec.of(build, causal=False)
    model, ids = spec.create().eval(), spec.batch(2, 8)
    keep = torch.arange(8).expand(2, 8) < 5
    expected = model.average(ids, keep)
    torch.testing.assert_close(spec.masked(model, ids, keep), expected)


def test_mask_that_is_not_read_is_seen_all_the_same():
    assert ModelSpec.of(Unread, causal=False).masked is not None


def test_cache_that_the_model_says_it_cannot_use(subjects):
    def build():
        model = subjects.x_decoder()
        model.can_cache_kv = False
        return model

    assert ModelSpec.of(build).decode is None


def test_cache_that_does_not_come_back():
    class Forgets(Averages):
        def forward(self, ids, past_key_values=None, use_cache=None):
            return types.SimpleNamespace(logits=self.average(ids, None), past_key_values=None)

    assert ModelSpec.of(Forgets).decode is None


@torch.no_grad()
def test_padded_decoding_says_where_the_tokens_are():
    seen = []

    class Watched(Averages):
        def forward(self, ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
            seen.append((attention_mask, position_ids))
            return types.SimpleNamespace(logits=self.average(ids, None), past_key_values=(ids,))

    spec = ModelSpec.of(Watched)
    seen.clear()
    model, ids = spec.create().eval(), spec.batch(2, 4)
    keep = torch.tensor([[True] * 4, [False, False, True, True]])
    _, cache = spec.decode(model, ids[:, :3], None, keep[:, :3])
    spec.decode(model, ids[:, 3:], cache, keep)
    assert [mask.tolist() for mask, _ in seen] == [keep[:, :3].long().tolist(), keep.long().tolist()]
    assert [positions.tolist() for _, positions in seen] == [[[0, 1, 2], [0, 0, 0]], [[3], [1]]]


def test_windows_that_differ_are_no_claim():
    class Layer(nn.Module):
        def __init__(self, sliding_window):
            super().__init__()
            self.sliding_window = sliding_window

    class Model(Averages):
        windows = (4, 4)

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(map(Layer, self.windows))

        def forward(self, ids):
            return self.average(ids, None)

    class Mixed(Model):
        windows = (4, None)

    assert ModelSpec.of(Model).window == 4
    assert ModelSpec.of(Mixed).window is None


class Routed(nn.Module):
    """A loss of its router comes back beside the logits, asked or not."""

    def __init__(self, kind="object", *, detached=False):
        super().__init__()
        self.kind, self.detached = kind, detached
        self.embedding, self.gate, self.head = nn.Embedding(31, 8), nn.Linear(8, 3), nn.Linear(8, 31)

    def forward(self, ids):
        x = self.embedding(ids)
        chosen = self.gate(x).softmax(-1)
        auxiliary = chosen.mean((0, 1)).square().sum()
        if self.detached:
            auxiliary = auxiliary.detach()
        logits = self.head(x * chosen.amax(-1, keepdim=True))
        if self.kind == "dict":
            return {"logits": logits, "aux_loss": auxiliary}
        return types.SimpleNamespace(logits=logits, aux_loss=auxiliary)


@pytest.mark.parametrize("kind", ["object", "dict"])
def test_a_loss_of_routers_that_comes_back_unasked(kind):
    spec = ModelSpec.of(lambda: Routed(kind))
    assert "auxiliary_loss" in spec.notes
    model, ids = spec.create(), spec.batch(2, 6)
    output = model(ids)
    value = spec.auxiliary_loss(model, ids, None)
    torch.testing.assert_close(value, output["aux_loss"] if kind == "dict" else output.aux_loss)
    value.backward()
    assert model.gate.weight.grad.abs().sum() > 0
    with pytest.raises(TypeError, match="attention_mask"):
        spec.auxiliary_loss(model, ids, torch.ones_like(ids, dtype=torch.bool))


def test_a_loss_of_routers_without_a_gradient_is_there_to_be_looked_at():
    assert ModelSpec.of(lambda: Routed(detached=True)).auxiliary_loss is None


class Full(Averages):
    """Raises where it is given what `name` names."""

    def __init__(self, name, error):
        super().__init__()
        self.name, self.error = name, error

    def forward(
        self,
        ids,
        attention_mask=None,
        document_ids=None,
        labels=None,
        targets=None,
        past_key_values=None,
        use_cache=False,
        output_router_logits=False,
    ):
        given = {
            "attention_mask": attention_mask is not None,
            "document_ids": document_ids is not None,
            "labels": labels is not None,
            "targets": targets is not None,
            "use_cache": use_cache,
            "output_router_logits": output_router_logits,
        }
        if given[self.name]:
            raise self.error
        return self.average(ids, attention_mask)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["cuda", "cpu"],
)
@pytest.mark.parametrize(
    "name", ["attention_mask", "document_ids", "labels", "targets", "use_cache", "output_router_logits"]
)
def test_memory_that_is_too_small_is_no_lack_of_a_capability(name, error):
    with pytest.raises(type(error)) as raised:
        ModelSpec.of(lambda: Full(name, error))
    assert str(raised.value) == str(error)
    assert ModelSpec.of(lambda: Full(name, ValueError("not I"))).width == 31


def test_a_compiled_model_can_do_what_the_model_can():
    """Its own signature takes anything, and says nothing."""
    spec = ModelSpec.of(llama)
    compiled = ModelSpec.of(lambda: torch.compile(llama(), backend="eager"))
    can = ("masked", "decode", "labelled_loss", "auxiliary_loss", "causal", "tied", "max_length", "width")
    for name in can:
        assert (getattr(compiled, name) is None) == (getattr(spec, name) is None), name
    assert compiled.decode is not None
    assert compiled.padding_sides == spec.padding_sides == ("right", "left")
    assert isinstance(compiled.create(), torch._dynamo.OptimizedModule)


class LossOnly(nn.Module):
    """Targets give the loss alone. Targets of -1 are ignored."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, ids, targets=None):
        logits = self.head(self.embedding(ids))
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def test_loss_that_is_the_whole_output_is_found():
    spec = ModelSpec.of(LossOnly)
    ids = spec.batch(2, 8)
    labels = ids.clone()
    labels[0, 4:] = -100

    loss = spec.labelled_loss(model := spec.create(), ids, labels)

    logits = model(ids)[:, :-1].flatten(0, 1)
    assert torch.equal(loss, nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100))
