"""transgenic#59 (wyim-pgl/transgenic): a run that is resumed within an epoch skips the wrong samples.

The order of an epoch is drawn from the global random state when its loader starts. A resume restores the
state of the middle of the epoch, draws another order and skips the first batches of that one.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

SAMPLES, LENGTH, BATCH_SIZE, VOCAB, SEED, LR = 64, 16, 4, 80, 42, 1e-3
GENES = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(5))
GENES[:, 0] = torch.arange(SAMPLES)  # a sequence begins with its number


class Annotator(nn.Module):
    """Embedding, two causal convolutions with dropout and the output layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 3) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.decoder = nn.Linear(width, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embed(ids).mT
        for conv in self.filters:
            x = x + self.dropout(F.gelu(conv(F.pad(x, (2, 0)))))
        return self.decoder(x.mT)


class Loader:
    """Shuffled batches of the training set."""

    def __init__(self, is_seedable: bool) -> None:
        self.is_seedable = is_seedable

    def batches(self, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of an epoch, shuffled when the first one is asked for."""
        own = torch.Generator().manual_seed(SEED + epoch) if self.is_seedable else None
        for numbers in torch.randperm(SAMPLES, generator=own).split(BATCH_SIZE):
            ids = GENES[numbers]
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


class Training:
    """Trains on the sequences, with checkpoints of everything that is random."""

    shuffles = True
    n_examples = SAMPLES

    def __init__(self, seedable_sampler: bool) -> None:
        self.model = Annotator()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.train_dl = Loader(seedable_sampler)
        self.epoch_number, self.next_batch = 0, 0

    def epoch(self, number: int) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of an epoch from its start."""
        return self.train_dl.batches(number)

    def position(self) -> tuple[int, int]:
        """Epoch, and index of its next batch."""
        return self.epoch_number, self.next_batch

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Train on the next batch."""
        logits = self.model(batch["input_ids"])[:, :-1]
        target = batch["labels"][:, 1:]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.next_batch += 1
        if self.next_batch == SAMPLES // BATCH_SIZE:
            self.epoch_number, self.next_batch = self.epoch_number + 1, 0
        return loss.item()

    def save(self, folder: str | Path) -> None:
        """Write the model, the optimizer, the position and the random state."""
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.position())
        torch.save((*parts, torch.get_rng_state()), Path(folder) / "state.pt")

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint, with its random state."""
        model, optimizer, position, random_state = torch.load(Path(folder) / "state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.epoch_number, self.next_batch = position
        torch.set_rng_state(random_state)


def buggy() -> Training:
    """Draws the order from the global random state."""
    return Training(seedable_sampler=False)


def healthy() -> Training:
    """Draws the order from the seed and the epoch."""
    return Training(seedable_sampler=True)


def declared(factory: Callable[[], Training]) -> stackwise.TrainerSpec:
    """The configured clipping and learning rate."""
    return stackwise.TrainerSpec.of(factory, max_norm=1.0, learning_rate=lambda _: LR, frozen=())


def _repeated(factory: Callable[[], Training]) -> float:
    run, resumed, seen = factory(), factory(), set()
    for batch, _ in zip(run.epoch(0), range(5), strict=False):
        run.step(batch)
        seen |= set(batch["input_ids"][:, 0].tolist())
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        resumed.load(folder)
    number, start = resumed.position()
    rest = torch.cat([batch["input_ids"][:, 0] for batch in list(resumed.epoch(number))[start:]])
    return float(len(seen & set(rest.tolist())))


def prove() -> tuple[float, float]:
    """Samples of an epoch that are trained on again after a resume."""
    return _repeated(buggy), _repeated(healthy)
