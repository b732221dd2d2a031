"""finetrainers#415 (huggingface/finetrainers): each loading worker yields the whole data set.

The iterable data set does not ask which worker it runs in, so an epoch contains every sample once per worker.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import stackwise

VOCAB, LENGTH, SAMPLES, BATCH_SIZE, NUM_WORKERS = 66, 16, 32, 4, 2


class IterableDatasetPreprocessingWrapper(IterableDataset):
    """Streams preprocessed samples, whose first token is their number."""

    def __init__(self, shard_by_worker: bool) -> None:
        self.shard_by_worker = shard_by_worker

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None or not self.shard_by_worker else (info.id, info.num_workers)
        for index in range(first, SAMPLES, stride):
            yield (index * torch.arange(1, LENGTH + 1) + torch.arange(LENGTH) ** 2) % VOCAB


class Transformer(nn.Module):
    """Embedding, gated layer and output."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.ff = nn.Linear(width, 2 * width)
        self.proj_out = nn.Linear(width, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embed(ids)
        return self.proj_out(x + F.glu(self.ff(self.norm(x))))


class SFTTrainer:
    """Fine-tunes on a stream that is read by several workers."""

    shuffles = False
    n_examples = SAMPLES

    def __init__(self, shard_by_worker: bool, train_epochs: int = 2) -> None:
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=1e-4)
        dataset = IterableDatasetPreprocessingWrapper(shard_by_worker)
        self.dataloader = DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
        self.train_epochs = train_epochs

    def epoch(self, number: int) -> Iterator[dict]:  # noqa: ARG002 - a stream has one order
        """The batches of an epoch."""
        for ids in self.dataloader:
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def step(self, batch: dict) -> float:
        """One update."""
        target = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def fit(self) -> None:
        """All epochs."""
        for number in range(self.train_epochs):
            for batch in self.epoch(number):
                self.step(batch)


def buggy() -> SFTTrainer:
    """Every worker reads everything."""
    return SFTTrainer(shard_by_worker=False)


def healthy() -> SFTTrainer:
    """Every worker reads its own samples."""
    return SFTTrainer(shard_by_worker=True)


def declared(factory: object) -> stackwise.TrainerSpec:
    """The fix, with the clipping and the planned number of updates."""
    return stackwise.TrainerSpec.of(factory, max_norm=1.0, total_steps=2 * SAMPLES // BATCH_SIZE, frozen=())


def _repeated(run: SFTTrainer) -> float:
    rows = torch.cat([batch["input_ids"] for batch in run.epoch(0)])
    return float(len(rows) - len(rows.unique(dim=0)))


def prove() -> tuple[float, float]:
    """Samples of an epoch that are repetitions."""
    return _repeated(buggy()), _repeated(healthy())
