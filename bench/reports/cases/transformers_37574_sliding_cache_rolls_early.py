"""transformers#37574 (huggingface/transformers): the sliding-window cache rolls one token too early.

The step that fills the window already shifts it, so the oldest key is lost although the window still has room
for it, and an empty slot of zeros is attended to instead.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

WINDOW, LAYERS, HEADS, WIDTH, VOCAB = 8, 2, 2, 32, 64
DECLARATION = "sliding window of 8 tokens (itself and the 7 before), with and without past_key_values"


class Cache:
    """Static cache of WINDOW slots per layer; full slots move left, the newest token goes last."""

    def __init__(self, *, rolls_early: bool) -> None:
        self.threshold = WINDOW - 1 if rolls_early else WINDOW
        self.layers: list[torch.Tensor | None] = [None] * LAYERS
        self.seen = [0] * LAYERS

    def update(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """Store keys and values (2, B, H, T, D) and return those to attend to."""
        past, new = self.seen[layer], kv.shape[3]
        self.seen[layer] = past + new
        slots = self.layers[layer] if past else kv.new_zeros(*kv.shape[:3], WINDOW, kv.shape[4])
        if new > 1:
            # A prompt or chunk sees all of itself, also what no longer fits the window afterwards.
            full = torch.cat([slots[:, :, :, : min(past, WINDOW)], kv], 3)
            self.layers[layer] = F.pad(full, (0, 0, 0, max(0, WINDOW - past - new)))[:, :, :, -WINDOW:]
            return full
        last = min(past, WINDOW - 1)
        self.layers[layer] = slots.roll(-1, 3) if past >= self.threshold else slots.clone()
        self.layers[layer][:, :, :, last] = kv[:, :, :, 0]
        return self.layers[layer][:, :, :, : last + 1]


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions on (B, H, T, D)."""
    inv = 1e4 ** (-torch.arange(0, x.shape[-1], 2, dtype=x.dtype) / x.shape[-1])
    angles = torch.cat([positions[:, None] * inv] * 2, -1)
    return x * angles.cos() + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * angles.sin()


class DecoderLayer(nn.Module):
    """Pre-norm attention in a window, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor, past: Cache | None, layer: int, start: int) -> torch.Tensor:
        """Attend to the window before each token."""
        b, t, _ = x.shape
        positions = torch.arange(start, start + t)
        q, k, v = self.qkv_proj(self.input_layernorm(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        k = rotate(k, positions)
        k, v = (k, v) if past is None else past.update(layer, torch.stack([k, v]))
        back = positions[:, None] - torch.arange(start + t - k.shape[2], start + t)
        y = F.scaled_dot_product_attention(rotate(q, positions), k, v, (back >= 0) & (back < WINDOW))
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_layernorm(x))


class SlidingForCausalLM(nn.Module):
    """Causal language model, all layers with a sliding window."""

    def __init__(self, *, rolls_early: bool) -> None:
        super().__init__()
        self.rolls_early = rolls_early
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self, input_ids: torch.Tensor, past_key_values: Cache | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        """Return logits and the cache."""
        if use_cache and past_key_values is None:
            past_key_values = Cache(rolls_early=self.rolls_early)
        start = 0 if past_key_values is None else past_key_values.seen[0]
        x = self.embed_tokens(input_ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, past_key_values, i, start)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)), past_key_values=past_key_values)


def buggy() -> nn.Module:
    """Shifts when the last slot is about to be filled."""
    return SlidingForCausalLM(rolls_early=True)


def healthy() -> nn.Module:
    """Shifts only when all slots are full."""
    return SlidingForCausalLM(rolls_early=False)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Difference between one full pass and a prompt of six tokens with single steps after it."""
    model = model.double().eval()
    ids = torch.arange(14)[None] * 5 % VOCAB
    out = model(ids[:, :6], use_cache=True)
    steps = [model(ids[:, i : i + 1], past_key_values=out.past_key_values).logits for i in range(6, 14)]
    return model(ids).logits - torch.cat([out.logits, *steps], 1)
