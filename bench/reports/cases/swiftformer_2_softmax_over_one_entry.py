"""SwiftFormer#2 (Amshaker/SwiftFormer): the softmax of the additive attention is over a dimension of size 1.

The scores have the shape (B, N, 1), so that each becomes 1. The learned vector w_g has no effect.
https://github.com/Amshaker/SwiftFormer/issues/2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EfficientAdditiveAttention(nn.Module):
    """Each key is multiplied by one weighted sum of all queries. (B, N, D) to (B, N, D)."""

    def __init__(self, dim: int, softmax_dim: int) -> None:
        super().__init__()
        self.to_query, self.to_key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.w_g = nn.Parameter(torch.randn(dim, 1))
        self.scale_factor, self.softmax_dim = dim**-0.5, softmax_dim
        self.proj, self.final = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key = F.normalize(self.to_query(x), dim=-1), F.normalize(self.to_key(x), dim=-1)
        a = (query @ self.w_g * self.scale_factor).softmax(dim=self.softmax_dim)
        g = torch.sum(a * query, dim=1, keepdim=True)
        return self.final(self.proj(g * key) + query)


class ConvEncoder(nn.Module):
    """Depthwise convolution and two pointwise ones, with a residual connection."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.norm, self.layer_scale = nn.BatchNorm2d(dim), nn.Parameter(torch.ones(dim, 1, 1))
        self.pwconv1, self.pwconv2 = nn.Conv2d(dim, hidden_dim, 1), nn.Conv2d(hidden_dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale * self.pwconv2(F.gelu(self.pwconv1(self.norm(self.dwconv(x)))))


class SwiftFormerEncoder(nn.Module):
    """Local representation, additive attention and MLP."""

    def __init__(self, dim: int, softmax_dim: int, init_value: float = 1e-5) -> None:
        super().__init__()
        self.local_representation = ConvEncoder(dim, dim)
        self.attn = EfficientAdditiveAttention(dim, softmax_dim)
        mlp = (nn.BatchNorm2d(dim), nn.Conv2d(dim, 4 * dim, 1), nn.GELU(), nn.Conv2d(4 * dim, dim, 1))
        self.linear = nn.Sequential(*mlp)
        self.layer_scale_1 = nn.Parameter(torch.full((dim, 1, 1), init_value))
        self.layer_scale_2 = nn.Parameter(torch.full((dim, 1, 1), init_value))

    def forward(self, x: Tensor) -> Tensor:
        x = self.local_representation(x)
        x = x + self.layer_scale_1 * self.attn(x.flatten(2).mT).mT.unflatten(-1, x.shape[2:])
        return x + self.layer_scale_2 * self.linear(x)


class SwiftFormer(nn.Module):
    """Image classifier with two stages."""

    def __init__(self, *, softmax_dim: int, num_classes: int = 10, dims: tuple[int, int] = (16, 32)) -> None:
        super().__init__()
        convs = (nn.Conv2d(3, dims[0], 3, 2, 1, bias=False), nn.Conv2d(*dims, 3, 2, 1, bias=False))
        self.patch_embed = nn.Sequential(convs[0], nn.BatchNorm2d(dims[0]), nn.ReLU())
        downsample = nn.Sequential(convs[1], nn.BatchNorm2d(dims[1]))
        stages = [nn.Sequential(ConvEncoder(d, 4 * d), SwiftFormerEncoder(d, softmax_dim)) for d in dims]
        self.network = nn.Sequential(stages[0], downsample, stages[1])
        self.norm, self.head = nn.BatchNorm2d(dims[1]), nn.Linear(dims[1], num_classes)
        self.apply(self._init_weights)

    def _init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.zeros_(m.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.network(self.patch_embed(x))).flatten(2).mean(-1))


def buggy() -> nn.Module:
    """Softmax over the last dimension."""
    return SwiftFormer(softmax_dim=-1)


def healthy() -> nn.Module:
    """Softmax over the positions."""
    return SwiftFormer(softmax_dim=1)


@torch.no_grad()
def observe(model: nn.Module) -> float:
    """Largest change of the output of an attention layer if w_g is drawn again."""
    attn = model.network[0][1].attn
    x = torch.randn(2, 25, 16, generator=torch.Generator().manual_seed(1))
    before = attn(x)
    attn.w_g.normal_(std=10)
    return (attn(x) - before).abs().max().item()
