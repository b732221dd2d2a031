"""nwm#16 (facebookresearch/nwm): with bfloat16 the gradients of all earlier steps stay in every update.

Only the branch for full precision clears the gradients.
"""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

EMA_DECAY, GRAD_CLIP, LR = 0.99, 10.0, 1e-3


class CDiT(nn.Module):
    """Embedding, two feed-forward blocks with causal averages as context, and a head."""

    def __init__(self, codes: int = 68, hidden_size: int = 32) -> None:
        super().__init__()
        self.x_embedder = nn.Embedding(codes, hidden_size)
        self.context = nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden_size),
            nn.Linear(hidden_size, 2 * hidden_size),
            nn.GELU(),
            nn.Linear(2 * hidden_size, hidden_size),
        )
        self.final_layer = nn.Linear(hidden_size, codes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the next code."""
        h = self.x_embedder(x)
        places = torch.arange(1, x.shape[1] + 1, device=x.device)
        h = h + self.context(h.cumsum(1) / places[:, None])
        return self.final_layer(h + self.mlp(h))


@torch.no_grad()
def update_ema(ema_model: nn.Module, model: nn.Module, decay: float = EMA_DECAY) -> None:
    """Moves the average towards the weights."""
    for average, p in zip(ema_model.parameters(), model.parameters(), strict=True):
        average.mul_(decay).add_(p, alpha=1 - decay)


class Trainer:
    """Trains a world model and an average of its weights."""

    def __init__(self, clear_in_bfloat: bool, bfloat_enable: bool = True) -> None:
        self.clear_in_bfloat, self.bfloat_enable = clear_in_bfloat, bfloat_enable
        self.model = CDiT()
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)

    def compute_loss(self, batch: dict) -> torch.Tensor:
        """Mean loss of the next codes."""
        target = batch["labels"][:, 1:]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bfloat_enable):
            logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.float().mT, target, ignore_index=-100, reduction="sum")
        return total / (target != -100).sum().clamp(min=1)

    def step(self, batch: dict) -> float:
        """One training step."""
        loss = self.compute_loss(batch)
        if not self.bfloat_enable or self.clear_in_bfloat:
            self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.step()
        update_ema(self.ema, self.model)
        return loss.detach().item()

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint."""
        state = {"model": self.model.state_dict(), "ema": self.ema.state_dict()}
        torch.save(state | {"opt": self.optimizer.state_dict()}, Path(folder) / "latest.pth.tar")

    def load(self, folder: str | Path) -> None:
        """Read the checkpoint."""
        state = torch.load(Path(folder) / "latest.pth.tar")
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["opt"])


def buggy() -> Trainer:
    """Keeps the gradients in bfloat16."""
    return Trainer(clear_in_bfloat=False)


def healthy() -> Trainer:
    """Clears the gradients in both precisions."""
    return Trainer(clear_in_bfloat=True)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The fix, with the configured clipping, average and learning rate."""
    facts = {"max_norm": GRAD_CLIP, "average_decay": lambda _: EMA_DECAY, "learning_rate": lambda _: LR}
    return stackwise.TrainerSpec.of(factory, frozen=(), **facts)


def _error(run: Trainer) -> float:
    for _ in range(5):
        ids = torch.randint(68, (4, 16))
        batch = {"input_ids": ids, "labels": ids}
        expected = torch.autograd.grad(run.compute_loss(batch), run.model.final_layer.weight)[0]
        run.step(batch)
    return ((run.model.final_layer.weight.grad - expected).norm() / expected.norm()).item()


def prove() -> tuple[float, float]:
    """Relative error of the fifth gradient that the optimizer uses."""
    return _error(buggy()), _error(healthy())
