"""Lightning#19987 (Lightning-AI/pytorch-lightning): the last step of an epoch has too small a gradient.

When the epoch ends before accumulate_grad_batches micro-batches are together, the loss is still divided by
the full number.
"""

from collections.abc import Iterator

import torch
from torch import nn


class GRULanguageModel(nn.Module):
    """Embedding, GRU, linear output."""

    def __init__(self, vocab: int = 66, features: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, features)
        self.gru = nn.GRU(features, features, batch_first=True)
        self.output = nn.Linear(features, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        hidden, _ = self.gru(self.embedding(tokens))
        return self.output(hidden)


def nll(model: nn.Module, batch: dict) -> tuple[torch.Tensor, int]:
    """Summed loss and number of targets."""
    logits = model(batch["input_ids"])[:, :-1]
    target = batch["labels"][:, 1:]
    loss = nn.functional.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
    return loss, int((target != -100).sum())


class Trainer:
    """Runs epochs with accumulated gradients; the last group of an epoch may be short."""

    def __init__(self, accumulate_grad_batches: int = 4, max_epochs: int = 2) -> None:
        self.model = GRULanguageModel()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.accumulate_grad_batches = accumulate_grad_batches
        self.max_epochs = max_epochs

    def divisor(self, present: int) -> int:
        """By what the loss of each micro-batch is divided when so many are present."""
        return present

    def _update(self, group: list[dict], divisor: int) -> float:
        counts = [max(int((batch["labels"][:, 1:] != -100).sum()), 1) for batch in group]
        # Micro-batches weigh as much as they have targets.
        average = sum(counts) / len(group)
        self.optimizer.zero_grad()
        total = 0.0
        for batch in group:
            loss, _ = nll(self.model, batch)
            (loss / average / divisor).backward()
            total += loss.item()
        self.optimizer.step()
        return total / sum(counts)

    def step(self, batch: dict) -> float:
        """One update from one batch without accumulation."""
        return self._update([batch], 1)

    def accumulate(self, batches: list[dict]) -> float:
        """One update from the micro-batches of a group."""
        batches = list(batches)
        return self._update(batches, self.divisor(len(batches)))

    def epoch(self, number: int) -> Iterator[dict]:
        """Ten micro-batches of counting sequences."""
        order = torch.randperm(40, generator=torch.Generator().manual_seed(number))
        for first in order.view(10, 4):
            ids = (first[:, None] + torch.arange(16)) % 66
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def fit(self) -> None:
        """Train for all epochs."""
        for number in range(self.max_epochs):
            group = []
            for batch in self.epoch(number):
                group.append(batch)
                if len(group) == self.accumulate_grad_batches:
                    self.accumulate(group)
                    group = []
            if group:
                self.accumulate(group)


class FixedDivisorTrainer(Trainer):
    """Divides by the configured number of micro-batches."""

    def divisor(self, present: int) -> int:
        """By what the loss of each micro-batch is divided when so many are present."""
        return max(present, self.accumulate_grad_batches)


def buggy() -> Trainer:
    """The configured number."""
    return FixedDivisorTrainer()


def healthy() -> Trainer:
    """The number of micro-batches that are there."""
    return Trainer()


def _error(run: Trainer) -> float:
    group = list(run.epoch(0))[8:]
    joined = {key: torch.cat([batch[key] for batch in group]) for key in group[0]}
    loss, count = nll(run.model, joined)
    expected = torch.autograd.grad(loss / count, run.model.output.weight)[0]
    before = run.model.output.weight.detach().clone()
    run.accumulate(group)
    taken = (before - run.model.output.weight.detach()) / 0.5
    return ((taken - expected).norm() / expected.norm()).item()


def prove() -> tuple[float, float]:
    """Relative error of the gradient that the last step of an epoch applies."""
    return _error(buggy()), _error(healthy())
