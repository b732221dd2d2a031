"""composer#2218 (mosaicml/composer): samples that a distributed sampler repeats are evaluated twice.

The sampler repeats the first samples, so that each rank has the same number. The metric counts them again.
"""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import stackwise

VOCAB, LENGTH, BATCH_SIZE = 58, 16, 2
# Five samples for two ranks: the first one comes twice.
EVAL_SET = [(n * torch.arange(1, LENGTH + 1) + n) % VOCAB for n in range(5)]


def summed(value: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


class ComposerModel(nn.Module):
    """Embedding, feed-forward layer and output."""

    def __init__(self, d_model: int = 24) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, d_model)
        self.ffn = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.GELU(), nn.Linear(2 * d_model, d_model))
        self.norm_f = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, VOCAB)

    def forward(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the losses and number of the targets."""
        x = self.wte(batch["input_ids"])
        logits = self.lm_head(self.norm_f(x + self.ffn(x)))[:, :-1]
        target = batch["labels"][:, 1:]
        total = F.cross_entropy(logits.mT, target, ignore_index=-100, reduction="sum")
        return total, (target != -100).sum()


class Trainer:
    """Data-parallel training with an evaluation set."""

    def __init__(self, slices_padding: bool) -> None:
        self.slices_padding = slices_padding
        ranks = dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
        self.model = ComposerModel()
        if ranks:
            for p in self.model.parameters():
                dist.broadcast(p.data, 0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        sampler = DistributedSampler(EVAL_SET, num_replicas=self.world_size, rank=self.rank, shuffle=False)
        self.eval_dataloader = DataLoader(EVAL_SET, batch_size=BATCH_SIZE, sampler=sampler)

    def step(self, batch: dict) -> float:
        """One update from the batches of all ranks."""
        total, count = self.model(batch)
        count = summed(count).clamp(min=1)
        self.optimizer.zero_grad()
        (total / count).backward()
        for p in self.model.parameters():
            summed(p.grad)
        self.optimizer.step()
        return (summed(total.detach().clone()) / count).item()

    def eval_batches(self) -> Iterable[dict]:
        """The batches of the evaluation set for the own rank."""
        seen = 0
        for ids in self.eval_dataloader:
            # Row i of the rank is sample i * world_size + rank of the set.
            numbers = (seen + torch.arange(len(ids))) * self.world_size + self.rank
            seen += len(ids)
            rows = ids[numbers < len(EVAL_SET)] if self.slices_padding else ids
            yield {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows.clone()}

    @torch.no_grad()
    def evaluate(self, batches: Iterable[dict] | None = None) -> float:
        """Loss per target over all ranks, of the evaluation set if no batches are given."""
        self.model.eval()
        sums = torch.zeros(2)
        for batch in self.eval_batches() if batches is None else batches:
            sums += torch.stack(self.model(batch))
        self.model.train()
        total, count = summed(sums).tolist()
        return total / max(count, 1)


def buggy() -> Trainer:
    """Evaluates what the sampler yields."""
    return Trainer(slices_padding=False)


def healthy() -> Trainer:
    """Leaves out the repeated samples."""
    return Trainer(slices_padding=True)


def buggy_declared() -> stackwise.TrainerSpec:
    """The same run on each rank."""
    return stackwise.TrainerSpec.of(buggy, distributed=buggy, frozen=())


def healthy_declared() -> stackwise.TrainerSpec:
    """The same run on each rank."""
    return stackwise.TrainerSpec.of(healthy, distributed=healthy, frozen=())


def _rank(rank: int, factory: Callable[[], Trainer], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    run, ids = factory(), torch.stack(EVAL_SET)
    total, count = run.model({"input_ids": ids, "labels": ids})
    torch.save(abs(run.evaluate() - (total / count).item()), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _error(factory: Callable[[], Trainer]) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(_rank, (factory, folder), nprocs=2, start_method="fork")
        return round(max(torch.load(folder / f"{rank}.pt") for rank in range(2)), 5)


def prove() -> tuple[float, float]:
    """Error of the loss of the evaluation set on two ranks, with five decimals."""
    return _error(buggy), _error(healthy)
