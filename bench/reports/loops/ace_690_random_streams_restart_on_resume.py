"""ace#690 (ai2cm/ace): a resumed run seeds again and its checkpoint holds no random state.

Dropout masks and rollout lengths repeat those of the beginning of the training instead of going on.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


class TimeLengthProbabilities:
    """Draws how many positions a step trains on."""

    def __init__(self, lengths: list[int], weights: list[float]) -> None:
        self.lengths = lengths
        self.weights = torch.tensor(weights)

    def initialize_rng(self, seed: int) -> None:
        """Start the stream of lengths."""
        self.rng = torch.Generator().manual_seed(seed)

    def sample(self) -> int:
        """The next length."""
        return self.lengths[torch.multinomial(self.weights, 1, generator=self.rng).item()]


class Stepper(nn.Module):
    """Predicts the next token from the running mean of the earlier ones."""

    def __init__(self, vocab: int = 72, dim: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.hidden = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        x = self.embedding(ids)
        context = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1).view(1, -1, 1)
        return self.head(self.dropout(torch.tanh(self.hidden(torch.cat([x, context], -1)))))


class Trainer:
    """Training of a stepper with rollouts of random length."""

    def __init__(self) -> None:
        self.model = Stepper()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.lengths = TimeLengthProbabilities([3, 5, 9, 15], [0.3, 0.3, 0.2, 0.2])
        # A configuration without a seed gets a fresh one, which stays the same when the job is resumed.
        self.set_random_seed(torch.randint(2**31 - 1, ()).item())

    def set_random_seed(self, seed: int) -> None:
        """Seed every stream of the training."""
        self.seed = seed
        torch.manual_seed(seed + 3)
        self.lengths.initialize_rng(seed + 5)

    def step(self, batch: dict) -> float:
        """One update on the first positions of the batch."""
        self.model.train()
        n = self.lengths.sample()
        ids, labels = batch["input_ids"][:, : n + 1], batch["labels"][:, 1 : n + 1]
        logits = self.model(ids)[:, : labels.shape[1]]
        total = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="sum")
        loss = total / labels.ne(-100).sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def random_state(self) -> None:
        """The checkpoint keeps nothing about random numbers."""

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint."""
        checkpoint = {"seed": self.seed, "random": self.random_state()}
        checkpoint["stepper"] = self.model.state_dict()
        checkpoint["optimization"] = self.optimizer.state_dict()
        torch.save(checkpoint, Path(folder, "ckpt.tar"))

    def load(self, folder: str | Path) -> None:
        """Start as the first job did and restore the checkpoint."""
        checkpoint = torch.load(Path(folder, "ckpt.tar"))
        self.set_random_seed(checkpoint["seed"])
        self.model.load_state_dict(checkpoint["stepper"])
        self.optimizer.load_state_dict(checkpoint["optimization"])
        if checkpoint["random"] is not None:
            torch.set_rng_state(checkpoint["random"]["torch"])
            self.lengths.rng.set_state(checkpoint["random"]["lengths"])


class TrainerWithRandomState(Trainer):
    """Keeps the random streams in the checkpoint."""

    def random_state(self) -> dict | None:
        """The state of both streams."""
        return {"torch": torch.get_rng_state(), "lengths": self.lengths.rng.get_state()}


def buggy() -> Trainer:
    """No random state in the checkpoint."""
    return Trainer()


def healthy() -> Trainer:
    """Random state in the checkpoint."""
    return TrainerWithRandomState()


def _difference(factory: Callable) -> float:
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(72, (12, 4, 16))]
    run, resumed = factory(), factory()
    for batch in batches[:6]:
        run.step(batch)
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        straight = [run.step(batch) for batch in batches[6:]]
        resumed.load(folder)
    return max(abs(a - resumed.step(batch)) for a, batch in zip(straight, batches[6:], strict=True))


def prove() -> tuple[float, float]:
    """Largest difference of the losses between the uninterrupted and the resumed training."""
    return _difference(buggy), _difference(healthy)
