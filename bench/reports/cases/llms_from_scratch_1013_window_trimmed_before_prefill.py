"""LLMs-from-scratch#1013 (rasbt/LLMs-from-scratch): a prompt longer than the window loses its first keys.

With the cache, the keys are cut to the last `window` ones before the attention of the prompt. The first
tokens then find no key at all (NaN), and the later ones only a part of their window, so the logits differ
from those without the cache. https://github.com/rasbt/LLMs-from-scratch/pull/1013
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, WINDOW, CONTEXT = 50, 32, 4, 4, 64


class MultiHeadAttentionWithSWA(nn.Module):
    """Attention to the last WINDOW tokens, whose keys and values are kept in the module."""

    def __init__(self, *, trims_first: bool) -> None:
        super().__init__()
        self.trims_first = trims_first
        self.W_query, self.W_key, self.W_value = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(DIM, DIM)
        self.reset_cache()

    def reset_cache(self) -> None:
        """Forget the earlier tokens."""
        self.cache: tuple[Tensor, Tensor] | None = None
        self.ptr_current_pos = 0

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        """`x` is (batch, tokens, DIM), which follow the cached tokens."""
        projected = (self.W_query(x), self.W_key(x), self.W_value(x))
        queries, keys, values = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in projected)
        start, n = (self.ptr_current_pos if use_cache else 0), x.shape[1]
        if use_cache:
            if self.cache is not None:
                keys = torch.cat([self.cache[0], keys], dim=2)
                values = torch.cat([self.cache[1], values], dim=2)
            self.cache = keys[:, :, -WINDOW:], values[:, :, -WINDOW:]
            self.ptr_current_pos += n
            if self.trims_first:
                keys, values = self.cache
        q_positions = torch.arange(start, start + n, device=x.device)
        k_positions = torch.arange(start + n - keys.shape[2], start + n, device=x.device)
        diff = q_positions[:, None] - k_positions
        scores = (queries @ keys.transpose(2, 3)) * keys.shape[-1] ** -0.5
        weights = scores.masked_fill((diff < 0) | (diff >= WINDOW), -torch.inf).softmax(dim=-1)
        return self.out_proj((weights @ values).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, *, trims_first: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.att = MultiHeadAttentionWithSWA(trims_first=trims_first)
        self.ff = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        """`x` is (batch, tokens, DIM)."""
        x = x + self.att(self.norm1(x), use_cache=use_cache)
        return x + self.ff(self.norm2(x))


class GPTModel(nn.Module):
    """Language model with a sliding window in all layers."""

    def __init__(self, *, trims_first: bool, n_layers: int = 2) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
        self.trf_blocks = nn.ModuleList(TransformerBlock(trims_first=trims_first) for _ in range(n_layers))
        self.current_pos = 0
        self.final_norm, self.out_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, in_idx: Tensor, use_cache: bool = False) -> Tensor:
        """Return logits."""
        start = self.current_pos if use_cache else 0
        positions = torch.arange(start, start + in_idx.shape[1], device=in_idx.device)
        if use_cache:
            self.current_pos += in_idx.shape[1]
        x = self.tok_emb(in_idx) + self.pos_emb(positions)
        for blk in self.trf_blocks:
            x = blk(x, use_cache=use_cache)
        return self.out_head(self.final_norm(x))

    def reset_kv_cache(self) -> None:
        """Start a new text."""
        for blk in self.trf_blocks:
            blk.att.reset_cache()
        self.current_pos = 0


@torch.no_grad()
def generate_text_simple_cached(model: nn.Module, idx: Tensor, max_new_tokens: int) -> Tensor:
    """Return `idx` (batch, tokens) and the most likely tokens after it."""
    model.reset_kv_cache()
    logits = model(idx, use_cache=True)
    for i in range(max_new_tokens):
        next_idx = logits[:, -1].argmax(dim=-1, keepdim=True)
        idx = torch.cat([idx, next_idx], dim=1)
        if i + 1 < max_new_tokens:
            logits = model(next_idx, use_cache=True)
    model.reset_kv_cache()
    return idx


def buggy() -> nn.Module:
    """Cut the keys before the attention."""
    return GPTModel(trims_first=True)


def healthy() -> nn.Module:
    """Cut the keys for the cache only."""
    return GPTModel(trims_first=False)


def _generate(model: nn.Module, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    device = model.tok_emb.weight.device
    rows = (torch.tensor([prompt], device=device) for prompt in prompts)
    return [generate_text_simple_cached(model, i, max_new_tokens)[0, i.shape[1] :].tolist() for i in rows]


def _decode(model: nn.Module, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    model.reset_kv_cache()
    if cache is not None:
        model.current_pos = cache[0]
        for blk, kept in zip(model.trf_blocks, cache[1], strict=True):
            blk.att.cache, blk.att.ptr_current_pos = kept, cache[0]
    logits = model(ids, use_cache=True)
    cache = model.current_pos, [blk.att.cache for blk in model.trf_blocks]
    model.reset_kv_cache()
    return logits, cache


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with a window, its cache and its greedy generation."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VOCAB,
        causal=True,
        max_length=CONTEXT,
        window=WINDOW,
        tied=False,
        decode=_decode,
        generate=_generate,
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the last logits of a long prompt with the cache, minus those without."""
    ids = torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))
    model.reset_kv_cache()
    return model(ids, use_cache=True)[:, -1] - model(ids)[:, -1]
