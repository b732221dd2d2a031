"""transformers#35078 (huggingface/transformers): the evaluation loss is multiplied by the number of ranks.

With average_tokens_across_devices every loss is scaled up, also in evaluation, where it is a local mean that
was not divided by the token count of all processes.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import stackwise


def world_size() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def reduced(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


class TinyLM(nn.Module):
    """Embedding and GRU with tied output."""

    def __init__(self, vocab_size: int = 80, hidden: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden)
        self.layers = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | None) -> torch.Tensor:
        """The sum of losses over the given number of items, or their mean."""
        x = self.layers(self.embed_tokens(ids))[0]
        logits = (x @ self.embed_tokens.weight.T)[:, :-1].flatten(0, 1)
        target = labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
        return total / ((target != -100).sum().clamp(min=1) if items is None else items)


class Trainer:
    """Data-parallel training whose loss is the mean over the tokens of all processes."""

    def __init__(self, scale_only_global_counts: bool) -> None:
        self.scale_only_global_counts = scale_only_global_counts
        self.model = TinyLM()
        if dist.is_initialized():
            for p in self.model.parameters():
                dist.broadcast(p.data, 0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def compute_loss(self, inputs: dict, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
        """Loss whose gradient is meant to be averaged over the processes."""
        loss = self.model(inputs["input_ids"], inputs["labels"], num_items_in_batch)
        if num_items_in_batch is not None or not self.scale_only_global_counts:
            loss = loss * world_size()
        return loss

    def step(self, batch: dict) -> float:
        """One update from the batches of all processes."""
        self.model.train()
        items = reduced((batch["labels"][:, 1:] != -100).sum()).clamp(min=1)
        loss = self.compute_loss(batch, items)
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.model.parameters():
            p.grad = reduced(p.grad) / world_size()
        self.optimizer.step()
        return (reduced(loss) / world_size()).item()

    def evaluate(self, batches: list[dict]) -> float:
        """Mean loss per target over the batches of all processes."""
        self.model.eval()
        sums = torch.zeros(2)
        with torch.no_grad():
            for batch in batches:
                count = (batch["labels"][:, 1:] != -100).sum()
                sums += torch.stack([self.compute_loss(batch) * count, count])
        self.model.train()
        loss, count = reduced(sums).tolist()
        return loss / max(count, 1)


def buggy() -> Trainer:
    """Scales every loss by the number of processes."""
    return Trainer(scale_only_global_counts=False)


def healthy() -> Trainer:
    """Scales only losses that were divided by the count of all processes."""
    return Trainer(scale_only_global_counts=True)


def buggy_declared() -> stackwise.TrainerSpec:
    """The same run on each rank."""
    return stackwise.TrainerSpec.of(buggy, distributed=buggy)


def healthy_declared() -> stackwise.TrainerSpec:
    """The same run on each rank."""
    return stackwise.TrainerSpec.of(healthy, distributed=healthy)


def _rank(rank: int, factory: Callable, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    run, ids = factory(), torch.randint(80, (4, 16))
    logged = run.evaluate([{"input_ids": ids, "labels": ids}])
    true = reduced(run.model(ids, ids, None)).item() / 2
    torch.save(abs(logged / true - 1), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _error(factory: Callable) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.start_processes(_rank, (factory, folder), nprocs=2, start_method="fork")
        return max(torch.load(folder / f"{rank}.pt") for rank in range(2))


def prove() -> tuple[float, float]:
    """Relative error of the evaluation loss on two ranks."""
    return _error(buggy), _error(healthy)
