"""LoFTR#176 (zju3dv/LoFTR): in cross-attention the second image reads the updated features of the first.

Both images should attend to the other's features before the layer. The code assigns the new features of
image 0 first and passes these to the layer of image 1, so the order of the two images matters.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

D_MODEL = 32


class LinearAttention(nn.Module):
    """Attention with the feature map elu + 1."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend in (batch, length, heads, dim); `kv_mask` (batch, length) is true at features."""
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if kv_mask is not None:
            k, v = k * kv_mask[:, :, None, None], v * kv_mask[:, :, None, None]
        kv = torch.einsum("nshd,nshv->nhdv", k, v)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + self.eps)
        return torch.einsum("nlhd,nhdv,nlh->nlhv", q, kv, z)


class LoFTREncoderLayer(nn.Module):
    """Attention from `x` to `source`, and feed-forward network of both."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__()
        self.nhead = nhead
        self.q_proj, self.k_proj, self.v_proj, self.merge = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.attention = LinearAttention()
        self.mlp = nn.Sequential(
            nn.Linear(2 * d_model, 2 * d_model, bias=False),
            nn.ReLU(),
            nn.Linear(2 * d_model, d_model, bias=False),
        )
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(
        self, x: torch.Tensor, source: torch.Tensor, source_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the new features of `x` (batch, length, d_model)."""
        q, k, v = (
            y.unflatten(-1, (self.nhead, -1))
            for y in (self.q_proj(x), self.k_proj(source), self.v_proj(source))
        )
        message = self.norm1(self.merge(self.attention(q, k, v, source_mask).flatten(2)))
        return x + self.norm2(self.mlp(torch.cat([x, message], dim=2)))


class LocalFeatureTransformer(nn.Module):
    """Self- and cross-attention of the features of two images."""

    def __init__(self, *, simultaneous: bool, layer_names: tuple[str, ...] = ("self", "cross") * 2) -> None:
        super().__init__()
        self.simultaneous, self.layer_names = simultaneous, layer_names
        self.layers = nn.ModuleList(LoFTREncoderLayer(D_MODEL, 4) for _ in layer_names)

    def forward(
        self,
        feat0: torch.Tensor,
        feat1: torch.Tensor,
        mask0: torch.Tensor | None = None,
        mask1: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new features (batch, length, d_model) of both images."""
        for layer, name in zip(self.layers, self.layer_names, strict=True):
            if name == "self":
                feat0, feat1 = layer(feat0, feat0, mask0), layer(feat1, feat1, mask1)
            elif self.simultaneous:
                feat0, feat1 = layer(feat0, feat1, mask1), layer(feat1, feat0, mask0)
            else:
                feat0 = layer(feat0, feat1, mask1)
                feat1 = layer(feat1, feat0, mask0)
        return feat0, feat1


def buggy() -> nn.Module:
    """Cross-attention of one image after the other."""
    return LocalFeatureTransformer(simultaneous=False)


def healthy() -> nn.Module:
    """Cross-attention of both images at once."""
    return LocalFeatureTransformer(simultaneous=True)


def _other(feat0: torch.Tensor) -> torch.Tensor:
    feat1 = torch.randn(1, 10, D_MODEL, generator=torch.Generator().manual_seed(0))
    return feat1.to(feat0).expand(len(feat0), -1, -1)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State features without positions of image 0, with those of image 1 fixed."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=D_MODEL,
        causal=False,
        positionless=True,
        forward=lambda model, feat0: model(feat0, _other(feat0))[0],
        padding_sides=("right",),
        masked=lambda model, feat0, keep: model(feat0, _other(feat0), mask0=keep)[0],
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the change of the features of image 0 if the two images are passed in the other order."""
    first, second = torch.randn(2, 1, 6, D_MODEL, generator=torch.Generator().manual_seed(1))
    return (model(first, second)[0] - model(second, first)[1]).abs().amax(dim=-1)
