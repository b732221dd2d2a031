"""hippogriff#7 (proger/hippogriff): local attention reads all earlier positions.

`flash_attn_func` gets the window `(-window_size, 0)`. A negative number means that this side has no limit;
the number of positions to the left should be positive.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Facts, ModelSpec

HEAD_DIM, WINDOW = 8, 5


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, window_size: tuple[int, int]) -> Tensor:
    """Causal attention over (batch, time, heads, dim), like the function of flash-attn.

    `window_size` is the number of positions to the left and right of the own one. Below 0: no limit.
    """
    at = torch.arange(q.shape[1], device=q.device)
    distance = at[:, None] - at
    mask = distance >= 0
    if window_size[0] >= 0:
        mask &= distance <= window_size[0]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def rotary(x: Tensor) -> Tensor:
    """Rotate halves of (batch, time, heads, HEAD_DIM)."""
    freqs = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = (torch.arange(x.shape[1], device=x.device)[:, None] * freqs)[:, None].to(x)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class RMSNorm(nn.Module):
    """Norm by the root mean square."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self.gamma * x * x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True)


class GatedMLP(nn.Module):
    """Feed-forward network with a gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.grow, self.shrink = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension."""
        gate, x = self.grow(x).chunk(2, dim=-1)
        return self.shrink(F.gelu(gate) * x)


class SlidingMQA(nn.Module):
    """Attention with one key head over the last WINDOW positions."""

    def __init__(self, dim: int, window_size: tuple[int, int]) -> None:
        super().__init__()
        self.window_size = window_size
        self.q, self.kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * HEAD_DIM, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, time, dim)."""
        q, (k, v) = self.q(x).unflatten(-1, (-1, HEAD_DIM)), self.kv(x)[:, :, None].chunk(2, dim=-1)
        y = flash_attn_func(rotary(q), rotary(k), v, window_size=self.window_size)
        return self.output(y.flatten(2))


class GriffinLM(nn.Module):
    """Language model of local attention layers, without the recurrent ones."""

    def __init__(self, *, window_size: tuple[int, int], vocab_size: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.smqa_norm, self.smqa_gmlp_norm = (
            nn.ModuleList(RMSNorm(dim) for _ in range(2)) for _ in range(2)
        )
        self.smqa = nn.ModuleList(SlidingMQA(dim, window_size) for _ in range(2))
        self.smqa_gmlp = nn.ModuleList(GatedMLP(dim) for _ in range(2))
        self.output_norm, self.lm_head = RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(input_ids)
        for i in range(2):
            x = x + self.smqa[i](self.smqa_norm[i](x))
            x = x + self.smqa_gmlp[i](self.smqa_gmlp_norm[i](x))
        return self.lm_head(self.output_norm(x))


def buggy() -> nn.Module:
    """Pass a negative number of positions."""
    return GriffinLM(window_size=(-WINDOW, 0))


def healthy() -> nn.Module:
    """Pass the number of positions before the own one."""
    return GriffinLM(window_size=(WINDOW - 1, 0))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State local attention over 5 positions, with one key head, and tied embeddings."""
    return ModelSpec.of(make, causal=True, tied=True, window=WINDOW, facts=Facts(key_heads=1))


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the change of the first attention at the last position, for other inputs before its window."""
    x = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(1))
    changed = torch.cat([torch.ones(1, 12 - WINDOW, 32), x[:, -WINDOW:]], dim=1)
    return model.smqa[0](x)[:, -1] - model.smqa[0](changed)[:, -1]
