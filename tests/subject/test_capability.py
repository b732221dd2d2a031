"""Capabilities: cache, padding, packing and losses that are found in third-party models."""

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
    # Its requirements conflict with those of stackwise: `make peers` installs it.
    from litgpt.config import Config
    from litgpt.model import GPT

    return GPT(Config(n_layer=2, n_head=4, n_embd=32, block_size=64, vocab_size=61, padded_vocab_size=61))


def positions_from_ids(kind):
    """Return a model whose positions start at the padding id + 1."""

    def build():
        import transformers

        config = getattr(transformers, f"{kind}Config")(**SIZES, is_decoder=True, pad_token_id=1)
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return build


@pytest.mark.parametrize("kind", ["Roberta", "Camembert"])
@torch.no_grad()
def test_mask_of_ones_keeps_the_output_of_a_model_with_own_positions(kind):
    spec = ModelSpec.of(positions_from_ids(kind))
    model, ids = spec.create().eval(), spec.batch(2, 9)
    ones = torch.ones(2, 9, dtype=torch.bool)
    torch.testing.assert_close(logits_of(spec.masked(model, ids, ones)), spec.logits(model, ids))
    torch.testing.assert_close(logits_of(spec.decode(model, ids, None, ones)[0]), spec.logits(model, ids))
    assert spec.padding_sides == ("right",)


# Model: (padding sides or None, other capabilities, window, tied head or None for no claim).
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
    if name is litgpt:  # a skip in a factory would be an error of the factory
        pytest.importorskip("litgpt")
    return ModelSpec.of(getattr(subjects, name) if isinstance(name, str) else name)


@pytest.mark.parametrize("name", SEEN, ids=lambda name: name if isinstance(name, str) else name.__name__)
def test_capabilities_are_found(subjects, name):
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
def test_decoding_equals_a_full_pass(subjects, name):
    spec = of(subjects, name)
    model, ids = spec.create().eval(), spec.batch(2, 10)
    outputs, cache = [], None
    for part in torch.split(ids, [4, 1, 1, 1, 1, 1, 1], dim=1):
        output, cache = spec.decode(model, part, cache)
        outputs.append(logits_of(output))
    # On a new model, because the other one may keep using its cache.
    torch.testing.assert_close(torch.cat(outputs, dim=1), spec.logits(spec.create().eval(), ids))


@pytest.mark.parametrize("name", [llama, mistral, "gpt2", "rack", "bert", "x_encoder", "encoder"])
@torch.no_grad()
def test_masked_tokens_are_hidden(subjects, name):
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
    """Adds the mean of the real tokens. Subclasses take masks with different meanings."""

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
def test_meaning_of_true_in_a_mask_is_found(build):
    spec = ModelSpec.of(build, causal=False)
    model, ids = spec.create().eval(), spec.batch(2, 8)
    keep = torch.arange(8).expand(2, 8) < 5
    expected = model.average(ids, keep)
    torch.testing.assert_close(spec.masked(model, ids, keep), expected)


def test_mask_that_is_not_read_is_found():
    assert ModelSpec.of(Unread, causal=False).masked is not None


class Forgets(Averages):
    def forward(self, ids, past_key_values=None, use_cache=None):
        return types.SimpleNamespace(logits=self.average(ids, None), past_key_values=None)


@pytest.mark.parametrize("has_claim", [True, False])
def test_cache_that_cannot_be_used_is_not_found(subjects, has_claim):
    def build():
        model = subjects.x_decoder() if has_claim else Forgets()
        if has_claim:
            model.can_cache_kv = False
        return model

    assert ModelSpec.of(build).decode is None


@torch.no_grad()
def test_padded_decoding_passes_mask_and_positions():
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


@pytest.mark.parametrize(("windows", "claim"), [((4, 4), 4), ((4, None), None)])
def test_window_is_claimed_if_all_layers_have_it(windows, claim):
    class Model(Averages):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Identity() for _ in windows)
            for layer, window in zip(self.layers, windows, strict=True):
                layer.sliding_window = window

        def forward(self, ids):
            return self.average(ids, None)

    assert ModelSpec.of(Model).window == claim


class Routed(nn.Module):
    """Always returns the loss of its router with the logits."""

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
def test_returned_loss_of_routers_is_found(kind):
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


def test_loss_of_routers_without_a_gradient_is_not_trained():
    assert ModelSpec.of(lambda: Routed(detached=True)).auxiliary_loss is None


class Full(Averages):
    """Raises an error if it gets an argument, or more than eight positions ("length")."""

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
        given = {**locals(), "length": ids.shape[1] > 8 or None}[self.name]
        if given is not None and given is not False:
            raise self.error
        return self.average(ids, attention_mask)


ARGUMENTS = ("attention_mask", "document_ids", "labels", "targets", "use_cache", "output_router_logits")


@pytest.mark.parametrize("name", [*ARGUMENTS, "length"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["cuda", "cpu"],
)
def test_exhausted_memory_is_no_missing_capability(name, error):
    with pytest.raises(type(error)) as raised:
        ModelSpec.of(lambda: Full(name, error))
    assert str(raised.value) == str(error)
    spec = ModelSpec.of(lambda: Full(name, ValueError("not supported")))
    assert (spec.width, spec.seq_len) == (31, 8 if name == "length" else 16)


def test_compiled_model_has_the_capabilities_of_the_model():
    spec = ModelSpec.of(llama)
    compiled = ModelSpec.of(lambda: torch.compile(llama(), backend="eager"))
    can = ("masked", "decode", "labelled_loss", "auxiliary_loss", "causal", "tied", "max_length", "width")
    for name in can:
        assert (getattr(compiled, name) is None) == (getattr(spec, name) is None), name
    assert compiled.decode is not None
    assert compiled.padding_sides == spec.padding_sides == ("right", "left")
    assert isinstance(compiled.create(), torch._dynamo.OptimizedModule)


class Packable(Averages):
    """Running sums. A new document begins where an argument says so."""

    def __init__(self, separates=True):
        super().__init__()
        self.separates = separates

    def forward(self, ids, attention_mask=None, position_ids=None, segment_ids=None):
        x = self.embedding(ids)
        if position_ids is not None:
            segment_ids = (position_ids == 0).long().cumsum(-1)
        if segment_ids is None or not self.separates:
            return x.cumsum(1)
        same = segment_ids[:, :, None] == segment_ids[:, None]
        return same.tril().to(x) @ x


class BySegments(Packable):
    def forward(self, ids, segment_ids=None):
        return super().forward(ids, segment_ids=segment_ids)


class ByPositions(Packable):
    def forward(self, ids, position_ids=None):
        return super().forward(ids, position_ids=position_ids)


@pytest.mark.parametrize("build", [Packable, BySegments, ByPositions])
def test_packed_documents_are_found_by_their_independence(build):
    spec = ModelSpec.of(build)
    model, ids = spec.create().eval(), spec.batch(1, 6)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1]])
    alone = torch.cat([spec.logits(model, part) for part in (ids[:, :2], ids[:, 2:])], dim=1)
    torch.testing.assert_close(spec.packed(model, ids, documents), alone)


@pytest.mark.parametrize("build", [Packable, BySegments, ByPositions])
def test_argument_that_separates_no_documents_is_not_used(build):
    assert ModelSpec.of(lambda: build(separates=False)).packed is None


def test_positions_that_read_no_others_are_not_packed():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places, self.head = nn.Embedding(50, 8), nn.Embedding(32, 8), nn.Linear(8, 50)

        def forward(self, ids, position_ids=None):
            positions = torch.arange(ids.shape[1]) if position_ids is None else position_ids
            return self.head(self.tokens(ids) + self.places(positions))

    assert ModelSpec.of(Alone).packed is None


@pytest.mark.parametrize("name", ["tie_embeddings", "use_weight_tying", "weight_tying"])
def test_claim_of_a_tied_head_is_found(name):
    def build():
        model = TrueIsReal()
        setattr(model, name, True)
        return model

    assert ModelSpec.of(build).tied is True
