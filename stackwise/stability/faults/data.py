"""Broken data: a sample of noise, a sample that cannot be read, a worker of the loader that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stackwise.stability.faults.batch import described, parts_of, with_part
from stackwise.stability.faults.fault import Acted, Fault
from stackwise.support.arguments import check_sizes

__all__ = ["CorruptSample", "UnreadableSample", "UnreadableSampleError", "WorkerDeath"]

Batch = Any

_SECONDS = 30.0


class UnreadableSampleError(RuntimeError):
    """What a loader raises for a sample that an UnreadableSample has broken."""


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
    """Replaces one row of a batch by noise: whole numbers that occur in the batch, and floats of their size.

    Attributes:
        seed: chooses the row and the noise; others at each step.
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
    # What is between two of them need not be one: labels are -100 where nothing is predicted.
    places = torch.randint(part.numel(), shape, generator=generator).to(part.device)
    return part.detach().flatten()[places]


@dataclass(frozen=True)
class UnreadableSample(_Seeded):
    """The loader raises UnreadableSampleError in place of its batch, as for a file that cannot be decoded.

    It is raised once in each of its steps: a loop that goes on gets the batch then.

    Attributes:
        seed: the number of the sample that the error names.
    """

    name: ClassVar[str] = "unreadable_sample"
    breaks: ClassVar[str] = "loader"

    def on_loader(self, batches: Iterator[Any], acted: Acted) -> None:  # noqa: ARG002, D102
        acted()
        raise UnreadableSampleError(f"sample {self.seed} cannot be read ({self})")


@dataclass(frozen=True)
class WorkerDeath(_Seeded):
    """Kills one of the worker processes of a `DataLoader`, which then raises as it draws a batch.

    Attributes:
        seed: chooses the worker.
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
