"""FunASR#3472 (modelscope/FunASR): the gradients of a window's last micro-batch stay on their rank.

The condition for no_sync is off by one: the first micro-batch of a window is reduced over the ranks and the
last one is not, so each rank steps with its own gradients and the copies of the model drift apart.
"""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stackwise


class Recogniser(nn.Module):
    """Embedding, one encoder layer and output."""

    def __init__(self, vocab_size: int = 64, size: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, size)
        self.encoder = nn.Sequential(nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, size))
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, vocab_size)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of the next tokens."""
        x = self.embed(ids)
        logits = self.output(self.norm(x + self.encoder(x)))[:, :-1]
        targets = labels[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")


class Trainer:
    """Data-parallel training that reduces gradients once per window."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.model = Recogniser()
        self.ddp = DistributedDataParallel(self.model) if dist.is_initialized() else None
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def no_sync(self) -> contextlib.AbstractContextManager:
        """Keeps gradients local, if there are other ranks."""
        return self.ddp.no_sync() if self.ddp is not None else contextlib.nullcontext()

    def tokens_per_rank(self, batches: list[dict]) -> torch.Tensor:
        """Targets of a window, averaged over the ranks as DDP averages the gradients."""
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches).float()
        if dist.is_initialized():
            dist.all_reduce(count)
            count /= dist.get_world_size()
        return count.clamp(min=1)

    def accumulate(self, batches: list[dict]) -> float:
        """One update from several micro-batches."""
        accum_grad, tokens = len(batches), self.tokens_per_rank(batches)
        forward = self.ddp if self.ddp is not None else self.model
        self.optimizer.zero_grad()
        total = 0.0
        for batch_idx, batch in enumerate(batches):
            local = accum_grad > 1 and (batch_idx + self.offset) % accum_grad != 0
            with self.no_sync() if local else contextlib.nullcontext():
                loss = forward(batch["input_ids"], batch["labels"]) / tokens
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=5.0)
        self.optimizer.step()
        return total

    def step(self, batch: dict) -> float:
        """One update from one batch."""
        return self.accumulate([batch])


def buggy() -> Trainer:
    """Synchronises the first micro-batch of a window."""
    return Trainer(offset=0)


def healthy() -> Trainer:
    """Synchronises the last micro-batch of a window."""
    return Trainer(offset=1)


def buggy_declared() -> stackwise.TrainerSpec:
    """The same run on each rank."""
    return stackwise.TrainerSpec.of(buggy, distributed=buggy)


def healthy_declared() -> stackwise.TrainerSpec:
    """The same run on each rank."""
    return stackwise.TrainerSpec.of(healthy, distributed=healthy)


def _rank(rank: int, factory: Callable, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    run = factory()
    for _ in range(5):
        window = torch.randint(64, (4, 4, 16))
        run.accumulate([{"input_ids": ids, "labels": ids} for ids in window])
    torch.save(nn.utils.parameters_to_vector(run.model.parameters()).detach(), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _divergence(factory: Callable) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(_rank, (factory, folder), nprocs=2, start_method="fork")
        first, second = (torch.load(folder / f"{rank}.pt") for rank in range(2))
        return (first - second).abs().max().item()


def prove() -> tuple[float, float]:
    """Largest difference of the weights between two ranks after five windows of four micro-batches."""
    return _divergence(buggy), _divergence(healthy)
