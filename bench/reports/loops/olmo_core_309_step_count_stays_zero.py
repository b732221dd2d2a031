"""OLMo-core#309 (allenai/OLMo-core): SkipStepAdamW never counts its steps.

The bias correction of the first step is applied for ever. With betas of 0.9 and 0.95 the effective learning
rate is 2.2 times the given one.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim.optimizer import Optimizer


class SkipStepAdamW(Optimizer):
    """AdamW that leaves out steps whose loss is far above the recent ones."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        counts: bool,
    ) -> None:
        self.counts = counts
        self.losses: list[torch.Tensor] = []
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step_factor(self) -> torch.Tensor:
        """One, or zero for a step to leave out."""
        if len(self.losses) < 64:
            return torch.tensor(1.0)
        std, mean = torch.std_mean(torch.stack(self.losses[-128:-1]))
        return (self.losses[-1] <= mean + 6 * std).float()

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Updates all parameters."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        factor = self.step_factor()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                self.update(p, group, state, factor, beta1, beta2)

    def update(
        self, p: nn.Parameter, group: dict, state: dict, factor: torch.Tensor, beta1: float, beta2: float
    ) -> None:
        """Updates one parameter in place."""
        p.mul_(1 - factor * group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(p.grad, factor * (1 - beta1))
        state["exp_avg_sq"].lerp_(p.grad * p.grad, factor * (1 - beta2))
        current = state["step"] + 1
        if self.counts:
            state["step"] += factor
        first, second = 1 - beta1**current, 1 - beta2**current
        denom = (state["exp_avg_sq"] / second).sqrt().add_(group["eps"])
        p.sub_(factor * group["lr"] / first * state["exp_avg"] / denom)


class LM(nn.Module):
    """Embedding, two residual layers, output."""

    def __init__(self, vocab: int = 96, d_model: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab, d_model)
        self.blocks = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(2))
        self.w_out = nn.Linear(d_model, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        h = self.embeddings(ids)
        for block in self.blocks:
            h = h + torch.relu(block(h))
        return self.w_out(h)


class TrainModule:
    """Trains with the optimizer that skips steps."""

    def __init__(self, counts: bool) -> None:
        self.model = LM()
        self.optimizer = SkipStepAdamW(self.model.parameters(), counts=counts)

    def step(self, batch: dict) -> torch.Tensor:
        """One update."""
        logits = self.model(batch["input_ids"])[:, :-1]
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.losses.append(loss.detach())
        self.optimizer.step()
        return loss.detach()


def buggy() -> TrainModule:
    """The count of steps stays at zero."""
    return TrainModule(counts=False)


def healthy() -> TrainModule:
    """The count of steps grows."""
    return TrainModule(counts=True)


def _excess(counts: bool) -> float:
    # The largest update of a parameter with a constant gradient is the learning rate.
    p = nn.Parameter(torch.zeros(3))
    optimizer = SkipStepAdamW([p], weight_decay=0.0, counts=counts)
    for _ in range(200):
        before = p.detach().clone()
        p.grad = torch.ones(3)
        optimizer.step()
    return (before - p).max().item() / 1e-3


def prove() -> tuple[float, float]:
    """Size of the 200th update under a constant gradient as a multiple of the learning rate."""
    return _excess(False), _excess(True)
