"""KDD2023-DCdetector#10 (DAMO-DI-ML/KDD2023-DCdetector): the in-patch view holds neighbouring points.

Row j of that view should hold point j of every patch. The window is split as "(p n)" instead of "(n p)", so
that row j is a block of n neighbouring points. (The report names other differences from the paper, too.)
https://github.com/DAMO-DI-ML/KDD2023-DCdetector/issues/10
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec


class DataEmbedding(nn.Module):
    """Circular convolution over the rows of a view, plus sinusoidal positions."""

    def __init__(self, c_in: int, d_model: int, max_len: int = 100) -> None:
        super().__init__()
        self.token_conv = nn.Conv1d(c_in, d_model, 3, padding=1, padding_mode="circular", bias=False)
        angles = torch.outer(torch.arange(max_len), 10000.0 ** (-torch.arange(0, d_model, 2) / d_model))
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.token_conv(x.mT).mT + self.pe[: x.shape[1]]


class AttentionLayer(nn.Module):
    """Attention between patches, and between the places inside of a patch, with the same projections."""

    def __init__(self, d_model: int, n_heads: int, channel: int) -> None:
        super().__init__()
        self.n_heads, self.channel = n_heads, channel
        self.patch_query, self.patch_key = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def attend(self, x: Tensor) -> Tensor:
        q, k = (w(x).unflatten(-1, (self.n_heads, -1)) for w in (self.patch_query, self.patch_key))
        return (torch.einsum("blhe,bshe->bhls", q, k) / math.sqrt(q.shape[-1])).softmax(dim=-1)

    def forward(self, x_patch_size: Tensor, x_patch_num: Tensor) -> tuple[Tensor, Tensor]:
        n, p = x_patch_size.shape[1], x_patch_num.shape[1]
        series = self.attend(x_patch_size).repeat_interleave(p, dim=2).repeat_interleave(p, dim=3)
        prior = self.attend(x_patch_num).repeat(1, 1, n, n)
        return tuple(x.unflatten(0, (-1, self.channel)).mean(dim=1) for x in (series, prior))


class DCdetector(nn.Module):
    """Two views of a normalised window at several patch sizes. They agree less at anomalies."""

    def __init__(self, *, patches_first: bool, win_size: int = 30, channel: int = 2) -> None:
        super().__init__()
        d_model = 32
        self.patches_first, self.patch_size = patches_first, (3, 5)
        sizes, numbers = self.patch_size, [win_size // p for p in self.patch_size]
        self.embedding_patch_size = nn.ModuleList(DataEmbedding(p, d_model) for p in sizes)
        self.embedding_patch_num = nn.ModuleList(DataEmbedding(n, d_model) for n in numbers)
        self.attn_layers = nn.ModuleList(AttentionLayer(d_model, 2, channel) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Attention maps (B, heads, win_size, win_size) of both views."""
        x = (x - x.mean(dim=1, keepdim=True)) / (x.var(dim=1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        x, maps = x.mT, []
        for i, p in enumerate(self.patch_size):
            patches = x.unflatten(-1, (-1, p)).flatten(0, 1)
            places = patches.mT if self.patches_first else x.unflatten(-1, (p, -1)).flatten(0, 1)
            views = self.embedding_patch_size[i](patches), self.embedding_patch_num[i](places)
            maps += [layer(*views) for layer in self.attn_layers]
        return tuple(map(list, zip(*maps, strict=True)))

    def anomaly_score(self, x: Tensor) -> Tensor:
        """Divergence of both views, (B, win_size)."""
        series, prior = (torch.stack(maps) for maps in self(x))
        log_ratio = (series + 1e-4).log() - (prior / prior.sum(dim=-1, keepdim=True) + 1e-4).log()
        return (series * log_ratio).sum(dim=-1).mean(dim=2).sum(dim=0)


def buggy() -> nn.Module:
    """Rows of neighbouring points."""
    return DCdetector(patches_first=False)


def healthy() -> nn.Module:
    """Rows of one place of every patch."""
    return DCdetector(patches_first=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The score of each point of a window."""
    sizes = {"width": 2, "seq_len": 30, "max_length": 30}
    return ModelSpec.of(make, inputs="vectors", forward=lambda m, x: m.anomaly_score(x)[..., None], **sizes)


def observe(model: nn.Module) -> Tensor:
    """In-patch view of the points 0 to 29 with patches of 3, as numbers of points."""
    seen: list[Tensor] = []
    model.embedding_patch_num[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.arange(30.0)[None, :, None].expand(1, 30, 2))
    return (seen[0][0] * 30 / math.sqrt(12) + 14.5).round().int()
