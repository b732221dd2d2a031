"""transformers#46624 (huggingface/transformers): after a long input, dynamic RoPE stays scaled.

The cached length is read as `max_seq_len_cached` and written as `None_max_seq_len_cached`, so the branch that
restores the original frequencies is never taken.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

ORIGINAL_MAX = 32


class RotaryEmbedding(nn.Module):
    """Cosines and sines; beyond the original length the base grows with the length (dynamic NTK)."""

    inv_freq: torch.Tensor

    def __init__(self, dim: int, *, with_prefix: bool, base: float = 100.0, factor: float = 2.0) -> None:
        super().__init__()
        self.dim, self.base, self.factor, self.with_prefix = dim, base, factor, with_prefix
        self.max_seq_len_cached = self.original_max_seq_len = ORIGINAL_MAX
        self.register_buffer("inv_freq", self.frequencies(base), persistent=False)
        self.original_inv_freq = self.inv_freq.clone()

    def frequencies(self, base: float) -> torch.Tensor:
        """Return the frequency of each pair."""
        return base ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)

    def dynamic_frequency_update(self, seq_len: int, layer_type: str | None = None) -> None:
        """Set the frequencies for this length."""
        prefix = "" if layer_type is None else f"{layer_type}_"
        written = f"{prefix}max_seq_len_cached" if self.with_prefix else f"{layer_type}_max_seq_len_cached"
        if seq_len > self.original_max_seq_len and seq_len != self.max_seq_len_cached:
            growth = self.factor * seq_len / self.original_max_seq_len - (self.factor - 1)
            inv_freq = self.frequencies(self.base * growth ** (self.dim / (self.dim - 2)))
            self.inv_freq = inv_freq.to(self.inv_freq)
            setattr(self, written, seq_len)
        elif seq_len <= self.original_max_seq_len < self.max_seq_len_cached:
            self.inv_freq = self.original_inv_freq.to(self.inv_freq)
            setattr(self, written, self.original_max_seq_len)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines (time, dim / 2) for `x` (batch, time, ...)."""
        self.dynamic_frequency_update(x.shape[1])
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.inv_freq
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of the last axis."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class LlamaDecoderLayer(nn.Module):
    """Causal rotary attention and gated MLP."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate_up_proj = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, time, hidden_size)."""
        qkv = self.qkv_proj(self.input_layernorm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in qkv)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class LlamaForCausalLM(nn.Module):
    """Language model whose rotary embedding is shared by the layers."""

    def __init__(self, *, with_prefix: bool, vocab_size: int = 72, hidden_size: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.rotary_emb = RotaryEmbedding(hidden_size // 4, with_prefix=with_prefix)
        self.layers = nn.ModuleList(LlamaDecoderLayer(hidden_size, 4) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """Writes the cached length to another attribute."""
    return LlamaForCausalLM(with_prefix=False)


def healthy() -> nn.Module:
    """Writes the cached length to the attribute that is read."""
    return LlamaForCausalLM(with_prefix=True)


def buggy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(buggy, causal=True)


def healthy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(healthy, causal=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Logits of a short input after a long one, minus those before it."""
    model = model.eval()
    ids = torch.randint(0, 72, (1, 50), generator=torch.Generator().manual_seed(1))
    before = model(ids[:, :12])
    model(ids)
    return model(ids[:, :12]) - before
