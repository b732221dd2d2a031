"""LongLive#71 (NVlabs/LongLive): the ranks of a data-parallel training cut different permutations.

Each rank seeds its DistributedSampler with the time multiplied by its rank, so samples occur on several
ranks and others are left out of the epoch.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import stackwise

VOCAB = 70
# Token sequences that begin with the number of their sample.
CLIPS = [torch.tensor([n, *((n * t + t * t) % VOCAB for t in range(1, 12))]) for n in range(48)]


class Mixer(nn.Module):
    """Gated causal convolution."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.conv = nn.Conv1d(dim, 2 * dim, 4)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        x = self.embed(ids)
        y = F.glu(self.conv(F.pad(x.mT, (3, 0))), dim=1).mT
        return self.out(x + y)


class Trainer:
    """Data-parallel training by hand; the mean loss is taken over the tokens of all ranks."""

    def __init__(self, share_seed: bool) -> None:
        ranks = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
        self.model = Mixer()
        for p in self.model.parameters():
            self._from_first(p.data)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if share_seed:
            seed = self._from_first(torch.randint(0, 10_000_000, (1,))).item()
        else:
            seed = int(time.time()) % 2**31 * self.rank
        self.sampler = DistributedSampler(
            CLIPS, num_replicas=self.world, rank=self.rank, shuffle=True, drop_last=True, seed=seed
        )
        self.loader = DataLoader(CLIPS, batch_size=4, sampler=self.sampler)

    def _from_first(self, value: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            dist.broadcast(value, 0)
        return value

    def _summed(self, value: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def epoch(self, number: int) -> Iterator[dict]:
        """The batches of an epoch for the own rank."""
        self.sampler.set_epoch(number)
        for ids in self.loader:
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def step(self, batch: dict) -> float:
        """One update from the batches of all ranks."""
        target = batch["labels"][:, 1:]
        logits = self.model(batch["input_ids"])[:, :-1]
        nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        count = self._summed((target != -100).sum()).clamp(min=1)
        self.optimizer.zero_grad()
        (nll / count).backward()
        for p in self.model.parameters():
            self._summed(p.grad)
        self.optimizer.step()
        return (self._summed(nll.detach().clone()) / count).item()


def buggy() -> Trainer:
    """A seed for each rank."""
    return Trainer(share_seed=False)


def healthy() -> Trainer:
    """One seed from rank 0."""
    return Trainer(share_seed=True)


def buggy_declared() -> stackwise.TrainerSpec:
    """The same run on each rank."""
    return stackwise.TrainerSpec.of(buggy, distributed=buggy)


def healthy_declared() -> stackwise.TrainerSpec:
    """The same run on each rank."""
    return stackwise.TrainerSpec.of(healthy, distributed=healthy)


def _rank(rank: int, factory: Callable, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    seen = [batch["input_ids"][:, 0] for batch in factory().epoch(0)]
    torch.save(torch.cat(seen), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _left_out(factory: Callable) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(_rank, (factory, folder), nprocs=2, start_method="fork")
        seen = torch.cat([torch.load(folder / f"{rank}.pt") for rank in range(2)])
    return float(len(CLIPS) - len(seen.unique()))


def prove() -> tuple[float, float]:
    """Samples that no rank sees in an epoch."""
    return _left_out(buggy), _left_out(healthy)
