"""Data faults: a sample replaced by noise, an unreadable sample, and a dead worker process of the loader."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stackwise.stability.faults.fault import Acted, Fault
from stackwise.stability.faults.tensors import described, parts_of, with_part
from stackwise.support.arguments import check_sizes

__all__ = ["CorruptSample", "UnreadableSample", "UnreadableSampleError", "WorkerDeath"]

Batch = Any

_SECONDS = 30.0


class UnreadableSampleError(RuntimeError):
    """Error that a loader raises for a sample that an UnreadableSample has broken."""


@dataclass(frozen=True)
class _Seeded(Fault):
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(0, **{f"{self.name}: seed": self.seed})

    def at(self, step: int) -> Self:
        return replace(self, seed=self.seed + step - self.step)


@dataclass(frozen=True)
class CorruptSample(_Seeded):
    """Fault that replaces one row of a batch with noise.

    Integers are drawn from the integers of the batch. Floating-point noise has the same root mean square as
    the batch.

    Attributes:
        seed: seed of the random row and noise, which differ from step to step.
    """

    name: ClassVar[str] = "corrupt_sample"
    told_by_history: ClassVar[bool] = True

    def on_batch(self, batch: Batch, acted: Acted) -> Batch:  # noqa: D102
        parts = {
            name: p for name, p in parts_of(batch).items() if p.ndim and p.numel() and not p.is_complex()
        }
        if not parts:
            raise ValueError(f"{self.name}: needs a batch with rows; it has {described(batch)}")
        n_rows = len(next(iter(parts.values())))
        generator = torch.Generator().manual_seed(self.seed)
        row = int(torch.randint(n_rows, (), generator=generator))
        moved = False
        for name, part in parts.items():
            if len(part) == n_rows:
                changed = part.detach().clone()
                changed[row] = _noise(part, generator)
                moved |= not torch.equal(changed, part)
                batch = with_part(batch, name, changed)
        if moved:
            acted()
        return batch


def _noise(part: Tensor, generator: torch.Generator) -> Tensor:
    shape = part.shape[1:]
    if part.is_floating_point():
        size = float(part.detach().float().square().mean().sqrt()) or 1.0
        return (size * torch.randn(shape, generator=generator)).to(part)
    # Integers between two valid ones may be invalid: ignored labels are -100.
    places = torch.randint(part.numel(), shape, generator=generator).to(part.device)
    return part.detach().flatten()[places]


@dataclass(frozen=True)
class UnreadableSample(_Seeded):
    """Fault that makes the loader raise UnreadableSampleError instead of returning a batch.

    This is like a file that cannot be decoded. The error is raised once in each faulty step. If the loop
    continues, the loader returns the batch.

    Attributes:
        seed: number of the sample that the error names, at the first faulty step. It grows by one per step.
    """

    name: ClassVar[str] = "unreadable_sample"
    breaks: ClassVar[str] = "loader"

    def on_loader(self, batches: Iterator[Any], acted: Acted) -> None:  # noqa: ARG002, D102
        acted()
        raise UnreadableSampleError(f"sample {self.seed} cannot be read ({self})")


@dataclass(frozen=True)
class WorkerDeath(_Seeded):
    """Fault that kills a worker process of a `DataLoader`, which then raises an error when a batch is drawn.

    Attributes:
        seed: selects the worker.
    """

    name: ClassVar[str] = "worker_death"
    breaks: ClassVar[str] = "loader"

    def on_loader(self, batches: Iterator[Any], acted: Acted) -> None:  # noqa: D102
        workers = [worker for worker in getattr(batches, "_workers", ()) if worker.is_alive()]
        if not workers:
            raise ValueError(
                f"{self.name}: needs a DataLoader with num_workers >= 1; got {type(batches).__name__}, which "
                "has no worker processes"
            )
        worker = workers[self.seed % len(workers)]
        acted()
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(_SECONDS)
