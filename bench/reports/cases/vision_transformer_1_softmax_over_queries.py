"""vision-transformer#1 (nerminnuraydogan/vision-transformer): attention weights are normalised over queries.

The softmax runs along the axis of queries, so the weights of one query over the keys do not sum to 1.
"""

import copy

import torch
from torch import nn


class AttentionHead(nn.Module):
    """One head of self-attention."""

    def __init__(self, dim: int, head_size: int, softmax_dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, head_size) for _ in range(3))
        self.head_size, self.softmax_dim = head_size, softmax_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, tokens, dim)."""
        scores = self.query(x) @ self.key(x).transpose(1, 2) / self.head_size**0.5
        return scores.softmax(dim=self.softmax_dim) @ self.value(x)


class TransformerEncoder(nn.Module):
    """Pre-norm block of the vision transformer."""

    def __init__(self, dim: int, num_heads: int, softmax_dim: int) -> None:
        super().__init__()
        self.layer_norm_1, self.layer_norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        heads = (AttentionHead(dim, dim // num_heads, softmax_dim) for _ in range(num_heads))
        self.heads, self.proj = nn.ModuleList(heads), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, tokens, dim)."""
        normed = self.layer_norm_1(x)
        x = x + self.proj(torch.cat([head(normed) for head in self.heads], dim=-1))
        return x + self.mlp(self.layer_norm_2(x))


class VisionTransformer(nn.Module):
    """Classifies images of 16 x 16 pixels by a class token."""

    def __init__(self, *, softmax_dim: int, dim: int = 32, num_classes: int = 10) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, dim, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.position_embedding = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.encoders = nn.ModuleList(TransformerEncoder(dim, 4, softmax_dim) for _ in range(2))
        self.norm, self.classifier = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return class logits of images (batch, 3, 16, 16)."""
        x = self.patch_embedding(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.position_embedding
        for encoder in self.encoders:
            x = encoder(x)
        return self.classifier(self.norm(x)[:, 0])


def buggy() -> nn.Module:
    """Softmax over queries."""
    return VisionTransformer(softmax_dim=1)


def healthy() -> nn.Module:
    """Softmax over keys."""
    return VisionTransformer(softmax_dim=-1)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Output of a head whose values are all 1, minus 1; 0 is right, as weights of a mean sum to 1."""
    head = copy.deepcopy(model.encoders[0].heads[0])
    head.value.weight.zero_()
    head.value.bias.fill_(1.0)
    return head(torch.randn(2, 17, 32, generator=torch.Generator().manual_seed(1))) - 1
