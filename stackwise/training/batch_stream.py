"""BatchStream: the batches of anybody's loader, pass after pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from torch import Tensor

from stackwise.argument import require

__all__ = ["Batch", "as_mapping", "batch_stream", "check_restarts"]

Batch = Mapping[str, Tensor] | Tensor | Sequence[Tensor]


def batch_stream(
    dataloader: Iterable[Batch], per_step: int = 1, first_step: int = 0
) -> Iterator[tuple[int, list[Mapping[str, Tensor]]]]:
    """Of each step the pass over the data in which it begins and its `per_step` batches, without end.

    Args:
        dataloader: started again when it ends; where it has `set_epoch`, that is told the pass.
        per_step: batches a step.
        first_step: how many steps are left out at first.

    Raises:
        ValueError: a loader without batches, also in a later pass, or a batch of another kind.
    """
    batches = islice(_forever(dataloader), first_step * per_step, None)
    while True:
        several = list(islice(batches, per_step))
        yield several[0][0], [as_mapping(batch) for _, batch in several]


def check_restarts(dataloader: Iterable[Batch], n_units: int) -> None:
    """Refuse what can be gone through once only where several units are to see the same data.

    Raises:
        ValueError: an iterator.
    """
    again = n_units < 2 or not isinstance(dataloader, Iterator)
    kind = type(dataloader).__name__
    require(again, "dataloader", kind, f"what gives its batches again to each of {n_units} units, as a list")


def as_mapping(batch: Batch) -> Mapping[str, Tensor]:
    """A batch under its names; bare ids are `input_ids`.

    Raises:
        ValueError: anything else.
    """
    if isinstance(batch, tuple | list) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return batch
    raise ValueError(
        f"dataloader: got a batch of {type(batch).__name__}; allowed: ids, or a dict with input_ids"
    )


def _forever(dataloader: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
    epoch = 0
    while True:
        if hasattr(dataloader, "set_epoch"):
            dataloader.set_epoch(epoch)
        batch = None
        for batch in dataloader:
            yield epoch, batch
        if batch is None:
            raise ValueError("dataloader: got no batch" + (" in a later epoch" if epoch else ""))
        epoch += 1
