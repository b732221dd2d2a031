"""Data faults: noise, wrong labels, an unreadable sample, and a dead worker process of the loader."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stackwise.stability.faults.fault import Acted, Fault
from stackwise.stability.faults.tensors import described, parts_of, with_part
from stackwise.support.arguments import check_number, check_sizes

__all__ = ["CorruptSample", "LabelCorruption", "UnreadableSample", "UnreadableSampleError", "WorkerDeath"]


Batch = Any

_SECONDS = 30.0  # to wait for the end of a killed worker
_LABELS = ("labels", "label", "targets", "target", "y")


class UnreadableSampleError(RuntimeError):
    """Error that a loader raises for a sample that an UnreadableSample has broken."""


@dataclass(frozen=True)
class _Seeded(Fault):
    seed: int = field(default=0, kw_only=True)

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


@dataclass(frozen=True)
class LabelCorruption(_Seeded):
    """Fault that replaces labels with other labels, up to the largest of the batch.

    Negative labels are not predicted and stay unchanged. Labels are the tensor named "labels", "label",
    "targets", "target" or "y" in a batch, or the second of two tensors.

    Attributes:
        fraction: fraction of the labels to replace. At least one is replaced.
        seed: seed of the random positions and replacements, which differ from step to step.
    """

    name: ClassVar[str] = "label_corruption"
    told_by_history: ClassVar[bool] = True

    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        key = f"{self.name}: fraction"
        check_number(key, self.fraction, "a number above 0, up to 1", lambda fraction: 0 < fraction <= 1)

    def on_batch(self, batch: Batch, acted: Acted) -> Batch:  # noqa: D102
        parts = parts_of(batch)
        names = [name for name in parts if name.rpartition(".")[2] in _LABELS]
        if not names and list(parts) == ["0", "1"]:
            names = ["1"]
        names = [name for name in names if _whole_numbers(parts[name])]
        if not names:
            raise ValueError(
                f"{self.name}: needs a batch with labels, whole numbers under one of the names {_LABELS}; "
                f"it has {described(batch)}"
            )
        labels = parts[names[0]]
        # A sum of two labels may exceed the range of their type.
        changed = labels.detach().flatten().to("cpu", torch.int64, copy=True)
        (places,) = torch.where(changed >= 0)
        # Other tensors, such as ids, do not show the number of classes, and a label that is too large is an
        # error.
        n_classes = 1 + int(changed.max()) if len(places) else 0
        if n_classes < 2:
            raise ValueError(f"{self.name}: {names[0]}: got no label, or only 0; wanted one above 0 at least")
        generator = torch.Generator().manual_seed(self.seed)
        count = max(1, round(self.fraction * len(places)))
        places = places[torch.randperm(len(places), generator=generator)[:count]]
        shift = torch.randint(1, n_classes, (count,), generator=generator)
        changed[places] = (changed[places] + shift) % n_classes
        acted()
        return with_part(batch, names[0], changed.view(labels.shape).to(labels))


def _whole_numbers(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
