"""DiT#41 (facebookresearch/DiT): guidance without a classifier applies to three of the four latent channels.

The number 3 is left from a model of RGB images. The fourth channel of the predicted noise is not guided.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

IMAGE, PATCH, CHANNELS, CLASSES = 8, 2, 4, 10


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shift and scale (batch, patches, width) by vectors (batch, width)."""
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTBlock(nn.Module):
    """Layer whose norms and residual scales depend on the condition."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = (
            nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.qkv, self.proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * hidden_size, hidden_size),
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Apply the layer; the condition `c` is (batch, hidden_size)."""
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, -1)
        y = self.qkv(modulate(self.norm1(x), shift_msa, scale_msa))
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in y.chunk(3, dim=-1))
        y = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + gate_msa[:, None] * y
        return x + gate_mlp[:, None] * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class DiT(nn.Module):
    """Diffusion transformer for latent images with a class; it predicts noise and variance."""

    def __init__(
        self, *, guided_channels: int, hidden_size: int = 32, class_dropout_prob: float = 0.1
    ) -> None:
        super().__init__()
        self.guided_channels, self.class_dropout_prob = guided_channels, class_dropout_prob
        self.x_embedder = nn.Conv2d(CHANNELS, hidden_size, PATCH, PATCH)
        self.t_embedder = nn.Sequential(
            nn.Linear(16, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.y_embedder = nn.Embedding(CLASSES + 1, hidden_size)  # the last one stands for no class
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (IMAGE // PATCH) ** 2, hidden_size))
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, 4) for _ in range(2))
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.final_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))
        self.final_linear = nn.Linear(hidden_size, PATCH * PATCH * 2 * CHANNELS)
        nn.init.normal_(self.y_embedder.weight, std=0.02)
        zero = [block.adaLN_modulation[-1] for block in self.blocks]
        for layer in (*zero, self.final_modulation[-1], self.final_linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return noise and variance, (batch, 8, height, width); `t` and `y` are (batch,)."""
        freqs = 10000.0 ** (-torch.arange(8, device=x.device, dtype=x.dtype) / 8)
        args = t[:, None].to(x.dtype) * freqs
        if self.training:
            y = y.where(torch.rand(len(y), device=y.device) >= self.class_dropout_prob, CLASSES)
        c = self.t_embedder(torch.cat([args.cos(), args.sin()], dim=-1)) + self.y_embedder(y)
        h = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            h = block(h, c)
        h = self.final_linear(modulate(self.norm_final(h), *self.final_modulation(c).chunk(2, dim=-1)))
        side = IMAGE // PATCH
        h = h.view(-1, side, side, PATCH, PATCH, 2 * CHANNELS).permute(0, 5, 1, 3, 2, 4)
        return h.reshape(-1, 2 * CHANNELS, IMAGE, IMAGE)

    def forward_with_cfg(
        self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, cfg_scale: float
    ) -> torch.Tensor:
        """Return guided outputs of a batch whose second half is the first one without a class."""
        half = x[: len(x) // 2]
        model_out = self(torch.cat([half, half]), t, y)
        eps, rest = model_out[:, : self.guided_channels], model_out[:, self.guided_channels :]
        cond_eps, uncond_eps = eps.chunk(2)
        half_eps = uncond_eps + cfg_scale * (cond_eps - uncond_eps)
        return torch.cat([torch.cat([half_eps, half_eps]), rest], dim=1)


def buggy() -> nn.Module:
    """Guide three channels."""
    return DiT(guided_channels=3)


def healthy() -> nn.Module:
    """Guide all channels of the noise."""
    return DiT(guided_channels=CHANNELS)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, CHANNELS, IMAGE, IMAGE, generator=generator)


def _forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = torch.ones(len(x), dtype=torch.long, device=x.device)
    return model(x, 300 * rows, 3 * rows)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    return F.mse_loss(_forward(model, 0.8 * x + 0.6 * noise), torch.cat([noise, 0.5 * noise], dim=1))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the latent images, a time step and a class."""
    return ModelSpec.of(make, make_batch=_make_batch, forward=_forward, loss=_loss, per_position=False)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the guided noise minus that computed from two calls, with a head that is not zero."""
    model, generator = model.eval(), torch.Generator().manual_seed(1)
    for layer in (model.final_linear, model.final_modulation[-1]):
        layer.weight.copy_(0.1 * torch.randn(layer.weight.shape, generator=generator))
    x, t = torch.randn(2, CHANNELS, IMAGE, IMAGE, generator=generator), torch.full((2,), 300)
    y, none = torch.tensor([3, 7]), torch.full((2,), CLASSES)
    guided = model.forward_with_cfg(torch.cat([x, x]), t.repeat(2), torch.cat([y, none]), 4.0)
    with_class, without = model(x, t, y)[:, :CHANNELS], model(x, t, none)[:, :CHANNELS]
    return guided[:2, :CHANNELS] - (without + 4 * (with_class - without))
