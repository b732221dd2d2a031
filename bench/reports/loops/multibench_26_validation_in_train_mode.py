"""MultiBench#26 (pliang279/MultiBench): the best model is chosen by a loss with dropout active.

The validation loop calls model.train() before every forward pass.
"""

import copy

import torch
from torch import nn


class Encoder(nn.Module):
    """Embeds tokens and their neighbours to the left."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.lookup = nn.Embedding(vocab, dim)
        self.left = nn.Linear(dim, dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Features of every position."""
        x = self.lookup(ids)
        previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return torch.cat([x, self.left(previous)], -1)


class Head(nn.Module):
    """A two-layer classifier with dropout and batch normalisation."""

    def __init__(self, width: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.dropout = nn.Dropout(0.3)
        self.fc2 = nn.Linear(hidden, vocab)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        x = self.norm(torch.relu(self.fc(x)).transpose(1, 2)).transpose(1, 2)
        return self.fc2(self.dropout(x))


class Supervised:
    """Training with a validation pass after each epoch."""

    train_in_validation = False

    def __init__(self, vocab: int = 55) -> None:
        self.vocab = vocab
        self.model = nn.Sequential(Encoder(vocab, 24), Head(48, 64, vocab))
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)
        self.objective = nn.CrossEntropyLoss(ignore_index=-100)
        self.best, self.best_loss = None, float("inf")

    def _forward(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(batch["input_ids"])[:, :-1].flatten(0, 1)
        return out, batch["labels"][:, 1:].flatten()

    def step(self, batch: dict) -> float:
        """One update."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.objective(*self._forward(batch))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 8)
        self.optimizer.step()
        return loss.item()

    def evaluate(self, batches: list[dict]) -> float:
        """Validation loss per target."""
        self.model.eval()
        total, totals = 0.0, 0
        with torch.no_grad():
            for batch in batches:
                if self.train_in_validation:
                    self.model.train()
                out, truth = self._forward(batch)
                kept = truth != -100
                if kept.any():
                    total += self.objective(out, truth).item() * kept.sum().item()
                    totals += kept.sum().item()
        self.model.train()
        return total / max(totals, 1)

    def fit(self) -> None:
        """Three epochs on sequences that count upwards; the best model is kept."""
        starts = torch.arange(self.vocab).view(11, 5)
        batches = []
        for start in starts:
            ids = (start[:, None] + torch.arange(12)) % self.vocab
            batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
        train, valid = batches[:8], batches[8:]
        for _ in range(3):
            for batch in train:
                self.step(batch)
            loss = self.evaluate(valid)
            if loss < self.best_loss:
                self.best_loss, self.best = loss, copy.deepcopy(self.model.state_dict())


class SupervisedTrainFlag(Supervised):
    """Sets the training mode again for each validation batch."""

    train_in_validation = True


def buggy() -> Supervised:
    """Validation in training mode."""
    return SupervisedTrainFlag()


def healthy() -> Supervised:
    """Validation in evaluation mode."""
    return Supervised()


def _spread(run: Supervised) -> float:
    batches = []
    for ids in torch.randint(run.vocab, (3, 4, 16)):
        run.step({"input_ids": ids, "labels": ids})
        batches.append({"input_ids": ids, "labels": ids})
    losses = [run.evaluate(batches) for _ in range(5)]
    return max(losses) - min(losses)


def prove() -> tuple[float, float]:
    """Spread of the validation loss over five passes with the same weights and batches."""
    return _spread(buggy()), _spread(healthy())
