"""open_lm#4 (mlfoundations/open_lm): the rotary embedding counts positions along the heads, not along time.

Queries and keys are (batch, time, heads, width): all tokens turn alike, and attention sees no positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Rotary(nn.Module):
    """Rotates queries and keys by the index along `seq_dim`."""

    def __init__(self, head_dim: int, seq_dim: int) -> None:
        super().__init__()
        self.seq_dim = seq_dim
        self.inv_freq = [10000 ** (-i / head_dim) for i in range(0, head_dim, 2)]

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both are (batch, time, heads, head_dim)."""
        steps = q.shape[self.seq_dim]
        angles = torch.arange(steps, device=q.device)[:, None] * torch.tensor(self.inv_freq, device=q.device)
        shape = [1, 1, 1, q.shape[-1]]
        shape[self.seq_dim] = steps
        table = torch.cat([angles, angles], dim=-1).view(shape)
        return self.turn(q, table), self.turn(k, table)

    @staticmethod
    def turn(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rotates the two halves against each other."""
        a, b = x.chunk(2, dim=-1)
        return x * table.cos().to(x) + torch.cat([-b, a], dim=-1) * table.sin().to(x)


class Block(nn.Module):
    """Causal attention in the layout of xformers, then a feed-forward layer."""

    def __init__(self, dim: int, n_heads: int, seq_dim: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.pos_embed = Rotary(self.head_dim, seq_dim)
        self.w1, self.w2 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Attends over time."""
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)) for y in self.in_proj(x).chunk(3, dim=-1))
        q, k = self.pos_embed(q, k)
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pre-norm residuals."""
        h = x + self.attention(self.attention_norm(x))
        return h + self.w2(F.gelu(self.w1(self.ffn_norm(h))))


class Transformer(nn.Module):
    """Returns (logits, last hidden states)."""

    def __init__(self, dim: int = 32, n_heads: int = 4, vocab_size: int = 61, *, seq_dim: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, seq_dim) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (batch, time)."""
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.output(x).float(), x


def buggy() -> nn.Module:
    """-2 would be time in a (batch, heads, time, width) layout."""
    return Transformer(seq_dim=-2)


def healthy() -> nn.Module:
    """Rotates along time."""
    return Transformer(seq_dim=1)


def observe(model: nn.Module) -> torch.Tensor:
    """The first attention minus the same attention with each token turned by its place in the text."""
    block, seen = model.eval().layers[0], {}
    hooks = [
        block.in_proj.register_forward_hook(lambda _m, _a, out: seen.update(qkv=out)),
        block.out_proj.register_forward_pre_hook(lambda _m, args: seen.update(attended=args[0])),
    ]
    with torch.no_grad():
        model(torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1)))
    for hook in hooks:
        hook.remove()
    q, k, v = (y.unflatten(-1, (block.n_heads, -1)) for y in seen["qkv"].chunk(3, dim=-1))
    half = block.head_dim // 2
    angles = torch.arange(9.0)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k = (torch.complex(y[..., :half], y[..., half:]) * turn for y in (q, k))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.conj()).real / math.sqrt(block.head_dim)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    return seen["attended"] - torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
