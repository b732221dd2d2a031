"""torchtitan#4167 (pytorch/torchtitan): the validation loss is a mean of batch means, not of all tokens.

Batches with few valid tokens, as with masked prompts or at the end of the data, count as much as full ones.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE_INDEX = -100


class Transformer(nn.Module):
    """One causal attention layer and a feed-forward layer."""

    def __init__(self, vocab: int = 88, dim: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 64), nn.SiLU(), nn.Linear(64, dim))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each position."""
        x = self.tok_embeddings(tokens)
        q, k, v = self.wqkv(x).chunk(3, dim=-1)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.output(self.norm(x + self.mlp(x)))


def loss_sum(pred: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses of the valid tokens, and their number."""
    targets = labels[:, 1:].flatten()
    total = F.cross_entropy(pred[:, :-1].flatten(0, 1), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return total, (targets != IGNORE_INDEX).sum()


class Validator:
    """Validates a model on given batches."""

    def __init__(self, per_batch: bool) -> None:
        self.per_batch = per_batch

    @torch.no_grad()
    def validate(self, model: nn.Module, batches: list[dict]) -> float:
        """The validation loss."""
        model.eval()
        sums, counts = [], []
        for batch in batches:
            total, count = loss_sum(model(batch["input_ids"]), batch["labels"])
            if count > 0:
                sums.append(total)
                counts.append(count)
        model.train()
        if not sums:
            return math.nan
        if self.per_batch:
            return torch.stack([s / c for s, c in zip(sums, counts, strict=True)]).mean().item()
        return (torch.stack(sums).sum() / torch.stack(counts).sum()).item()


class Trainer:
    """Plain training with a validator."""

    def __init__(self, validator: Validator) -> None:
        self.validator = validator
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95))

    def step(self, batch: dict) -> torch.Tensor:
        """One update."""
        total, count = loss_sum(self.model(batch["input_ids"]), batch["labels"])
        loss = total / count.clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def evaluate(self, batches: list[dict]) -> float:
        """Validation loss in nats per target."""
        return self.validator.validate(self.model, batches)


def buggy() -> Trainer:
    """Gives every batch the same weight."""
    return Trainer(Validator(per_batch=True))


def healthy() -> Trainer:
    """Gives every token the same weight."""
    return Trainer(Validator(per_batch=False))


def _error(run: Trainer) -> float:
    ids = torch.randint(88, (4, 16))
    full = {"input_ids": ids, "labels": ids}
    for _ in range(10):
        run.step(full)
    other = torch.randint(88, (4, 16))
    labels = other.masked_fill(torch.arange(16) < 14, IGNORE_INDEX)
    both = {"input_ids": torch.cat([ids, other]), "labels": torch.cat([ids, labels])}
    joint = run.evaluate([both])
    return abs(run.evaluate([full, {"input_ids": other, "labels": labels}]) - joint)


def prove() -> tuple[float, float]:
    """Difference of the loss of two batches from the loss of both as one batch."""
    return _error(buggy()), _error(healthy())
