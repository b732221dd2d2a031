"""transformers#39408 (huggingface/transformers): sliding_window W lets every token see W + 1 keys.

The flash attention path passes window_size=(W, W), but flash attention counts W keys besides the token.
"""

import importlib
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

WINDOW = 8


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window_size: tuple[int, int]
) -> torch.Tensor:
    """Stand-in for the library: query i sees keys i - window_size[0] to i + window_size[1], both included."""
    row = torch.arange(q.shape[2], device=q.device)[:, None]
    col = torch.arange(k.shape[2], device=q.device)[None, :]
    allowed = (col >= row - window_size[0]) & (col <= row + window_size[1])
    if causal:
        allowed &= col <= row
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Half-split rotation."""
    return torch.cat((-x.chunk(2, dim=-1)[1], x.chunk(2, dim=-1)[0]), dim=-1)


class MistralDecoderLayer(nn.Module):
    """Attention with rotary positions and a sliding window, then the MLP."""

    def __init__(self, hidden_size: int, num_heads: int, sliding_window: int, fixed: bool) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.sliding_window, self.fixed = sliding_window, fixed
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 64), nn.SiLU(), nn.Linear(64, hidden_size))
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend inside the window."""
        h, shape = self.input_layernorm(x), (*x.shape[:2], -1, self.head_dim)
        q, k, v = (p(h).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        reach = self.sliding_window - 1 if self.fixed else self.sliding_window
        out = flash_attn_func(q, k, v, causal=True, window_size=(reach, reach))
        x = x + self.o_proj(out.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.post_attention_layernorm(x))


class MistralForCausalLM(nn.Module):
    """Two decoder layers, both with the window."""

    def __init__(self, fixed: bool, vocab_size: int = 64, hidden_size: int = 32) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab_size, hidden_size=hidden_size, sliding_window=WINDOW)
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(MistralDecoderLayer(hidden_size, 4, WINDOW, fixed) for _ in range(2))
        self.norm = nn.RMSNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        """Return logits and, with labels, the next-token loss."""
        x = self.embed_tokens(input_ids)
        inv_freq = 10000.0 ** (-torch.arange(0, 8, 2, device=x.device).to(x.dtype) / 8)
        positions = torch.arange(input_ids.shape[1], device=x.device).to(x.dtype)
        angle = positions[:, None] * torch.cat((inv_freq, inv_freq))
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        logits = self.lm_head(self.norm(x))
        loss = (
            None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )
        return SimpleNamespace(logits=logits, loss=loss)


def buggy() -> nn.Module:
    """Window of W + 1 keys."""
    return MistralForCausalLM(fixed=False)


def healthy() -> nn.Module:
    """Window of W keys."""
    return MistralForCausalLM(fixed=True)


def buggy_declared() -> object:
    """The author states the window."""
    return importlib.import_module("stackwise").ModelSpec.of(buggy, window=WINDOW)


def healthy_declared() -> object:
    """The author states the window."""
    return importlib.import_module("stackwise").ModelSpec.of(healthy, window=WINDOW)


def observe(model: nn.Module) -> torch.Tensor:
    """Change of the last logits when a token out of the reach of two windows of 8 changes; 0 is right."""
    model = model.double().eval()
    ids = torch.arange(24)[None] % 64
    changed = ids.clone()
    changed[0, 23 - 2 * (WINDOW - 1) - 1] = 50
    with torch.no_grad():
        return model(changed).logits[0, -1] - model(ids).logits[0, -1]
