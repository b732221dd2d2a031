"""KempnerForge#57 (KempnerInstitute/KempnerForge): the second resume within an epoch goes back in the data.

The loader counts only the batches since it was last loaded, so the second checkpoint of an epoch lacks those
from before the first one, and they are trained on again.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

VOCAB, ROWS, BATCH, SEQ = 40, 80, 4, 16


class SkippingSampler:
    """Row numbers in the shuffled order of an epoch, without the first ones."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.epoch = self.skip = 0

    def order(self, epoch: int) -> list[int]:
        """The permutation of an epoch."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.rows, generator=generator).tolist()


class StatefulDataLoader:
    """Batches of token rows with a state to resume from."""

    def __init__(self, data: torch.Tensor, sampler: SkippingSampler, keeps_count: bool) -> None:
        self.data, self.sampler, self.keeps_count = data, sampler, keeps_count
        self.batches_yielded = 0
        self.length = sampler.rows // BATCH

    def batches(self, epoch: int) -> Iterator[dict]:
        """All batches of an epoch."""
        rows = self.data[self.sampler.order(epoch)]
        for ids in rows.split(BATCH):
            yield {"input_ids": ids, "labels": ids.clone()}

    def advance(self) -> None:
        """Counts one batch, and starts the next epoch after the last one."""
        self.batches_yielded += 1
        if self.next_index() >= self.length:
            self.sampler.epoch += 1
            self.sampler.skip = self.batches_yielded = 0

    def next_index(self) -> int:
        """Index in its epoch of the batch that comes next."""
        return self.sampler.skip + self.batches_yielded

    def state_dict(self) -> dict:
        """Where to go on."""
        count = self.next_index() if self.keeps_count else self.batches_yielded
        return {"epoch": self.sampler.epoch, "batches_yielded": count}

    def load_state_dict(self, state: dict) -> None:
        """Makes the sampler skip what was yielded before."""
        self.sampler.epoch = state["epoch"]
        self.sampler.skip = state["batches_yielded"]
        self.batches_yielded = 0


class Run:
    """Language-model training over a fixed data set."""

    def __init__(self, keeps_count: bool) -> None:
        self.model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Tanh(), nn.Linear(32, VOCAB))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        corpus = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(7))
        self.loader = StatefulDataLoader(corpus, SkippingSampler(ROWS, seed=11), keeps_count)

    def step(self, batch: dict) -> float:
        """Trains on the next batch."""
        logits = self.model(batch["input_ids"][:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loader.advance()
        return loss.item()

    def epoch(self, number: int) -> Iterator[dict]:
        """The batches of an epoch from its start."""
        return self.loader.batches(number)

    def position(self) -> tuple[int, int]:
        """Epoch and index of the next batch."""
        return self.loader.sampler.epoch, self.loader.next_index()

    def save(self, folder: str) -> None:
        """Writes model, optimizer and loader."""
        for name in ("model", "optimizer", "loader"):
            torch.save(getattr(self, name).state_dict(), Path(folder) / f"{name}.pt")

    def load(self, folder: str) -> None:
        """Reads model, optimizer and loader."""
        for name in ("model", "optimizer", "loader"):
            getattr(self, name).load_state_dict(torch.load(Path(folder) / f"{name}.pt"))


def buggy() -> Run:
    """Saves the batches since the last load."""
    return Run(keeps_count=False)


def healthy() -> Run:
    """Saves the batches since the start of the epoch."""
    return Run(keeps_count=True)


def _lost(keeps_count: bool) -> float:
    run, done = Run(keeps_count), 0
    for steps in (5, 3):
        for batch in list(run.epoch(0))[done : done + steps]:
            run.step(batch)
        done += steps
        with tempfile.TemporaryDirectory() as folder:
            run.save(folder)
            run = Run(keeps_count)
            run.load(folder)
    return float(done - run.position()[1])


def prove() -> tuple[float, float]:
    """Batches that are trained on twice after two resumes in one epoch."""
    return _lost(False), _lost(True)
