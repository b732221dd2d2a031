"""mlx-lm#388 (ml-explore/mlx-lm): with a small top_k, the top_p filter can remove every token.

The filter of top_p assumes that probabilities sum to 1, but the one of top_k has already removed some. If the
rest has a total below 1 - top_p, no token is left, and the sampler returns an arbitrary one. The fix applies
top_k last.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

KVCache = list[tuple[torch.Tensor, torch.Tensor]]


def apply_top_k(logprobs: torch.Tensor, top_k: int) -> torch.Tensor:
    """Keep the most likely tokens."""
    keep = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1).indices
    return torch.full_like(logprobs, -torch.inf).scatter(-1, keep, logprobs.gather(-1, keep))


def apply_top_p(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the most likely tokens up to a total probability of `top_p`."""
    sorted_probs, order = logprobs.exp().sort(dim=-1)
    cumulative = torch.empty_like(sorted_probs).scatter(-1, order, sorted_probs.cumsum(dim=-1))
    return logprobs.masked_fill(cumulative <= 1 - top_p, -torch.inf)


def make_sampler(
    temp: float, top_p: float, top_k: int, *, top_k_last: bool
) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor]:
    """Return a function from logits (rows, vocabulary) to tokens (rows,)."""

    def sample(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if temp == 0:
            return logits.argmax(dim=-1)
        logprobs = (logits / temp).log_softmax(dim=-1)
        if top_k > 0 and not top_k_last:
            logprobs = apply_top_k(logprobs, top_k)
        if 0 < top_p < 1:
            logprobs = apply_top_p(logprobs, top_p)
        if top_k > 0 and top_k_last:
            logprobs = apply_top_k(logprobs, top_k)
        uniform = torch.rand(logprobs.shape, generator=generator, dtype=torch.float64)
        return (logprobs.double() - (-uniform.log()).log()).argmax(dim=-1)

    return sample


class Block(nn.Module):
    """Causal attention with a cache, and feed-forward network."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.o_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the output and all keys and values so far."""
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.tril(k.shape[2] - q.shape[2]))
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x)), (k, v)


class Model(nn.Module):
    """Language model with learned positions."""

    def __init__(self, *, top_k_last: bool, vocab_size: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.top_k_last = top_k_last
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, inputs: torch.Tensor, cache: KVCache | None = None) -> tuple[torch.Tensor, KVCache]:
        """Return logits of the new tokens, and the cache."""
        start = cache[0][0].shape[2] if cache else 0
        x = self.embed_tokens(inputs) + self.embed_positions.weight[start : start + inputs.shape[1]]
        new_cache = []
        for i, layer in enumerate(self.layers):
            x, last = layer(x, cache[i] if cache else None)
            new_cache.append(last)
        return self.lm_head(self.norm(x)), new_cache


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: list[torch.Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return new tokens of each prompt."""
    sampler = make_sampler(temperature, top_p, top_k or 0, top_k_last=model.top_k_last)
    generator, rows = torch.Generator().manual_seed(seed), []
    for prompt in prompts:
        new, tokens, cache = prompt[None], [], None
        for _ in range(max_new_tokens):
            logits, cache = model(new, cache)
            new = sampler(logits[:, -1].cpu(), generator).to(prompt.device)[:, None]
            tokens.append(new[0, 0])
        rows.append(torch.stack(tokens))
    return rows


def buggy() -> nn.Module:
    """Filter by top_k, then by top_p."""
    return Model(top_k_last=False)


def healthy() -> nn.Module:
    """Filter by top_p, then by top_k."""
    return Model(top_k_last=True)


def _decode(model: nn.Module, ids: torch.Tensor, cache: KVCache | None) -> tuple[torch.Tensor, KVCache]:
    return model(ids, cache)


def buggy_declared() -> ModelSpec:
    """State a causal model with cache and sampling."""
    return ModelSpec.of(buggy, causal=True, max_length=64, decode=_decode, generate=generate)


def healthy_declared() -> ModelSpec:
    """State a causal model with cache and sampling."""
    return ModelSpec.of(healthy, causal=True, max_length=64, decode=_decode, generate=generate)


def observe(model: nn.Module) -> torch.Tensor:
    """Return tokens sampled with top_k = 1 and top_p = 0.8 minus the most likely ones."""
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([1, 2])]
    sampled = generate(model, prompts, max_new_tokens=5, temperature=1.0, top_k=1, top_p=0.8)
    greedy = generate(model, prompts, max_new_tokens=5)
    return torch.stack(sampled) - torch.stack(greedy)
