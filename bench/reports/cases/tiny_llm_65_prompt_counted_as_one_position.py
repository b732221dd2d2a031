"""tiny-llm#65 (skyzh/tiny-llm): after the prefill, the position advances by 1 instead of the prompt's length.

The positions start at the length of the prompt, since #46, and the size of the new token is added even after
the prefill. Generated tokens get positions among those of the prompt, so generation with the cache is wrong.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 4, 2, 8


class KvFullCache:
    """Keys and values of one layer."""

    def __init__(self) -> None:
        self.key_values: tuple[Tensor, Tensor] | None = None
        self.offset = 0

    def update_and_fetch(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, heads, L, HEAD_DIM) and return everything."""
        if self.key_values is not None:
            key = torch.cat((self.key_values[0], key), dim=2)
            value = torch.cat((self.key_values[1], value), dim=2)
        self.key_values, self.offset = (key, value), key.shape[2]
        return key, value


Cache = list[KvFullCache]


def rope(x: Tensor, offset: int, base: float = 1_000_000.0) -> Tensor:
    """Rotate the halves of (B, heads, L, HEAD_DIM), whose first position is `offset`."""
    half = x.shape[-1] // 2
    inner = torch.arange(half, dtype=x.dtype, device=x.device) / half
    angles = torch.arange(offset, offset + x.shape[2], device=x.device)[:, None] * base**-inner
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


class MultiHeadAttention(nn.Module):
    """Grouped-query attention of Qwen2."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(DIM, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.wk, self.wv = nn.Linear(DIM, KV_HEADS * HEAD_DIM), nn.Linear(DIM, KV_HEADS * HEAD_DIM)
        for projection in (self.wq, self.wk):  # attention that is as selective as that of a trained model
            nn.init.normal_(projection.weight, std=0.3)

    def forward(self, x: Tensor, offset: int, cache: KvFullCache) -> Tensor:
        """`x` is (B, L, DIM), whose first position is `offset`."""
        projections = self.wq, self.wk, self.wv
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in projections)
        k, v = cache.update_and_fetch(rope(k, offset), v)
        causal = x.new_ones(x.shape[1], k.shape[2], dtype=torch.bool).tril(k.shape[2] - x.shape[1])
        out = F.scaled_dot_product_attention(rope(q, offset), k, v, causal, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = MultiHeadAttention()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)
        self.w_gate, self.w_up = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.w_down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, offset: int, cache: KvFullCache) -> Tensor:
        """`x` is (B, L, DIM)."""
        x = x + self.self_attn(self.input_layernorm(x), offset, cache)
        h = self.post_attention_layernorm(x)
        return x + self.w_down(F.silu(self.w_gate(h)) * self.w_up(h))


class Qwen2Model(nn.Module):
    """Language model. The caller counts the positions."""

    def __init__(self, *, counts_prompt: bool, num_hidden_layers: int = 2) -> None:
        super().__init__()
        self.counts_prompt, self.num_hidden_layers = counts_prompt, num_hidden_layers
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(num_hidden_layers))
        self.norm, self.lm_head = nn.RMSNorm(DIM, 1e-6), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, inputs: Tensor, offset: int, cache: Cache) -> Tensor:
        """Return logits of the new tokens (B, L), and add them to the cache."""
        x = self.embedding(inputs)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, offset, layer_cache)
        return self.lm_head(self.norm(x))


def make_cache(model: nn.Module) -> Cache:
    """Return an empty cache."""
    return [KvFullCache() for _ in range(model.num_hidden_layers)]


@torch.no_grad()
def simple_generate_with_kv_cache(model: nn.Module, prompt: Tensor, max_new_tokens: int) -> Tensor:
    """Return the likeliest continuation of a prompt (T,)."""
    cache, tokens, generated = make_cache(model), prompt, []
    offset = 0 if model.counts_prompt else len(prompt)
    for _ in range(max_new_tokens):
        token = model(tokens[None], offset, cache)[0, -1:].argmax(dim=-1)
        generated.append(token)
        offset += len(tokens) if model.counts_prompt else len(token)
        tokens = token
    return torch.cat(generated)


def buggy() -> nn.Module:
    """Generation adds 1 after the prefill."""
    return Qwen2Model(counts_prompt=False)


def healthy() -> nn.Module:
    """Generation adds the length of the prompt."""
    return Qwen2Model(counts_prompt=True)


def _decode(model: nn.Module, tokens: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
    cache = make_cache(model) if cache is None else cache
    return model(tokens, cache[0].offset, cache), cache


def _generate(model: nn.Module, prompts: list[Tensor], *, max_new_tokens: int) -> list[Tensor]:
    return [simple_generate_with_kv_cache(model, prompt, max_new_tokens) for prompt in prompts]


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model, its cache, and its generation."""
    return ModelSpec.of(
        make,
        width=VOCAB,
        causal=True,
        forward=lambda model, tokens: model(tokens, 0, make_cache(model)),
        decode=_decode,
        generate=_generate,
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Share of generated tokens that differ from those of generation without the cache."""
    model = model.double().eval()
    prompts = torch.randint(VOCAB, (8, 12), generator=torch.Generator().manual_seed(1))
    right = prompts
    for _ in range(10):
        last = model(right, 0, make_cache(model))[:, -1]
        right = torch.cat((right, last.argmax(dim=-1, keepdim=True)), dim=1)
    got = torch.stack(_generate(model, list(prompts), max_new_tokens=10))
    return (got != right[:, 12:]).double().mean()
