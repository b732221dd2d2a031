"""modalities#462 (Modalities/modalities): rotary frequencies are rounded to bfloat16 before use.

With bfloat16 activations the phase position * frequency is wrong by up to whole radians at long positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class RotaryTransform(nn.Module):
    """Rotary positions for queries and keys (batch, heads, sequence, head dimension)."""

    def __init__(self, head_dim: int, early_cast: bool, base_freq: int = 10000) -> None:
        super().__init__()
        self.early_cast = early_cast
        # Not a buffer: model.to(bfloat16) must not round it.
        self.inv_freq = 1.0 / base_freq ** (torch.arange(0, head_dim, 2).float() / head_dim)

    def rotate_half(self, x: torch.Tensor) -> torch.Tensor:
        """Half-split rotation."""
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((-x2, x1), dim=-1)

    def cos_sin(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables for the length of `x` in its dtype."""
        t = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)
        inv_freq = self.inv_freq.to(x.device)
        if self.early_cast:
            inv_freq = inv_freq.to(x.dtype)
        freqs = t[:, None] * inv_freq[None, :]
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate both."""
        cos, sin = self.cos_sin(k)
        return q * cos + self.rotate_half(q) * sin, k * cos + self.rotate_half(k) * sin


class CausalSelfAttention(nn.Module):
    """Attention of the GPT-2 model."""

    def __init__(self, n_embd: int, n_head: int, early_cast: bool) -> None:
        super().__init__()
        self.n_head = n_head
        self.q_attn, self.k_attn, self.v_attn, self.c_proj = (nn.Linear(n_embd, n_embd) for _ in range(4))
        self.rotary = RotaryTransform(n_embd // n_head, early_cast)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention."""
        q, k, v = (
            layer(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for layer in (self.q_attn, self.k_attn, self.v_attn)
        )
        q, k = self.rotary(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class GPT2LLM(nn.Module):
    """GPT-2 with rotary positions; takes and returns dictionaries."""

    def __init__(self, early_cast: bool, vocab_size: int = 64, n_embd: int = 32, n_layer: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList(CausalSelfAttention(n_embd, 2, early_cast) for _ in range(n_layer))
        self.norms = nn.ModuleList(nn.LayerNorm(n_embd) for _ in range(n_layer))
        self.lm_head_norm = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(
        self, inputs: dict[str, torch.Tensor] | torch.Tensor
    ) -> dict[str, torch.Tensor] | torch.Tensor:
        """Token ids, alone or under "input_ids", to logits, alone or under "logits"."""
        x = self.wte(inputs["input_ids"] if isinstance(inputs, dict) else inputs)
        for norm, attention in zip(self.norms, self.h, strict=True):
            x = x + attention(norm(x))
        logits = self.lm_head(self.lm_head_norm(x))
        return {"logits": logits} if isinstance(inputs, dict) else logits


def buggy() -> nn.Module:
    """Frequencies cast first."""
    return GPT2LLM(early_cast=True)


def healthy() -> nn.Module:
    """Frequencies kept in float32."""
    return GPT2LLM(early_cast=False)


def observe(model: nn.Module) -> torch.Tensor:
    """Rotated bfloat16 queries minus the same rotated in Python floats; bfloat16 rounding is right."""
    seen: list[torch.Tensor] = []
    model = model.bfloat16().eval()
    hook = model.h[0].rotary.register_forward_hook(lambda _m, args, out: seen.extend((args[0], out[0])))
    with torch.no_grad():
        model({"input_ids": torch.arange(2048)[None] % 64})
    hook.remove()
    angles = [[p * 10000 ** (-i / 8) for i in range(8)] for p in range(2048)]
    cos, sin = (torch.tensor([[f(a) for a in row] for row in angles]).double() for f in (math.cos, math.sin))
    x1, x2 = seen[0].double().chunk(2, dim=-1)
    return seen[1].double() - torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
