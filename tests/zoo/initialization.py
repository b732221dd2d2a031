"""Bugs of weights as they are built, loaded and tied."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from stackwise.model import create_simple_rack
from stackwise.subject.spec import ModelSpec
from tests.zoo.forward import logits
from tests.zoo.gpt import GPT, gpt, spec_of
from tests.zoo.mutant import mutant


def untied():
    class Untied(GPT):
        tied = False

    return spec_of(Untied)


def rack():
    def build():
        return create_simple_rack(2, 2, 32, 48, 4, vocab_size=61)

    return ModelSpec.of(build, name="rack")


def llama(**changes):
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**sizes | changes)


def tied_llama():
    return ModelSpec.of(llama(), name="llama", tied=True)


def loaded(spec):
    """Logits of a model under seed 1 that was given the weights of one under seed 0."""
    target = spec.create(seed=1).eval()
    target.load_state_dict(spec.create().state_dict())
    with torch.no_grad():
        return spec.logits(target, spec.batch(2, 12))


def one_storage(spec):
    """How many tensors a model holds for its embedding and its head, also after deepcopy()."""
    counts = []
    for model in (spec.create(), copy.deepcopy(spec.create())):
        with torch.no_grad():
            inputs = torch.zeros(1, 4, dtype=torch.long)
            before = spec.logits(model.eval(), inputs)
            table = next(m for m in model.modules() if isinstance(m, nn.Embedding))
            table.weight[7] += 1
            counts.append(bool((spec.logits(model, inputs) != before)[..., 7].any()))
    return counts


def twice(spec):
    return [spec.create().state_dict()[name] for name in ("norm.weight",)] + [
        all(
            torch.equal(a, b)
            for a, b in zip(spec.create().parameters(), spec.create().parameters(), strict=True)
        )
    ]


@mutant(
    "49",
    twin=untied,
    family="initialization",
    source="huggingface/transformers#46620; fla-org/flash-linear-attention#820",
    observable=loaded,
)
def init_at_the_first_call():
    """Weights are initialised when the model is first called, and those that were loaded are lost."""

    class Mutant(GPT):
        tied = False
        ready = False

        def embed(self, input_ids):
            if not self.ready:
                self.ready = True
                with torch.no_grad():
                    self.initialize()
            return super().embed(input_ids)

    return spec_of(Mutant)


@mutant(
    "49",
    twin=untied,
    family="initialization",
    source="huggingface/transformers#45591",
    observable=loaded,
)
def init_after_loading():
    """A hook of load_state_dict() initialises the layer norms once more."""

    class Mutant(GPT):
        tied = False

        def __init__(self):
            super().__init__()
            self.register_load_state_dict_post_hook(lambda model, keys: model.initialize())

    return spec_of(Mutant)


@mutant("51", twin=gpt, family="norm", source="huggingface/transformers#143", observable=logits)
def norm_gain_from_normal():
    """The gains of norms start from N(0, 0.02) with all other weights."""

    class Mutant(GPT):
        def initialize(self):
            super().initialize()
            for name, p in self.named_parameters():
                if "norm" in name:
                    nn.init.normal_(p, std=0.02)

    return spec_of(Mutant)


class Decay(nn.Module):
    """A scale for each channel."""

    def __init__(self, width):
        super().__init__()
        self.decay = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x * self.decay


class WithDecay(GPT):
    def layer(self):
        layer = super().layer()
        layer["decay"] = Decay(self.width)
        return layer

    def initialize(self):
        super().initialize()
        for name, p in self.named_parameters():
            if name.endswith("decay"):
                nn.init.uniform_(p, 0.5, 1.0)

    def mlp(self, layer, x):
        return layer["decay"](super().mlp(layer, x))


def with_decay():
    return spec_of(WithDecay)


@mutant(
    "52",
    twin=with_decay,
    family="initialization",
    source="fla-org/flash-linear-attention#753",
    observable=logits,
)
def init_skipped():
    """A kind of module that the initialisation does not know keeps what torch.empty() found."""

    class Mutant(WithDecay):
        def initialize(self):
            GPT.initialize(self)
            # Memory is what happens to be there, but never what the twin has left in it.
            found = np.random.default_rng()
            for name, p in self.named_parameters():
                if name.endswith("decay"):
                    p.data = torch.tensor(found.normal(0.0, 1e3, tuple(p.shape)), dtype=torch.float32)

    return spec_of(Mutant)


@mutant("init-generator", twin=gpt, family="initialization", source="classic", observable=twice)
def init_by_its_own_generator():
    """Weights are drawn from a generator that no seed reaches."""

    class Mutant(GPT):
        def initialize(self):
            generator = np.random.default_rng()
            for p in self.parameters():
                if p.ndim == 2:
                    p.data = torch.tensor(generator.normal(0, 0.02, tuple(p.shape)), dtype=torch.float32)

    return spec_of(Mutant)


@mutant("init-constant", twin=gpt, family="initialization", source="classic", observable=logits)
def init_constant():
    """All hidden units of a feed-forward layer start equal, and stay equal."""

    class Mutant(GPT):
        def initialize(self):
            super().initialize()
            for name, p in self.named_parameters():
                if name.endswith(("gate.weight", "up.weight", "down.weight")):
                    nn.init.constant_(p, 0.05)

    return spec_of(Mutant)


@mutant("init-embedding", twin=gpt, family="initialization", source="classic", observable=logits)
def tied_embedding_from_unit_normal():
    """An embedding from N(0, 1), torch's default, is the head as well: the first loss is far off."""

    class Mutant(GPT):
        def initialize(self):
            super().initialize()
            nn.init.normal_(self.embedding.weight)

    return spec_of(Mutant)


@mutant("init-head", twin=tied_llama, family="initialization", source="classic", observable=logits)
def logits_multiplied():
    """The logits are multiplied by the root of the width once too often."""
    spec = tied_llama()

    def build():
        model = spec.build()
        model.lm_head.register_forward_hook(lambda module, args, output: output * 32)
        return model

    return ModelSpec.of(build, name="Mutant", tied=True)


@mutant("init-nan", twin=rack, family="finiteness", source="classic", observable=lambda spec: [
    bool(p.isfinite().all()) for p in spec.create().parameters()
])  # fmt: skip
def weight_not_a_number():
    """One value of the embedding, of a token that is seldom drawn, is NaN."""
    spec = rack()

    def build():
        model = spec.build()
        table = next(m for m in model.modules() if isinstance(m, nn.Embedding))
        with torch.no_grad():
            table.weight[60, 0] = torch.nan
        return model

    return ModelSpec.of(build, name="Mutant", width=60)


@mutant(
    "55",
    twin=gpt,
    family="tying",
    source="huggingface/transformers#43429",
    observable=one_storage,
)
def tied_by_copy():
    """The head starts as a copy of the embedding, and is a tensor of its own."""

    class Mutant(GPT):
        def tie(self):
            self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())

    return spec_of(Mutant)


@mutant("55", twin=gpt, family="tying", source="classic", observable=one_storage)
def tie_lost_in_a_copy():
    """The head reads the embedding through a closure, which deepcopy() does not follow."""

    class Closure(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.project = lambda x: x @ weight.t()

        def forward(self, x):
            return self.project(x)

    class Mutant(GPT):
        def tie(self):
            self.head = Closure(self.embedding.weight)

    return spec_of(Mutant)


@mutant(
    "55",
    twin=tied_llama,
    family="tying",
    source="jxmorris12/vec2text#94",
    observable=one_storage,
)
def head_replaced_after_tying():
    """The vocabulary is resized by hand: the head becomes a new layer, and the tie is lost."""
    spec = tied_llama()

    def build():
        model = spec.build()
        model.lm_head = nn.Linear(32, 61, bias=False)
        nn.init.normal_(model.lm_head.weight, std=0.02)
        return model

    return ModelSpec.of(build, name="Mutant", tied=True)
