"""lightly-train#892 (lightly-ai/lightly-train): the decay of the average warms up again after a resume.

The average counts its updates in a plain integer, which is not in the state of the module. After a resume the
first decays are close to zero, so the restored average is overwritten by the current weights.
"""

import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

DECAY, WARMUP_STEPS, LR = 0.99, 12, 2e-3


def decay_at(updates: int) -> float:
    """Decay of the update with this number, counted from 1."""
    return DECAY * (1.0 - math.exp(-updates / WARMUP_STEPS))


class ModelEMA(nn.Module):
    """Average of a model's weights, with a decay that warms up."""

    def __init__(self, model: nn.Module, registers_updates: bool) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        if registers_updates:
            self.register_buffer("updates", torch.tensor(0))
        else:
            self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Average the current weights in."""
        self.updates += 1
        decay = decay_at(int(self.updates))
        for average, current in zip(self.model.parameters(), model.parameters(), strict=True):
            average.mul_(decay).add_(current, alpha=1.0 - decay)


class Segmenter(nn.Module):
    """Labels each token of a sequence."""

    def __init__(self, tokens: int = 70, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Embedding(tokens, width), nn.LayerNorm(width))
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, tokens))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, tokens)."""
        return self.head(self.backbone(ids))


def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses of the next tokens, and their number."""
    target = batch["labels"][:, 1:]
    logits = model(batch["input_ids"])[:, :-1]
    total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
    return total, (target != -100).sum()


class TrainModel:
    """Trains a model and validates its average."""

    def __init__(self, registers_updates: bool) -> None:
        self.model = Segmenter()
        self.ema = ModelEMA(self.model, registers_updates)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One update of the model and then of its average."""
        total, count = summed_loss(self.model, batch)
        loss = total / count.clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.ema.update(self.model)
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """Validation loss of the average per target."""
        sums = [summed_loss(self.ema.model, batch) for batch in batches]
        return (sum(total for total, _ in sums) / sum(count for _, count in sums)).item()

    def save(self, folder: str | Path) -> None:
        """Write the state of the model, its average and the optimizer."""
        parts = {"model": self.model, "ema": self.ema, "optimizer": self.optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, Path(folder) / "last.ckpt")

    def load(self, folder: str | Path) -> None:
        """Resume an interrupted run."""
        state = torch.load(Path(folder) / "last.ckpt")
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])


def buggy() -> TrainModel:
    """Counts in a plain integer."""
    return TrainModel(registers_updates=False)


def healthy() -> TrainModel:
    """Counts in a buffer."""
    return TrainModel(registers_updates=True)


def declared(factory: Callable[[], TrainModel]) -> stackwise.TrainerSpec:
    """The configured average and learning rate."""
    return stackwise.TrainerSpec.of(
        factory, average_decay=lambda n: decay_at(n + 1), learning_rate=lambda _: LR, frozen=()
    )


def _difference(factory: Callable[[], TrainModel]) -> float:
    run, resumed = factory(), factory()
    for _ in range(20):
        ids = torch.randint(70, (4, 16))
        run.step({"input_ids": ids, "labels": ids})
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        resumed.load(folder)
    for each in (run, resumed):
        each.step({"input_ids": ids, "labels": ids})
    pairs = zip(run.ema.model.parameters(), resumed.ema.model.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def prove() -> tuple[float, float]:
    """Largest difference of the average one update after a resume."""
    return _difference(buggy), _difference(healthy)
