"""TrenTorch#192 (TrenTorch/TrenTorch): the key and value of the first token are never written to the cache.

While the cache is empty, the attention takes the path without a cache and only the position advances. Slot 0
stays zero, and each later token attends to it as if it were the first token.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB_SIZE, MAX_SEQ_LEN = 60, 64


class KVCache:
    """Preallocated keys and values of all layers, and the number of tokens that they hold."""

    def __init__(self, like: Tensor, num_layers: int, batch: int, num_heads: int, head_dim: int) -> None:
        shape = num_layers, batch, num_heads, MAX_SEQ_LEN, head_dim
        self.keys, self.values, self.seq_pos = like.new_zeros(shape), like.new_zeros(shape), 0

    def update(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write one token at the current position."""
        self.keys[layer, :, :, self.seq_pos] = key[:, :, 0]
        self.values[layer, :, :, self.seq_pos] = value[:, :, 0]

    def get(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values up to the current position, which was just written."""
        return self.keys[layer, :, :, : self.seq_pos + 1], self.values[layer, :, :, : self.seq_pos + 1]

    def advance(self) -> None:
        """Go to the next position. Called once all layers have seen the token."""
        self.seq_pos += 1


class MultiHeadAttention(nn.Module):
    """Causal attention, on a whole sequence or on one token with a cache."""

    def __init__(self, embed_dim: int, num_heads: int, layer: int, *, writes_first: bool) -> None:
        super().__init__()
        self.num_heads, self.layer, self.writes_first = num_heads, layer, writes_first
        linears = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = linears

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        past = torch.ones_like(scores, dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        weights = scores.masked_fill(~past, float("-inf")).softmax(dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """`x` is (batch, time, embed_dim), of one token if there is a cache."""
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in projections)
        if cache is None:
            return self._attend(q, k, v)
        if cache.seq_pos == 0:  # nothing to read yet
            if self.writes_first:
                cache.update(self.layer, k, v)
            return self._attend(q, k, v)
        cache.update(self.layer, k, v)
        return self._attend(q, *cache.get(self.layer))


class TransformerBlock(nn.Module):
    """Attention and feed-forward network with norms before them."""

    def __init__(self, embed_dim: int, num_heads: int, layer: int, *, writes_first: bool) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(embed_dim, num_heads, layer, writes_first=writes_first)
        self.ln1, self.ln2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        wide = 4 * embed_dim
        self.mlp = nn.Sequential(nn.Linear(embed_dim, wide), nn.GELU(), nn.Linear(wide, embed_dim))

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """`x` is (batch, time, embed_dim)."""
        x = x + self.attention(self.ln1(x), cache)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Language model with learned positions."""

    def __init__(self, *, writes_first: bool, embed_dim: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.token_embedding = nn.Embedding(VOCAB_SIZE, embed_dim)
        self.position_embedding = nn.Embedding(MAX_SEQ_LEN, embed_dim)
        self.blocks = nn.ModuleList(
            TransformerBlock(embed_dim, heads, i, writes_first=writes_first) for i in range(layers)
        )
        self.ln_f, self.lm_head = nn.LayerNorm(embed_dim), nn.Linear(embed_dim, VOCAB_SIZE, bias=False)

    def enable_kv_cache(self, batch: int) -> KVCache:
        """Return an empty cache for `batch` rows."""
        weight = self.token_embedding.weight
        return KVCache(weight, len(self.blocks), batch, self.num_heads, weight.shape[1] // self.num_heads)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits of a sequence, or of its next token if there is a cache."""
        start = cache.seq_pos if cache else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x, cache)
        return self.lm_head(self.ln_f(x))


@torch.no_grad()
def decode(model: nn.Module, tokens: Tensor, cache: KVCache | None) -> tuple[Tensor, KVCache]:
    """Feed the tokens one at a time, as the prefill and the generation do."""
    cache = cache or model.enable_kv_cache(len(tokens))
    logits = []
    for token in tokens.split(1, dim=1):
        logits.append(model(token, cache))
        cache.advance()
    return torch.cat(logits, dim=1), cache


def generate(model: nn.Module, prompts: list[Tensor], *, max_new_tokens: int) -> list[Tensor]:
    """Return the likeliest continuation of each prompt."""
    rows = []
    for prompt in prompts:
        tokens, cache, row = prompt[None], None, []
        for _ in range(max_new_tokens):
            logits, cache = decode(model, tokens, cache)
            tokens = logits[:, -1:].argmax(dim=-1)
            row.append(tokens[0, 0])
        rows.append(torch.stack(row))
    return rows


def buggy() -> nn.Module:
    """The first token is processed without the cache."""
    return GPT(writes_first=False)


def healthy() -> nn.Module:
    """The first token is written to the cache as well."""
    return GPT(writes_first=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A causal model with a cache and greedy generation."""
    return ModelSpec.of(
        make, width=VOCAB_SIZE, causal=True, max_length=MAX_SEQ_LEN, decode=decode, generate=generate
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits of decoding token by token, less those of one pass without a cache."""
    model = model.double().eval()
    tokens = torch.randint(VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
    return decode(model, tokens, None)[0] - model(tokens)
