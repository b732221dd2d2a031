"""labml#66 (labmlai/annotated_deep_learning_paper_implementations): the teacher is distilled into itself.

Both distributions of the soft loss come from the logits of the large model. The loss is 0, and the small
model learns nothing from the large one.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

IMAGE, PATCH, CHANNELS, CLASSES = 8, 2, 3, 10


class TransformerLayer(nn.Module):
    """Pre-norm layer."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_self_attn, self.norm_ff = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.output = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, patches, d_model)."""
        y = self.qkv(self.norm_self_attn(x))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in y.chunk(3, dim=-1))
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_ff(x))


class VisionTransformer(nn.Module):
    """Image classifier of the mean over patches."""

    def __init__(self, d_model: int, layers: int) -> None:
        super().__init__()
        self.patch_emb = nn.Conv2d(CHANNELS, d_model, PATCH, PATCH)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, (IMAGE // PATCH) ** 2, d_model))
        self.transformer_layers = nn.Sequential(*(TransformerLayer(d_model, 4) for _ in range(layers)))
        self.ln, self.classification = nn.LayerNorm(d_model), nn.Linear(d_model, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of images."""
        x = self.patch_emb(x).flatten(2).transpose(1, 2) + self.pos_emb
        return self.classification(self.ln(self.transformer_layers(x).mean(dim=1)))


class Distillation(nn.Module):
    """Small model that learns from labels and from the frozen large model."""

    def __init__(self, *, uses_output: bool, temperature: float = 5.0) -> None:
        super().__init__()
        self.uses_output, self.temperature = uses_output, temperature
        self.soft_targets_weight, self.label_loss_weight = 100.0, 0.5
        self.model, self.large = VisionTransformer(16, 2), VisionTransformer(32, 2).requires_grad_(False)
        self.kl_div_loss, self.loss_func = nn.KLDivLoss(reduction="batchmean"), nn.CrossEntropyLoss()

    def soft_loss(self, output: torch.Tensor, large_logits: torch.Tensor) -> torch.Tensor:
        """Return the divergence of the small model from the large one."""
        soft_targets = (large_logits / self.temperature).softmax(dim=-1)
        logits = output if self.uses_output else large_logits
        return self.kl_div_loss((logits / self.temperature).log_softmax(dim=-1), soft_targets)

    def forward(self, data: torch.Tensor, target: torch.Tensor | None = None) -> SimpleNamespace:
        """Return logits of the small model, and the loss if there are classes."""
        output, loss = self.model(data), None
        if target is not None:
            with torch.no_grad():
                large_logits = self.large(data)
            loss = self.soft_targets_weight * self.soft_loss(output, large_logits)
            loss = loss + self.label_loss_weight * self.loss_func(output, target)
        return SimpleNamespace(loss=loss, logits=output)


def buggy() -> nn.Module:
    """The logits of the large model on both sides."""
    return Distillation(uses_output=False)


def healthy() -> nn.Module:
    """The logits of the small model."""
    return Distillation(uses_output=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, CHANNELS, IMAGE, IMAGE, generator=generator)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x, torch.arange(len(x), device=x.device) % CLASSES).loss


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the images, the loss and the frozen model."""
    return ModelSpec.of(
        make,
        make_batch=_make_batch,
        forward=lambda model, x: model(x).logits,
        loss=_loss,
        per_position=False,
        frozen=("large",),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the soft loss minus the divergence of two given distributions."""
    output, large_logits = torch.randn(2, 4, CLASSES, generator=torch.Generator().manual_seed(1)).mul(3)
    p, q = (large_logits / 5).softmax(dim=-1), (output / 5).softmax(dim=-1)
    return model.soft_loss(output, large_logits) - (p * (p.log() - q.log())).sum(dim=-1).mean()
