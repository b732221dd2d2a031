"""audiolm-pytorch#166 (lucidrains/audiolm-pytorch): strided causal convolutions never read the last samples.

`CausalConv1d` pads `dilation * (kernel_size - 1)` on the left for every stride. The kernel of a step then
ends at the first sample of its stride, so the last samples of the audio reach no code. The padding should
be `dilation * (kernel_size - 1) + 1 - stride`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

STRIDES = (2, 2)
FRAME = 4


class CausalConv1d(nn.Module):
    """Convolution with padding on the left."""

    def __init__(
        self,
        chan_in: int,
        chan_out: int,
        kernel_size: int,
        *,
        dilation: int = 1,
        stride: int = 1,
        short: bool,
    ) -> None:
        super().__init__()
        self.causal_padding = dilation * (kernel_size - 1) + (1 - stride if short else 0)
        self.conv = nn.Conv1d(chan_in, chan_out, kernel_size, dilation=dilation, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, channels, time)."""
        return self.conv(F.pad(x, (self.causal_padding, 0)))


class CausalConvTranspose1d(nn.Module):
    """Transposed convolution whose output ends with the stride of the last input."""

    def __init__(self, chan_in: int, chan_out: int, kernel_size: int, *, stride: int) -> None:
        super().__init__()
        self.upsample_factor = stride
        self.conv = nn.ConvTranspose1d(chan_in, chan_out, kernel_size, stride)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, channels, time)."""
        return self.conv(x)[..., : x.shape[-1] * self.upsample_factor]


class ResidualUnit(nn.Module):
    """Dilated convolution and convolution of size 1, added to the input."""

    def __init__(self, chan: int, dilation: int, *, short: bool) -> None:
        super().__init__()
        self.fn = nn.Sequential(
            CausalConv1d(chan, chan, 7, dilation=dilation, short=short),
            nn.ELU(),
            CausalConv1d(chan, chan, 1, short=short),
            nn.ELU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the unit to (batch, channels, time)."""
        return x + self.fn(x)


class SoundStream(nn.Module):
    """Autoencoder of audio. Its quantiser is left out."""

    def __init__(self, *, short: bool, channels: int = 16, codebook_dim: int = 32) -> None:
        super().__init__()
        encoder: list[nn.Module] = [CausalConv1d(1, channels, 7, short=short)]
        decoder: list[nn.Module] = [CausalConv1d(codebook_dim, channels, 7, short=short)]
        for stride in STRIDES:
            down = CausalConv1d(channels, channels, 2 * stride, stride=stride, short=short)
            encoder += [ResidualUnit(channels, 1, short=short), ResidualUnit(channels, 3, short=short), down]
            up = CausalConvTranspose1d(channels, channels, 2 * stride, stride=stride)
            decoder += [up, ResidualUnit(channels, 1, short=short), ResidualUnit(channels, 3, short=short)]
        self.encoder = nn.Sequential(*encoder, CausalConv1d(channels, codebook_dim, 3, short=short))
        self.decoder = nn.Sequential(*decoder, CausalConv1d(channels, 1, 7, short=short))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, samples); silence is added at the end of an incomplete frame."""
        frames = F.pad(x, (0, -x.shape[1] % FRAME))
        return self.decoder(self.encoder(frames[:, None]))[:, 0, : x.shape[1]]


def buggy() -> nn.Module:
    """Pad as if the stride were 1."""
    return SoundStream(short=False)


def healthy() -> nn.Module:
    """Pad less for larger strides."""
    return SoundStream(short=True)


def _visible(x: Tensor) -> Tensor:
    frame = torch.arange(x.shape[1], device=x.device) // FRAME
    return frame[:, None] >= frame


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State audio that sees its own and earlier frames, and the loss of its reconstruction."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=1,
        forward=lambda model, x: model(x[..., 0])[..., None],
        loss=lambda model, x: F.mse_loss(model(x[..., 0]), x[..., 0]),
        visible=_visible,
    )


def observe(model: nn.Module) -> Tensor:
    """Return the number of samples, of 16, that change no output."""
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model(x).square().sum().backward()
    return (x.grad == 0).sum()
