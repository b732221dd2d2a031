"""LabelCorruption: replaces a fraction of the labels of a batch with wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stackwise.stability.faults.fault import Acted, Fault
from stackwise.stability.faults.tensors import described, parts_of, with_part
from stackwise.support.arguments import check_number, check_sizes

__all__ = ["LabelCorruption"]

Batch = Any

_NAMES = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class LabelCorruption(Fault):
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
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        key = f"{self.name}: fraction"
        check_number(key, self.fraction, "a number above 0, up to 1", lambda fraction: 0 < fraction <= 1)
        check_sizes(0, **{f"{self.name}: seed": self.seed})

    def at(self, step: int) -> Self:  # noqa: D102
        return replace(self, seed=self.seed + step - self.step)

    def on_batch(self, batch: Batch, acted: Acted) -> Batch:  # noqa: D102
        parts = parts_of(batch)
        names = [name for name in parts if name.rpartition(".")[2] in _NAMES]
        if not names and list(parts) == ["0", "1"]:
            names = ["1"]
        names = [name for name in names if _whole_numbers(parts[name])]
        if not names:
            raise ValueError(
                f"{self.name}: needs a batch with labels, whole numbers under one of the names {_NAMES}; "
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
