"""bitsandbytes#1992 (bitsandbytes-foundation/bitsandbytes): Lion adds the weight decay to the gradient.

The decay goes through the momentum and the sign of the update, where it should shrink the weights directly.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

LR, WEIGHT_DECAY = 5e-4, 0.1


class Lion(torch.optim.Optimizer):
    """Update by the sign of an interpolation of momentum and gradient."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        decoupled: bool,
    ) -> None:
        self.decoupled = decoupled
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update_step(group, p)
        return loss

    def update_step(self, group: dict, p: nn.Parameter) -> None:
        """Update one parameter."""
        state = self.state[p]
        if not state:
            state["state1"] = torch.zeros_like(p)
        momentum, (beta1, beta2), decay = state["state1"], group["betas"], group["weight_decay"]
        gradient = p.grad
        if self.decoupled:
            p.mul_(1.0 - group["lr"] * decay)
        else:
            gradient = gradient + decay * p
        p.sub_(group["lr"] * momentum.lerp(gradient, 1.0 - beta1).sign())
        momentum.lerp_(gradient, 1.0 - beta2)


class CausalLM(nn.Module):
    """Embedding, one causal attention layer and output."""

    def __init__(self, vocab_size: int = 74, hidden_size: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embed_tokens(ids)
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        return self.lm_head(x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Trainer:
    """Plain training with Lion."""

    def __init__(self, decoupled: bool) -> None:
        self.model = CausalLM()
        self.optimizer = Lion(self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, decoupled=decoupled)

    def loss(self, batch: dict) -> torch.Tensor:
        """Mean loss of the next tokens."""
        target = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        return total / (target != -100).sum().clamp(min=1)

    def step(self, batch: dict) -> float:
        """One update."""
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def buggy() -> Trainer:
    """Decay as a part of the gradient."""
    return Trainer(decoupled=False)


def healthy() -> Trainer:
    """Decay apart from the gradient."""
    return Trainer(decoupled=True)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The fix, with the learning rate and the decayed parameters."""
    return stackwise.TrainerSpec.of(
        factory, learning_rate=lambda _: LR, frozen=(), decayed=lambda _name, _parameter: True
    )


def _error(decoupled: bool) -> float:
    # A gradient of zero leaves the decay alone.
    p = nn.Parameter(torch.linspace(0.5, 2.0, 7))
    optimizer = Lion([p], lr=LR, weight_decay=WEIGHT_DECAY, decoupled=decoupled)
    expected = p.detach() * (1 - LR * WEIGHT_DECAY)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    return ((p - expected).abs().max() / LR).item()


def prove() -> tuple[float, float]:
    """Distance of weights without a gradient from the decayed ones, in learning rates."""
    return _error(False), _error(True)
