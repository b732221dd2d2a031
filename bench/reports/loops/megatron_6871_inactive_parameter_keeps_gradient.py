"""Megatron-LM#6871 (NVIDIA/Megatron-LM): a parameter without a gradient is updated with its last one.

The hybrid optimizer copies gradients to its own copies of the parameters. If a parameter has none in a step,
as that of an expert without tokens, its copy keeps the old gradient and the inner optimizer uses it again.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

LR, WEIGHT_DECAY, CLIP_GRAD = 2e-3, 0.01, 1.0


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """Runs AdamW on copies of the parameters, which could be on another device."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, clears: bool) -> None:
        self.clears = clears
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        own = [p for group in self.param_groups for p in group["params"]]
        self.inner = {p: nn.Parameter(p.detach().clone()) for p in own}
        groups = [group | {"params": self._copies(group)} for group in self.param_groups]
        self.sub_optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)

    def _copies(self, group: dict) -> list[nn.Parameter]:
        return [self.inner[p] for p in group["params"]]

    def _sync_to_inner(self) -> None:
        for group, inner_group in zip(self.param_groups, self.sub_optimizer.param_groups, strict=True):
            inner_group |= {key: group[key] for key in ("lr", "weight_decay")}
        for p, inner in self.inner.items():
            inner.copy_(p)
            inner.requires_grad = p.grad is not None
            if p.grad is not None:
                inner.grad = p.grad.detach().clone()
            elif self.clears:
                inner.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update the copies, then the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._sync_to_inner()
        self.sub_optimizer.step()
        for p, inner in self.inner.items():
            p.copy_(inner)
            if inner in self.sub_optimizer.state:
                self.state[p] = self.sub_optimizer.state[inner]
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore this optimizer and the inner one."""
        super().load_state_dict(state_dict)
        for p, inner in self.inner.items():
            self.sub_optimizer.state.pop(inner, None)
            if p in self.state:
                self.sub_optimizer.state[inner] = self.state[p]


class MoEModel(nn.Module):
    """Embedding, a router that sends each token to one of eight experts, and output."""

    def __init__(self, vocab: int = 72, hidden: int = 24, num_experts: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden))
            for _ in range(num_experts)
        )
        self.output_layer = nn.Linear(hidden, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embedding(ids)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = chosen == number
            if tokens.any():
                y[tokens] = weight[tokens][:, None] * expert(x[tokens])
        return self.output_layer(x + y)


class Trainer:
    """Plain training with the hybrid optimizer."""

    def __init__(self, clears: bool) -> None:
        self.model = MoEModel()
        self.optimizer = HybridDeviceOptimizer(
            self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, clears=clears
        )

    def step(self, batch: dict) -> float:
        """One update."""
        self.optimizer.zero_grad(set_to_none=True)
        target = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        return loss.item()


def buggy() -> Trainer:
    """Old gradients stay in the copies."""
    return Trainer(clears=False)


def healthy() -> Trainer:
    """Old gradients are cleared."""
    return Trainer(clears=True)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The fix, with learning rate, decay and clipping."""
    facts = {"learning_rate": lambda _: LR, "decayed": lambda _name, _parameter: True}
    return stackwise.TrainerSpec.of(factory, max_norm=CLIP_GRAD, **facts)


def _moved(run: Trainer) -> float:
    ids = torch.arange(64).view(4, 16)
    run.step({"input_ids": ids, "labels": ids})
    before = [p.detach().clone() for p in run.model.experts.parameters()]
    single = ids[:1, :2]
    run.step({"input_ids": single, "labels": single})
    pairs = zip(before, run.model.experts.parameters(), strict=True)
    return max((p - old).abs().max().item() for old, p in pairs if p.grad is None)


def prove() -> tuple[float, float]:
    """Largest update of a weight of an expert that had no token."""
    return _moved(buggy()), _moved(healthy())
