"""episodic-transformer-memory-ppo#22 (MarcoMeter): each head projects only its own slice of the input.

The input is first split into heads, and then one small projection is applied to all of them. So all heads
have the same weights, and a head reads the channels of its slice only. The projection should come first.
https://github.com/MarcoMeter/episodic-transformer-memory-ppo/pull/22
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

OBS, DIM, HEADS, BLOCKS = 10, 32, 4, 2


class MultiHeadAttention(nn.Module):
    """Attention of one query to the memories."""

    def __init__(self, embed_dim: int, num_heads: int, *, project_first: bool) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.project_first = num_heads, embed_dim // num_heads, project_first
        size = embed_dim if project_first else self.head_size
        self.values, self.keys, self.queries = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.fc_out = nn.Linear(embed_dim, embed_dim)

    def heads(self, x: Tensor, projection: nn.Module) -> Tensor:
        """Project and split (batch, length, embed_dim)."""
        if self.project_first:
            return projection(x).unflatten(-1, (self.num_heads, self.head_size))
        return projection(x.unflatten(-1, (self.num_heads, self.head_size)))

    def forward(self, values: Tensor, keys: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` (batch, length) is True for memories that exist."""
        v, k = self.heads(values, self.values), self.heads(keys, self.keys)
        q = self.heads(queries, self.queries)
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k) * self.head_size**-0.5
        if mask is not None:
            energy = energy.masked_fill(~mask[:, None, None], -1e20)
        return self.fc_out(torch.einsum("nhql,nlhd->nqhd", energy.softmax(dim=-1), v).flatten(2))


class TransformerBlock(nn.Module):
    """Attention to memories and a feed-forward network, with norms in front."""

    def __init__(self, *, project_first: bool) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(DIM, HEADS, project_first=project_first)
        self.norm1, self.norm2, self.norm_kv = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.fc = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU())

    def forward(self, memories: Tensor, query: Tensor, mask: Tensor | None) -> Tensor:
        """`memories` is (batch, length, DIM), `query` (batch, 1, DIM)."""
        memories = self.norm_kv(memories)
        h = query + self.attention(memories, memories, self.norm1(query), mask)
        return h + self.fc(self.norm2(h))


def sinusoidal(indices: Tensor, dim: int) -> Tensor:
    """Return encodings (..., dim) of time steps."""
    freqs = 10000.0 ** (-torch.arange(0, dim, 2, device=indices.device, dtype=torch.float64) / dim)
    angles = indices[..., None] * freqs
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Transformer(nn.Module):
    """Policy network with an episodic memory: one step attends to the activations of the earlier steps."""

    def __init__(self, *, project_first: bool) -> None:
        super().__init__()
        self.linear_embedding = nn.Sequential(nn.Linear(OBS, DIM), nn.ReLU())
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(project_first=project_first) for _ in range(BLOCKS)
        )
        self.policy = nn.Linear(DIM, 5)

    def forward(
        self, obs: Tensor, memories: Tensor, mask: Tensor | None, memory_indices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of actions, and the memory (batch, BLOCKS, DIM) of this step.

        `memories` is (batch, length, BLOCKS, DIM) and `memory_indices` (batch, length) are their time steps.
        """
        h, out_memories = self.linear_embedding(obs), []
        positions = sinusoidal(memory_indices, DIM).to(memories.dtype)
        for i, block in enumerate(self.transformer_blocks):
            out_memories.append(h)
            h = block(memories[:, :, i] + positions, h[:, None], mask)[:, 0]
        return self.policy(h), torch.stack(out_memories, dim=1)


def rollout(model: nn.Module, observations: Tensor) -> Tensor:
    """Return the logits (batch, time, actions) of an episode. The first step has one empty memory."""
    batch, time, _ = observations.shape
    memories = observations.new_zeros(batch, 1, BLOCKS, DIM)
    logits = []
    for t in range(time):
        indices = torch.arange(t + 1, device=observations.device).expand(batch, -1)
        step, memory = model(observations[:, t], memories, None, indices)
        memories = torch.cat([memories, memory[:, None]], dim=1)
        logits.append(step)
    return torch.stack(logits, dim=1)


def buggy() -> nn.Module:
    """Split into heads first."""
    return Transformer(project_first=False)


def healthy() -> nn.Module:
    """Project first."""
    return Transformer(project_first=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal policy, called step by step."""
    return ModelSpec.of(make, inputs="vectors", width=OBS, causal=True, forward=rollout)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return how many of the other heads do not notice a change of the channels of the first head's slice."""
    attention, seen = model.transformer_blocks[0].attention, []
    handle = attention.fc_out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(1, 6, DIM, generator=torch.Generator().manual_seed(1))
    other = torch.cat([x[..., : DIM // HEADS] + 1, x[..., DIM // HEADS :]], dim=-1)
    for memories in (x, other):
        attention(memories, memories, x[:, :1], None)
    handle.remove()
    change = (seen[0] - seen[1]).unflatten(-1, (HEADS, -1)).abs().amax(dim=(0, 1, 3))
    return (change[1:] == 0).sum()
