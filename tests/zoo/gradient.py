"""Bugs of the backward pass: the output is right, its gradient is not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, gpt, spec_of
from tests.zoo.initialization import rack, tied_llama, untied
from tests.zoo.mutant import mutant


def gradients(spec):
    """Of the sum of squared logits, by parameter, empty where there is none."""
    model = spec.create().eval()
    with torch.enable_grad():
        spec.logits(model, spec.batch(2, 12)).square().sum().backward()
    return {n: torch.zeros(0) if p.grad is None else p.grad for n, p in model.named_parameters()}


def trainable(spec):
    return [p.requires_grad for p in spec.create().train().parameters()]


@mutant("gradient-branch", twin=gpt, family="gradient", source="classic", observable=gradients)
def attention_detached():
    """The result of attention is detached: queries, keys and values never learn."""

    class Mutant(GPT):
        def attend(self, layer, x, positions, visible, cache):
            y, kept = super().attend(layer, x, positions, visible, cache)
            return y.detach(), kept

    return spec_of(Mutant)


@mutant("gradient-gate", twin=gpt, family="gradient", source="classic", observable=gradients)
def gate_without_gradient():
    """The gate of the feed-forward layer is computed under no_grad()."""

    class Mutant(GPT):
        def mlp(self, layer, x):
            with torch.no_grad():
                gate = F.silu(layer["gate"](x))
            return layer["down"](gate * layer["up"](x))

    return spec_of(Mutant)


@mutant("gradient-head", twin=untied, family="gradient", source="classic", observable=gradients)
def head_without_gradient():
    """The head's weight is read through .data: it stays as it started."""

    class Head(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.data)

    class Mutant(GPT):
        tied = False

        def tie(self):
            head = Head(self.width, self.vocab_size, bias=False)
            head.weight = self.head.weight
            self.head = head

    return spec_of(Mutant)


@mutant("gradient-dead", twin=gpt, family="gradient", source="classic", observable=gradients)
def branch_times_zero():
    """A switch that was to be warmed up stays at 0: the feed-forward layers do nothing."""

    class Mutant(GPT):
        def mlp(self, layer, x):
            return 0.0 * super().mlp(layer, x)

    return spec_of(Mutant)


class Scaled(torch.autograd.Function):
    """Twice the input; the gradient that comes back is not doubled."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Doubled(GPT):
    def mlp(self, layer, x):
        return self.double(super().mlp(layer, x))

    def double(self, x):
        return 2 * x


def doubled():
    return spec_of(Doubled)


@mutant("gradient-custom", twin=doubled, family="gradient", source="classic", observable=gradients)
def custom_backward_without_the_factor():
    """A custom autograd function whose backward forgets the factor of its forward."""

    class Mutant(Doubled):
        def double(self, x):
            return Scaled.apply(x)

    return spec_of(Mutant)


@mutant("gradient-norm", twin=gpt, family="gradient", source="classic", observable=gradients)
def norm_statistics_detached():
    """The root mean square of a norm is taken as a constant in the backward pass."""

    class Norm(nn.RMSNorm):
        def forward(self, x):
            size = x.detach().square().mean(dim=-1, keepdim=True)
            return x * (size + torch.finfo(x.dtype).eps).rsqrt() * self.weight

    class Mutant(GPT):
        def __init__(self):
            super().__init__()
            self.norm = Norm(self.width)

    return spec_of(Mutant)


@mutant("gradient-residual", twin=gpt, family="gradient", source="classic", observable=gradients)
def half_of_the_embedding_detached():
    """Half of the gradient to the embedding is cut off, to keep it stable, and nobody knows."""

    class Mutant(GPT):
        def embed(self, input_ids):
            x = super().embed(input_ids)
            return 0.5 * x + 0.5 * x.detach()

    return spec_of(Mutant)


@mutant("gradient-hook", twin=rack, family="gradient", source="classic", observable=gradients)
def gradient_hook_left_in():
    """A hook that halves gradients, of an experiment, is left in a model."""
    spec = rack()

    def build():
        model = spec.build()
        model.register_forward_hook(_halved)
        return model

    return ModelSpec.of(build, name="Mutant")


def _halved(module, args, output):
    hidden = getattr(output, "logits", output)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient / 2)


@mutant("gradient-block", twin=tied_llama, family="gradient", source="classic", observable=gradients)
def layer_detached():
    """The first layer's result goes on as a tensor of its own: nothing before it learns."""
    spec = tied_llama()

    def build():
        model = spec.build()
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output.detach())
        return model

    return ModelSpec.of(build, name="Mutant", tied=True)


@mutant("T05", twin=gpt, family="gradient", source="open-mmlab/mmpretrain#702", observable=trainable)
def frozen_by_train_mode():
    """The embedding is frozen in train() alone: what an optimizer gets hangs on when it is made."""

    class Mutant(GPT):
        def train(self, mode=True):
            self.embedding.weight.requires_grad_(not mode)
            return super().train(mode)

    return spec_of(Mutant)


@mutant("gradient-steps", twin=gpt, family="gradient", source="classic", observable=gradients)
def rounding_without_a_surrogate():
    """The stream is rounded before the head, as for quantisation, and gradients are not passed through."""

    class Mutant(GPT):
        def forward(self, *args, **kwargs):
            handle = self.norm.register_forward_hook(lambda _, args, output: (64 * output).round() / 64)
            try:
                return super().forward(*args, **kwargs)
            finally:
                handle.remove()

    return spec_of(Mutant)


class Adapted(GPT):
    """A frozen base, and a layer beside the head that trains."""

    def __init__(self):
        super().__init__()
        self.base_is_frozen()
        self.adapter = nn.Linear(self.width, self.vocab_size, bias=False)
        nn.init.normal_(self.adapter.weight, std=0.02)
        self.norm.register_forward_hook(self.remember)

    def base_is_frozen(self):
        self.requires_grad_(False)

    def remember(self, norm, args, output):
        self.last = [output]

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.adapter(self.last.pop())
        return output


BASE = ("embedding", "layers", "norm", "head")


def adapted():
    """The clean twin."""
    return spec_of(Adapted, tied=None, labelled_loss=None, frozen=BASE)


@mutant("gradient-frozen", twin=adapted, family="gradient", source="classic", observable=trainable)
def base_that_is_not_frozen():
    """The base under an adapter is frozen through its gains alone: p.ndim == 1 where all are meant."""

    class Mutant(Adapted):
        def base_is_frozen(self):
            for p in self.parameters():
                p.requires_grad_(p.ndim > 1)

    return spec_of(Mutant, tied=None, labelled_loss=None, frozen=BASE)


class Penalty(torch.autograd.Function):
    """The input. Its gradient gets that of a penalty."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 1e-3 * ctx.saved_tensors[0]


def train_gradients(spec):
    """Return the gradient of each parameter in train mode."""
    model = spec.create().train()
    with torch.enable_grad():
        spec.logits(model, spec.batch(2, 12)).square().sum().backward()
    return [p.grad for p in model.parameters()]


class Penalised(GPT):
    """The outputs of the feed-forward layers have a penalty in training."""

    dropout = 0.0

    def mlp(self, layer, x):
        y = super().mlp(layer, x)
        return Penalty.apply(y) if self.training else y


def penalised():
    return spec_of(Penalised)


@mutant(
    "gradient-unused",
    twin=penalised,
    family="sensitivity",
    source="NVIDIA-NeMo/Automodel#1408",
    observable=train_gradients,
)
def penalty_in_an_unused_variable():
    """The result of the function that adds the gradient of a penalty is assigned and never used."""

    class Mutant(GPT):
        dropout = 0.0

        def mlp(self, layer, x):
            y = super().mlp(layer, x)
            if self.training:
                penalised = Penalty.apply(y)  # noqa: F841
            return y

    return spec_of(Mutant)


class WithAdapters(GPT):
    """An adapter follows each feed-forward layer."""

    def layer(self):
        layer = super().layer()
        layer["adapter"] = nn.Linear(self.width, self.width)
        return layer

    def mlp(self, layer, x):
        return layer["adapter"](super().mlp(layer, x))


def with_adapters():
    return spec_of(WithAdapters)


@mutant(
    "gradient-not-called",
    twin=with_adapters,
    family="gradient",
    source="explainingai-code/DiT-PyTorch#1",
    observable=gradients,
)
def adapter_that_no_layer_calls():
    """Each layer has an adapter and never calls it."""

    class Mutant(WithAdapters):
        def mlp(self, layer, x):
            return GPT.mlp(self, layer, x)

    return spec_of(Mutant)
