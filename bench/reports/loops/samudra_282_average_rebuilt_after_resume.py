"""Samudra#282 (m2lines/Samudra): the average of the weights starts anew when training is resumed.

The trainer restores the tracker of averaged weights and later in its set-up builds a new one over it, which
starts from the current weights and with its short early memory.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


class EMATracker:
    """Exponential moving average of the weights whose memory grows with the number of updates."""

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        self.decay = decay
        self.num_updates = 0
        self.params = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Move the average towards the weights."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, p in module.named_parameters():
            self.params[name].lerp_(p, 1 - decay)

    @classmethod
    def from_state(cls, state: dict, module: nn.Module) -> "EMATracker":
        """A tracker that continues a saved one."""
        tracker = cls(module, state["decay"])
        tracker.num_updates = state["num_updates"]
        tracker.params = state["params"]
        return tracker


class CausalConvNet(nn.Module):
    """Tokens in, next-token logits out."""

    def __init__(self, vocab: int = 64, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.conv = nn.Conv1d(width, width, 3)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        x = self.tokens(ids).mT
        return self.out((x + F.gelu(self.conv(F.pad(x, (2, 0))))).mT)


class Trainer:
    """Trains with raw weights and validates with averaged ones."""

    def __init__(self, keep_restored: bool) -> None:
        self.keep_restored = keep_restored
        self.model = CausalConvNet()
        self._setup(None)

    def _setup(self, checkpoint: dict | None) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.ema = EMATracker.from_state(checkpoint["ema"], self.model)
        if checkpoint is None or not self.keep_restored:
            self.ema = EMATracker(self.model)

    def _nll(self, batch: dict, weights: dict) -> tuple[torch.Tensor, torch.Tensor]:
        logits = functional_call(self.model, weights, (batch["input_ids"],))[:, :-1]
        target = batch["labels"][:, 1:]
        nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        return nll, (target != -100).sum().clamp(min=1)

    def step(self, batch: dict) -> torch.Tensor:
        """One update of the weights and of their average."""
        nll, count = self._nll(batch, {})
        loss = nll / count
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.ema(self.model)
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: list[dict]) -> float:
        """Mean loss per target of the averaged weights."""
        sums = [self._nll(batch, self.ema.params) for batch in batches]
        return (sum(nll for nll, _ in sums) / sum(count for _, count in sums)).item()

    def save(self, folder: str | Path) -> None:
        """Write the training checkpoint."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state["ema"] = vars(self.ema)
        torch.save(state, Path(folder) / "ckpt.pt")

    def load(self, folder: str | Path) -> None:
        """Set the trainer up again from a checkpoint."""
        self._setup(torch.load(Path(folder) / "ckpt.pt"))


def buggy() -> Trainer:
    """The restored average is replaced."""
    return Trainer(keep_restored=False)


def healthy() -> Trainer:
    """The restored average stays."""
    return Trainer(keep_restored=True)


def _lost(factory: Callable) -> float:
    run, resumed = factory(), factory()
    for _ in range(8):
        ids = torch.randint(64, (4, 16))
        run.step({"input_ids": ids, "labels": ids})
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        resumed.load(folder)
    return max((run.ema.params[k] - resumed.ema.params[k]).abs().max().item() for k in run.ema.params)


def prove() -> tuple[float, float]:
    """Largest difference between the saved and the resumed averaged weights."""
    return _lost(buggy), _lost(healthy)
