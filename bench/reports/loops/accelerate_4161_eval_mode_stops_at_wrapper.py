"""accelerate#4161 (huggingface/accelerate): a schedule-free optimizer under a wrapper is never in eval mode.

`train()` of the prepared optimizer looks one wrapper further for the method, `eval()` does not. The model is
therefore evaluated with the weights at which gradients are taken, and not with the averaged ones.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import stackwise

LR, BETA = 0.5, 0.9


class SGDScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD. The model holds y in train mode and the average x in eval mode."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": LR, "beta": BETA, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _show(self, train_mode: bool) -> None:
        for group in self.param_groups:
            group["train_mode"] = train_mode
            for p in (p for p in group["params"] if p in self.state):
                x, z = self.state[p]["x"], self.state[p]["z"]
                p.copy_(z.lerp(x, group["beta"]) if train_mode else x)

    def train(self) -> None:
        """Put the weights for the gradients into the model."""
        self._show(train_mode=True)

    def eval(self) -> None:
        """Put the averaged weights into the model."""
        self._show(train_mode=False)

    @torch.no_grad()
    def step(self) -> None:
        """One update in train mode."""
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["x"], state["z"] = p.clone(), p.clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1.0 / group["k"])
                p.copy_(state["z"].lerp(state["x"], group["beta"]))


class EngineOptimizer:
    """The wrapper of the training engine, without modes of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """One update."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()


class PreparedOptimizer:
    """The optimizer that the training script sees."""

    def __init__(self, optimizer: Any, eval_reaches_through: bool) -> None:
        self.optimizer, self.eval_reaches_through = optimizer, eval_reaches_through

    def train(self) -> None:
        """Train mode, if the optimizer has modes."""
        self._set("train", reaches_through=True)

    def eval(self) -> None:
        """Eval mode, if the optimizer has modes."""
        self._set("eval", reaches_through=self.eval_reaches_through)

    def _set(self, mode: str, reaches_through: bool) -> None:
        inner = getattr(self.optimizer, "optimizer", None)
        if callable(getattr(self.optimizer, mode, None)):
            getattr(self.optimizer, mode)()
        elif reaches_through and callable(getattr(inner, mode, None)):
            getattr(inner, mode)()


class Script:
    """A training script with a prepared schedule-free optimizer."""

    def __init__(self, eval_reaches_through: bool) -> None:
        self.model = nn.Sequential(nn.Embedding(56, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 56))
        self.optimizer = SGDScheduleFree(self.model.parameters())
        self.engine = EngineOptimizer(self.optimizer)
        self.prepared = PreparedOptimizer(self.engine, eval_reaches_through)

    def _summed(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        target = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        return total, (target != -100).sum()

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One update."""
        self.model.train()
        self.prepared.train()
        total, count = self._summed(batch)
        loss = total / count.clamp(min=1)
        self.engine.zero_grad()
        loss.backward()
        self.engine.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """Mean loss per target in eval mode."""
        self.model.eval()
        self.prepared.eval()
        sums = [self._summed(batch) for batch in batches]
        self.model.train()
        self.prepared.train()
        return (sum(total for total, _ in sums) / sum(count for _, count in sums)).item()

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint to resume from."""
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), Path(folder) / "state.pt")

    def load(self, folder: str | Path) -> None:
        """Resume from a checkpoint."""
        model, optimizer = torch.load(Path(folder) / "state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def buggy() -> Script:
    """Asks only the outer wrapper for eval mode."""
    return Script(eval_reaches_through=False)


def healthy() -> Script:
    """Asks the wrapped optimizer too."""
    return Script(eval_reaches_through=True)


def declared(factory: Callable[[], Script]) -> stackwise.TrainerSpec:
    """The constant learning rate."""
    return stackwise.TrainerSpec.of(factory, learning_rate=lambda _: LR, frozen=())


def _error(run: Script) -> float:
    for _ in range(8):
        ids = torch.randint(56, (4, 16))
        run.step({"input_ids": ids, "labels": ids})
    average = {name: run.optimizer.state[p]["x"] for name, p in run.model.named_parameters()}
    logits = functional_call(run.model, average, (ids,))[:, :-1]
    expected = F.cross_entropy(logits.mT, ids[:, 1:]).item()
    return abs(run.evaluate([{"input_ids": ids, "labels": ids}]) - expected)


def prove() -> tuple[float, float]:
    """Difference of the evaluated loss from that of the averaged weights."""
    return _error(buggy()), _error(healthy())
