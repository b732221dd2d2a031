"""YOLO-Master#262 (Tencent/YOLO-Master): recomputation updates the running statistics of BatchNorm again.

Outputs and gradients of a training step are right. Each step moves the statistics of checkpointed layers
twice, and evaluation uses them. https://github.com/Tencent/YOLO-Master/issues/262
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stackwise import ModelSpec


class Conv(nn.Module):
    """Convolution, BatchNorm, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(outputs), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return self.act(self.bn(self.conv(x)))


class PSABlock(nn.Module):
    """Attention over positions, with convolutions as projections."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj, self.pe = Conv(dim, 3 * dim, 1), Conv(dim, dim, 1), Conv(dim, dim)
        self.ffn = nn.Sequential(Conv(dim, 2 * dim, 1), Conv(2 * dim, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        q, k, v = (
            y.flatten(2).transpose(1, 2).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(x).chunk(3, dim=1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(1, 2)
        x = x + self.proj(attended.unflatten(2, x.shape[2:]) + self.pe(x))
        return x + self.ffn(x)


@contextlib.contextmanager
def kept_statistics(module: nn.Module) -> Iterator[None]:
    """Leave running statistics as they are."""
    norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm2d)]
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(tracked)


class Backbone(nn.Module):
    """Classifier whose stages are recomputed in training."""

    def __init__(self, keeps: bool, dim: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.keeps, self.gradient_checkpointing = keeps, True
        self.stages = nn.ModuleList(
            (Conv(3, dim, 3, 2), nn.Sequential(Conv(dim, dim, 3, 2), Conv(dim, dim)), PSABlock(dim, 2))
        )
        self.head = nn.Linear(dim, classes)

    def _apply_checkpointing(self, stage: nn.Module, x: Tensor) -> Tensor:
        if not self.keeps:
            return checkpoint(stage, x, use_reentrant=False)
        return checkpoint(
            stage,
            x,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), kept_statistics(stage)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Class logits of images (batch, 3, height, width)."""
        for stage in self.stages:
            recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
            x = self._apply_checkpointing(stage, x) if recompute else stage(x)
        return self.head(x.mean(dim=(2, 3)))


def buggy() -> nn.Module:
    """Recomputes with BatchNorm in training mode."""
    return Backbone(keeps=False)


def healthy() -> nn.Module:
    """Keeps the statistics in the recomputation."""
    return Backbone(keeps=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Images and a loss of classes."""

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        return F.cross_entropy(model(images), torch.arange(len(images), device=images.device) % 5)

    return ModelSpec.of(
        make,
        make_batch=lambda batch_size, _length, generator: torch.randn(
            batch_size, 3, 16, 16, generator=generator
        ),
        per_position=False,
        loss=loss,
    )


def observe(model: nn.Module) -> Tensor:
    """Batches that a BatchNorm counts in one training step, less 1."""
    model.train()(torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))).sum().backward()
    return model.stages[0].bn.num_batches_tracked.float() - 1
