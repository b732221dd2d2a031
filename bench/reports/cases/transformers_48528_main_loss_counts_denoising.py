"""transformers#48528 (huggingface/transformers): RT-DETR's main loss matches objects to denoising queries.

In training, noisy copies of the objects are added in front of the queries. The losses of earlier layers leave
them out. The main loss, that of the last layer, does not. Its objects are matched to the noisy copies, and
the last layer learns that the queries that are used at inference are background.
"""

from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

IMAGE, LABELS, QUERIES, GROUPS = 16, 5, 6, 2


def inverse_sigmoid(x: Tensor) -> Tensor:
    """Return the logit of a number between 0 and 1."""
    return x.clamp(1e-5, 1 - 1e-5).logit()


def generalized_box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the generalised overlap of boxes (..., 4) as centre and size."""
    (a0, a1), (b0, b1) = (
        (x[..., :2] - x[..., 2:] / 2, x[..., :2] + x[..., 2:] / 2) for x in torch.broadcast_tensors(a, b)
    )
    inter = (a1.minimum(b1) - a0.maximum(b0)).clamp(min=0).prod(dim=-1)
    union = (a1 - a0).prod(dim=-1) + (b1 - b0).prod(dim=-1) - inter
    hull = (a1.maximum(b1) - a0.minimum(b0)).prod(dim=-1)
    return inter / union - (hull - union) / hull


class RTDetrDecoderLayer(nn.Module):
    """Attention among the queries, attention to the pixels, and a feed-forward network."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.encoder_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x: Tensor, pos: Tensor, memory: Tensor, attn_mask: Tensor | None) -> Tensor:
        """`x` is (batch, queries, dim). `attn_mask` is True where attention is not allowed."""
        q = x + pos
        x = self.norm1(x + self.self_attn(q, q, x, attn_mask=attn_mask, need_weights=False)[0])
        x = self.norm2(x + self.encoder_attn(x + pos, memory, memory, need_weights=False)[0])
        return self.norm3(x + self.ffn(x))


class RTDetrForObjectDetection(nn.Module):
    """Image -> classes and boxes of the queries, and the loss if there are labels."""

    def __init__(self, *, splits_main: bool, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.splits_main = splits_main
        self.backbone = nn.Sequential(
            nn.Conv2d(3, dim, 4, stride=4), nn.GroupNorm(4, dim), nn.ReLU(), nn.Conv2d(dim, dim, 1)
        )
        self.pixel_positions = nn.Parameter(torch.randn((IMAGE // 4) ** 2, dim) * 0.1)
        self.weight_embedding = nn.Embedding(QUERIES, dim)
        self.reference_points = nn.Parameter(torch.randn(QUERIES, 4))
        self.denoising_class_embed = nn.Embedding(LABELS, dim)
        self.query_pos_head = nn.Sequential(nn.Linear(4, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(RTDetrDecoderLayer(dim, heads) for _ in range(2))
        self.class_embed = nn.ModuleList(nn.Linear(dim, LABELS) for _ in range(2))
        self.bbox_embed = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4)) for _ in range(2)
        )
        for head in self.class_embed:
            nn.init.constant_(head.bias, -2.0)

    def denoising_queries(self, labels: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return groups of copies with little and with much noise, and the attention mask."""
        n = 2 * labels.shape[1]
        labels, boxes = labels.repeat(1, 2 * GROUPS), boxes.repeat(1, 2 * GROUPS, 1)
        flip = torch.rand(labels.shape, device=labels.device) < 0.25
        labels = torch.where(flip, torch.randint_like(labels, LABELS), labels)
        much = (torch.arange(labels.shape[1], device=labels.device) % n >= n // 2).to(boxes)[:, None]
        noise = (torch.rand_like(boxes) + much) * (torch.randint_like(boxes, 2) * 2 - 1)
        noisy = (boxes + noise * boxes[..., 2:].repeat(1, 1, 2) / 4).clamp(0.01, 0.99)
        group = torch.arange(GROUPS * n + QUERIES, device=labels.device).div(n, rounding_mode="floor")
        group = group.clamp(max=GROUPS)
        # A query sees its own group, and copies see the other queries.
        mask = (group[:, None] != group) & (group != GROUPS)
        return self.denoising_class_embed(labels), noisy, mask

    def forward(self, pixel_values: Tensor, labels: dict[str, Tensor] | None = None) -> SimpleNamespace:
        """`labels` has `class_labels` (batch, objects) and `boxes` (batch, objects, 4)."""
        memory = self.backbone(pixel_values).flatten(2).transpose(1, 2) + self.pixel_positions
        x = self.weight_embedding.weight.expand(len(memory), -1, -1)
        reference, mask = self.reference_points.sigmoid().expand(len(memory), -1, -1), None
        dn = 0
        if self.training and labels is not None:
            copies, noisy, mask = self.denoising_queries(labels["class_labels"], labels["boxes"])
            x, reference = torch.cat([copies, x], dim=1), torch.cat([noisy, reference], dim=1)
            dn = copies.shape[1]
        outputs = []
        for layer, class_embed, bbox_embed in zip(
            self.layers, self.class_embed, self.bbox_embed, strict=True
        ):
            x = layer(x, self.query_pos_head(reference), memory, mask)
            boxes = (bbox_embed(x) + inverse_sigmoid(reference)).sigmoid()
            outputs.append((class_embed(x), boxes))
            reference = boxes.detach()
        loss = None
        if labels is not None:
            loss = self.main_loss(*outputs[-1], labels, dn)
            for logits, boxes in outputs[:-1]:
                loss = loss + self.matched_loss(logits[:, dn:], boxes[:, dn:], labels)
            for logits, boxes in outputs if dn else ():
                loss = loss + self.denoising_loss(logits[:, :dn], boxes[:, :dn], labels)
        logits, boxes = outputs[-1]
        return SimpleNamespace(loss=loss, logits=logits[:, dn:], pred_boxes=boxes[:, dn:])

    def main_loss(self, logits: Tensor, boxes: Tensor, labels: dict[str, Tensor], dn: int) -> Tensor:
        """Return the loss of the last layer, whose first `dn` queries are for denoising."""
        if self.splits_main:
            logits, boxes = logits[:, dn:], boxes[:, dn:]
        return self.matched_loss(logits, boxes, labels)

    def matched_loss(self, logits: Tensor, boxes: Tensor, labels: dict[str, Tensor]) -> Tensor:
        """Return the loss with the best assignment of queries to objects."""
        classes, targets = labels["class_labels"], labels["boxes"]
        with torch.no_grad():
            pairs = boxes[:, :, None], targets[:, None]
            scores = logits.sigmoid().gather(2, classes[:, None].expand(-1, logits.shape[1], -1))
            cost = 5 * (pairs[0] - pairs[1]).abs().sum(dim=-1) - 2 * generalized_box_iou(*pairs) - 2 * scores
            choices = torch.tensor(list(permutations(range(logits.shape[1]), classes.shape[1])))
            choices = choices.to(logits.device)
            at = torch.arange(classes.shape[1], device=logits.device)
            query = choices[cost[:, choices, at].sum(dim=-1).argmin(dim=1)]
        return self.set_loss(logits, boxes, query, classes, targets)

    def denoising_loss(self, logits: Tensor, boxes: Tensor, labels: dict[str, Tensor]) -> Tensor:
        """Return the loss of the copies: those with little noise belong to their objects."""
        n = labels["class_labels"].shape[1]
        at = torch.arange(GROUPS * n, device=logits.device)
        query = (2 * n * at.div(n, rounding_mode="floor") + at % n).expand(len(logits), -1)
        targets = labels["class_labels"].repeat(1, GROUPS), labels["boxes"].repeat(1, GROUPS, 1)
        return self.set_loss(logits, boxes, query, *targets)

    def set_loss(
        self, logits: Tensor, boxes: Tensor, query: Tensor, classes: Tensor, targets: Tensor
    ) -> Tensor:
        """Return the focal loss of all queries and the box losses of the matched ones."""
        rows = torch.arange(len(logits), device=logits.device)[:, None]
        wanted = torch.zeros_like(logits)
        wanted[rows, query, classes] = 1
        p = logits.sigmoid()
        weight = torch.where(wanted > 0, 0.75 * (1 - p).square(), 0.25 * p.square())
        focal = (weight * F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")).sum()
        chosen = boxes[rows, query]
        l1, giou = (chosen - targets).abs().sum(), (1 - generalized_box_iou(chosen, targets)).sum()
        return (focal + 5 * l1 + 2 * giou) / classes.numel()


def buggy() -> nn.Module:
    """Match all queries."""
    return RTDetrForObjectDetection(splits_main=False)


def healthy() -> nn.Module:
    """Match the queries behind the noisy copies."""
    return RTDetrForObjectDetection(splits_main=True)


def _labels(images: Tensor) -> dict[str, Tensor]:
    """Return two objects for each image."""
    boxes = torch.tensor([[0.3, 0.3, 0.4, 0.2], [0.7, 0.6, 0.2, 0.4]]).to(images)
    classes = torch.tensor([1, 3], device=images.device)
    return {"class_labels": classes.expand(len(images), -1), "boxes": boxes.expand(len(images), -1, -1)}


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State images and the loss of two objects."""
    return ModelSpec.of(
        make,
        make_batch=_make_batch,
        per_position=False,
        forward=lambda model, images: model(images).logits,
        loss=lambda model, images: model(images, labels=_labels(images)).loss,
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the change of the main loss with the predictions of four denoising queries."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4 + QUERIES, LABELS, generator=generator)
    boxes = torch.rand(2, 4 + QUERIES, 4, generator=generator) * 0.8 + 0.1
    labels = _labels(logits)
    other = torch.cat([logits[:, :4] + 3, logits[:, 4:]], dim=1)
    return model.main_loss(other, boxes, labels, 4) - model.main_loss(logits, boxes, labels, 4)
