"""coqui-ai-Trainer#23 (idiap/coqui-ai-Trainer): with mixed precision the learning rate never changes.

After an epoch the schedule advances only if the optimizer is marked as stepped. The branch for the gradient
scaler does not set this mark.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

VOCAB, SAMPLES, BATCH_SIZE, EPOCHS = 62, 24, 4, 3
LR, LR_DECAY = 2e-3, 0.8


class TextEncoder(nn.Module):
    """Embedding, gated convolution and output."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, channels)
        self.conv = nn.Conv1d(channels, 2 * channels, 3)
        self.proj = nn.Linear(channels, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the next character."""
        x = self.emb(x)
        return self.proj(x + F.glu(self.conv(F.pad(x.mT, (2, 0))), dim=1).mT)


class Trainer:
    """Trains with a scheduler that is stepped after each epoch."""

    shuffles = True
    n_examples = SAMPLES

    def __init__(self, marks_scaled_steps: bool) -> None:
        self.marks_scaled_steps = marks_scaled_steps
        self.model = TextEncoder()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.8, 0.99))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=LR_DECAY)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        self.epochs_done = self.batch_n_steps = 0
        self.optimizer_stepped = False

    def epoch(self, number: int) -> Iterator[dict]:
        """The batches of an epoch, in a new order."""
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(number))
        for rows in order.split(BATCH_SIZE):
            ids = (rows[:, None] * 2 + torch.arange(16) * (1 + rows[:, None] % 5)) % VOCAB
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def optimize(self, loss: torch.Tensor) -> None:
        """Backward pass and update, which the scaler leaves out after an overflow."""
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.marks_scaled_steps and self.scaler.get_scale() >= scale:
            self.optimizer_stepped = True

    def step(self, batch: dict) -> float:
        """One training step, with the end of the epoch after its last one."""
        target = batch["labels"][:, 1:]
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.float().mT, target, ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        self.optimize(loss)
        self.batch_n_steps += 1
        if self.batch_n_steps == SAMPLES // BATCH_SIZE:
            self.end_epoch()
        return loss.item()

    def end_epoch(self) -> None:
        """Advances the schedule."""
        if self.optimizer_stepped:
            self.scheduler.step()
        self.epochs_done, self.batch_n_steps = self.epochs_done + 1, 0
        self.optimizer_stepped = False

    def position(self) -> tuple[int, int]:
        """The epoch and its next batch."""
        return self.epochs_done, self.batch_n_steps

    def fit(self) -> None:
        """All epochs."""
        while self.epochs_done < EPOCHS:
            for batch in self.epoch(self.epochs_done):
                self.step(batch)


def buggy() -> Trainer:
    """A step of the scaler is not marked."""
    return Trainer(marks_scaled_steps=False)


def healthy() -> Trainer:
    """A step of the scaler is marked."""
    return Trainer(marks_scaled_steps=True)


def _planned(step: int) -> float:
    return LR * LR_DECAY ** (step // (SAMPLES // BATCH_SIZE))


def declared(factory: object) -> stackwise.TrainerSpec:
    """The fix, with the configured schedule, length and clipping."""
    steps = EPOCHS * SAMPLES // BATCH_SIZE
    return stackwise.TrainerSpec.of(factory, learning_rate=_planned, total_steps=steps, max_norm=5.0)


def _error(run: Trainer) -> float:
    run.fit()
    return abs(run.optimizer.param_groups[0]["lr"] / (LR * LR_DECAY**EPOCHS) - 1)


def prove() -> tuple[float, float]:
    """Relative error of the learning rate after three epochs."""
    return _error(buggy()), _error(healthy())
