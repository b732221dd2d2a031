"""DeepSpeed#5287 (deepspeedai/DeepSpeed): the first update ignores the warmup.

WarmupCosineLR sets no learning rate before its first step, which follows the first update. That update uses
the full rate of the optimizer, and the values of the warmup come one update late.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

LR, TOTAL_STEPS, WARMUP_STEPS, WARMUP_MIN_RATIO, COS_MIN_RATIO = 2e-3, 50, 8, 0.05, 0.01


def lr_ratio(iteration: int) -> float:
    """Linear warmup, then a cosine."""
    if iteration < WARMUP_STEPS:
        return WARMUP_MIN_RATIO + (1.0 - WARMUP_MIN_RATIO) * iteration / WARMUP_STEPS
    progress = min(1.0, (iteration - WARMUP_STEPS) / (TOTAL_STEPS - WARMUP_STEPS))
    return COS_MIN_RATIO + (1.0 - COS_MIN_RATIO) * (1.0 + math.cos(math.pi * progress)) / 2


class WarmupCosineLR:
    """Sets the learning rates of an optimizer to a part of their first values."""

    def __init__(self, optimizer: torch.optim.Optimizer, sets_first: bool) -> None:
        self.optimizer = optimizer
        self.org_lrs = [group["lr"] for group in optimizer.param_groups]
        self.last_batch_iteration = -1
        if sets_first:
            self.step()

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [lr * lr_ratio(self.last_batch_iteration) for lr in self.org_lrs]

    def step(self) -> None:
        """Move to the next iteration."""
        self.last_batch_iteration += 1
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict:
        """What a checkpoint keeps."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a checkpoint, whose optimizer has the learning rate."""
        self.last_batch_iteration = state["last_batch_iteration"]


class SimpleModel(nn.Module):
    """Embedding, two linear layers and output."""

    def __init__(self, vocab: int = 60, hidden_dim: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden_dim)
        self.linears = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(2))
        self.head = nn.Linear(hidden_dim, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        hidden = self.embedding(ids)
        for linear in self.linears:
            hidden = hidden + torch.tanh(linear(hidden))
        return self.head(hidden)


class Engine:
    """Forward, backward, optimizer step and scheduler step."""

    def __init__(self, sets_first: bool) -> None:
        self.model = SimpleModel()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)
        self.lr_scheduler = WarmupCosineLR(self.optimizer, sets_first)

    def step(self, batch: dict) -> float:
        """One update."""
        target = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.lr_scheduler.step()
        return loss.item()

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint."""
        parts = (self.model, self.optimizer, self.lr_scheduler)
        torch.save([part.state_dict() for part in parts], Path(folder) / "states.pt")

    def load(self, folder: str | Path) -> None:
        """Read the checkpoint."""
        states = torch.load(Path(folder) / "states.pt")
        for part, state in zip((self.model, self.optimizer, self.lr_scheduler), states, strict=True):
            part.load_state_dict(state)


def buggy() -> Engine:
    """No learning rate from the schedule before its first step."""
    return Engine(sets_first=False)


def healthy() -> Engine:
    """The schedule sets its first learning rate at once."""
    return Engine(sets_first=True)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The fix, with the configured schedule and clipping."""
    return stackwise.TrainerSpec.of(factory, learning_rate=lambda step: LR * lr_ratio(step), max_norm=1.0)


def _first(run: Engine) -> float:
    ids = torch.randint(60, (4, 16))
    before = run.model.head.bias.detach().clone()
    run.step({"input_ids": ids, "labels": ids})
    # The first update of Adam is as large as the learning rate.
    return (run.model.head.bias - before).abs().max().item() / (LR * WARMUP_MIN_RATIO)


def prove() -> tuple[float, float]:
    """Size of the first update as a multiple of the first planned learning rate."""
    return _first(buggy()), _first(healthy())
