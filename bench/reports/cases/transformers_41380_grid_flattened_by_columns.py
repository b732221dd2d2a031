"""transformers#41380 (huggingface/transformers): RT-DETR gives pixels of wide images wrong positions.

The grid of positions is made with the width as its first axis and flattened column by column, while the
features are flattened row by row. In images that are not square, a pixel gets the coordinates of another one.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

STRIDE, LABELS = 4, 5


class SinePositionEmbedding(nn.Module):
    """Sines and cosines of the column and the row."""

    def __init__(self, embed_dim: int, *, by_rows: bool, temperature: float = 10000.0) -> None:
        super().__init__()
        self.embed_dim, self.by_rows, self.temperature = embed_dim, by_rows, temperature

    def forward(self, width: int, height: int, like: Tensor) -> Tensor:
        """Return (1, height * width, embed_dim), like `like`."""
        grid_w, grid_h = torch.arange(width).to(like), torch.arange(height).to(like)
        if self.by_rows:
            grid_w, grid_h = torch.meshgrid(grid_w, grid_h, indexing="xy")
        else:
            grid_w, grid_h = torch.meshgrid(grid_w, grid_h, indexing="ij")
        pos_dim = self.embed_dim // 4
        omega = self.temperature ** (-torch.arange(pos_dim).to(like) / pos_dim)
        out_w, out_h = grid_w.flatten()[:, None] * omega, grid_h.flatten()[:, None] * omega
        return torch.cat([out_w.sin(), out_w.cos(), out_h.sin(), out_h.cos()], dim=1)[None]


class RTDetrEncoderLayer(nn.Module):
    """Attention with positions in queries and keys, and a feed-forward network."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, position_embeddings: Tensor) -> Tensor:
        """Apply the layer to (batch, pixels, dim)."""
        q = x + position_embeddings
        x = self.self_attn_layer_norm(x + self.self_attn(q, q, x, need_weights=False)[0])
        return self.final_layer_norm(x + self.fc2(nn.functional.gelu(self.fc1(x))))


class RTDetrHybridEncoder(nn.Module):
    """Image -> logits of classes at each pixel of the feature map, from which queries are chosen."""

    def __init__(self, *, by_rows: bool, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, dim, STRIDE, stride=STRIDE), nn.BatchNorm2d(dim), nn.SiLU()
        )
        self.position_embedding = SinePositionEmbedding(dim, by_rows=by_rows)
        self.layers = nn.ModuleList(RTDetrEncoderLayer(dim, heads) for _ in range(2))
        self.enc_score_head = nn.Linear(dim, LABELS)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """`pixel_values` is (batch, 3, height, width)."""
        features = self.backbone(pixel_values)
        height, width = features.shape[2:]
        x = features.flatten(2).transpose(1, 2)
        positions = self.position_embedding(width, height, x)
        for layer in self.layers:
            x = layer(x, positions)
        return self.enc_score_head(x)


def buggy() -> nn.Module:
    """Flatten the grid column by column."""
    return RTDetrHybridEncoder(by_rows=False)


def healthy() -> nn.Module:
    """Flatten the grid row by row."""
    return RTDetrHybridEncoder(by_rows=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch_size, 3, 3 * STRIDE, 5 * STRIDE, generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State images of 12 rows and 20 columns."""
    return ModelSpec.of(make, make_batch=_make_batch, per_position=False, causal=False)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the change of the column part of the positions (of 3 rows and 5 columns) along the rows."""
    positions = model.position_embedding(5, 3, torch.zeros(1))[0].unflatten(0, (3, 5))
    return positions[1:, :, :16] - positions[:-1, :, :16]
