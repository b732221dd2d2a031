"""FinCast-fts#8 (vincent05r/FinCast-fts): the scale of a quiet series is lost in its normalisation.

The variance is the mean of the squares minus the square of the mean, which is rounding noise if the series
varies little around a large level. A result below the tolerance is then replaced by 1, not by the tolerance.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

PATCH_LEN, HORIZON_LEN, TOLERANCE, MAX_PATCHES = 8, 4, 1e-6, 16


def masked_mean_std(inputs: Tensor, *, one_pass: bool) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (batch,) of the first patch."""
    first = inputs[:, 0]
    mu = first.mean(dim=1)
    if one_pass:
        variance = (first.square().mean(dim=1) - mu.square()).clamp(min=0)
        sigma = variance.sqrt()
        return mu, torch.where(sigma < TOLERANCE, 1.0, sigma)
    sigma = (first - mu[:, None]).square().mean(dim=1).clamp(min=TOLERANCE**2).sqrt()
    return mu, sigma


class ResidualBlock(nn.Module):
    """Network with one hidden layer, and a linear shortcut."""

    def __init__(self, input_dims: int, hidden_dims: int, output_dims: int) -> None:
        super().__init__()
        self.hidden_layer, self.output_layer = (
            nn.Linear(input_dims, hidden_dims),
            nn.Linear(hidden_dims, output_dims),
        )
        self.residual_layer = nn.Linear(input_dims, output_dims)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dimension."""
        return self.output_layer(F.silu(self.hidden_layer(x))) + self.residual_layer(x)


class DecoderLayer(nn.Module):
    """Causal attention over patches, and a feed-forward network."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.input_layernorm, self.layer_norm = nn.RMSNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv_proj, self.o_proj = (
            nn.Linear(hidden_size, 3 * hidden_size),
            nn.Linear(hidden_size, hidden_size),
        )
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to (batch, patches, hidden)."""
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.layer_norm(x))


class PatchedTimeSeriesDecoder(nn.Module):
    """Prices -> the next HORIZON_LEN prices."""

    def __init__(self, *, one_pass: bool, hidden_size: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.one_pass = one_pass
        self.input_ff_layer = ResidualBlock(PATCH_LEN, hidden_size, hidden_size)
        self.position_emb = nn.Embedding(MAX_PATCHES, hidden_size)
        self.stacked_transformer = nn.ModuleList(DecoderLayer(hidden_size, num_heads) for _ in range(2))
        self.horizon_ff_layer = ResidualBlock(hidden_size, hidden_size, HORIZON_LEN)

    def forward(self, input_ts: Tensor) -> Tensor:
        """`input_ts` is (batch, length); a start that fills no patch is ignored."""
        patched = input_ts[:, input_ts.shape[1] % PATCH_LEN :].unflatten(1, (-1, PATCH_LEN))
        mu, sigma = masked_mean_std(patched, one_pass=self.one_pass)
        normed = (patched - mu[:, None, None]) / sigma[:, None, None]
        x = self.input_ff_layer(normed) + self.position_emb.weight[: normed.shape[1]]
        for layer in self.stacked_transformer:
            x = layer(x)
        return self.horizon_ff_layer(x[:, -1]) * sigma[:, None] + mu[:, None]


def buggy() -> nn.Module:
    """Take the variance in one pass, and replace small ones by 1."""
    return PatchedTimeSeriesDecoder(one_pass=True)


def healthy() -> nn.Module:
    """Take the variance around the mean, at least the tolerance."""
    return PatchedTimeSeriesDecoder(one_pass=False)


def _make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> Tensor:
    """Return prices of a currency pair."""
    return 1.1 + 1e-4 * torch.randn(batch_size, seq_len, generator=generator)


def _loss(model: nn.Module, prices: Tensor) -> Tensor:
    context, future = prices.split([prices.shape[1] - HORIZON_LEN, HORIZON_LEN], dim=1)
    scale = context.std(dim=1, keepdim=True)
    return ((model(context) - future) / scale).square().mean()


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State quiet prices, one forecast for each series, and the loss of the last prices."""
    limit = MAX_PATCHES * PATCH_LEN
    return ModelSpec.of(
        make, make_batch=_make_batch, loss=_loss, per_position=False, max_length=limit, seq_len=32
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the standard deviations used for quiet prices, relative to the exact ones, minus 1."""
    prices = _make_batch(4, 32, torch.Generator().manual_seed(1)).unflatten(1, (-1, PATCH_LEN))
    exact = prices.double()[:, 0].std(dim=1, correction=0)
    ratios = masked_mean_std(prices, one_pass=model.one_pass)[1] / exact - 1
    return torch.where(ratios.abs() < 0.01, 0.0, ratios)
