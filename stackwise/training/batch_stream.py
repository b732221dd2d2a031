"""BatchStream: the batches of anybody's loader, pass after pass."""

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
    """Of each step the pass over the data in which it begins and its `per_step` batches, without end.

    Its state is a place: a pass and the batch of it that comes next. A loader with a state of its own
    (`Batches`, `StatefulDataLoader`) goes on there by it. Of any other as many batches are taken again and
    left out, after the random states with which the pass began, those of a `generator` that the loader or one
    of its parts has included: that is the same of a `DataLoader` that shuffles. With `persistent_workers`,
    which draw once for all passes, it may be another, and there is a warning.

    Args:
        dataloader: started again when it ends; it, its dataset and its samplers are told the pass, where they
            have `set_epoch`.
        per_step: batches a step.
        first_step: how many steps are left out at first; `Batches` make none of theirs for that.

    Attributes:
        place: (pass, place in it) of the first batch of the last step, both counted from 0.

    Raises:
        ValueError: from `next`: a loader without batches, also in a later pass, or a batch of another kind.
    """

    def __init__(self, dataloader: Iterable[Batch], per_step: int = 1, first_step: int = 0) -> None:
        self._dataloader, self._per_step = dataloader, per_step
        self._epoch = self._index = 0
        self.place = (0, 0)
        self._batches: Iterator[Batch] | None = None
        self._began: dict[str, Any] | None = None  # random states at the start of the pass
        self._leave_out(first_step * per_step)

    def __iter__(self) -> Iterator[tuple[int, list[Mapping[str, Tensor]]]]:
        return self

    def __next__(self) -> tuple[int, list[Mapping[str, Tensor]]]:
        first = self._take()
        self.place = (self._epoch, self._index - 1)
        batches = [first, *(self._take() for _ in range(self._per_step - 1))]
        return self.place[0], [as_mapping(batch) for batch in batches]

    def state_dict(self) -> dict[str, Any]:
        """The place of the batch that comes next."""
        state: dict[str, Any] = {"epoch": self._epoch, "batch": self._index}
        state["generators"] = generator_states(self._dataloader)
        if _has_state(self._dataloader):
            return state | {"loader": self._dataloader.state_dict()}  # type: ignore[attr-defined]
        return state | {"began": self._began}  # None: the pass has not begun

    def load_state_dict(self, state: Mapping[str, Any], *, reads: bool = True) -> None:
        """Go on at a place; random states are as they then come to be.

        Args:
            state: of `state_dict`.
            reads: whether the rest of the pass is asked for; without, batches are not taken again, and only
                the generators of the loader go on, for passes of another stream.

        Raises:
            ValueError: the loader is another one, or has fewer batches.
        """
        generators = state.get("generators")  # older states have none
        if not _has_state(self._dataloader):
            warn_if_not_resumable(self._dataloader)
        if not reads:
            if len(own_generators(self._dataloader)) < len(generators or []):
                next(iter(self._dataloader), None)  # a sampler may make its own when it is gone through
            set_generators(self._dataloader, generators)
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
        set_generators(self._dataloader, generators)

    def _leave_out(self, count: int) -> None:
        loader = self._dataloader
        source = loader.loader if isinstance(loader, Prefetched) else loader
        if not (count and isinstance(source, Batches)):
            for _ in range(count):
                self._take()
            return
        # Not yet at the first of the next pass where the last one left out ends its own.
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
    """Refuse validation data whose evaluation would move the training elsewhere in its data.

    Args:
        saves: whether the place in the training data is saved.

    Raises:
        ValueError: both are one loader of one pass at a time; or, where it `saves`, both are, or go through,
            one object that keeps its place.
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
