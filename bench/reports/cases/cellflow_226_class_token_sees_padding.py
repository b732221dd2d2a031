"""CellFlow#226 (theislab/CellFlow): the class token that pools a set looks at padded slots as well.

Only the output of that token is used, so the mask has no effect and padding changes the embedding of a set.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from stackwise import ModelSpec

DECLARATION = "slots that hold the mask value are padding and do not change the embedding of a set"


class TokenAttentionPooling(nn.Module):
    """Aggregates a set by attention from a learned class token."""

    def __init__(self, dim: int, num_heads: int = 4, *, mask_class_token: bool) -> None:
        super().__init__()
        self.num_heads, self.mask_class_token = num_heads, mask_class_token
        self.class_token = nn.Embedding(1, dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, set, dim), `mask` is (batch, 1, set, set)."""
        batch, size, _ = x.shape
        token = self.class_token(torch.zeros(batch, 1, dtype=torch.long, device=x.device))
        z = torch.cat((token, x), dim=1)
        token_mask = torch.zeros(batch, 1, size + 1, size + 1, dtype=torch.bool, device=x.device)
        token_mask[:, :, 0, :] = True
        token_mask[:, :, :, 0] = True
        token_mask[:, :, 1:, 1:] = mask
        if self.mask_class_token:
            token_mask[:, :, 0, 1:] = mask.any(dim=-2)
        q, k, v = (
            p(z).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~token_mask, -1e30)
        z = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        return self.out(z)[:, 0]


class ConditionEncoder(nn.Module):
    """Embeds a set of conditions (a drug with its dose, several drugs at once)."""

    def __init__(
        self,
        widths: dict[str, int],
        dim: int = 24,
        output_dim: int = 8,
        mask_value: float = 0.0,
        *,
        fixed: bool,
    ) -> None:
        super().__init__()
        self.mask_value = mask_value
        self.before_pool = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(width, dim), nn.SiLU()) for name, width in widths.items()}
        )
        self.merge = nn.Linear(dim * len(widths), dim)
        self.pool = TokenAttentionPooling(dim, mask_class_token=fixed)
        self.after_pool = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, output_dim))

    def get_mask(self, conditions: dict[str, torch.Tensor]) -> torch.Tensor:
        """Which slot may look at which, (batch, 1, set, set)."""
        empty = torch.stack([(c == self.mask_value).all(dim=-1) for c in conditions.values()]).all(dim=0)
        mask = ~empty
        return (mask[:, :, None] & mask[:, None, :]).unsqueeze(1)

    def forward(self, conditions: dict[str, torch.Tensor]) -> torch.Tensor:
        """Every condition is (batch, set, width); unused slots hold `mask_value`."""
        mask = self.get_mask(conditions)
        x = torch.cat([self.before_pool[name](c) for name, c in conditions.items()], dim=-1)
        return self.after_pool(self.pool(self.merge(x), mask))


def buggy() -> nn.Module:
    """The class token sees all."""
    return ConditionEncoder({"drug": 6, "dose": 2}, fixed=False)


def healthy() -> nn.Module:
    """The class token sees what is there."""
    return ConditionEncoder({"drug": 6, "dose": 2}, fixed=True)


def _called(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model({"drug": x[..., :6], "dose": x[..., 6:]})


def declared(build: Callable[[], nn.Module]) -> ModelSpec:
    """Unused slots are zeros."""
    return ModelSpec.of(
        build,
        inputs="vectors",
        width=8,
        forward=_called,
        masked=lambda model, x, keep: _called(model, x * keep[..., None]),
    )


def observe(model: nn.Module) -> torch.Tensor:
    """Sets of two and three conditions alone, minus the same sets in a batch with a set of five."""
    model.eval()
    gen = torch.Generator().manual_seed(1)
    sizes = (2, 5, 3)
    sets = [
        {"drug": torch.randn(1, n, 6, generator=gen), "dose": torch.rand(1, n, 2, generator=gen)}
        for n in sizes
    ]
    batch = {
        name: torch.cat([torch.nn.functional.pad(s[name], (0, 0, 0, 5 - s[name].shape[1])) for s in sets])
        for name in ("drug", "dose")
    }
    with torch.no_grad():
        alone = torch.cat([model(s) for s in sets])
        return model(batch) - alone
