"""Bugs of recomputed activations, compiled code, other attention kernels, and a host that waits.

Shapes: B batch, T positions, C width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded
from tests.zoo.gpt import GPT, gpt, spec_of
from tests.zoo.mutant import mutant


def gradients(spec: ModelSpec, model: nn.Module, call: Any = None) -> dict[str, Tensor]:
    """Of every parameter, of one batch in train mode."""
    with seeded(0):
        spec.loss_of(model if call is None else call, spec.batch(2, 12)).backward()
    return {n: torch.zeros(()) if p.grad is None else p.grad for n, p in model.named_parameters()}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the parameters whose gradients are more than rounding apart."""
    return [n for n in a if not torch.allclose(a[n], b[n], rtol=1e-3, atol=1e-3 * a[n].abs().max().item())]


# Recomputation


class Recomputing(GPT):
    """Can compute the feed-forward part again instead of keeping its activations."""

    recomputes = False
    how: dict[str, Any] = {"use_reentrant": False}  # noqa: RUF012

    def gradient_checkpointing_enable(self) -> None:
        self.recomputes = True

    def part(self, layer: nn.Module, x: Tensor) -> Tensor:
        return GPT.mlp(self, layer, x)

    def mlp(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.recomputes and self.training:
            return checkpoint(self.part, layer, x, **self.how)
        return self.part(layer, x)


def recomputing() -> ModelSpec:
    return spec_of(Recomputing)


def recomputed(spec: ModelSpec) -> list[str]:
    """Parameters whose gradient is another one where activations are recomputed."""
    plain, again = spec.create().train(), spec.create().train()
    again.gradient_checkpointing_enable()
    return apart(gradients(spec, plain), gradients(spec, again))


class SharedKeys(Recomputing):
    """The second layer attends to keys and values of the first."""

    keeps_aside = False

    def attend(self, layer, x, positions, visible, cache):
        shared = () if layer is self.layers[0] else self.shared
        if self.recomputes and self.training:
            given = () if self.keeps_aside else shared
            y, *kept = checkpoint(self.attention, layer, x, positions, visible, *given, **self.how)
        else:
            y, *kept = self.attention(layer, x, positions, visible, *shared)
        self.shared = self.aside if self.keeps_aside and self.recomputes and self.training else tuple(kept)
        return y, tuple(kept)

    def attention(self, layer, x, positions, visible, k=None, v=None):
        if layer is not self.layers[0] and k is None:
            k, v = (kept.clone() for kept in self.aside)
        if k is None:
            k, v = self.rotate(self.split(layer["k"](x)), positions), self.split(layer["v"](x))
            self.aside = k.clone(), v.clone()
        q = self.rotate(self.split(layer["q"](x)), positions)
        scores = q @ self.repeat(k).transpose(-2, -1) * self.scale()
        weights = self.softmax(scores.masked_fill(~visible, -torch.inf))
        return layer["out"](self.merge(self.drop(weights) @ self.repeat(v))), k, v


def shared_keys(build: type[SharedKeys] = SharedKeys) -> ModelSpec:
    unused = ("layers.1.k", "layers.1.v")
    return spec_of(build, decode=None, unused=unused)


@mutant(
    "86",
    twin=shared_keys,
    family="recompute",
    source="unslothai/unsloth-zoo#813",
    observable=recomputed,
)
def keys_shared_past_recomputation():
    """Shared keys and values reach a recomputed layer by an attribute: their gradients are cut off."""

    class Mutant(SharedKeys):
        keeps_aside = True
        how = {"use_reentrant": True}  # noqa: RUF012

    return shared_keys(Mutant)


@mutant("R1", twin=recomputing, family="recompute", source="classic", observable=recomputed)
def dropout_not_restored():
    """The recomputation draws another dropout than the forward pass."""

    class Mutant(Recomputing):
        how = {"use_reentrant": False, "preserve_rng_state": False}  # noqa: RUF012

        def part(self, layer, x):
            return F.dropout(super().part(layer, x), 0.1, self.training)

    return spec_of(Mutant)


@mutant("R2", twin=recomputing, family="recompute", source="classic", observable=recomputed)
def input_changed_in_place():
    """The recomputed part scales its input in place, so that it is scaled twice."""

    class Mutant(Recomputing):
        def mlp(self, layer, x):
            return super().mlp(layer, x + 0.0)

        def part(self, layer, x):
            x.data.mul_(1.5)
            return super().part(layer, x)

    return spec_of(Mutant)


@mutant("R3", twin=recomputing, family="recompute", source="classic", observable=recomputed)
def counter_in_recomputed_part():
    """A slope grows with a counter of calls, which recomputing moves on."""

    class Mutant(Recomputing):
        calls = 0

        def part(self, layer, x):
            self.calls += self.training
            return super().part(layer, x * (1 + 0.1 * self.calls))

    return spec_of(Mutant)


class Stash(torch.autograd.Function):
    """x * gate, whose backward takes the gate from where the last forward has left it."""

    @staticmethod
    def forward(ctx, x, gate, owner):
        ctx.save_for_backward(x, gate)
        ctx.owner = owner
        owner["again"] = owner.get("again", 0) + 1
        return x * gate

    @staticmethod
    def backward(ctx, gradient):
        x, gate = ctx.saved_tensors
        if ctx.owner["again"] > 1:
            gate = gate.detach() * 0.5
        return gradient * gate, gradient * x, None


@mutant("R4", twin=recomputing, family="recompute", source="classic", observable=recomputed)
def backward_that_counts_forwards():
    """A hand-written backward is wrong once its forward has run twice for one backward."""

    class Mutant(Recomputing):
        def part(self, layer, x):
            owners = self.__dict__.setdefault("owners", {})
            owner = owners.setdefault(id(layer), {})
            if self.recomputes and not owner.pop("open", False):
                owner["again"], owner["open"] = 0, True
            elif not self.recomputes:
                owner["again"] = 0
            hidden = Stash.apply(F.silu(layer["gate"](x)), layer["up"](x), owner)
            return layer["down"](hidden)

    return spec_of(Mutant)


@mutant("R5", twin=recomputing, family="recompute", source="classic", observable=recomputed)
def gate_remembered_from_the_first_pass():
    """The gate is remembered from the pass without gradients, and takes none in the pass with them."""

    class Mutant(Recomputing):
        how = {"use_reentrant": True}  # noqa: RUF012

        def part(self, layer, x):
            if torch.is_grad_enabled() and getattr(self, "gate", None) is not None:
                gate = self.gates.pop(id(layer))
            else:
                gate = F.silu(layer["gate"](x))
                if not torch.is_grad_enabled() and self.training and self.recomputes:
                    self.gates = getattr(self, "gates", {}) | {id(layer): gate}
                    self.gate = gate
            return layer["down"](gate * layer["up"](x))

    return spec_of(Mutant)


# Compilation


def compiled(spec: ModelSpec, steps: int = 1) -> list[str]:
    """Parameters whose gradient is another one under torch.compile."""
    found = []
    torch._dynamo.reset()  # mutants share code, for which the compiler keeps few graphs
    plain, again = spec.create().eval(), spec.create().eval()
    call = torch.compile(again, backend="eager", dynamic=False)
    for _ in range(steps):
        plain.zero_grad(), again.zero_grad()
        found += apart(gradients(spec, plain), gradients(spec, again, call))
        for buffer in (*plain.buffers(), *again.buffers()):
            buffer *= 0.9
    return found


@mutant("88", twin=gpt, family="compilation", source="pytorch/pytorch#152309", observable=compiled)
def softmax_taken_apart_for_the_compiler():
    """Compiled, a softmax is taken apart, and no gradient flows through its sum."""

    class Mutant(GPT):
        def softmax(self, scores):
            if not torch.compiler.is_compiling():
                return super().softmax(scores)
            weights = (scores - scores.amax(dim=-1, keepdim=True).detach()).exp()
            return weights / weights.sum(dim=-1, keepdim=True).detach()

    return spec_of(Mutant)


class Annealed(GPT):
    """The embeddings are scaled by what a schedule turns down."""

    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def factor(self) -> Tensor:
        return self.temperature

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.factor()


def annealed() -> ModelSpec:
    return spec_of(Annealed)


@mutant(
    "T10",
    twin=annealed,
    family="compilation",
    source="pytorch/pytorch#115607",
    observable=lambda spec: compiled(spec, steps=3),
)
def temperature_frozen_by_the_compiler():
    """What a schedule changes is read once, as the compiler traces, and stays what it was."""

    class Mutant(Annealed):
        @torch.compiler.assume_constant_result
        def factor(self):
            return self.temperature.item()

    return spec_of(Mutant)


@mutant("C1", twin=gpt, family="compilation", source="classic", observable=compiled)
def residual_detached_while_compiling():
    """A branch on is_compiling() keeps a copy of the stream, without its gradient."""

    class Mutant(GPT):
        def mlp(self, layer, x):
            return super().mlp(layer, x.detach() if torch.compiler.is_compiling() else x)

    return spec_of(Mutant)


# Other kernels of attention


class Fused(GPT):
    """Attention by torch's own function."""

    window = 5

    def attend(self, layer, x, positions, visible, cache):
        q = self.rotate(self.split(layer["q"](x)), positions)
        k = self.rotate(self.split(layer["k"](x)), positions)
        v = self.split(layer["v"](x))
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        y = self.fused(q, self.repeat(k), self.repeat(v), visible)
        return layer["out"](self.merge(y)), (k, v)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, visible)


def fused() -> ModelSpec:
    return spec_of(Fused)


def by_the_formula(spec: ModelSpec) -> list[str]:
    """Parameters whose gradient is another one by the plain formula of attention."""
    one, other = spec.create().eval(), spec.create().eval()
    usual = gradients(spec, one)
    with sdpa_kernel(SDPBackend.MATH):
        return apart(usual, gradients(spec, other))


@mutant("26b", twin=fused, family="backend", source="unslothai/unsloth#8253", observable=by_the_formula)
def window_dropped_by_the_fast_kernel():
    """Where the fast kernel may be used, is_causal stands in for the mask, and the window is gone."""

    class Mutant(Fused):
        def fused(self, q, k, v, visible):
            if torch.backends.cuda.flash_sdp_enabled() and q.shape[2] == k.shape[2]:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return super().fused(q, k, v, visible)

    return spec_of(Mutant)


# A host that waits


def claiming(build: type[GPT] = GPT, **declared: Any) -> ModelSpec:
    return ModelSpec(
        build=build,
        name=build.__name__,
        inputs="tokens",
        width=61,
        causal=True,
        never_waits=True,
        **declared,
    )


def values_read(spec: ModelSpec) -> int:
    """How often a forward pass or a loss asks a tensor for its value."""
    read = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            asks = (Tensor.item, Tensor.__bool__, Tensor.tolist, Tensor.nonzero, torch.nonzero)
            read.append(function in asks)
            return function(*args, **(kwargs or {}))

    with Watch():
        spec.loss_of(spec.create(), spec.batch(2, 12))
    return sum(read)


@mutant("S1", twin=claiming, family="synchronization", source="classic", observable=values_read)
def item_in_forward():
    """The stream is scaled by its largest value, read by the host."""

    class Mutant(GPT):
        def mlp(self, layer, x):
            return super().mlp(layer, x / x.abs().max().item())

    return claiming(Mutant)


@mutant("S2", twin=claiming, family="synchronization", source="classic", observable=values_read)
def branch_on_the_loss():
    """The loss is left as it is only if it is finite."""

    def loss(model: nn.Module, inputs: Tensor) -> Tensor:
        value = model(inputs, labels=inputs).loss
        return value if torch.isfinite(value) else value * 0

    return claiming(loss=loss)


@mutant("S3", twin=claiming, family="synchronization", source="classic", observable=values_read)
def tokens_picked_by_nonzero():
    """The feed-forward part runs on the tokens that a condition picks, so that shapes depend on values."""

    class Mutant(GPT):
        def mlp(self, layer, x):
            flat = x.flatten(0, 1)
            picked = torch.nonzero(flat.norm(dim=-1) > 0).flatten()
            return torch.zeros_like(flat).index_copy(0, picked, super().mlp(layer, flat[picked])).view_as(x)

    return claiming(Mutant)
