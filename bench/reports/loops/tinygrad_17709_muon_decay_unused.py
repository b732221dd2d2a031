"""tinygrad#17709 (tinygrad/tinygrad): the weight decay of Muon has no effect.

The step computes the decayed weight after the momentum, but then uses it only for its dtype: the update is
applied to the weight that has not decayed.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

MUON_LR, WEIGHT_DECAY, ADAM_LR = 0.02, 0.1, 2e-3


def newton_schulz(gradient: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest orthogonal matrix, approximately."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.mT if gradient.shape[0] > gradient.shape[1] else gradient
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if gradient.shape[0] > gradient.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is made orthogonal, with decoupled weight decay."""

    def __init__(self, params: Iterable[nn.Parameter], uses_decayed: bool) -> None:
        super().__init__(params, {"lr": MUON_LR, "momentum": 0.95, "weight_decay": WEIGHT_DECAY})
        self.uses_decayed = uses_decayed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of the matrices that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"].mul_(momentum).add_(p.grad)
                update = newton_schulz(p.grad + momentum * buffer)
                decayed = p * (1.0 - lr * group["weight_decay"])
                update = lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * update.to(decayed.dtype)
                p.copy_((decayed if self.uses_decayed else p) - update)
        return loss


class GPT(nn.Module):
    """Embedding, a causal attention layer, an MLP and the output layer."""

    def __init__(self, vocab: int = 72, dim: int = 32) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.norm = nn.RMSNorm(dim)
        blocks = {"qkv": nn.Linear(dim, 3 * dim, bias=False), "proj": nn.Linear(dim, dim, bias=False)}
        blocks |= {"up": nn.Linear(dim, 2 * dim, bias=False), "down": nn.Linear(2 * dim, dim, bias=False)}
        self.blocks = nn.ModuleDict(blocks)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.wte(ids)
        q, k, v = self.blocks["qkv"](self.norm(x)).chunk(3, dim=-1)
        x = x + self.blocks["proj"](F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.lm_head(x + self.blocks["down"](F.silu(self.blocks["up"](x))))


class Trainer:
    """Muon for the matrices of the blocks, AdamW without decay for the rest."""

    def __init__(self, uses_decayed: bool) -> None:
        self.model = GPT()
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("blocks.")]
        self.muon = Muon(self.model.blocks.parameters(), uses_decayed)
        self.adam = torch.optim.AdamW(rest, lr=ADAM_LR, weight_decay=0.0)
        self.optimizer = [self.muon, self.adam]

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One update."""
        logits = self.model(batch["input_ids"])[:, :-1]
        target = batch["labels"][:, 1:]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        for optimizer in self.optimizer:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizer:
            optimizer.step()
        return loss.item()


def buggy() -> Trainer:
    """Subtracts the update from the weight as it was."""
    return Trainer(uses_decayed=False)


def healthy() -> Trainer:
    """Subtracts the update from the decayed weight."""
    return Trainer(uses_decayed=True)


def declared(factory: Callable[[], Trainer]) -> stackwise.TrainerSpec:
    """Which parameters decay."""
    return stackwise.TrainerSpec.of(factory, decayed=lambda name, _: name.startswith("blocks."), frozen=())


def _missing(run: Trainer) -> float:
    weight = run.model.blocks["up"].weight
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    run.muon.step()
    decay = MUON_LR * WEIGHT_DECAY * before
    return ((weight.detach() - (before - decay)).norm() / decay.norm()).item()


def prove() -> tuple[float, float]:
    """Share of the weight decay that is missing in a step without a gradient."""
    return _missing(buggy()), _missing(healthy())
