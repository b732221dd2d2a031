"""pytorch_optimizer#516 (kozistr/pytorch_optimizer): SignSGD zeroes its momentum buffer before every step.

Its default momentum of 0.9 therefore has no effect: the update is the sign of the newest gradient alone.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class SignSGD(torch.optim.Optimizer):
    """Step along the sign of an average of gradients (Signum)."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def init_group(self, group: dict[str, Any]) -> None:
        """Create the state of parameters that have none."""
        for p in group["params"]:
            state = self.state[p]
            if p.grad is not None and group["momentum"] > 0.0 and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter with a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.init_group(group)
            momentum = group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                direction = p.grad
                if momentum > 0.0:
                    direction = self.state[p]["momentum_buffer"]
                    direction.mul_(momentum).add_(p.grad, alpha=1.0 - momentum)
                p.add_(direction.sign(), alpha=-group["lr"])
        return loss


class SignSGDEveryStep(SignSGD):
    """Creates the state anew on each call."""

    def init_group(self, group: dict[str, Any]) -> None:
        """Set up the buffers."""
        for p in group["params"]:
            if p.grad is not None and group["momentum"] > 0.0:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)


class CharModel(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 24)
        self.hidden = nn.Linear(24, 48)
        self.out = nn.Linear(48, 60)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        return self.out(torch.tanh(self.hidden(self.table(ids))))


class Loop:
    """A plain training loop around an optimizer class."""

    def __init__(self, optimizer: type[SignSGD]) -> None:
        self.model = CharModel()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One update; returns the loss before it."""
        self.optimizer.zero_grad()
        logits = self.model(batch["input_ids"][:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def buggy() -> Loop:
    """The buffer starts from zero in every step."""
    return Loop(SignSGDEveryStep)


def healthy() -> Loop:
    """The buffer lives on."""
    return Loop(SignSGD)


def _buffer_error(loop: Loop) -> float:
    weight = loop.model.out.weight
    average = torch.zeros_like(weight)
    for _ in range(5):
        ids = torch.randint(0, 60, (4, 16))
        loop.step({"input_ids": ids, "labels": ids})
        average = 0.9 * average + 0.1 * weight.grad
    buffer = loop.optimizer.state[weight]["momentum_buffer"]
    return ((buffer - average).norm() / average.norm()).item()


def prove() -> tuple[float, float]:
    """Relative distance of the buffer from the average of the gradients seen so far; must be 0."""
    return _buffer_error(buggy()), _buffer_error(healthy())
