"""neural_sp#146 (hirofumi0810/neural_sp): Conformer blocks run the convolution before the self-attention.

The block calls its convolution module and then its self-attention. The Conformer (arXiv:2005.08100) has them
the other way round: the convolution comes after the attention, between it and the second feed-forward part.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

FEATURES, VOCAB = 20, 50


class RelMHA(nn.Module):
    """Self-attention with relative positions."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.w_query, self.w_key, self.w_value, self.w_out = (nn.Linear(d_model, d_model) for _ in range(4))
        self.w_pos = nn.Linear(d_model, d_model, bias=False)

    def forward(self, xs: Tensor, pos_embs: Tensor) -> Tensor:
        """`xs` is (batch, time, d_model). `pos_embs` has the distances 1 - time to time - 1."""
        q, k, v = (
            w(xs).unflatten(-1, (self.n_heads, self.d_k)).transpose(1, 2)
            for w in (self.w_query, self.w_key, self.w_value)
        )
        p = self.w_pos(pos_embs).unflatten(-1, (self.n_heads, self.d_k)).transpose(0, 1)
        at = torch.arange(xs.shape[1], device=xs.device)
        by_distance = (q @ p.transpose(1, 2)).gather(
            -1, (at - at[:, None] + len(at) - 1).expand(len(xs), self.n_heads, -1, -1)
        )
        aws = ((q @ k.transpose(2, 3) + by_distance) / self.d_k**0.5).softmax(dim=-1)
        return self.w_out((aws @ v).transpose(1, 2).flatten(2))


class ConformerConvBlock(nn.Module):
    """Pointwise, gate, depthwise, norm, swish, pointwise."""

    def __init__(self, d_model: int, kernel_size: int) -> None:
        super().__init__()
        self.pointwise_conv1 = nn.Conv1d(d_model, 2 * d_model, 1)
        self.depthwise_conv = nn.Conv1d(
            d_model, d_model, kernel_size, padding=kernel_size // 2, groups=d_model
        )
        self.norm, self.pointwise_conv2 = nn.LayerNorm(d_model), nn.Conv1d(d_model, d_model, 1)

    def forward(self, xs: Tensor) -> Tensor:
        """`xs` is (batch, time, d_model)."""
        xs = self.depthwise_conv(F.glu(self.pointwise_conv1(xs.transpose(1, 2)), dim=1))
        xs = F.silu(self.norm(xs.transpose(1, 2)))
        return self.pointwise_conv2(xs.transpose(1, 2)).transpose(1, 2)


def feed_forward(d_model: int) -> nn.Sequential:
    """Return a feed-forward network of the macaron."""
    return nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.SiLU(), nn.Linear(2 * d_model, d_model))


class ConformerEncoderBlock(nn.Module):
    """Half feed-forward, self-attention, convolution, half feed-forward, norm."""

    def __init__(self, d_model: int, n_heads: int, kernel_size: int, *, conv_first: bool) -> None:
        super().__init__()
        self.conv_first, self.fc_factor = conv_first, 0.5
        self.norm1, self.norm2, self.norm3, self.norm4, self.norm5 = (nn.LayerNorm(d_model) for _ in range(5))
        self.feed_forward_macaron, self.feed_forward = feed_forward(d_model), feed_forward(d_model)
        self.self_attn, self.conv = RelMHA(d_model, n_heads), ConformerConvBlock(d_model, kernel_size)

    def forward(self, xs: Tensor, pos_embs: Tensor) -> Tensor:
        """`xs` is (batch, time, d_model)."""
        xs = xs + self.fc_factor * self.feed_forward_macaron(self.norm1(xs))
        if self.conv_first:
            xs = xs + self.conv(self.norm3(xs))
        xs = xs + self.self_attn(self.norm2(xs), pos_embs)
        if not self.conv_first:
            xs = xs + self.conv(self.norm3(xs))
        xs = xs + self.fc_factor * self.feed_forward(self.norm4(xs))
        return self.norm5(xs)


class ConformerEncoder(nn.Module):
    """Frames -> logits of tokens at each frame."""

    def __init__(
        self, *, conv_first: bool, d_model: int = 32, n_heads: int = 4, kernel_size: int = 3
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, d_model)
        self.layers = nn.ModuleList(
            ConformerEncoderBlock(d_model, n_heads, kernel_size, conv_first=conv_first) for _ in range(2)
        )
        self.output = nn.Linear(d_model, VOCAB)

    def pos_embs(self, xs: Tensor) -> Tensor:
        """Return sines and cosines of the distances between frames, (2 * time - 1, d_model)."""
        distance = torch.arange(1 - xs.shape[1], xs.shape[1], device=xs.device).to(xs)
        rate = 10000.0 ** (-torch.arange(0, xs.shape[2], 2, device=xs.device).to(xs) / xs.shape[2])
        angles = distance[:, None] * rate
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(self, xs: Tensor) -> Tensor:
        """`xs` is (batch, time, FEATURES)."""
        xs = self.embed(xs)
        pos_embs = self.pos_embs(xs)
        for layer in self.layers:
            xs = layer(xs, pos_embs)
        return self.output(xs)


def buggy() -> nn.Module:
    """Run the convolution first."""
    return ConformerEncoder(conv_first=True)


def healthy() -> nn.Module:
    """Run the self-attention first."""
    return ConformerEncoder(conv_first=False)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State frames without a direction."""
    return ModelSpec.of(make, inputs="vectors", width=FEATURES, causal=False)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the output of a block minus that of its parts in the order of the paper."""
    layer, xs = model.layers[0], torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    pos_embs = model.pos_embs(xs)
    y = xs + layer.feed_forward_macaron(layer.norm1(xs)) / 2
    y = y + layer.self_attn(layer.norm2(y), pos_embs)
    y = y + layer.conv(layer.norm3(y))
    y = y + layer.feed_forward(layer.norm4(y)) / 2
    return layer(xs, pos_embs) - layer.norm5(y)
