"""torch-rechub#176 (datawhalechina/torch-rechub): the initialiser gives padding an embedding like any item.

The initialisers build the table without `padding_idx`, so row 0 is random and is trained. DIN sums weighted
histories and relies on an embedding of zero for padding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class RandomNormal:
    """Initialiser that builds embedding tables."""

    def __init__(self, std: float = 0.3, *, knows_padding: bool) -> None:
        self.std, self.knows_padding = std, knows_padding

    def __call__(self, vocab_size: int, embed_dim: int, padding_idx: int | None = None) -> nn.Embedding:
        """Return a table."""
        padding_idx = padding_idx if self.knows_padding else None
        embed = nn.Embedding(vocab_size, embed_dim, padding_idx=padding_idx)
        nn.init.normal_(embed.weight, 0.0, self.std)
        if padding_idx is not None:
            nn.init.zeros_(embed.weight[padding_idx])
        return embed


class ActivationUnit(nn.Module):
    """Weighted sum of a history, with a weight from each item and the target."""

    def __init__(self, emb_dim: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(4 * emb_dim, 36), nn.PReLU(), nn.Linear(36, 1))

    def forward(self, history: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """`history` is (batch, items, emb_dim), `target` is (batch, emb_dim)."""
        target = target[:, None].expand_as(history)
        pairs = torch.cat([target, history, target - history, target * history], dim=-1)
        return (self.attention(pairs) * history).sum(dim=1)


class DIN(nn.Module):
    """Predicts a click on a target item from the history of a user; 0 is padding."""

    def __init__(self, *, knows_padding: bool, vocab_size: int = 80, embed_dim: int = 16) -> None:
        super().__init__()
        self.embedding = RandomNormal(knows_padding=knows_padding)(vocab_size, embed_dim, padding_idx=0)
        self.attention_layer = ActivationUnit(embed_dim)
        self.mlp = nn.Sequential(nn.Linear(2 * embed_dim, 32), nn.PReLU(), nn.Linear(32, 1))

    def forward(self, history: torch.Tensor, target_item: torch.Tensor) -> torch.Tensor:
        """Return the logit (batch, 1) of a click; `history` is (batch, items)."""
        target = self.embedding(target_item)
        pooled = self.attention_layer(self.embedding(history), target)
        return self.mlp(torch.cat([pooled, target], dim=-1))


def buggy() -> nn.Module:
    """Row 0 is random."""
    return DIN(knows_padding=False)


def healthy() -> nn.Module:
    """Row 0 is zero and stays zero."""
    return DIN(knows_padding=True)


def _called(model: nn.Module, history: torch.Tensor) -> torch.Tensor:
    return model(history, torch.full_like(history[:, 0], 7))


def _loss(model: nn.Module, history: torch.Tensor) -> torch.Tensor:
    clicks = (history % 2).float().mean(dim=1, keepdim=True).round()
    logits = _called(model, history)
    return F.binary_cross_entropy_with_logits(logits, clicks.to(logits.dtype))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Padding is 0, on both sides."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=80,
        per_position=False,
        causal=False,
        forward=_called,
        loss=_loss,
        make_batch=lambda rows, length, generator: torch.randint(1, 80, (rows, length), generator=generator),
        padding_sides=("left", "right"),
        masked=lambda model, history, keep: _called(model, history * keep),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Logit of a padded history minus that of the history alone."""
    model = model.double().eval()
    history, target = torch.tensor([[5, 33, 71]]), torch.tensor([9])
    return model(F.pad(history, (0, 4)), target) - model(history, target)
