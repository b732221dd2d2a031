"""Bugs that only a reference shows: the model is sound in itself, and computes something else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.model import create_simple_rack
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, spec_of
from tests.zoo.loss import llama, tiny_llama
from tests.zoo.mutant import mutant


def logits(spec: ModelSpec) -> Tensor:
    """In eval mode, of one batch."""
    with torch.no_grad():
        return spec.logits(spec.create().eval(), spec.batch(2, 12))


def gradients(spec: ModelSpec) -> list[Tensor]:
    """In eval mode, of one batch."""
    model, inputs = spec.create().eval(), spec.batch(2, 12)
    spec.labelled_loss(model, inputs, inputs).backward()
    return [p.grad for p in model.parameters()]


class GemmaNorm(nn.Module):
    """Its gain is 1 + weight."""

    narrow = False

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        scaled = x * (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
        if self.narrow:
            return (scaled.bfloat16() * (1 + self.weight).bfloat16()).to(x.dtype)
        return scaled * (1 + self.weight)


class Gemma(GPT):
    """A GPT with such norms, and a gate of tanh-GELU."""

    norm_type = GemmaNorm

    def __init__(self):
        super().__init__()
        self.norm = self.norm_type(self.width)

    def layer(self):
        layer = super().layer()
        layer["attention_norm"], layer["mlp_norm"] = self.norm_type(self.width), self.norm_type(self.width)
        return layer

    def mlp(self, layer, x):
        return layer["down"](F.gelu(layer["gate"](x), approximate="tanh") * layer["up"](x))


class Interleaved(GPT):
    """A GPT whose rotary pairs are neighbours, not halves."""

    def rotate(self, x, positions):
        halves = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        one, two = super().rotate(halves, positions).chunk(2, dim=-1)
        return torch.stack((one, two), dim=-1).flatten(-2)


def to_neighbours(weight: Tensor, n_heads: int) -> Tensor:
    """Rows (heads, 2, pairs) of a projection as (heads, pairs, 2)."""
    return weight.view(n_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def converted_to_halves(n_k_heads: int) -> ModelSpec:
    """The reference pairs neighbours, and the model pairs halves."""

    def to_reference(state):
        heads = {"q.weight": GPT.n_heads, "k.weight": n_k_heads}
        sizes = {name: heads.get(name.partition(".")[2].partition(".")[2]) for name in state}
        return {name: to_neighbours(p, sizes[name]) if sizes[name] else p for name, p in state.items()}

    return ModelSpec.of(spec_of(), name="converted", reference=Interleaved, to_reference=to_reference)


def gpt_with_reference():
    """The clean twin."""
    return spec_of(reference=GPT)


def gemma_with_reference():
    """The clean twin."""
    return spec_of(Gemma, reference=Gemma)


def rack_of(theta: float) -> ModelSpec:
    def build():
        return create_simple_rack(1, 2, 32, 48, 4, vocab_size=61, n_kv_heads=2, rope_theta=theta)

    def reference():
        return create_simple_rack(1, 2, 32, 48, 4, vocab_size=61, n_kv_heads=2)

    return ModelSpec.of(build, name="rack", reference=reference)


def rack_with_reference():
    """The clean twin."""
    return rack_of(10_000.0)


def converted():
    """The clean twin."""
    return converted_to_halves(GPT.n_kv_heads)


@mutant("34", twin=gpt_with_reference, family="parity", source="apple/axlearn#842", observable=logits)
def keys_tiled():
    """Shared keys are tiled, not repeated: query heads meet the keys of another group."""

    class Mutant(GPT):
        def repeat(self, x):
            return x.repeat(1, self.n_heads // self.n_kv_heads, 1, 1)

    return spec_of(Mutant, reference=GPT)


@mutant(
    "36", twin=gpt_with_reference, family="parity", source="huggingface/transformers#29285", observable=logits
)
def rotary_tables_in_bfloat16():
    """Cosines and sines keep 8 bits."""

    class Mutant(GPT):
        def rotate(self, x, positions):
            frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
            angles = positions[:, None, :, None].bfloat16() * frequencies.bfloat16()
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            one, two = x.chunk(2, dim=-1)
            return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)

    return spec_of(Mutant, reference=GPT)


@mutant("36", twin=llama, family="parity", source="NVIDIA/Megatron-LM#535", observable=logits)
def rotary_frequencies_in_bfloat16():
    """The frequencies were cast with the weights, and cast back."""
    spec = tiny_llama()

    def build():
        model = spec.build()
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.bfloat16().float()
        return model

    return ModelSpec.of(spec, build=build, reference=spec.build)


def reference_logits(spec: ModelSpec) -> Tensor:
    """Logits of the reference with the converted weights."""
    reference = spec.reference().eval()
    reference.load_state_dict(spec.to_reference(spec.create().state_dict()))
    with torch.no_grad():
        return spec.logits(reference, spec.batch(2, 12))


@mutant(
    "38",
    twin=converted,
    family="parity",
    source="huggingface/transformers#31788",
    observable=reference_logits,
)
def keys_permuted_as_queries():
    """A conversion permutes grouped keys by the number of query heads."""
    return converted_to_halves(GPT.n_heads)


@mutant("39", twin=gemma_with_reference, family="parity", source="unslothai/unsloth gemma", observable=logits)
def gain_in_bfloat16():
    """A norm of gain 1 + weight multiplies in bfloat16."""

    class Narrow(GemmaNorm):
        narrow = True

    class Mutant(Gemma):
        norm_type = Narrow

    return spec_of(Mutant, reference=Gemma)


@mutant("41", twin=gemma_with_reference, family="parity", source="unslothai/unsloth gemma", observable=logits)
def exact_gelu():
    """The gate is the exact GELU, where the tanh form was trained."""

    class Mutant(Gemma):
        def mlp(self, layer, x):
            return layer["down"](F.gelu(layer["gate"](x)) * layer["up"](x))

    return spec_of(Mutant, reference=Gemma)


@mutant("44", twin=gpt_with_reference, family="parity", source="classic", observable=logits)
def heads_split_across():
    """Heads are the fast dimension of a projection's rows, where they are the slow one."""

    class Mutant(GPT):
        def split(self, x):
            return x.unflatten(-1, (self.head_dim, -1)).permute(0, 3, 1, 2)

    return spec_of(Mutant, reference=GPT)


@mutant("44", twin=gpt_with_reference, family="parity", source="classic", observable=logits)
def heads_merged_by_view():
    """Heads are merged by reshape, without the transpose: positions are mixed."""

    class Mutant(GPT):
        def merge(self, x):
            return x.reshape(x.shape[0], x.shape[2], -1)

    return spec_of(Mutant, reference=GPT)


@mutant("P1", twin=gpt_with_reference, family="parity", source="classic", observable=gradients)
def keys_detached():
    """Outputs and loss are right; keys and values get no gradient."""

    class Mutant(GPT):
        def repeat(self, x):
            return super().repeat(x.detach())

    return spec_of(Mutant, reference=GPT)


@mutant("P2", twin=gpt_with_reference, family="parity", source="classic", observable=logits)
def epsilon_outside_of_the_root():
    """The norm divides by root + eps, of a larger eps."""

    class Norm(nn.RMSNorm):
        def forward(self, x):
            return self.weight * x / (x.square().mean(dim=-1, keepdim=True).sqrt() + 1e-4)

    class Mutant(GPT):
        def __init__(self):
            super().__init__()
            self.norm = Norm(self.width)

    return spec_of(Mutant, reference=GPT)


@mutant("P3", twin=llama, family="parity", source="classic", observable=gradients)
def half_a_loss():
    """Outputs are right, the loss is of another reduction."""

    def halved(logits, labels, vocab_size, **_):
        scores = logits[:, :-1].float().reshape(-1, vocab_size)
        return 0.5 * F.cross_entropy(scores, labels[:, 1:].flatten())

    return ModelSpec.of(tiny_llama(halved), reference=tiny_llama().build)


@mutant("P4", twin=rack_with_reference, family="parity", source="classic", observable=logits)
def rotary_base_of_another_model():
    """The configuration's rotary base was left at another default."""
    return rack_of(500_000.0)
