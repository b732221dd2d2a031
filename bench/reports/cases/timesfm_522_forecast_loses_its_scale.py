"""timesfm#522 (google-research/timesfm): the forecast of a nearly constant series collapses to its mean.

RevIN divides by 1 if the deviation is below 1e-6, but multiplies the forecast by the deviation itself.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

TOLERANCE = 1e-6


def revin(
    x: torch.Tensor, mu: torch.Tensor, sigma: torch.Tensor, *, reverse: bool, guarded: bool
) -> torch.Tensor:
    """Normalise patches by the mean and deviation of their past, or undo it."""
    safe_sigma = torch.where(sigma < TOLERANCE, torch.ones_like(sigma), sigma)
    if reverse:
        return x * (safe_sigma if guarded else sigma) + mu
    return (x - mu) / safe_sigma


def running_stats(patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of each patch and its past, (batch, patches, 1)."""
    count = torch.arange(1, patches.shape[1] + 1, dtype=patches.dtype, device=patches.device)[:, None]
    mu = patches.mean(dim=-1, keepdim=True).cumsum(dim=1) / count
    # The first value is subtracted, as a difference of large squares loses precision.
    shifted = patches - patches[:, :1, :1]
    square = (shifted**2).mean(dim=-1, keepdim=True).cumsum(dim=1) / count
    mean = shifted.mean(dim=-1, keepdim=True).cumsum(dim=1) / count
    return mu, (square - mean**2).clamp(min=1e-30).sqrt()


class TransformerLayer(nn.Module):
    """Causal attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.pre_attn_ln, self.pre_ff_ln = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv_proj, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.ff0, self.ff1 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, patches, dim)."""
        qkv = self.qkv_proj(self.pre_attn_ln(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.ff1(F.silu(self.ff0(self.pre_ff_ln(x))))


class TimesFM(nn.Module):
    """Forecasts the patch after each patch of a series."""

    def __init__(self, *, guarded: bool, patch_len: int = 8, dim: int = 32, max_patches: int = 64) -> None:
        super().__init__()
        self.guarded = guarded
        self.tokenizer = nn.Sequential(nn.Linear(patch_len, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.positions = nn.Parameter(torch.randn(max_patches, dim) * 0.1)
        self.stacked_xf = nn.ModuleList(TransformerLayer(dim, 4) for _ in range(2))
        self.final_norm, self.output_projection = nn.RMSNorm(dim), nn.Linear(dim, patch_len)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """`patches` is (batch, patches, patch_len); so is the forecast."""
        mu, sigma = running_stats(patches)
        normed = revin(patches, mu, sigma, reverse=False, guarded=self.guarded)
        x = self.tokenizer(normed) + self.positions[: patches.shape[1]]
        for layer in self.stacked_xf:
            x = layer(x)
        forecast = self.output_projection(self.final_norm(x))
        return revin(forecast, mu, sigma, reverse=True, guarded=self.guarded)


def buggy() -> nn.Module:
    """The reverse direction has no guard."""
    return TimesFM(guarded=False)


def healthy() -> nn.Module:
    """Both directions have the same guard."""
    return TimesFM(guarded=True)


def _loss(model: nn.Module, patches: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(patches)[:, :-1], patches[:, 1:])


def buggy_declared() -> ModelSpec:
    """The model is causal, and is trained to forecast the next patch."""
    return ModelSpec.of(buggy, inputs="vectors", width=8, causal=True, max_length=64, loss=_loss)


def healthy_declared() -> ModelSpec:
    """The model is causal, and is trained to forecast the next patch."""
    return ModelSpec.of(healthy, inputs="vectors", width=8, causal=True, max_length=64, loss=_loss)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Predictions of a quiet series, denormalised and normalised, minus the predictions."""
    generator = torch.Generator().manual_seed(1)
    mu, sigma = running_stats(torch.full((2, 5, 8), 3.0) + 1e-8 * torch.randn(2, 5, 8, generator=generator))
    predicted = torch.randn(2, 5, 8, generator=generator)
    forecast = revin(predicted, mu, sigma, reverse=True, guarded=model.guarded)
    return revin(forecast, mu, sigma, reverse=False, guarded=model.guarded) - predicted
