"""ocannl#673 (ahrefs/ocannl): the SGD update walks over frozen parameters too and decays them every step.

It takes all parameters that the loss reads, not those that are trained.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

import stackwise


class Network(nn.Module):
    """A frozen backbone below a trained head."""

    def __init__(self, vocab: int = 64, dims: int = 32) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"embed": nn.Embedding(vocab, dims), "mix": nn.Linear(dims, dims)})
        self.head = nn.Sequential(nn.Linear(2 * dims, dims), nn.ReLU(), nn.Linear(dims, vocab))
        self.backbone.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits from each token and the one before it."""
        # stop_gradient over the whole backbone
        with torch.no_grad():
            features = torch.tanh(self.backbone["mix"](self.backbone["embed"](ids)))
        previous = F.pad(features, (0, 0, 1, 0))[:, :-1]
        return self.head(torch.cat([features, previous], dim=-1))


class SGD(torch.optim.Optimizer):
    """Momentum SGD over given parameters; a gradient that nothing wrote is zero."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update everything that was passed in."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                sgd_delta = grad + group["weight_decay"] * p
                state = self.state[p]
                if "momentum" in state:
                    sgd_delta = state["momentum"].mul_(group["momentum"]).add_(sgd_delta)
                else:
                    state["momentum"] = sgd_delta.clone()
                p.sub_(group["lr"] * sgd_delta)


class Training:
    """Steps of SGD on the cross entropy."""

    def __init__(self, *, loss_params: bool) -> None:
        self.model = Network()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = SGD(self.model.parameters() if loss_params else trained)

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One update."""
        logits = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def buggy() -> Training:
    """Updates every parameter of the loss."""
    return Training(loss_params=True)


def healthy() -> Training:
    """Updates the trained parameters."""
    return Training(loss_params=False)


def buggy_declared() -> stackwise.TrainerSpec:
    """The mistake, with what is meant to be frozen."""
    return stackwise.TrainerSpec.of(buggy, frozen=("backbone",))


def healthy_declared() -> stackwise.TrainerSpec:
    """The fix, with what is meant to be frozen."""
    return stackwise.TrainerSpec.of(healthy, frozen=("backbone",))


def _drift(training: Training) -> float:
    before = {name: p.clone() for name, p in training.model.backbone.named_parameters()}
    for _ in range(5):
        ids = torch.randint(0, 64, (4, 16))
        training.step({"input_ids": ids, "labels": ids})
    after = dict(training.model.backbone.named_parameters())
    return max((after[name] - old).abs().max().item() for name, old in before.items())


def prove() -> tuple[float, float]:
    """Largest change of a frozen weight in 5 steps; must be 0."""
    return _drift(buggy()), _drift(healthy())
