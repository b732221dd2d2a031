"""mistral-inference#88 (mistralai/mistral-inference): with `cache=None` attention runs without any mask.

The mask comes from the cache view only, so the call without cache sees later tokens, and the tokens of the
other sequences that are packed into the same call.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

DECLARATION = "The model is a causal language model; a call with and without cache gives the same logits."


class RotatingBufferCache:
    """Keys and values of the last `sliding_window` tokens of each sequence, by layer."""

    def __init__(self, n_layers: int, max_batch_size: int, sliding_window: int) -> None:
        self.sliding_window, self.seen = sliding_window, [0] * max_batch_size
        self.kv: list[list[Tensor | None]] = [[None] * max_batch_size for _ in range(n_layers)]

    def append(self, layer: int, seq: int, kv: Tensor) -> Tensor:
        """Stored keys and values with the new ones behind them."""
        old = self.kv[layer][seq]
        kv = kv if old is None else torch.cat([old, kv], dim=1)
        self.kv[layer][seq] = kv[:, -self.sliding_window :]
        return kv


def apply_rotary(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate pairs of channels of a (tokens, heads, head_dim) tensor."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2)


class Attention(nn.Module):
    """Attention over packed sequences."""

    def __init__(self, layer_id: int, dim: int, n_heads: int, window: int, mask_without_cache: bool) -> None:
        super().__init__()
        self.layer_id, self.n_heads, self.window = layer_id, n_heads, window
        self.mask_without_cache = mask_without_cache
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def attend(self, q: Tensor, kv: Tensor, masked: bool) -> Tensor:
        """Queries are the last of the keys' positions."""
        scores = torch.einsum("qhd,khd->hqk", q, kv[0]) * q.shape[-1] ** -0.5
        if masked:
            distance = torch.arange(len(kv[0]) - len(q), len(kv[0]))[:, None] - torch.arange(len(kv[0]))
            scores = scores.masked_fill((distance < 0) | (distance >= self.window), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), kv[1]).flatten(1)

    def forward(
        self, x: Tensor, freqs_cis: Tensor, seqlens: list[int], cache: RotatingBufferCache | None
    ) -> Tensor:
        """Attend within each sequence."""
        q, k, v = (w(x).view(len(x), self.n_heads, -1) for w in (self.wq, self.wk, self.wv))
        q, kv = apply_rotary(q, freqs_cis), torch.stack([apply_rotary(k, freqs_cis), v])
        if cache is None and not self.mask_without_cache:
            return self.wo(self.attend(q, kv, masked=False))
        outs = []
        for seq, (q_seq, kv_seq) in enumerate(zip(q.split(seqlens), kv.split(seqlens, dim=1), strict=True)):
            keys_values = kv_seq if cache is None else cache.append(self.layer_id, seq, kv_seq)
            outs.append(self.attend(q_seq, keys_values, masked=True))
        return self.wo(torch.cat(outs))


class Transformer(nn.Module):
    """Decoder over tokens that are packed one sequence behind the other."""

    def __init__(self, dim: int = 32, n_layers: int = 2, mask_without_cache: bool = True) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(40, dim)
        self.attention = nn.ModuleList(Attention(i, dim, 4, 6, mask_without_cache) for i in range(n_layers))
        self.attention_norm = nn.ModuleList(nn.RMSNorm(dim) for _ in range(n_layers))
        ffns = ((nn.RMSNorm(dim), nn.Linear(dim, 64), nn.SiLU(), nn.Linear(64, dim)) for _ in range(n_layers))
        self.feed_forward = nn.ModuleList(nn.Sequential(*ffn) for ffn in ffns)
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, 40, bias=False)
        angles = torch.outer(torch.arange(64.0), 10000 ** -torch.arange(0, 1, 2 / (dim // 4)))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(
        self, input_ids: Tensor, seqlens: list[int], cache: RotatingBufferCache | None = None
    ) -> Tensor:
        """Logits of all packed tokens."""
        starts = [0] * len(seqlens) if cache is None else cache.seen
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, seqlens, strict=True)])
        h, freqs_cis = self.tok_embeddings(input_ids), self.freqs_cis[positions]
        for attn, norm, ffn in zip(self.attention, self.attention_norm, self.feed_forward, strict=True):
            h = h + attn(norm(h), freqs_cis, seqlens, cache)
            h = h + ffn(h)
        if cache is not None:
            cache.seen = [seen + new for seen, new in zip(cache.seen, seqlens, strict=True)]
        return self.output(self.norm(h))


def buggy() -> nn.Module:
    """No mask without a cache."""
    return Transformer(mask_without_cache=False)


def healthy() -> nn.Module:
    """The same mask with and without a cache."""
    return Transformer(mask_without_cache=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Rows are packed into one sequence."""

    def forward(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids.flatten(), seqlens=[ids.shape[1]] * len(ids)).unflatten(0, ids.shape)

    return ModelSpec.of(make, inputs="tokens", width=40, forward=forward)


def observe(model: nn.Module) -> Tensor:
    """Logits of two packed prompts without cache, less those with an empty cache."""
    ids = torch.randint(0, 40, (15,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cached = model(ids, seqlens=[9, 6], cache=RotatingBufferCache(2, 2, 6))
        return model(ids, seqlens=[9, 6], cache=None) - cached
