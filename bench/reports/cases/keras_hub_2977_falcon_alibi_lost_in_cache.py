"""keras-hub#2977 (keras-team/keras-hub): Falcon decodes with a cache as if it had no ALiBi.

The bias is built over the new tokens instead of all keys: for one token it is zero and broadcasts silently.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn

Cache = list[tuple[torch.Tensor, torch.Tensor]]


class FalconTransformerDecoder(nn.Module):
    """Attention with ALiBi and shared keys/values, then the MLP."""

    def __init__(self, hidden_dim: int, num_heads: int, num_kv_heads: int, over_all_keys: bool) -> None:
        super().__init__()
        self.num_heads, self.key_dim, self.over_all_keys = num_heads, hidden_dim // num_heads, over_all_keys
        self.query_dense = nn.Linear(hidden_dim, hidden_dim)
        self.key_dense = nn.Linear(hidden_dim, num_kv_heads * self.key_dim)
        self.value_dense = nn.Linear(hidden_dim, num_kv_heads * self.key_dim)
        self.output_dense = nn.Linear(hidden_dim, hidden_dim)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.LayerNorm(hidden_dim),
            nn.LayerNorm(hidden_dim),
        )
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(hidden_dim, 64), nn.Linear(64, hidden_dim)

    def build_alibi(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Slope times position of every key: [batch, heads, 1, keys]."""
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.num_heads + 1).to(dtype) / self.num_heads)
        positions = ((mask.cumsum(-1) - 1) * mask).to(dtype)
        return slopes[None, :, None, None] * positions[:, None, None, :]

    def forward(
        self, x: torch.Tensor, padding_mask: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """`padding_mask` covers the cached and the new tokens."""
        h, new = self.input_layernorm(x), x.shape[1]
        q, k, v = (
            dense(h).unflatten(-1, (-1, self.key_dim)).transpose(1, 2)
            for dense in (self.query_dense, self.key_dense, self.value_dense)
        )
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        groups = self.num_heads // k.shape[1]
        scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) / math.sqrt(self.key_dim)
        window = padding_mask if self.over_all_keys else padding_mask[:, -new:]
        scores = scores + self.build_alibi(window, x.dtype)
        allowed = torch.ones(new, k.shape[2], dtype=torch.bool).tril(k.shape[2] - new)
        allowed = allowed & padding_mask.bool()[:, None, None, :]
        weights = scores.masked_fill(~allowed, torch.finfo(x.dtype).min).softmax(-1)
        x = x + self.output_dense((weights @ v.repeat_interleave(groups, 1)).transpose(1, 2).flatten(2))
        mlp = torch.nn.functional.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)))
        return x + self.dense_4h_to_h(mlp), (k, v)


class FalconCausalLM(nn.Module):
    """Falcon with an optional cache of keys and values."""

    def __init__(self, over_all_keys: bool, vocabulary_size: int = 64, hidden_dim: int = 32) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary_size, hidden_dim)
        self.transformer_layers = nn.ModuleList(
            FalconTransformerDecoder(hidden_dim, 4, 2, over_all_keys) for _ in range(2)
        )
        self.final_layernorm = nn.LayerNorm(hidden_dim)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """Return logits and, with use_cache, the cache."""
        past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        if attention_mask is None:
            attention_mask = input_ids.new_ones(input_ids.shape[0], past + input_ids.shape[1])
        x, caches = self.token_embedding(input_ids), []
        for i, layer in enumerate(self.transformer_layers):
            x, cache = layer(
                x, attention_mask.long(), None if past_key_values is None else past_key_values[i]
            )
            caches.append(cache)
        logits = self.final_layernorm(x) @ self.token_embedding.weight.T
        return SimpleNamespace(logits=logits, past_key_values=caches if use_cache else None)


def buggy() -> nn.Module:
    """Bias over the new tokens."""
    return FalconCausalLM(over_all_keys=False)


def healthy() -> nn.Module:
    """Bias over all keys."""
    return FalconCausalLM(over_all_keys=True)


def observe(model: nn.Module) -> torch.Tensor:
    """Logits decoded token by token after a prompt of 5 minus those of one full pass; 0 is right."""
    model, ids, steps = model.double().eval(), torch.arange(12)[None] * 5 % 64, []
    with torch.no_grad():
        out = model(ids[:, :5], use_cache=True)
        for t in range(5, 12):
            out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits)
        return torch.cat(steps, dim=1) - model(ids).logits[:, 5:]
