"""ms-swift#10050 (modelscope/ms-swift): a resumed epoch goes on in the order of the first epoch.

A checkpoint inside a later epoch is resumed with a rebuilt sampler that still stands at epoch 0, so the rest
of the epoch repeats samples that it has already seen.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

VOCAB, LENGTH, SAMPLES, BATCH = 61, 16, 40, 4


class ShuffledBatches:
    """Batches of sample numbers; the permutation comes from the data seed plus the epoch."""

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        self.size, self.batch_size, self.seed, self.at = size, batch_size, seed, 0

    def set_epoch(self, number: int) -> None:
        """Choose the permutation of one epoch."""
        self.at = number

    def __len__(self) -> int:
        return self.size // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.at)
        order = torch.randperm(self.size, generator=generator).tolist()
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield order[start : start + self.batch_size]


def sample(index: int) -> list[int]:
    """A fixed token sequence that begins with the number of the sample."""
    return [index, *((3 * index + 5 * place**2 + index * place) % VOCAB for place in range(1, LENGTH))]


class SwiftTrainer:
    """Fine-tunes on the corpus and can resume inside an epoch."""

    def __init__(self, set_epoch_on_rebuild: bool, data_seed: int = 42) -> None:
        self.model = nn.Sequential(
            nn.Embedding(VOCAB, 24), nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, VOCAB)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.set_epoch_on_rebuild, self.data_seed = set_epoch_on_rebuild, data_seed
        self.sampler = self.build_sampler()
        self.current, self.next_batch = 0, 0
        self.resumed_in = None

    def build_sampler(self) -> ShuffledBatches:
        """A sampler over the whole corpus."""
        return ShuffledBatches(SAMPLES, BATCH, self.data_seed)

    def epoch(self, number: int) -> Iterator[dict]:
        """All batches of an epoch in their order."""
        self.sampler.set_epoch(number)
        sampler = self.sampler
        if number == self.resumed_in:
            # The loop that skips the seen batches wants its own loader.
            sampler = self.build_sampler()
            if self.set_epoch_on_rebuild:
                sampler.set_epoch(number)
        for numbers in sampler:
            ids = torch.tensor([sample(index) for index in numbers])
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def position(self) -> tuple[int, int]:
        """The epoch and the index of its next batch."""
        return self.current, self.next_batch

    def step(self, batch: dict) -> float:
        """One update."""
        logits = self.model(batch["input_ids"])[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.next_batch += 1
        if self.next_batch == len(self.sampler):
            self.current, self.next_batch = self.current + 1, 0
        return loss.item()

    def save(self, folder: str | Path) -> None:
        """Write everything a resumed run needs."""
        state = (self.model.state_dict(), self.optimizer.state_dict(), self.position())
        torch.save(state, Path(folder) / "trainer.pt")

    def load(self, folder: str | Path) -> None:
        """Continue a saved run."""
        model, optimizer, (self.current, self.next_batch) = torch.load(Path(folder) / "trainer.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.resumed_in = self.current if self.next_batch else None


def buggy() -> SwiftTrainer:
    """The rebuilt sampler keeps epoch 0."""
    return SwiftTrainer(set_epoch_on_rebuild=False)


def healthy() -> SwiftTrainer:
    """The rebuilt sampler is told the epoch."""
    return SwiftTrainer(set_epoch_on_rebuild=True)


def _repeated(factory: Callable) -> float:
    run, seen = factory(), []
    for batch in run.epoch(0):
        run.step(batch)
    for batch, _ in zip(run.epoch(1), range(6), strict=False):
        run.step(batch)
        seen += batch["input_ids"][:, 0].tolist()
    resumed = factory()
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        resumed.load(folder)
    number, start = resumed.position()
    rest = torch.cat([batch["input_ids"][:, 0] for batch in resumed.epoch(number)][start:])
    return float(len(set(seen) & set(rest.tolist())))


def prove() -> tuple[float, float]:
    """Samples of the second epoch that the resumed run trains on a second time."""
    return _repeated(buggy), _repeated(healthy)
