"""torchaudio#4205 (pytorch/audio): the convolution module of the Conformer ignores `lengths`.

Its depthwise convolution mixes padded frames into the last real ones and batch norm counts padded frames.
"""

import torch
from torch import nn

DECLARATION = "frames beyond `lengths` are padding and change nothing in the real frames"


class FrameBatchNorm(nn.BatchNorm1d):
    """Batch norm that can leave frames out of its statistics."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """`x` is (batch, channels, time), `keep` is (batch, time)."""
        if keep is None:
            return super().forward(x)
        frames = x.transpose(1, 2)
        out = torch.zeros_like(frames)
        out[keep] = super().forward(frames[keep])
        return out.transpose(1, 2)


class ConvolutionModule(nn.Module):
    """Gated pointwise, depthwise, norm, pointwise."""

    def __init__(self, dim: int, kernel: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(dim)
        self.pointwise_in = nn.Conv1d(dim, 2 * dim, 1)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=(kernel - 1) // 2, groups=dim)
        self.norm = FrameBatchNorm(dim)
        self.pointwise_out = nn.Conv1d(dim, dim, 1)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """`x` is (batch, time, dim)."""
        y = nn.functional.glu(self.pointwise_in(self.layer_norm(x).transpose(1, 2)), dim=1)
        if keep is not None:
            # Its bias fills the padding, however empty the input was.
            y = y * keep[:, None]
        y = nn.functional.silu(self.norm(self.depthwise(y), keep))
        return self.pointwise_out(y).transpose(1, 2)


def feed_forward(dim: int) -> nn.Sequential:
    """Half of a macaron."""
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))


class ConformerLayer(nn.Module):
    """Feed-forward, attention, convolution, feed-forward."""

    def __init__(self, dim: int, heads: int, kernel: int, *, mask_conv: bool) -> None:
        super().__init__()
        self.mask_conv = mask_conv
        self.ffn1, self.ffn2 = feed_forward(dim), feed_forward(dim)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.conv_module = ConvolutionModule(dim, kernel)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """`padding` is True at frames beyond a length."""
        x = x + 0.5 * self.ffn1(x)
        y = self.self_attn_layer_norm(x)
        x = x + self.self_attn(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        x = x + self.conv_module(x, ~padding if self.mask_conv else None)
        x = x + 0.5 * self.ffn2(x)
        return self.final_layer_norm(x)


class Conformer(nn.Module):
    """Stack of Conformer layers over feature frames."""

    def __init__(
        self, dim: int = 32, heads: int = 4, layers: int = 2, kernel: int = 5, *, mask_conv: bool
    ) -> None:
        super().__init__()
        self.conformer_layers = nn.ModuleList(
            ConformerLayer(dim, heads, kernel, mask_conv=mask_conv) for _ in range(layers)
        )

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`frames` is (batch, time, dim); returns the frames and their lengths."""
        padding = torch.arange(frames.shape[1], device=frames.device) >= lengths[:, None]
        for layer in self.conformer_layers:
            frames = layer(frames, padding)
        return frames, lengths


def buggy() -> nn.Module:
    """The convolution module never hears of the lengths."""
    return Conformer(mask_conv=False)


def healthy() -> nn.Module:
    """Padding is emptied before the convolution and left out of batch norm."""
    return Conformer(mask_conv=True)


def observe(model: nn.Module) -> torch.Tensor:
    """Seven frames alone, minus the same frames padded with zeros in a batch with a longer row."""
    model.eval()
    gen = torch.Generator().manual_seed(1)
    short, long = torch.randn(1, 7, 32, generator=gen), torch.randn(1, 12, 32, generator=gen)
    batch = torch.cat([nn.functional.pad(short, (0, 0, 0, 5)), long])
    with torch.no_grad():
        alone = model(short, torch.tensor([7]))[0]
        return model(batch, torch.tensor([7, 12]))[0][:1, :7] - alone
