"""Liger-Kernel#269 (linkedin/Liger-Kernel): all residual blocks of a Medusa head are the same block.

`[ResBlock(...)] * n` repeats a reference, so that a head of n layers has the parameters of one.
https://github.com/linkedin/Liger-Kernel/pull/269
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class ResBlock(nn.Module):
    """Residual layer that starts as the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return x + F.silu(self.linear(x))


class MedusaModel(nn.Module):
    """Causal language model with heads for the tokens after the next one."""

    def __init__(
        self, separate: bool, heads: int = 2, layers: int = 2, vocab: int = 48, dim: int = 32
    ) -> None:
        super().__init__()
        self.embed_tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

        def blocks() -> list[nn.Module]:
            return [ResBlock(dim) for _ in range(layers)] if separate else [ResBlock(dim)] * layers

        self.medusa_head = nn.ModuleList(
            nn.Sequential(*blocks(), nn.Linear(dim, vocab, bias=False)) for _ in range(heads)
        )

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, medusa_return: bool = False
    ) -> SimpleNamespace:
        """Logits of the next token; with labels the loss of all heads; or the logits of all heads."""
        length = input_ids.shape[1]
        x = self.embed_tokens(input_ids) + self.positions.weight[:length]
        x = self.model(x, torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1))
        all_logits = torch.stack([self.lm_head(x), *(head(x) for head in self.medusa_head)])
        loss = None
        if labels is not None:
            loss = x.new_zeros(())
            for i, logits in enumerate(all_logits):
                term = F.cross_entropy(logits[:, : -(1 + i)].flatten(0, 1), labels[:, 1 + i :].flatten())
                loss = loss + term * (1.0 if i == 0 else 0.2 * 0.8**i)
        return SimpleNamespace(loss=loss, logits=all_logits if medusa_return else all_logits[0])


def buggy() -> nn.Module:
    """Repeated references."""
    return MedusaModel(separate=False)


def healthy() -> nn.Module:
    """A block per layer."""
    return MedusaModel(separate=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The training loss is that of the model."""
    return ModelSpec.of(make, causal=True, loss=lambda model, ids: model(ids, labels=ids).loss)


def observe(model: nn.Module) -> Tensor:
    """Layers of the first head, less its different layers."""
    layers = model.medusa_head[0]
    return torch.tensor(float(len(layers) - len({id(layer) for layer in layers})))
