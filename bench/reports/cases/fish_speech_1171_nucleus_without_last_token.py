"""fish-speech#1171 (fishaudio/fish-speech): top-p sampling removes the token that reaches the threshold.

The mask compares the sum that includes a token with `top_p`. The tokens that stay have a probability below
`top_p`, although they should be the smallest set that reaches it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

Cache = list[tuple[torch.Tensor, torch.Tensor]]


def logits_to_probs(
    logits: torch.Tensor, temperature: float, top_p: float, *, keep_last: bool
) -> torch.Tensor:
    """Return the probabilities (vocabulary,) after both filters."""
    sorted_logits, sorted_indices = logits.sort(descending=True)
    probs = sorted_logits.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - (probs if keep_last else 0)
    remove = before > top_p
    remove[0] = False
    logits = logits.masked_fill(torch.zeros_like(remove).scatter(0, sorted_indices, remove), -torch.inf)
    return (logits / temperature).softmax(dim=-1)


def apply_rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Rotate neighbours of (batch, time, heads, head_dim)."""
    real, imag = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = freqs_cis[:, None].to(x.dtype).unbind(-1)
    return torch.stack([real * cos - imag * sin, imag * cos + real * sin], dim=-1).flatten(3)


class TransformerBlock(nn.Module):
    """Attention with rotary positions, and a gated feed-forward network."""

    def __init__(self, dim: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)

    def forward(
        self, x: torch.Tensor, freqs_cis: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the output, and the keys and values of all positions."""
        q, k, v = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, self.n_head, -1)).unbind(2)
        q, k = apply_rotary_emb(q, freqs_cis), apply_rotary_emb(k, freqs_cis)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=x.device)
        mask = mask.tril(k.shape[1] - q.shape[1])
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask)
        h = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y)), (k, v)


class BaseTransformer(nn.Module):
    """Language model from text to semantic tokens."""

    def __init__(self, *, keep_last: bool, vocab_size: int = 96, dim: int = 32, n_head: int = 4) -> None:
        super().__init__()
        self.keep_last = keep_last
        self.embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, n_head) for _ in range(2))
        self.norm, self.output = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocab_size, bias=False)
        freqs = 10000.0 ** (-torch.arange(0, dim // n_head, 2) / (dim // n_head))
        angles = torch.outer(torch.arange(128), freqs)
        self.register_buffer("freqs_cis", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inp: torch.Tensor, cache: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        """Return logits of the new tokens, and the cache."""
        start = cache[0][0].shape[1] if cache else 0
        freqs_cis = self.freqs_cis[start : start + inp.shape[1]]
        x, new_cache = self.embeddings(inp), []
        for i, layer in enumerate(self.layers):
            x, last = layer(x, freqs_cis, cache[i] if cache else None)
            new_cache.append(last)
        return self.output(self.norm(x)), new_cache


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: list[torch.Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return the new tokens of each prompt."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for prompt in prompts:
        cur, tokens, cache = prompt[None], [], None
        for _ in range(max_new_tokens):
            logits, cache = model(cur, cache)
            last = logits[0, -1].cpu()
            if temperature == 0:
                token = last.argmax(keepdim=True)
            else:
                probs = logits_to_probs(last, temperature, top_p, keep_last=model.keep_last)
                token = torch.multinomial(probs, 1, generator=generator)
            cur = token.to(prompt.device)[None]
            tokens.append(cur[0, 0])
        rows.append(torch.stack(tokens))
    return rows


def buggy() -> nn.Module:
    """Remove the token that reaches the threshold."""
    return BaseTransformer(keep_last=False)


def healthy() -> nn.Module:
    """Keep the token that reaches the threshold."""
    return BaseTransformer(keep_last=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with cache and sampling."""
    return ModelSpec.of(
        make,
        causal=True,
        max_length=128,
        decode=lambda model, tokens, cache: model(tokens, cache),
        generate=generate,
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the probability that the kept tokens lack to `top_p`."""
    logits = 3 * torch.randn(96, generator=torch.Generator().manual_seed(1))
    lacks = []
    for top_p in (0.5, 0.8, 0.9):
        kept = logits_to_probs(logits, 1.0, top_p, keep_last=model.keep_last) > 0
        lacks.append((top_p - logits.softmax(dim=-1)[kept].sum()).clamp(min=0))
    return torch.stack(lacks)
