"""starVLA#210 (starVLA/starVLA): the learning-rate schedule advances on every micro-batch.

With two accumulation steps the rate decays twice as fast as configured.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

BASE_LR, WARMUP, MAX_STEPS, ACCUMULATION = 2e-3, 3, 20, 2


def lr_scale(step: int) -> float:
    """Linear warmup, then a cosine to a tenth."""
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    progress = min(1.0, (step - WARMUP) / (MAX_STEPS - WARMUP))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class Policy(nn.Module):
    """Token embeddings, a causal convolution and an action head."""

    def __init__(self, actions: int = 72, width: int = 24) -> None:
        super().__init__()
        self.tokens = nn.Embedding(actions, width)
        self.conv = nn.Conv1d(width, 2 * width, kernel_size=3)
        self.action_head = nn.Linear(2 * width, actions)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the following action token."""
        x = F.pad(self.tokens(ids).transpose(1, 2), (2, 0))
        return self.action_head(F.silu(self.conv(x)).transpose(1, 2))


class VLATrainer:
    """Splits each batch into micro-batches and updates once."""

    def __init__(self, only_on_sync: bool) -> None:
        self.model = Policy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=BASE_LR, weight_decay=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_scale)
        self.only_on_sync = only_on_sync

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One optimizer step."""
        pieces = [batch[key].chunk(ACCUMULATION) for key in ("input_ids", "labels")]
        return self.accumulate([{"input_ids": x, "labels": y} for x, y in zip(*pieces, strict=True)])

    def accumulate(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """One optimizer step from several micro-batches."""
        total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        loss_sum = 0.0
        for index, batch in enumerate(batches):
            sync_gradients = index == len(batches) - 1
            logits = self.model(batch["input_ids"])[:, :-1].reshape(-1, self.action_dim)
            loss = F.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1), reduction="sum")
            loss = loss / max(total, 1)
            loss.backward()
            loss_sum += loss.item()
            if sync_gradients:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if sync_gradients or not self.only_on_sync:
                self.scheduler.step()
        return loss_sum

    @property
    def action_dim(self) -> int:
        """How many action tokens there are."""
        return self.model.action_head.out_features


def buggy() -> VLATrainer:
    """The scheduler steps in the micro-batch loop."""
    return VLATrainer(only_on_sync=False)


def healthy() -> VLATrainer:
    """The scheduler steps with the optimizer."""
    return VLATrainer(only_on_sync=True)


def _planned(step: int) -> float:
    return BASE_LR * lr_scale(step)


def buggy_declared() -> stackwise.TrainerSpec:
    """The mistake, with the configured schedule."""
    return stackwise.TrainerSpec.of(buggy, learning_rate=_planned, total_steps=MAX_STEPS)


def healthy_declared() -> stackwise.TrainerSpec:
    """The fix, with the configured schedule."""
    return stackwise.TrainerSpec.of(healthy, learning_rate=_planned, total_steps=MAX_STEPS)


def _error(trainer: VLATrainer) -> float:
    for _ in range(8):
        ids = torch.randint(0, 72, (4, 16))
        trainer.step({"input_ids": ids, "labels": ids})
    return abs(trainer.optimizer.param_groups[0]["lr"] - _planned(8)) / BASE_LR


def prove() -> tuple[float, float]:
    """Distance of the learning rate after 8 steps from the plan, in base rates; must be 0."""
    return _error(buggy()), _error(healthy())
