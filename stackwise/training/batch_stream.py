"""BatchStream: endless, resumable iterator over the batches of a loader, epoch after epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from stackwise.data.batches import Batches
from stackwise.data.prefetch import Prefetched
from stackwise.support.arguments import require
from stackwise.support.dataloader import (
    all_parts,
    epoch_start,
    generator_states,
    own_generators,
    resume_epoch,
    set_generators,
    set_loader_epoch,
    warn_if_not_resumable,
)

__all__ = ["Batch", "BatchStream", "as_mapping", "check_apart", "check_restarts"]

Batch = Mapping[str, Tensor] | Tensor | Sequence[Tensor]


class BatchStream:
    """Endless iterator over the steps of a run: the epoch in which a step begins, and its `per_step` batches.

    The saved state is a position: an epoch, and the index of the next batch in it. A loader that has a state
    (`Batches`, `StatefulDataLoader`) resumes by itself. For any other loader, the random states at the start
    of the epoch are restored, including each `generator` of the loader and of its parts. Then the batches
    that were already used are drawn and skipped. A `DataLoader` that shuffles yields the same batches as
    before. With `persistent_workers`, which draw random numbers once for all epochs, the batches may differ;
    a warning says so.

    Args:
        dataloader: restarted at the end of each epoch. `set_epoch` is called on the loader, its dataset and
            its samplers, if they have it.
        per_step: number of batches per step.
        first_step: number of steps to skip at the start. `Batches` skip them without building a batch.

    Attributes:
        place: (epoch, index in the epoch) of the first batch of the last step, both from 0.

    Raises:
        ValueError: raised by `next`: the loader has no batches, in the first or a later epoch, or the batch
            has an unsupported type.
    """

    def __init__(self, dataloader: Iterable[Batch], per_step: int = 1, first_step: int = 0) -> None:
        self._dataloader, self._per_step = dataloader, per_step
        self._epoch = self._index = 0
        self.place = (0, 0)
        self._batches: Iterator[Batch] | None = None
        self._began: dict[str, Any] | None = None  # random states at the start of the epoch
        self._leave_out(first_step * per_step)

    def __iter__(self) -> Iterator[tuple[int, list[Mapping[str, Tensor]]]]:
        return self

    def __next__(self) -> tuple[int, list[Mapping[str, Tensor]]]:
        first = self._take()
        self.place = (self._epoch, self._index - 1)
        batches = [first, *(self._take() for _ in range(self._per_step - 1))]
        return self.place[0], [as_mapping(batch) for batch in batches]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, with the random states that a resume needs."""
        state: dict[str, Any] = {"epoch": self._epoch, "batch": self._index}
        state["generators"] = generator_states(self._dataloader)
        if _has_state(self._dataloader):
            return state | {"loader": self._dataloader.state_dict()}  # type: ignore[attr-defined]
        return state | {"began": self._began}  # None: the epoch has not begun

    def load_state_dict(self, state: Mapping[str, Any], *, reads: bool = True) -> None:
        """Continue at a saved position. This changes the random states of the process.

        Args:
            state: returned by `state_dict`.
            reads: True if the rest of the epoch will be read. If False, no batch is drawn. Only the
                loader's own generators are restored, for the epochs of another stream.

        Raises:
            ValueError: the loader has no state but had one when the state was saved, or it has fewer batches.
        """
        if not _has_state(self._dataloader):
            warn_if_not_resumable(self._dataloader)
        if not reads:
            if len(own_generators(self._dataloader)) < len(state["generators"]):
                next(iter(self._dataloader), None)  # a sampler may create its generator when it is iterated
            set_generators(self._dataloader, state["generators"])
            return
        self._epoch, self._index = state["epoch"], state["batch"]
        set_loader_epoch(self._dataloader, self._epoch)
        if _has_state(self._dataloader):
            kind = type(self._dataloader).__name__
            require("loader" in state, "dataloader", kind, "one without a state, as when this was saved")
            self._dataloader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            self._batches = iter(self._dataloader)
            return
        self._began = state["began"]
        if self._began is None:
            return
        self._batches = resume_epoch(self._dataloader, self._began, self._index, self._epoch)
        set_generators(self._dataloader, state["generators"])

    def _leave_out(self, count: int) -> None:
        loader = self._dataloader
        source = loader.loader if isinstance(loader, Prefetched) else loader
        if not (count and isinstance(source, Batches)):
            for _ in range(count):
                self._take()
            return
        # If the last skipped batch is the last of an epoch, the position stays at the end of that epoch.
        whole, within = (0, count - 1) if source.n_batches is None else divmod(count - 1, source.n_batches)
        place = {"epoch": whole, "batch": within + 1}
        self.load_state_dict({**place, "loader": {**place, "data": source.identity()}})

    def _take(self) -> Batch:
        while True:
            if self._batches is None:
                set_loader_epoch(self._dataloader, self._epoch)
                if not _has_state(self._dataloader):
                    self._began = epoch_start(self._dataloader)
                self._batches, self._index = iter(self._dataloader), 0
            for batch in self._batches:
                self._index += 1
                return batch
            if not self._index:
                raise ValueError("dataloader: got no batch" + (" in a later epoch" if self._epoch else ""))
            self._epoch, self._batches = self._epoch + 1, None


def _has_state(dataloader: object) -> bool:
    return hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")


def check_apart(dataloader: Iterable[Batch], validation: Iterable[Batch], *, saves: bool) -> None:
    """Raise if evaluating `validation` would change the position of the training in its data.

    Args:
        saves: True if the position in the training data is saved.

    Raises:
        ValueError: both are the same loader, and it supports one iteration at a time. Or, if `saves`, both
            share an object that stores its position.
    """
    kind, keeps = type(validation).__name__, saves and _has_state(dataloader)
    kept = [part for part in all_parts(dataloader) if _has_state(part)] if keeps else []
    others = {id(part) for part in all_parts(validation)}
    shared = [type(part).__name__ for part in kept if id(part) in others]
    allowed = f"batches of its own: the dataloader keeps its place in the same {', '.join(shared)}"
    require(not shared, "validation", kind, allowed)
    one_pass = isinstance(dataloader, Prefetched) or getattr(dataloader, "persistent_workers", False)
    ends = dataloader is validation and one_pass
    require(not ends, "validation", kind, "a loader of its own: its pass would end that of the training")


def check_restarts(dataloader: Iterable[Batch], n_units: int) -> None:
    """Raise if several units need the same data but the loader can be iterated only once.

    Raises:
        ValueError: the loader is an iterator.
    """
    again = n_units < 2 or not isinstance(dataloader, Iterator)
    kind = type(dataloader).__name__
    require(again, "dataloader", kind, f"what gives its batches again to each of {n_units} units, as a list")


def as_mapping(batch: Batch) -> Mapping[str, Tensor]:
    """Return the batch as a mapping of names to tensors. A tensor without a name becomes `input_ids`.

    Raises:
        ValueError: the batch is neither a tensor of ids nor a mapping with `input_ids`.
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
