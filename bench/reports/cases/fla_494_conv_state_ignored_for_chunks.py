"""flash-linear-attention#494 (fla-org): outputs differ between a sequence in chunks and in one pass.

Gated DeltaNet hands its cache over from chunk to chunk. The report names no cause. Here the short convolution
uses its cached inputs for single tokens only: a longer chunk starts with zeros, as a prompt does.
https://github.com/fla-org/flash-linear-attention/issues/494
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

State = tuple[Tensor, Tensor]


class ShortConvolution(nn.Module):
    """Causal depthwise convolution with a state of its last inputs."""

    def __init__(self, dim: int, chunks: bool, size: int = 4) -> None:
        super().__init__()
        self.size, self.chunks = size, chunks
        self.weight = nn.Parameter(torch.randn(dim, 1, size) * size**-0.5)

    def forward(self, x: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and the new state, both (batch, length, dim)."""
        start = x.new_zeros(x.shape[0], self.size - 1, x.shape[2])
        before = start if cache is None else cache
        used = before if self.chunks or x.shape[1] == 1 else start
        y = F.conv1d(torch.cat((used, x), dim=1).transpose(1, 2), self.weight, groups=x.shape[2])
        return F.silu(y.transpose(1, 2)), torch.cat((before, x), dim=1)[:, 1 - self.size :]


class GatedDeltaNet(nn.Module):
    """Delta rule with a decay per head."""

    def __init__(self, dim: int, heads: int, chunks: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj, self.o_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.a_proj, self.b_proj = nn.Linear(dim, heads), nn.Linear(dim, heads)
        self.conv1d = ShortConvolution(3 * dim, chunks)
        self.o_norm = nn.RMSNorm(dim // heads)

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Output and the new state."""
        qkv, conv = self.conv1d(self.qkv_proj(x), None if state is None else state[0])
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in qkv.chunk(3, dim=-1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        decay, beta = self.a_proj(x).sigmoid()[..., None, None], self.b_proj(x).sigmoid()[..., None]
        memory = x.new_zeros(*q[:, 0].shape, v.shape[-1]) if state is None else state[1]
        outputs = []
        for t in range(x.shape[1]):
            memory = memory * decay[:, t]
            error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], memory)
            memory = memory + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t] * error)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], memory))
        return self.o_proj(self.o_norm(torch.stack(outputs, dim=1)).flatten(2)), (conv, memory)


class GatedDeltaNetForCausalLM(nn.Module):
    """Language model."""

    def __init__(self, chunks: bool, vocab_size: int = 40, dim: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(GatedDeltaNet(dim, 4, chunks) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(3))
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, past_key_values: list[State] | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        """Logits, and the states of all layers."""
        x, states = self.embeddings(input_ids), []
        for i, layer in enumerate(self.layers):
            y, state = layer(self.norms[i](x), None if past_key_values is None else past_key_values[i])
            x = x + y
            states.append(state)
        return SimpleNamespace(
            logits=self.lm_head(self.norms[-1](x)), past_key_values=states if use_cache else None
        )


def buggy() -> nn.Module:
    """Chunks start with zeros."""
    return GatedDeltaNetForCausalLM(chunks=False)


def healthy() -> nn.Module:
    """Chunks start with the cached inputs."""
    return GatedDeltaNetForCausalLM(chunks=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The states continue a sequence."""

    def decode(model: nn.Module, ids: Tensor, cache: list[State] | None) -> tuple[Tensor, list[State]]:
        out = model(ids, past_key_values=cache, use_cache=True)
        return out.logits, out.past_key_values

    return ModelSpec.of(make, causal=True, decode=decode)


def observe(model: nn.Module) -> Tensor:
    """Logits of two chunks of five tokens, less those of one pass."""
    ids = torch.randint(0, 40, (2, 10), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first = model(ids[:, :5], use_cache=True)
        second = model(ids[:, 5:], past_key_values=first.past_key_values)
        return torch.cat((first.logits, second.logits), dim=1) - model(ids).logits
