"""Fast-LLM#442 (ServiceNow/Fast-LLM): the loss mask is applied to the language loss, not to distillation.

Labels of -100 mark tokens without a loss. The distillation term of the head averages over all positions.
https://github.com/ServiceNow/Fast-LLM/issues/442
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class Decoder(nn.Module):
    """Causal transformer."""

    def __init__(self, vocab_size: int, dim: int, depth: int) -> None:
        super().__init__()
        self.embed_tokens, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        length = input_ids.shape[1]
        x = self.embed_tokens(input_ids) + self.positions.weight[:length]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.layers(x, later))


class DistilledLM(nn.Module):
    """Student that learns from labels and from a frozen teacher."""

    def __init__(self, masked: bool, vocab_size: int = 48, dim: int = 32) -> None:
        super().__init__()
        self.masked, self.distillation_weight = masked, 0.5
        self.student = Decoder(vocab_size, dim, 2)
        self.teacher = Decoder(vocab_size, 2 * dim, 2).requires_grad_(False)

    def distillation(self, logits: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy with the distribution of the teacher."""
        with torch.no_grad():
            target = self.teacher(input_ids)[:, :-1].softmax(-1)
        per_token = -(target * logits.log_softmax(-1)).sum(-1)
        if not self.masked:
            return per_token.mean()
        used = (labels != -100).to(per_token.dtype)
        return (per_token * used).sum() / used.sum().clamp(min=1)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        """Logits, and the loss if there are labels, which are shifted here."""
        logits, loss = self.student(input_ids), None
        if labels is not None:
            targets = labels[:, 1:]
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
            loss = loss + self.distillation_weight * self.distillation(logits[:, :-1], input_ids, targets)
        return SimpleNamespace(loss=loss, logits=logits)


def buggy() -> nn.Module:
    """Distils all positions."""
    return DistilledLM(masked=False)


def healthy() -> nn.Module:
    """Distils positions with a label."""
    return DistilledLM(masked=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The teacher is frozen; labels of -100 have no loss."""
    return ModelSpec.of(
        make,
        causal=True,
        frozen=("teacher",),
        loss=lambda model, ids: model(ids, labels=ids).loss,
        labelled_loss=lambda model, ids, labels: model(ids, labels=labels).loss,
    )


def observe(model: nn.Module) -> Tensor:
    """Gradient of the loss in logits of positions without a label."""
    ids = torch.randint(0, 48, (2, 10), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :6] = -100
    out = model.eval()(ids, labels=labels)
    (gradient,) = torch.autograd.grad(out.loss, out.logits)
    return gradient[:, :5]
