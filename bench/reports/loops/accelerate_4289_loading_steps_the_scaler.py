"""accelerate#4289 (huggingface/accelerate): loading a float16 checkpoint advances the restored loss scale.

The optimizer state is created for loading by a dummy step. It goes through the wrapper that also steps and
updates the gradient scaler, so the loss scale and its growth counter differ from the saved ones.
"""

import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn


class AcceleratedOptimizer:
    """An optimizer whose step goes through the gradient scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    @property
    def param_groups(self) -> list[dict]:
        """Groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        """State of the wrapped optimizer."""
        return self.optimizer.state

    def state_dict(self) -> dict:
        """State of the wrapped optimizer, to save."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Restores the wrapped optimizer."""
        self.optimizer.load_state_dict(state)

    def zero_grad(self) -> None:
        """Clears all gradients."""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Steps if the gradients are finite, and updates the scale."""
        self.scaler.step(self.optimizer)
        self.scaler.update()


def init_optim_state(optimizer: AcceleratedOptimizer | torch.optim.Optimizer) -> None:
    """Creates the state of a new optimizer by a step that changes nothing."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


class Accelerator:
    """Mixed-precision training with checkpoints."""

    def __init__(self, unwraps: bool) -> None:
        self.unwraps = unwraps
        self.model = nn.Sequential(nn.Embedding(56, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 56))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = AcceleratedOptimizer(adamw, self.scaler)

    def compute_loss(self, batch: dict) -> torch.Tensor:
        """Mean loss of the next tokens with float16 matrix products."""
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(batch["input_ids"])[:, :-1]
        return nn.functional.cross_entropy(logits.float().transpose(1, 2), batch["labels"][:, 1:])

    def step(self, batch: dict) -> float:
        """One update with a scaled loss."""
        self.optimizer.zero_grad()
        loss = self.compute_loss(batch)
        self.scaler.scale(loss).backward()
        self.optimizer.step()
        return loss.item()

    def save(self, folder: str) -> None:
        """Writes one file per object."""
        torch.save(self.model.state_dict(), Path(folder) / "model.pt")
        torch.save(self.optimizer.state_dict(), Path(folder) / "optimizer.pt")
        torch.save(self.scaler.state_dict(), Path(folder) / "scaler.pt")

    def load(self, folder: str) -> None:
        """Restores all objects, the scaler before the optimizer."""
        self.model.load_state_dict(torch.load(Path(folder) / "model.pt"))
        self.scaler.load_state_dict(torch.load(Path(folder) / "scaler.pt"))
        self.scaler.scale(torch.zeros(()))  # creates the tensors that a step reads
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            init_optim_state(self.optimizer.optimizer if self.unwraps else self.optimizer)
        self.optimizer.load_state_dict(torch.load(Path(folder) / "optimizer.pt"))


def buggy() -> Accelerator:
    """Creates the optimizer state through the wrapper."""
    return Accelerator(unwraps=False)


def healthy() -> Accelerator:
    """Creates the optimizer state with the plain optimizer."""
    return Accelerator(unwraps=True)


def _change(first: Accelerator, second: Accelerator) -> float:
    for _ in range(3):
        ids = torch.randint(56, (4, 16))
        first.step({"input_ids": ids, "labels": ids})
    with tempfile.TemporaryDirectory() as folder:
        first.save(folder)
        second.load(folder)
    return second.scaler.get_scale() / first.scaler.get_scale() - 1


def prove() -> tuple[float, float]:
    """Relative change of the loss scale from before saving to after loading."""
    return _change(buggy(), buggy()), _change(healthy(), healthy())
