"""transformers#41184 (huggingface/transformers): the window of continuous batching is on the wrong side.

The mask of packed requests keeps the causal mask only within a window after each query. So a query reads all
tokens before its window, and those further ahead. https://github.com/huggingface/transformers/issues/41184
"""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

WINDOW, DIM, HEADS = 4, 32, 4


def build_attention_mask(starts_q: Tensor, starts_k: Tensor, *, future_only: bool) -> Tensor:
    """Return the visible keys (1, 1, queries, keys) of requests, which start at `starts_q` and `starts_k`."""
    visible = torch.zeros(int(starts_q[-1]), int(starts_k[-1]), dtype=torch.bool)
    ends = zip(starts_q.tolist(), starts_k.tolist(), strict=True)
    for (first_q, first_k), (end_q, end_k) in pairwise(ends):
        ones = torch.ones(end_q - first_q, end_k - first_k, dtype=torch.bool)
        diagonal = ones.shape[1] - ones.shape[0]
        masked = ones.triu(diagonal + 1)
        masked = masked.tril(diagonal + WINDOW) if future_only else masked | ones.tril(diagonal - WINDOW)
        visible[first_q:end_q, first_k:end_k] = ~masked
    return visible[None, None]


class PagedAttentionCache:
    """Keys and values of each request, for each layer, and where the requests start in a packed row."""

    def __init__(self, requests: int, layers: int) -> None:
        self.states: list[list[Tensor]] = [[] for _ in range(layers)]
        self.starts_q = self.starts_k = torch.zeros(requests + 1, dtype=torch.long)

    def schedule(self, lengths: list[int]) -> Tensor:
        """Return the positions (1, queries) of the next tokens, `lengths` of them for each request."""
        self.starts_q = torch.tensor([0, *lengths]).cumsum(0)
        self.starts_k = self.starts_k + self.starts_q
        totals = self.starts_k.diff().tolist()
        return torch.cat([torch.arange(n)[n - new :] for n, new in zip(totals, lengths, strict=True)])[None]

    def update(self, states: Tensor, layer_idx: int) -> Tensor:
        """Append `states` (2, 1, heads, queries, dim) of packed requests, and return those of all tokens."""
        kept = self.states[layer_idx]
        for i, new in enumerate(states.split(self.starts_q.diff().tolist(), dim=3)):
            kept[i : i + 1] = [torch.cat([*kept[i : i + 1], new], dim=3)]
        return torch.cat(kept, dim=3)


def apply_rotary(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotate `x` (batch, heads, time, dim) by its positions (batch, time)."""
    half = x.shape[-1] // 2
    inv_freq = 1e4 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = position_ids[:, None, :, None].double() * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MistralLayer(nn.Module):
    """Attention with a window, then an MLP."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    def forward(
        self, x: Tensor, mask: Tensor, position_ids: Tensor, cache: PagedAttentionCache | None
    ) -> Tensor:
        """One layer; `mask` is True for visible keys."""
        normed = self.input_layernorm(x)
        q, k, v = (
            proj(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary(q, position_ids), apply_rotary(k, position_ids)
        if cache is not None:
            k, v = cache.update(torch.stack([k, v]), self.layer_idx)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class MistralForCausalLM(nn.Module):
    """Causal language model, with batched generation of requests in one packed row."""

    def __init__(self, *, future_only: bool, vocab_size: int = 64) -> None:
        super().__init__()
        self.future_only = future_only
        self.embed_tokens = nn.Embedding(vocab_size, DIM)
        self.layers = nn.ModuleList(MistralLayer(i) for i in range(2))
        self.norm, self.lm_head = nn.RMSNorm(DIM), nn.Linear(DIM, vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: PagedAttentionCache | None = None,
    ) -> SimpleNamespace:
        """Logits of rows, or of one row of requests, which are scheduled in `cache`."""
        x = self.embed_tokens(input_ids)
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        if position_ids is None:
            position_ids = index[None]
        if cache is not None:
            mask = build_attention_mask(cache.starts_q, cache.starts_k, future_only=self.future_only)
            mask = mask.to(x.device)
        else:
            distance = index[:, None] - index
            mask = ((distance >= 0) & (distance < WINDOW))[None, None]
            if attention_mask is not None:
                mask = mask & attention_mask[:, None, None].bool() | (distance == 0)
        for layer in self.layers:
            x = layer(x, mask, position_ids, cache)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))

    @torch.no_grad()
    def generate_batch(self, inputs: list[Tensor], max_new_tokens: int) -> list[list[int]]:
        """Return the greedy continuation of each prompt."""
        device = self.lm_head.weight.device
        cache, outputs = (
            PagedAttentionCache(len(inputs), len(self.layers)),
            [list(map(int, x)) for x in inputs],
        )
        new = outputs
        for _ in range(max_new_tokens):
            position_ids = cache.schedule([len(each) for each in new]).to(device)
            row = torch.cat([torch.tensor(each) for each in new])[None].to(device)
            logits = self(row, None, position_ids, cache).logits[0, cache.starts_q[1:] - 1]
            new = [[token] for token in logits.argmax(dim=-1).tolist()]
            outputs = [old + each for old, each in zip(outputs, new, strict=True)]
        return [output[len(prompt) :] for output, prompt in zip(outputs, inputs, strict=True)]


def buggy() -> nn.Module:
    """The window limits the causal mask."""
    return MistralForCausalLM(future_only=True)


def healthy() -> nn.Module:
    """The window masks what is before it."""
    return MistralForCausalLM(future_only=False)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The model is causal with a window, and generates for several prompts at once."""
    return ModelSpec.of(make, causal=True, window=WINDOW, generate=MistralForCausalLM.generate_batch)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits of two packed requests minus those of each one alone."""
    model = model.double().eval()
    ids = torch.randint(64, (1, 19), generator=torch.Generator().manual_seed(1))
    cache, parts = PagedAttentionCache(2, len(model.layers)), ids.split([8, 11], dim=1)
    packed = model(ids, position_ids=cache.schedule([8, 11]), cache=cache).logits
    return packed - torch.cat([model(part).logits for part in parts], dim=1)
