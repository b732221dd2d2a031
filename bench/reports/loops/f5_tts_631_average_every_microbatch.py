"""F5-TTS#631 (SWivid/F5-TTS): the EMA model is updated on every micro-batch, also without an optimizer step.

With gradient accumulation over n micro-batches the same weights enter the average n times, so that its decay
depends on the accumulation setting.
"""

import copy
from pathlib import Path

import torch
from torch import nn


class EMA(nn.Module):
    """Exponential moving average of a model, as a model of its own."""

    def __init__(self, model: nn.Module, beta: float = 0.9) -> None:
        super().__init__()
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.beta = beta

    @torch.no_grad()
    def update(self, online: nn.Module) -> None:
        """Averages the parameters of the trained model in."""
        for average, current in zip(self.ema_model.parameters(), online.parameters(), strict=True):
            average.lerp_(current, 1.0 - self.beta)


class TextModel(nn.Module):
    """Embedding, LSTM and projection."""

    def __init__(self, text_num_embeds: int = 50, dim: int = 28) -> None:
        super().__init__()
        self.text_embed = nn.Embedding(text_num_embeds, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.proj_out = nn.Linear(dim, text_num_embeds)

    def forward(self, text: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of the next tokens."""
        out = self.proj_out(self.lstm(self.text_embed(text))[0])
        return nn.functional.cross_entropy(out[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum")


class Trainer:
    """Training with gradient accumulation and an EMA model."""

    def __init__(self, wait_for_sync: bool) -> None:
        self.wait_for_sync = wait_for_sync
        self.model = TextModel()
        self.ema = EMA(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.max_grad_norm = 1.0

    def accumulate(self, batches: list) -> float:
        """One optimizer step from several micro-batches."""
        tokens = max(1, sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
        total = 0.0
        for i, batch in enumerate(batches, start=1):
            sync_gradients = i == len(batches)
            loss = self.model(batch["input_ids"], batch["labels"]) / tokens
            loss.backward()
            total += loss.item()
            if sync_gradients:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if sync_gradients or not self.wait_for_sync:
                self.ema.update(self.model)
        return total

    def step(self, batch: dict) -> float:
        """One optimizer step from one batch."""
        return self.accumulate([batch])

    def save(self, folder: str) -> None:
        """Saves the model, its average and the optimizer."""
        checkpoint = {
            "model_state_dict": self.model.state_dict(),
            "ema_model_state_dict": self.ema.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
        }
        torch.save(checkpoint, Path(folder) / "model_last.pt")

    def load(self, folder: str) -> None:
        """Loads the last checkpoint."""
        checkpoint = torch.load(Path(folder) / "model_last.pt")
        self.model.load_state_dict(checkpoint["model_state_dict"])
        self.ema.load_state_dict(checkpoint["ema_model_state_dict"])
        self.optimizer.load_state_dict(checkpoint["optimizer_state_dict"])


def buggy() -> Trainer:
    """Updates the average once per micro-batch."""
    return Trainer(wait_for_sync=False)


def healthy() -> Trainer:
    """Updates the average once per optimizer step."""
    return Trainer(wait_for_sync=True)


def _difference(whole: Trainer) -> float:
    split = copy.deepcopy(whole)
    split.optimizer = torch.optim.AdamW(split.model.parameters(), lr=2e-3)
    for _ in range(5):
        ids = torch.randint(50, (4, 16))
        whole.accumulate([{"input_ids": ids, "labels": ids}])
        split.accumulate([{"input_ids": row, "labels": row} for row in ids.split(1)])
    pairs = zip(whole.ema.parameters(), split.ema.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def prove() -> tuple[float, float]:
    """Largest difference of the average between one batch and four micro-batches per step."""
    return _difference(buggy()), _difference(healthy())
