"""aprender#2112 (paiml/aprender): the gradient clipping of the CPU trainer is a no-op.

The trainer computes the norm of all gradients and the scale that clips them, and then discards the scale. The
optimizer steps on the gradients as they are.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

MAX_GRAD_NORM, LR = 0.25, 3e-3


def total_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Norm of all gradients together."""
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()


class Transformer(nn.Module):
    """Embedding, one causal attention block and the output layer."""

    def __init__(self, vocab: int = 66, hidden: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.input_norm = nn.RMSNorm(hidden)
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        h = self.embed_tokens(ids)
        q, k, v = self.qkv_proj(self.input_norm(h)).chunk(3, dim=-1)
        return self.lm_head(h + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class TransformerTrainer:
    """Trains on the CPU, with gradient accumulation and clipping."""

    def __init__(self, applies_scale: bool) -> None:
        self.applies_scale = applies_scale
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.grad_norm = 0.0

    def _clip_and_step(self) -> None:
        parameters = list(self.model.parameters())
        norm = total_norm(parameters)
        scale = (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0)
        if self.applies_scale:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(scale)
        self.grad_norm = norm.item()
        self.optimizer.step()

    def accumulate(self, batches: Sequence[dict[str, torch.Tensor]]) -> float:
        """One update from some micro-batches."""
        targets = max(1, sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
        self.optimizer.zero_grad()
        mean = 0.0
        for batch in batches:
            logits = self.model(batch["input_ids"])[:, :-1]
            total = F.cross_entropy(logits.mT, batch["labels"][:, 1:], ignore_index=-100, reduction="sum")
            loss = total / targets
            loss.backward()
            mean += loss.item()
        self._clip_and_step()
        return mean

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One update from one batch."""
        return self.accumulate([batch])

    def save(self, folder: str | Path) -> None:
        """Write the model and the optimizer."""
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), Path(folder) / "trainer.pt")

    def load(self, folder: str | Path) -> None:
        """Read the model and the optimizer."""
        model, optimizer = torch.load(Path(folder) / "trainer.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def buggy() -> TransformerTrainer:
    """Discards the scale."""
    return TransformerTrainer(applies_scale=False)


def healthy() -> TransformerTrainer:
    """Applies the scale."""
    return TransformerTrainer(applies_scale=True)


def declared(factory: Callable[[], TransformerTrainer]) -> stackwise.TrainerSpec:
    """The configured clipping and learning rate."""
    return stackwise.TrainerSpec.of(factory, max_norm=MAX_GRAD_NORM, learning_rate=lambda _: LR, frozen=())


def _excess(run: TransformerTrainer) -> float:
    ids = torch.randint(66, (4, 16))
    run.step({"input_ids": ids, "labels": ids})
    return max(0.0, total_norm(list(run.model.parameters())).item() / MAX_GRAD_NORM - 1.0)


def prove() -> tuple[float, float]:
    """Relative excess of the norm of the gradients that the optimizer used over the limit."""
    return _excess(buggy()), _excess(healthy())
