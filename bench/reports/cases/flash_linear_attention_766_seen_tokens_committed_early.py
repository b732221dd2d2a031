"""flash-linear-attention#766 (fla-org/flash-linear-attention): the cache counts new tokens too early.

`update` adds the new tokens to `_seen_tokens` when layer 0 stores its keys. Upper layers then read an offset
for their rotary embedding that already contains the new tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec, RotaryClaim


class FLACache:
    """Keys and values of all layers, and the number of tokens so far."""

    def __init__(self, commit_layer: int) -> None:
        self.commit_layer = commit_layer
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen_tokens = 0

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Return the number of tokens before the current call."""
        return self._seen_tokens

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values (batch, heads, time, head_dim), and return all of the layer."""
        offset = k.shape[2]
        if len(self.states) <= layer_idx:
            self.states.append((k, v))
        else:
            past_k, past_v = self.states[layer_idx]
            self.states[layer_idx] = (torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2))
        if layer_idx == self.commit_layer:
            self._seen_tokens += offset
        return self.states[layer_idx]


@dataclass
class CausalLMOutputWithPast:
    """Logits and cache."""

    logits: torch.Tensor
    past_key_values: FLACache | None = None


def rotary(x: torch.Tensor, seqlen_offset: int) -> torch.Tensor:
    """Rotate (batch, heads, time, head_dim) by positions from `seqlen_offset` on."""
    half = x.shape[-1] // 2
    inv_freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    positions = torch.arange(seqlen_offset, seqlen_offset + x.shape[2], device=x.device, dtype=x.dtype)
    angles = positions[:, None] * inv_freq
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


class Attention(nn.Module):
    """Attention with rotary embedding, whose offset is the length of the cache."""

    def __init__(self, hidden_size: int, num_heads: int, layer_idx: int) -> None:
        super().__init__()
        self.num_heads, self.layer_idx = num_heads, layer_idx
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, hidden_states: torch.Tensor, past_key_values: FLACache | None) -> torch.Tensor:
        """Apply attention to (batch, time, hidden_size)."""
        q, k, v = (
            p(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        seqlen_offset = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        q, k = rotary(q, seqlen_offset), rotary(k, seqlen_offset)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        seen = seen.tril(k.shape[2] - q.shape[2])
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class TransformerForCausalLM(nn.Module):
    """Transformer language model of fla."""

    def __init__(self, *, commit_last: bool, vocab_size: int = 60, hidden_size: int = 32) -> None:
        super().__init__()
        self.commit_layer = 1 if commit_last else 0
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.attn = nn.ModuleList(Attention(hidden_size, 4, i) for i in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden_size, 64), nn.SiLU(), nn.Linear(64, hidden_size)) for _ in range(2)
        )
        self.attn_norm = nn.ModuleList(nn.RMSNorm(hidden_size) for _ in range(2))
        self.mlp_norm = nn.ModuleList(nn.RMSNorm(hidden_size) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values: FLACache | None = None,
        use_cache: bool = False,
        **_kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits of the new tokens; the cache is updated."""
        if use_cache and past_key_values is None:
            past_key_values = FLACache(self.commit_layer)
        x = self.embeddings(input_ids)
        for i in range(2):
            x = x + self.attn[i](self.attn_norm[i](x), past_key_values)
            x = x + self.mlp[i](self.mlp_norm[i](x))
        return CausalLMOutputWithPast(self.lm_head(self.norm(x)), past_key_values)


def buggy() -> nn.Module:
    """Count new tokens in layer 0."""
    return TransformerForCausalLM(commit_last=False)


def healthy() -> nn.Module:
    """Count new tokens in the last layer."""
    return TransformerForCausalLM(commit_last=True)


def _decode(model: nn.Module, ids: torch.Tensor, cache: FLACache | None) -> tuple[torch.Tensor, FLACache]:
    output = model(ids, past_key_values=cache, use_cache=True)
    return output.logits, output.past_key_values


def buggy_declared() -> ModelSpec:
    """State a causal model with rotary embedding and cache."""
    return ModelSpec.of(buggy, causal=True, decode=_decode, rotary=RotaryClaim(theta=10000.0))


def healthy_declared() -> ModelSpec:
    """State a causal model with rotary embedding and cache."""
    return ModelSpec.of(healthy, causal=True, decode=_decode, rotary=RotaryClaim(theta=10000.0))


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return logits of tokens decoded one by one minus those of one pass."""
    model = model.double().eval()
    ids = torch.randint(0, 60, (1, 8), generator=torch.Generator().manual_seed(1))
    logits, cache = _decode(model, ids[:, :4], None)
    parts = [logits]
    for t in range(4, 8):
        logits, cache = _decode(model, ids[:, t : t + 1], cache)
        parts.append(logits)
    return (torch.cat(parts, dim=1) - model(ids).logits).abs().amax(dim=(0, 2))
