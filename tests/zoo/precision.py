"""Bugs of narrow floating-point formats: bfloat16, float16, autocast.

Shapes: B batch, T positions, D head size, F width of the feed-forward part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, gpt, spec_of
from tests.zoo.mutant import mutant

BEYOND = 300  # positions: bfloat16 counts to 256


@torch.no_grad()
def narrow_logits(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16, seq_len: int = BEYOND) -> Tensor:
    """In eval mode, of a model whose weights are cast."""
    model = spec.create().eval().to(dtype)
    return spec.logits(model, spec.batch(1, seq_len))


def half_logits(spec: ModelSpec) -> Tensor:
    """The same in float16, of few positions."""
    return narrow_logits(spec, torch.float16, 12)


@torch.no_grad()
def autocast_logits(spec: ModelSpec) -> Tensor:
    """In eval mode under autocast, gains as far apart as trained ones."""
    model = spec.create().eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.ndim == 1:
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
    with torch.autocast("cpu", torch.bfloat16):
        return spec.logits(model, spec.batch(1, 12))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs; `cos` and `sin` are (T, D / 2)."""
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


@mutant("36", twin=gpt, family="precision", source="huggingface/transformers#29285", observable=narrow_logits)
def rotary_angles_in_bfloat16():
    """Positions and angles are computed in the dtype of the activations: beyond 256 neighbours are one."""

    class Mutant(GPT):
        def rotate(self, x, positions):
            frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
            angles = positions[0].to(x.dtype)[:, None] * frequencies.to(x.dtype)
            return turned(x, angles.cos(), angles.sin())

    return spec_of(Mutant)


class RotaryModule(GPT):
    """Inverse frequencies in a buffer, angles by a matrix product, as in many published models."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def angles(self, positions: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return positions[0, :, None].float() @ self.frequencies[None].float()

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = self.angles(positions)
        return turned(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def rotary_module() -> ModelSpec:
    # It reads the positions of the first row only, so that rows have no padding of their own.
    return spec_of(RotaryModule, packed=None, decode=None, masked=None, padding_sides=())


@mutant(
    "36a",
    twin=rotary_module,
    family="precision",
    source="EleutherAI/gpt-neox#1016",
    observable=lambda spec: autocast_angles(spec),
)
def rotary_angles_under_autocast():
    """The product of positions and frequencies is not kept out of autocast."""

    class Mutant(RotaryModule):
        def angles(self, positions):
            return positions[0, :, None].float() @ self.frequencies[None]

    return spec_of(Mutant)


@torch.no_grad()
def autocast_angles(spec: ModelSpec) -> Tensor:
    """Of the last position, under autocast."""
    model = spec.create()
    with torch.autocast("cpu", torch.bfloat16):
        return model.angles(torch.arange(BEYOND)[None])[-1].float()


@mutant(
    "36b", twin=rotary_module, family="precision", source="NVIDIA/Megatron-LM#535", observable=narrow_logits
)
def positions_summed_in_bfloat16():
    """Positions count the tokens before them in the dtype of the activations."""

    class Mutant(RotaryModule):
        def positions(self, input_ids, past, keep, documents):
            real = torch.ones_like(input_ids).to(self.norm.weight.dtype)
            return real.cumsum(dim=1) - 1

    return spec_of(Mutant)


class OffsetNorm(nn.Module):
    """RMSNorm whose gain is 1 + weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def gain(self) -> Tensor:
        return 1 + self.weight.float()

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)
        return (wide * self.gain()).to(x.dtype)


def with_norm(norm: type[nn.Module]) -> ModelSpec:
    class Normed(GPT):
        def layer(self):
            layer = super().layer()
            for name in ("attention_norm", "mlp_norm"):
                layer[name] = norm(self.width)
            return layer

    return spec_of(Normed, name=f"GPT with {norm.__name__}")


def offset_norm() -> ModelSpec:
    return with_norm(OffsetNorm)


@mutant(
    "39",
    twin=offset_norm,
    family="precision",
    source="unslothai/unsloth, gemma fixes",
    observable=autocast_logits,
)
def offset_gain_in_bfloat16():
    """A norm's gain 1 + weight is formed in bfloat16: gains that differ by less than 1/128 become one."""

    class Mutant(OffsetNorm):
        def gain(self):
            return 1 + self.weight.bfloat16()

    return with_norm(Mutant)


class Outliers(GPT):
    """Trained weights have channels whose gate and up projections are both large."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for layer in self.layers:
                layer["gate"].weight[0] *= 300
                layer["up"].weight[0] *= 300
                layer["down"].weight[:, 0] *= 1e-4

    def mlp(self, layer: nn.Module, x: Tensor) -> Tensor:
        gate, up = F.silu(layer["gate"](x)), layer["up"](x)
        if x.dtype != torch.float16:
            return layer["down"](gate * up)
        return F.linear(gate.float() * up.float(), layer["down"].weight.float()).to(x.dtype)


def outliers() -> ModelSpec:
    """Their product and what follows is computed in float32."""
    return spec_of(Outliers, trained=True)


@mutant("77", twin=outliers, family="precision", source="unslothai/unsloth-zoo#600", observable=half_logits)
def gate_times_up_overflows():
    """In float16 the product of gate and up projection is infinite."""

    class Mutant(Outliers):
        def mlp(self, layer, x):
            return layer["down"](F.silu(layer["gate"](x)) * layer["up"](x))

    return spec_of(Mutant, trained=True)


@mutant("29a", twin=gpt, family="precision", source="huggingface/transformers#17306", observable=half_logits)
def mask_value_beyond_float16():
    """An additive mask of -1e9 is -inf in float16, and 0 * -inf is NaN."""

    class Mutant(GPT):
        def attend(self, layer, x, positions, visible, cache):
            self.hidden = (~visible).to(x.dtype)
            return super().attend(layer, x, positions, torch.ones_like(visible), cache)

        def softmax(self, scores):
            return (scores + self.hidden * torch.tensor(-1e9).to(scores.dtype)).softmax(dim=-1)

    return spec_of(Mutant)


class Running(GPT):
    """Softmax by a running sum over keys, of attention that looks at its first key above all."""

    def accumulator(self, scores: Tensor) -> torch.dtype:
        return torch.float64 if scores.dtype == torch.float64 else torch.float32

    def softmax(self, scores: Tensor) -> Tensor:
        sink = F.pad(torch.tensor([5.7]), (0, scores.shape[-1] - 1)).to(scores)
        scores = scores + sink
        weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        total = torch.zeros_like(scores[..., 0], dtype=self.accumulator(scores))
        for column in weights.unbind(dim=-1):
            total = total + column.to(total.dtype)
        return weights / total[..., None].to(weights.dtype)


def running() -> ModelSpec:
    # The first key is that of the row, whatever stands there.
    return spec_of(Running, packed=None, padding_sides=("right",))


@mutant("P1", twin=running, family="precision", source="classic", observable=narrow_logits)
def softmax_sum_in_bfloat16():
    """The running sum of a softmax is kept in bfloat16: what is small beside it is never added."""

    class Mutant(Running):
        def accumulator(self, scores):
            return scores.dtype

    return spec_of(Mutant)


def shifted_stream(norm: type[nn.Module] = nn.LayerNorm) -> ModelSpec:
    """A stream whose mean is large beside its spread, as trained ones have it in some channels."""

    class Shifted(GPT):
        def layer(self):
            layer = super().layer()
            for name in ("attention_norm", "mlp_norm"):
                layer[name] = norm(self.width)
            return layer

        def embed(self, input_ids):
            return self.embedding(input_ids) + 0.25

    return spec_of(Shifted, name=f"GPT with a shifted stream and {norm.__name__}")


@mutant("P2", twin=shifted_stream, family="precision", source="classic", observable=narrow_logits)
def variance_by_difference():
    """A norm takes its variance as E[x^2] - E[x]^2 in bfloat16, of a stream whose mean is large."""

    class Norm(nn.LayerNorm):
        def forward(self, x):
            mean, square = x.mean(dim=-1, keepdim=True), x.square().mean(dim=-1, keepdim=True)
            variance = (square - mean.square()).clamp(min=0)
            return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias

    return shifted_stream(Norm)


class InPlaceProduct(nn.Linear):
    """Linear by an operation in place, which saves an allocation."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        y = torch.zeros(len(flat), self.out_features, dtype=flat.dtype)
        return y.addmm_(flat, self.weight.t()).unflatten(0, x.shape[:-1])


@mutant(
    "T04",
    twin=gpt,
    family="precision",
    source="Lightning-AI/lightning-thunder#725",
    observable=autocast_logits,
)
def linear_that_autocast_passes_over():
    """A linear layer writes in place, and autocast leaves such operations as they are."""

    class Mutant(GPT):
        def layer(self):
            layer = super().layer()
            for name in ("gate", "up"):
                layer[name] = InPlaceProduct(self.width, self.d_ff, bias=False)
            return layer

    return spec_of(Mutant)


@torch.no_grad()
def float32_logits(spec: ModelSpec) -> Tensor:
    """In eval mode, as the model is built."""
    return spec.logits(spec.create().eval(), spec.batch(1, 12))


@mutant("P3", twin=gpt, family="precision", source="classic", observable=float32_logits)
def softmax_always_in_bfloat16():
    """The softmax is taken in bfloat16 whatever the model is in, and so are its weights."""

    class Mutant(GPT):
        def softmax(self, scores):
            return super().softmax(scores.to(torch.bfloat16)).to(scores.dtype)

    return spec_of(Mutant)


@mutant("P4", twin=gpt, family="precision", source="classic", observable=float32_logits)
def stream_always_in_float16():
    """The embeddings pass through float16 on their way, as .half() was left in the code."""

    class Mutant(GPT):
        def embed(self, input_ids):
            return super().embed(input_ids).half().float()

    return spec_of(Mutant)
