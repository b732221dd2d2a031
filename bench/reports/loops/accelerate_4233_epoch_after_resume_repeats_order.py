"""accelerate#4233 (huggingface/accelerate): the epoch after a resumed one has the order of the resumed one.

The rest of the epoch comes from a second loader that skips the first batches. The loader of the other epochs
never hears that an epoch has ended, so it repeats the same permutation, and stays one epoch behind.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import stackwise

ROWS, LENGTH, BATCH_SIZE, VOCAB, SEED, LR = 48, 16, 4, 64, 17, 2e-3
TEXTS = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
TEXTS[:, 0] = torch.arange(ROWS)  # a row begins with its number


class ShuffledLoader:
    """Batches in the permutation of the iteration that the loader is in."""

    def __init__(self, iteration: int = 0) -> None:
        self.iteration = iteration

    def __len__(self) -> int:
        return ROWS // BATCH_SIZE

    def batches(self, ahead: int = 0) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of this iteration, or of one that is some iterations ahead."""
        generator = torch.Generator().manual_seed(SEED + self.iteration + ahead)
        for numbers in torch.randperm(ROWS, generator=generator).split(BATCH_SIZE):
            ids = TEXTS[numbers]
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


class Checkpointing:
    """A training script that can be resumed within an epoch."""

    shuffles = True
    n_examples = ROWS

    def __init__(self, tells_source: bool) -> None:
        self.tells_source = tells_source
        self.model = nn.Sequential(
            nn.Embedding(VOCAB, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, VOCAB)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.loader = ShuffledLoader()
        self.skipping: ShuffledLoader | None = None
        self.at_epoch, self.at_batch = 0, 0

    def epoch(self, number: int) -> Iterator[dict[str, torch.Tensor]]:
        """All batches of an epoch, in the order in which this run comes to them."""
        ahead = number - self.at_epoch
        if self.skipping is not None:
            if ahead == 0:
                return self.skipping.batches()
            if ahead > 0 and not self.tells_source:
                ahead -= 1  # the end of this epoch does not count
        return self.loader.batches(ahead)

    def position(self) -> tuple[int, int]:
        """Epoch, and index of its next batch."""
        return self.at_epoch, self.at_batch

    def _end_epoch(self) -> None:
        if self.skipping is None or self.tells_source:
            self.loader.iteration += 1
        self.skipping = None
        self.at_epoch, self.at_batch = self.at_epoch + 1, 0

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Train on the next batch."""
        logits = self.model(batch["input_ids"])[:, :-1]
        target = batch["labels"][:, 1:]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.at_batch += 1
        if self.at_batch == len(self.loader):
            self._end_epoch()
        return loss.item()

    def save(self, folder: str | Path) -> None:
        """Write the state of the run."""
        states = (self.model.state_dict(), self.optimizer.state_dict())
        torch.save((*states, self.position(), self.loader.iteration), Path(folder) / "state.pt")

    def load(self, folder: str | Path) -> None:
        """Go on where a run was saved, with a loader that skips the batches before."""
        model, optimizer, position, iteration = torch.load(Path(folder) / "state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.at_epoch, self.at_batch = position
        self.loader = ShuffledLoader(iteration)
        self.skipping = ShuffledLoader(iteration) if self.at_batch else None


def buggy() -> Checkpointing:
    """Counts the end of the resumed epoch in the second loader only."""
    return Checkpointing(tells_source=False)


def healthy() -> Checkpointing:
    """Counts it in the loader of the other epochs too."""
    return Checkpointing(tells_source=True)


def declared(factory: Callable[[], Checkpointing]) -> stackwise.TrainerSpec:
    """The constant learning rate."""
    return stackwise.TrainerSpec.of(factory, learning_rate=lambda _: LR, frozen=())


def _order(run: Checkpointing, number: int) -> torch.Tensor:
    return torch.cat([batch["input_ids"][:, 0] for batch in run.epoch(number)])


def _repeats(factory: Callable[[], Checkpointing]) -> float:
    run, resumed = factory(), factory()
    for batch in [*run.epoch(0), *list(run.epoch(1))[:5]]:
        run.step(batch)
    with tempfile.TemporaryDirectory() as folder:
        run.save(folder)
        resumed.load(folder)
    first = _order(resumed, 1)
    for batch in list(resumed.epoch(1))[5:]:
        resumed.step(batch)
    return float(torch.equal(first, _order(resumed, 2)))


def prove() -> tuple[float, float]:
    """1 if the epoch after the resumed one has the same order."""
    return _repeats(buggy), _repeats(healthy)
