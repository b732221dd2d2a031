"""lightly-train#301 (lightly-ai/lightly-train): the learning-rate schedule starts over after a resume.

The checkpoint holds model and optimizer but not the scheduler, so its last_epoch is back at the start and the
two-stage warm-up is run again in the middle of the training.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler


class TwoStageWarmupPolySchedule(LRScheduler):
    """Warms up the head first, then the backbone, and decays both by a polynomial."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup: tuple[int, int], total_steps: int, power: float
    ) -> None:
        self.warmup, self.total_steps, self.power = warmup, total_steps, power
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """Rates of the head and the backbone at the current step."""
        step, (head, backbone) = self.last_epoch, self.warmup
        return [
            self.base_lrs[0] * self.factor(step, 0, head),
            self.base_lrs[1] * self.factor(step, head, backbone),
        ]

    def factor(self, step: int, start: int, length: int) -> float:
        """Zero before the warm-up starts, then linear, then polynomial."""
        if step < start + length:
            return max(0, step - start + 1) / length
        done = (step - start - length) / max(1, self.total_steps - start - length)
        return max(0.0, 1.0 - done) ** self.power


class Segmenter(nn.Module):
    """Backbone and head over patch tokens."""

    def __init__(self, patches: int = 72, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Embedding(patches, width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, patches)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Class scores of each patch."""
        return self.head(self.backbone(ids))


class TrainTask:
    """State of a training with its checkpoints."""

    def __init__(self, saves_scheduler: bool) -> None:
        self.model = Segmenter()
        groups = [
            {"params": self.model.head.parameters(), "lr": 2e-3},
            {"params": self.model.backbone.parameters(), "lr": 5e-4},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
        self.scheduler = TwoStageWarmupPolySchedule(self.optimizer, (4, 6), total_steps=60, power=0.9)
        self.current_step = 0
        self.saves_scheduler = saves_scheduler

    def step(self, batch: dict) -> torch.Tensor:
        """One update and one step of the schedule."""
        scores = self.model(batch["input_ids"])[:, :-1]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.current_step += 1
        return loss.detach()

    def state(self) -> dict:
        """The objects that a checkpoint holds."""
        state = {"model": self.model, "optimizer": self.optimizer}
        if self.saves_scheduler:
            state["scheduler"] = self.scheduler
        return state

    def save(self, folder: Path) -> None:
        """Writes a checkpoint."""
        states = {name: item.state_dict() for name, item in self.state().items()}
        torch.save({**states, "step": self.current_step}, Path(folder, "last.ckpt"))

    def load(self, folder: Path) -> None:
        """Resumes an interrupted training."""
        checkpoint = torch.load(Path(folder, "last.ckpt"))
        for name, item in self.state().items():
            item.load_state_dict(checkpoint[name])
        self.current_step = checkpoint["step"]


def buggy() -> TrainTask:
    """Checkpoints without the scheduler."""
    return TrainTask(saves_scheduler=False)


def healthy() -> TrainTask:
    """Checkpoints with the scheduler."""
    return TrainTask(saves_scheduler=True)


def _gap(first: TrainTask, resumed: TrainTask) -> float:
    ids = torch.randint(72, (4, 16))
    batch = {"input_ids": ids, "labels": ids}
    for _ in range(12):
        first.step(batch)
    with tempfile.TemporaryDirectory() as name:
        first.save(Path(name))
        resumed.load(Path(name))
    first.step(batch)
    resumed.step(batch)
    rates = zip(first.optimizer.param_groups, resumed.optimizer.param_groups, strict=True)
    return max(abs(a["lr"] - b["lr"]) / a["lr"] for a, b in rates)


def prove() -> tuple[float, float]:
    """Relative difference of the rates one step after a resume from those of an uninterrupted run."""
    return _gap(buggy(), buggy()), _gap(healthy(), healthy())
