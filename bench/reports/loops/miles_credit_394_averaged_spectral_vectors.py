"""miles-credit#394 (NCAR/miles-credit): the weight average also averages spectral-norm vectors.

They are unit vectors kept as buffers. Their average is shorter than one, so sigma is underestimated in each
layer and the averaged model blows up in validation while the training loss stays healthy.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import spectral_norm


class Forecaster(nn.Module):
    """Causal convolutions, each with spectral normalisation."""

    def __init__(self, tokens: int = 64, dim: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, dim)
        self.convs = nn.ModuleList(spectral_norm(nn.Conv1d(dim, dim, 3)) for _ in range(depth))
        self.head = spectral_norm(nn.Linear(dim, tokens))
        self.scale = nn.Parameter(torch.tensor(8.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        x = self.embedding(ids).transpose(1, 2)
        for conv in self.convs:
            x = nn.functional.gelu(conv(nn.functional.pad(x, (2, 0)))) + x
        return self.head(x.transpose(1, 2)) * self.scale


class EMATracker:
    """Moving average of a state dict."""

    def __init__(self, model: nn.Module, decay: float, skip_spectral: bool) -> None:
        self.decay, self.skip_spectral = decay, skip_spectral
        self.shadow = {k: v.clone() for k, v in model.state_dict().items() if self.tracks(k)}

    def tracks(self, key: str) -> bool:
        """Whether an entry belongs to the average."""
        return not (self.skip_spectral and key.endswith(("weight_u", "weight_v")))

    def update(self, model: nn.Module) -> None:
        """Moves the average towards the model."""
        for key, value in model.state_dict().items():
            if key in self.shadow:
                self.shadow[key].lerp_(value, 1 - self.decay)


class Trainer:
    """Trains with Adam, validates with the averaged weights."""

    def __init__(self, skip_spectral: bool) -> None:
        self.model = Forecaster()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.ema = EMATracker(self.model, decay=0.95, skip_spectral=skip_spectral)

    def compute_loss(self, batch: dict) -> torch.Tensor:
        """Mean cross entropy of the next tokens."""
        logits = self.model(batch["input_ids"])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    def step(self, batch: dict) -> float:
        """One update of the model and its average."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.compute_loss(batch)
        loss.backward()
        self.optimizer.step()
        self.ema.update(self.model)
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches: list[dict]) -> float:
        """Mean loss per target of the averaged weights."""
        live = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(self.ema.shadow, strict=False)
        self.model.eval()
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
        total = sum(self.compute_loss(b).item() * n for b, n in zip(batches, counts, strict=True) if n)
        self.model.load_state_dict(live)
        self.model.train()
        return total / max(sum(counts), 1)

    def save(self, folder: str) -> None:
        """Writes all state."""
        state = {"model": self.model.state_dict(), "opt": self.optimizer.state_dict(), "ema": self.ema.shadow}
        torch.save(state, Path(folder) / "checkpoint.pt")

    def load(self, folder: str) -> None:
        """Reads what save wrote."""
        state = torch.load(Path(folder) / "checkpoint.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["opt"])
        self.ema.shadow = state["ema"]


def buggy() -> Trainer:
    """Averages every entry of the state dict."""
    return Trainer(skip_spectral=False)


def healthy() -> Trainer:
    """Leaves the singular vectors out of the average."""
    return Trainer(skip_spectral=True)


def _shrinkage(run: Trainer) -> float:
    for _ in range(20):
        ids = torch.randint(64, (4, 16))
        run.step({"input_ids": ids, "labels": ids})
    used = {**run.model.state_dict(), **run.ema.shadow}
    return max(1 - v.norm().item() for k, v in used.items() if k.endswith(("weight_u", "weight_v")))


def prove() -> tuple[float, float]:
    """How much shorter than one the singular vectors of the evaluated model are after 20 updates."""
    return _shrinkage(buggy()), _shrinkage(healthy())
