"""miles-credit#141 (NCAR/miles-credit): gradients are clipped while the loss scale is still in them.

With mixed precision every step looks far too long to the clipping and is cut down by the scale.
"""

import torch
import torch.nn.functional as F
from torch import nn

import stackwise


class Block(nn.Module):
    """Causal mean of what came before, then an MLP."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dims)
        self.mlp = nn.Sequential(nn.Linear(2 * dims, 2 * dims), nn.GELU(), nn.Linear(2 * dims, dims))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block's output to the stream."""
        h = self.norm(x)
        count = torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        past = h.cumsum(dim=1) / count
        return x + self.mlp(torch.cat([h, past], dim=-1))


class Forecaster(nn.Module):
    """Two blocks over token embeddings."""

    def __init__(self, vocab_size: int = 80, dims: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dims)
        self.blocks = nn.ModuleList([Block(dims), Block(dims)])
        self.decoder = nn.Linear(dims, vocab_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.decoder(x)


class Trainer:
    """One optimizer step for each batch, in mixed precision with a loss scale."""

    grad_max_norm = 1.0
    unscale = True

    def __init__(self) -> None:
        self.model = Forecaster()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=1e-5, betas=(0.9, 0.95), amsgrad=True
        )
        self.scaler = torch.amp.GradScaler("cpu")

    def criterion(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Cross entropy of the labels."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y_pred = self.model(batch["input_ids"])
        y = batch["labels"][:, 1:]
        return F.cross_entropy(y_pred[:, :-1].float().flatten(0, 1), y.flatten(), ignore_index=-100)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Train on one batch and return its loss."""
        self.optimizer.zero_grad()
        loss = self.criterion(batch)
        self.scaler.scale(loss).backward()
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=self.grad_max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


class ScaledClipTrainer(Trainer):
    """Leaves the unscaling to the scaler's step, as before the fix."""

    unscale = False


def buggy() -> Trainer:
    """Clips scaled gradients."""
    return ScaledClipTrainer()


def healthy() -> Trainer:
    """Unscales, then clips."""
    return Trainer()


def buggy_declared() -> stackwise.TrainerSpec:
    """The mistake, with the configured clipping stated."""
    return stackwise.TrainerSpec.of(buggy, max_norm=1.0)


def healthy_declared() -> stackwise.TrainerSpec:
    """The fix, with the configured clipping stated."""
    return stackwise.TrainerSpec.of(healthy, max_norm=1.0)


def _applied_norm(trainer: Trainer) -> float:
    ids = torch.randint(0, 80, (4, 16))
    trainer.step({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    # The scaler's step has unscaled them by now, so these are what the optimizer used.
    return torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm().item()


def prove() -> tuple[float, float]:
    """Norm of the gradient that reached the optimizer: near 1, or near 1 divided by the scale."""
    return _applied_norm(buggy()), _applied_norm(healthy())
