"""pytorch-semseg#1 (meetps/pytorch-semseg): the skip connections of the U-Net start after the pooling.

They carry features of half the size, which are padded with zeros to the size of the upsampled ones. Pixels
near the border get no skip connection, the others that of another place. U-Net takes features before pooling.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

IMAGE, CLASSES = 16, 4


def unet_conv2(in_size: int, out_size: int) -> nn.Sequential:
    """Return two convolutions with batch norm."""
    return nn.Sequential(
        nn.Conv2d(in_size, out_size, 3, padding=1),
        nn.BatchNorm2d(out_size),
        nn.ReLU(),
        nn.Conv2d(out_size, out_size, 3, padding=1),
        nn.BatchNorm2d(out_size),
        nn.ReLU(),
    )


class UnetDown(nn.Module):
    """Convolutions and pooling."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.conv, self.down = unet_conv2(in_size, out_size), nn.MaxPool2d(2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features before and after pooling."""
        outputs = self.conv(inputs)
        return outputs, self.down(outputs)


class UnetUp(nn.Module):
    """Upsampling, and convolutions that read the skip connection as well."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(in_size, out_size, kernel_size=2, stride=2)
        self.conv = unet_conv2(in_size, out_size)

    def forward(self, inputs1: Tensor, inputs2: Tensor) -> Tensor:
        """`inputs1` is the skip connection, `inputs2` is to be upsampled."""
        outputs2 = self.up(inputs2)
        offset = (outputs2.shape[2] - inputs1.shape[2]) // 2
        return self.conv(torch.cat([F.pad(inputs1, 4 * [offset]), outputs2], dim=1))


class UNet(nn.Module):
    """Image -> logits of classes at each pixel."""

    def __init__(self, *, before_pooling: bool, filters: tuple[int, int, int] = (8, 16, 32)) -> None:
        super().__init__()
        self.before_pooling = before_pooling
        self.down1, self.down2 = UnetDown(3, filters[0]), UnetDown(filters[0], filters[1])
        self.center = unet_conv2(filters[1], filters[2])
        self.up2, self.up1 = UnetUp(filters[2], filters[1]), UnetUp(filters[1], filters[0])
        self.final = nn.Conv2d(filters[0], CLASSES, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs` is (batch, 3, height, width), both multiples of 4."""
        conv1, down1 = self.down1(inputs)
        conv2, down2 = self.down2(down1)
        center = self.center(down2)
        up2 = self.up2(conv2 if self.before_pooling else down2, center)
        up1 = self.up1(conv1 if self.before_pooling else down1, up2)
        return self.final(up1)


def buggy() -> nn.Module:
    """Concatenate features after pooling."""
    return UNet(before_pooling=False)


def healthy() -> nn.Module:
    """Concatenate features before pooling."""
    return UNet(before_pooling=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator)


def _loss(model: nn.Module, images: Tensor) -> Tensor:
    """Return the cross-entropy of classes that follow from the sign of two colours."""
    return F.cross_entropy(model(images), (images[:, 0] > 0).long() + 2 * (images[:, 1] > 0).long())


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State images and the loss of their pixels."""
    return ModelSpec.of(make, make_batch=_make_batch, per_position=False, causal=False, loss=_loss)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return by how many rows the last skip connection is smaller than the image."""
    skips: list[Tensor] = []
    handle = model.up1.register_forward_pre_hook(lambda _, inputs: skips.append(inputs[0]))
    model.eval()(_make_batch(1, 0, torch.Generator().manual_seed(1)))
    handle.remove()
    return torch.tensor(IMAGE - skips[0].shape[2])
