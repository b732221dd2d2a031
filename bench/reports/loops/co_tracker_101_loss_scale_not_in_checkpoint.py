"""co-tracker#101 (facebookresearch/co-tracker): a resumed run starts again from the initial loss scale.

The checkpoint has model, optimizer and schedule, but not the state of the gradient scaler.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

MAX_LR, NUM_STEPS, PCT_START, CLIP = 5e-4, 300, 0.05, 10.0


def one_cycle(step: int) -> float:
    """Linear rise from a 25th of the largest learning rate, and linear fall nearly to zero."""
    top, end = PCT_START * NUM_STEPS - 1, NUM_STEPS - 1
    initial, final = MAX_LR / 25, MAX_LR / 25e4
    if step <= top:
        return initial + (MAX_LR - initial) * step / top
    return MAX_LR + (final - MAX_LR) * (step - top) / (end - top)


class UpdateFormer(nn.Module):
    """Embedding, time mixing over earlier places, feed-forward layer and head."""

    def __init__(self, bins: int = 78, hidden_size: int = 32) -> None:
        super().__init__()
        self.input_transform = nn.Embedding(bins, hidden_size)
        self.time_conv = nn.Conv1d(hidden_size, hidden_size, 4)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 64), nn.GELU(), nn.Linear(64, hidden_size))
        self.flow_head = nn.Linear(hidden_size, bins)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next position bin."""
        x = self.input_transform(ids)
        x = x + self.time_conv(F.pad(x.mT, (3, 0))).mT
        return self.flow_head(x + self.mlp(x))


class Trainer:
    """Trains in mixed precision with a one-cycle schedule."""

    def __init__(self, saves_scaler: bool) -> None:
        self.saves_scaler = saves_scaler
        self.model = UpdateFormer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=MAX_LR, weight_decay=1e-5, eps=1e-8)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            MAX_LR,
            NUM_STEPS,
            pct_start=PCT_START,
            cycle_momentum=False,
            anneal_strategy="linear",
        )
        self.scaler = torch.amp.GradScaler("cpu")
        self.total_steps = 0

    def step(self, batch: dict) -> float:
        """One update with a scaled loss."""
        self.optimizer.zero_grad()
        target = batch["labels"][:, 1:]
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.float().mT, target, ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.scaler.step(self.optimizer)
        self.scheduler.step()
        self.scaler.update()
        self.total_steps += 1
        return loss.item()

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint."""
        save_dict = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "total_steps": self.total_steps,
        }
        if self.saves_scaler:
            save_dict["scaler"] = self.scaler.state_dict()
        torch.save(save_dict, Path(folder) / "model.pth")

    def load(self, folder: str | Path) -> None:
        """Continue from the checkpoint."""
        load_dict = torch.load(Path(folder) / "model.pth")
        self.model.load_state_dict(load_dict["model"])
        self.optimizer.load_state_dict(load_dict["optimizer"])
        self.scheduler.load_state_dict(load_dict["scheduler"])
        self.total_steps = load_dict["total_steps"]
        if "scaler" in load_dict:
            self.scaler.load_state_dict(load_dict["scaler"])


def buggy() -> Trainer:
    """The scaler is not saved."""
    return Trainer(saves_scaler=False)


def healthy() -> Trainer:
    """The scaler is saved."""
    return Trainer(saves_scaler=True)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The fix, with the schedule and the clipping."""
    return stackwise.TrainerSpec.of(factory, learning_rate=one_cycle, max_norm=CLIP)


def _change(factory: Callable[[], Trainer]) -> float:
    run, resumed = factory(), factory()
    ids = torch.randint(78, (4, 16))
    batch = {"input_ids": ids, "labels": ids}
    run.step(batch)
    run.scaler.update(1024.0)  # where a long run has arrived
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        resumed.load(folder)
    run.step(batch)
    resumed.step(batch)
    return resumed.scaler.get_scale() / run.scaler.get_scale()


def prove() -> tuple[float, float]:
    """Loss scale of the resumed run as a multiple of that of the run which went on."""
    return _change(buggy), _change(healthy)
