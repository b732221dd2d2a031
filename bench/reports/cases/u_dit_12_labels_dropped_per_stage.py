"""U-DiT#12 (YuchuanTian/U-DiT): each resolution drops the class label independently of the others.

Classifier-free guidance needs samples without any label. With three independent embedders at 0.1 one sample
in a thousand has none, and the others leak the label in another stage.
https://github.com/YuchuanTian/U-DiT/issues/12
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class LabelEmbedder(nn.Module):
    """Embeds labels; one more row stands for no label."""

    def __init__(self, num_classes: int, dim: int, dropout_prob: float) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, dim)
        self.num_classes, self.dropout_prob = num_classes, dropout_prob

    def draw(self, labels: Tensor) -> Tensor:
        """Samples that lose their label."""
        return torch.rand(labels.shape, device=labels.device) < self.dropout_prob

    def forward(self, labels: Tensor, drop: Tensor | None) -> Tensor:
        """Embeddings of the labels; `drop` is drawn if it is None."""
        if self.training:
            labels = torch.where(self.draw(labels) if drop is None else drop, self.num_classes, labels)
        return self.embedding_table(labels)


class DiTBlock(nn.Module):
    """Attention and feed-forward layer with adaptive norms, on feature maps."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, maps: Tensor, c: Tensor) -> Tensor:
        """Maps (batch, dim, height, width) under a condition (batch, dim)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, dim=-1)
        x = maps.flatten(2).transpose(1, 2)
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(3, dim=-1)
        )
        x = x + gate1 * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return x.transpose(1, 2).unflatten(2, maps.shape[2:])


class UDiT(nn.Module):
    """Encoder, bottleneck and decoder, each with its own embeddings of time and label."""

    def __init__(self, one_draw: bool, classes: int = 10, dim: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.one_draw = one_draw
        self.x_embedder, self.final = nn.Conv2d(4, dim, 3, padding=1), nn.Conv2d(dim, 4, 3, padding=1)
        widths = (dim, 2 * dim, dim)
        self.blocks = nn.ModuleList(DiTBlock(width, 2) for width in widths)
        self.y_embedders = nn.ModuleList(LabelEmbedder(classes, width, dropout) for width in widths)
        self.t_embedders = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width)) for width in widths
        )
        self.down, self.up = nn.Conv2d(dim, 2 * dim, 2, 2), nn.ConvTranspose2d(2 * dim, dim, 2, 2)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predicted noise of latents (batch, 4, height, width)."""
        angles = t[:, None].to(x.dtype) * 10.0 ** -torch.arange(4, device=x.device, dtype=x.dtype)
        time = torch.cat((angles.cos(), angles.sin()), dim=-1)
        drop = self.y_embedders[0].draw(y) if self.one_draw else None
        c = [
            embed(time) + label(y, drop)
            for embed, label in zip(self.t_embedders, self.y_embedders, strict=True)
        ]
        skip = self.blocks[0](self.x_embedder(x), c[0])
        middle = self.blocks[1](self.down(skip), c[1])
        return self.final(self.blocks[2](self.up(middle) + skip, c[2]))


def buggy() -> nn.Module:
    """A draw per stage."""
    return UDiT(one_draw=False)


def healthy() -> nn.Module:
    """One draw for all stages."""
    return UDiT(one_draw=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Latents of 8 x 8 with a time and a label."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        rows = torch.ones(len(x), dtype=torch.long, device=x.device)
        return model(x, 107 * rows, 3 * rows)

    return ModelSpec.of(
        make,
        make_batch=lambda batch_size, _length, generator: torch.randn(
            batch_size, 4, 8, 8, generator=generator
        ),
        forward=forward,
        loss=lambda model, x: F.mse_loss(forward(model, x), x.roll(1, dims=-1)),
        per_position=False,
    )


def observe(model: nn.Module) -> Tensor:
    """Samples of a training batch that lose their label in some stages, but not in all."""
    seen: list[Tensor] = []
    tables = [embedder.embedding_table for embedder in model.y_embedders]
    hooks = [table.register_forward_hook(lambda _m, given, _o: seen.append(given[0])) for table in tables]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model.train()(torch.zeros(64, 4, 4, 4), torch.arange(64), torch.arange(64) % 10)
    for hook in hooks:
        hook.remove()
    lost = torch.stack(seen) == 10
    return (lost.any(dim=0) & ~lost.all(dim=0)).float()
