"""x-transformers#10 (lucidrains/x-transformers): causal and bidirectional buckets of positions are swapped.

An encoder puts all later positions into one bucket, that of distance 0, so it does not know their distance. A
decoder uses half of its buckets.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec


class RelativePositionBias(nn.Module):
    """Learned bias of each range of distances, in the way of T5."""

    def __init__(
        self, *, swapped: bool, causal: bool, num_buckets: int = 32, max_distance: int = 128, heads: int = 4
    ) -> None:
        super().__init__()
        self.swapped, self.causal = swapped, causal
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, heads)

    def _relative_position_bucket(self, relative_position: torch.Tensor) -> torch.Tensor:
        """Return the bucket of each distance from query to key."""
        n, num_buckets = -relative_position, self.num_buckets
        ret = torch.zeros_like(n)
        if self.causal == self.swapped:
            num_buckets //= 2
            ret = (n < 0).long() * num_buckets
            n = n.abs()
        else:
            n = n.clamp(min=0)
        max_exact = num_buckets // 2
        ratio = (n.float().clamp(min=1) / max_exact).log() / math.log(self.max_distance / max_exact)
        val_if_large = (max_exact + (ratio * (num_buckets - max_exact)).long()).clamp(max=num_buckets - 1)
        return ret + torch.where(n < max_exact, n, val_if_large)

    def forward(self, qk_dots: torch.Tensor) -> torch.Tensor:
        """Add the bias to scores (batch, heads, queries, keys)."""
        q_pos, k_pos = (torch.arange(n, device=qk_dots.device) for n in qk_dots.shape[-2:])
        bucket = self._relative_position_bucket(k_pos - q_pos[:, None])
        return qk_dots + self.relative_attention_bias(bucket).permute(2, 0, 1)


class Attention(nn.Module):
    """Attention with relative positions."""

    def __init__(self, dim: int, heads: int, *, swapped: bool) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = nn.Linear(dim, dim)
        self.rel_pos = RelativePositionBias(swapped=swapped, causal=False, heads=heads)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """`mask` is True at tokens, (batch, time)."""
        q, k, v = (
            to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v)
        )
        dots = self.rel_pos(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
        if mask is not None:
            dots = dots.masked_fill(~mask[:, None, None], -torch.finfo(dots.dtype).max)
        return self.to_out((dots.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Pre-norm layers."""

    def __init__(self, dim: int, depth: int, heads: int, *, swapped: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(depth):
            ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            attn = Attention(dim, heads, swapped=swapped)
            self.layers.append(nn.ModuleList([nn.LayerNorm(dim), attn, nn.LayerNorm(dim), ff]))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layers to (batch, time, dim)."""
        for norm, attn, ff_norm, ff in self.layers:
            x = x + attn(norm(x), mask)
            x = x + ff(ff_norm(x))
        return x


class TransformerWrapper(nn.Module):
    """Tokens to logits."""

    def __init__(self, *, num_tokens: int, max_seq_len: int, attn_layers: Encoder, dim: int) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.attn_layers, self.norm = attn_layers, nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, num_tokens)
        nn.init.normal_(self.token_emb.weight, std=0.02)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits; `mask` is True at tokens."""
        return self.to_logits(self.norm(self.attn_layers(self.token_emb(x), mask)))


def _model(*, swapped: bool) -> nn.Module:
    layers = Encoder(32, depth=2, heads=4, swapped=swapped)
    return TransformerWrapper(num_tokens=96, max_seq_len=128, attn_layers=layers, dim=32)


def buggy() -> nn.Module:
    """Causal buckets in an encoder."""
    return _model(swapped=True)


def healthy() -> nn.Module:
    """Bidirectional buckets in an encoder."""
    return _model(swapped=False)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State an encoder with 32 buckets up to a distance of 128."""
    return ModelSpec.of(
        make,
        causal=False,
        max_length=128,
        loss=lambda model, ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        masked=lambda model, ids, keep: model(ids, mask=keep),
        padding_sides=("left", "right"),
        facts=Facts(relative_buckets=(32, 128)),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the buckets of keys up to 20 positions before and after, minus those of the formula."""
    expected = []
    for distance in range(-20, 21):
        n = abs(distance)
        far = min(15, 8 + int(math.log(max(n, 1) / 8) / math.log(128 / 8) * 8))
        expected.append((n if n < 8 else far) + 16 * (distance > 0))
    rel_pos = model.attn_layers.layers[0][1].rel_pos
    return rel_pos._relative_position_bucket(torch.arange(-20, 21)) - torch.tensor(expected)
