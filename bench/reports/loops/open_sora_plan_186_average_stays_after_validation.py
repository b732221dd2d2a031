"""Open-Sora-Plan#186 (PKU-YuanGroup/Open-Sora-Plan): training goes on from the averaged weights.

Validation puts the average into the model and keeps a copy of the trained weights, but never puts them back.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

EMA_DECAY = 0.995


def ema_decay(update: int) -> float:
    """Decay of an update of the average, counted from 0."""
    return min(EMA_DECAY, (1 + update) / (10 + update)) if update > 0 else 0.0


class EMAModel:
    """Exponential moving average of parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shadow_params = [p.detach().clone() for p in parameters]
        self.temp_stored_params: list[torch.Tensor] | None = None
        self.optimization_step = 0

    @torch.no_grad()
    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update the average."""
        decay = ema_decay(self.optimization_step)
        self.optimization_step += 1
        for shadow, p in zip(self.shadow_params, parameters, strict=True):
            shadow.sub_((1 - decay) * (shadow - p))

    def store(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep a copy of the parameters."""
        self.temp_stored_params = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put the average into the parameters."""
        for shadow, p in zip(self.shadow_params, parameters, strict=True):
            p.copy_(shadow)

    @torch.no_grad()
    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put the kept copy back."""
        for stored, p in zip(self.temp_stored_params, parameters, strict=True):
            p.copy_(stored)
        self.temp_stored_params = None


class LatteT2V(nn.Module):
    """Token embedding, causal temporal convolution and a head."""

    def __init__(self, codes: int = 84, width: int = 32) -> None:
        super().__init__()
        self.patch_embed = nn.Embedding(codes, width)
        self.temporal = nn.Conv1d(width, width, 3)
        self.norm = nn.LayerNorm(width)
        self.proj_out = nn.Linear(width, codes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next code."""
        x = self.patch_embed(ids)
        x = x + F.gelu(self.temporal(F.pad(x.mT, (2, 0)))).mT
        return self.proj_out(self.norm(x))


class Trainer:
    """Trains, averages the weights and validates with the average."""

    def __init__(self, restores: bool) -> None:
        self.restores = restores
        self.model = LatteT2V()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=1e-2)
        self.ema_model = EMAModel(self.model.parameters())

    def _sum(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        target = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        return F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum"), (target != -100).sum()

    def step(self, batch: dict) -> float:
        """One update of the weights and of the average."""
        total, count = self._sum(batch)
        loss = total / count.clamp(min=1)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema_model.step(self.model.parameters())
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches: list[dict]) -> float:
        """Validation loss of the averaged weights."""
        self.ema_model.store(self.model.parameters())
        self.ema_model.copy_to(self.model.parameters())
        sums = [self._sum(batch) for batch in batches]
        if self.restores:
            self.ema_model.restore(self.model.parameters())
        return float(sum(total for total, _ in sums) / max(sum(int(count) for _, count in sums), 1))

    def save(self, folder: str | Path) -> None:
        """Write model, optimizer and average."""
        ema = (self.ema_model.shadow_params, self.ema_model.optimization_step)
        torch.save((self.model.state_dict(), self.optimizer.state_dict(), ema), Path(folder) / "state.pt")

    def load(self, folder: str | Path) -> None:
        """Read model, optimizer and average."""
        model, optimizer, ema = torch.load(Path(folder) / "state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.ema_model.shadow_params, self.ema_model.optimization_step = ema


def buggy() -> Trainer:
    """The average stays in the model."""
    return Trainer(restores=False)


def healthy() -> Trainer:
    """The trained weights come back."""
    return Trainer(restores=True)


def buggy_declared() -> stackwise.TrainerSpec:
    """The mistake, with the average and the clipping."""
    return stackwise.TrainerSpec.of(buggy, average_decay=ema_decay, max_norm=1.0)


def healthy_declared() -> stackwise.TrainerSpec:
    """The fix, with the average and the clipping."""
    return stackwise.TrainerSpec.of(healthy, average_decay=ema_decay, max_norm=1.0)


def _change(factory: Callable[[], Trainer]) -> float:
    run = factory()
    for _ in range(8):
        ids = torch.randint(84, (4, 16))
        run.step({"input_ids": ids, "labels": ids})
    before = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    run.evaluate([{"input_ids": ids, "labels": ids}])
    return (nn.utils.parameters_to_vector(run.model.parameters()) - before).abs().max().item()


def prove() -> tuple[float, float]:
    """Largest change of a trained weight by a validation."""
    return _change(buggy), _change(healthy)
