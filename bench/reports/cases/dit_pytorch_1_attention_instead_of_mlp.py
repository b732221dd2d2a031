"""DiT-PyTorch#1 (explainingai-code/DiT-PyTorch): the second half of each layer runs attention, not the MLP.

The input normalised for the feed-forward block goes through `attn_block` again. `mlp_block` exists, but
nothing calls it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

IMAGE, CHANNELS, PATCH = 8, 4, 2


class Attention(nn.Module):
    """Attention of all patches."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.output_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply attention to (batch, patches, hidden_size)."""
        q, k, v = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv_proj(x).chunk(3, dim=-1)
        )
        return self.output_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """Layer whose norms and residual scales depend on the condition."""

    def __init__(self, hidden_size: int, *, use_mlp: bool) -> None:
        super().__init__()
        self.use_mlp = use_mlp
        self.att_norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn_block = Attention(hidden_size, 4)
        self.ff_norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp_block = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * hidden_size, hidden_size),
        )
        self.adaptive_norm_layer = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        nn.init.zeros_(self.adaptive_norm_layer[-1].weight)
        nn.init.zeros_(self.adaptive_norm_layer[-1].bias)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Apply the layer; `condition` is (batch, hidden_size)."""
        params = self.adaptive_norm_layer(condition)[:, None].chunk(6, dim=-1)
        attn_shift, attn_scale, attn_gate, mlp_shift, mlp_scale, mlp_gate = params
        out = x + attn_gate * self.attn_block(self.att_norm(x) * (1 + attn_scale) + attn_shift)
        mlp_norm_output = self.ff_norm(out) * (1 + mlp_scale) + mlp_shift
        block = self.mlp_block if self.use_mlp else self.attn_block
        return out + mlp_gate * block(mlp_norm_output)


class DIT(nn.Module):
    """Diffusion transformer for latent images."""

    def __init__(self, *, use_mlp: bool, hidden_size: int = 32) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(CHANNELS, hidden_size, PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(torch.empty(1, (IMAGE // PATCH) ** 2, hidden_size))
        nn.init.normal_(self.pos_embed, std=0.02)
        self.t_proj = nn.Sequential(
            nn.Linear(hidden_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.layers = nn.ModuleList(TransformerLayer(hidden_size, use_mlp=use_mlp) for _ in range(2))
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.adaptive_norm_layer = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))
        self.proj_out = nn.Linear(hidden_size, PATCH * PATCH * CHANNELS)
        for layer in (self.adaptive_norm_layer[-1], self.proj_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return the predicted noise, an image like `x`; `t` is (batch,)."""
        size = IMAGE // PATCH
        half = self.t_proj[0].in_features // 2
        freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
        angles = t[:, None].to(x.dtype) * freqs
        condition = self.t_proj(torch.cat([angles.sin(), angles.cos()], dim=-1))
        out = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        for layer in self.layers:
            out = layer(out, condition)
        shift, scale = self.adaptive_norm_layer(condition)[:, None].chunk(2, dim=-1)
        out = self.proj_out(self.norm(out) * (1 + scale) + shift)
        out = out.view(-1, size, size, PATCH, PATCH, CHANNELS).permute(0, 5, 1, 3, 2, 4)
        return out.reshape(-1, CHANNELS, IMAGE, IMAGE)


def buggy() -> nn.Module:
    """Attention twice."""
    return DIT(use_mlp=False)


def healthy() -> nn.Module:
    """Attention and MLP."""
    return DIT(use_mlp=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, CHANNELS, IMAGE, IMAGE, generator=generator)


def _forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x, torch.full((len(x),), 300, device=x.device))


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    return F.mse_loss(_forward(model, 0.8 * x + 0.6 * noise), noise)


def buggy_declared() -> ModelSpec:
    """State the latent images, the time step and the loss of the noise."""
    return ModelSpec.of(buggy, make_batch=_make_batch, forward=_forward, loss=_loss, per_position=False)


def healthy_declared() -> ModelSpec:
    """State the latent images, the time step and the loss of the noise."""
    return ModelSpec.of(healthy, make_batch=_make_batch, forward=_forward, loss=_loss, per_position=False)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the output of a layer with residual scales of 1 minus that computed from its parts."""
    layer = model.layers[0]
    layer.adaptive_norm_layer[-1].bias.view(6, -1)[[2, 5]] = 1.0
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    y = x + layer.attn_block(layer.att_norm(x))
    return (layer(x, torch.zeros(1, 32)) - y - layer.mlp_block(layer.ff_norm(y))).abs().amax(dim=-1)
