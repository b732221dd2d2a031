"""transformers#40214 (huggingface/transformers): chunks of attention are counted from the padding on.

With left padding, a row starts its first chunk at the first pad token, so the borders of its chunks depend on
the longest row of the batch.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of (batch, heads, time, width) by their position."""
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    freqs = 10_000 ** (-torch.arange(half, dtype=dtype, device=x.device) / half)
    angles = torch.arange(x.shape[2], dtype=dtype, device=x.device)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Llama4TextDecoderLayer(nn.Module):
    """Rotary attention within chunks, or full attention without positions."""

    def __init__(self, hidden_size: int, num_heads: int, *, chunked: bool) -> None:
        super().__init__()
        self.num_heads, self.chunked = num_heads, chunked
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate_up_proj = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask` is True for visible keys, (batch, 1, time, time)."""
        qkv = self.qkv_proj(self.input_layernorm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in qkv)
        if self.chunked:
            q, k = rotary(q), rotary(k)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class Llama4ForCausalLM(nn.Module):
    """Language model with two chunked layers and a full one."""

    def __init__(
        self, *, skip_padding: bool, vocab_size: int = 70, hidden_size: int = 32, chunk_size: int = 5
    ) -> None:
        super().__init__()
        self.skip_padding, self.chunk_size = skip_padding, chunk_size
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        kinds = (True, True, False)
        self.layers = nn.ModuleList(Llama4TextDecoderLayer(hidden_size, 4, chunked=kind) for kind in kinds)
        self.norm, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits."""
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        left_padding = (keep.cumsum(dim=1) == 0).sum(dim=1, keepdim=True) if self.skip_padding else 0
        chunk = (index - left_padding).div(self.chunk_size, rounding_mode="floor").expand(len(keep), -1)
        # A row of padding needs a key, and sees itself.
        full = (index[:, None] >= index) & keep[:, None].bool() | (index[:, None] == index)
        within = full & (chunk[:, :, None] == chunk[:, None])
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, (within if layer.chunked else full)[:, None])
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """Chunks are counted from the first column."""
    return Llama4ForCausalLM(skip_padding=False)


def healthy() -> nn.Module:
    """Chunks are counted from the first token of a row."""
    return Llama4ForCausalLM(skip_padding=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The model is causal, and padding may be on both sides."""
    return ModelSpec.of(
        make,
        causal=True,
        padding_sides=("left", "right"),
        masked=lambda model, tokens, keep: model(tokens, attention_mask=keep.long()),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Logits of a left-padded, masked prompt minus those of the prompt without padding."""
    model, tokens = model.double().eval(), torch.arange(3, 15)[None]
    padded, mask = F.pad(tokens, (3, 0)), F.pad(torch.ones_like(tokens), (3, 0))
    return model(padded, attention_mask=mask)[:, 3:] - model(tokens)
