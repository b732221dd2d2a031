"""ReplayLoader: iterates over a data loader, replays steps and omits quarantined batches."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from stackwise.checkpoint import tree
from stackwise.stability.guard.alarm import hashable
from stackwise.support.arguments import check_sizes, require
from stackwise.support.dataloader import (
    epoch_start,
    generator_states,
    own_generators,
    resume_epoch,
    set_generators,
    warn_if_not_resumable,
)
from stackwise.support.random_state import (
    keep_random_states,
    random_states,
    random_states_equal,
    set_random_states,
    use_random_states,
)
from stackwise.support.tensor_tree import tensors_of

__all__ = ["DrawnBatch", "ReplayLoader", "to_device"]


@dataclass(frozen=True, eq=False)
class DrawnBatch:
    """Drawn batch, with the state that a replay needs.

    Attributes:
        step: number of the step that the batch belongs to. A replay keeps it.
        id: identity of the batch.
        batch: object that the loader returned, not a copy.
        random: random states when the batch was drawn. A replay restores them.
    """

    step: int
    id: Hashable
    batch: Any
    random: dict[str, Any]


class ReplayLoader:
    """Iterator over the batches of a loader that can replay steps.

    A step may use several batches. Batches drawn since the last `take_pending` are pending. Quarantined
    batches are never returned.

    Args:
        batch_id: function that identifies a batch by an integer, a string, or a tuple of these. None: (epoch,
            index in the epoch), both from 0.
    """

    def __init__(self, batch_id: Callable[[Any], Hashable] | None = None) -> None:
        self._batch_id = batch_id
        self.quarantined: dict[Hashable, None] = {}  # by id, in the order of quarantine
        self.pending: list[DrawnBatch] = []
        self._again: deque[DrawnBatch] = deque()
        self._kept: list[DrawnBatch] = []
        self._before: list[DrawnBatch] = []  # references only, which are not replayed
        self._frontier: dict[str, Any] | None = None  # random states to restore after a replay
        self._epoch, self._index = 0, 0  # of the next new batch
        self._began: dict[str, Any] | None = None  # random states at the start of the epoch
        self._loader: Iterable[Any] | None = None
        self._generators: list[Tensor] | None = None  # of the loader, from a loaded state
        self._next_step = 0
        self._drawn_outside = False
        self._is_checked = False  # True after the check of one batch
        self._within = False  # True while `batches` is within an epoch

    @property
    def step(self) -> int:
        """Number of the pending step, or of the next step if none is pending."""
        first = self.pending[0] if self.pending else self._again[0] if self._again else None
        return self._next_step if first is None else first.step

    def batches(
        self, loader: Iterable[Any], *, fast_forward: bool = False, ending: Callable[[], object]
    ) -> Iterator[Any]:
        """Yield the rest of the epoch of a loaded state, or a new epoch. See `Guard.batches`.

        If the previous loop left its epoch early, a new epoch starts.

        Args:
            loader: iterated once.
            fast_forward: read and discard as many batches as this epoch has already used.
            ending: called when the loader is exhausted. It may queue replays, which are then yielded.

        Raises:
            ValueError: an invalid batch id, or a loader with fewer batches than the epoch has already used.

        Warns:
            UserWarning: the batches that `fast_forward` discards may differ from those already used.
        """
        if self._within:
            self._end_epoch()
        self._within = True
        generators = self._generators if fast_forward else None
        self._loader, self._generators = loader, None
        if self._index or self._began is not None:
            source = self._gone_on(loader, generators, fast_forward)
        else:
            source = self._begun(loader, generators)
        while True:
            if self._again:
                given = self._again.popleft()
                set_random_states(given.random)
            else:
                if self._frontier is not None:
                    set_random_states(self._frontier)
                    self._frontier = None
                new = self._new(source)
                if new is None:
                    ending()
                    if self._again:
                        continue
                    break
                given = new
            self._drawn_outside = False
            self._give(given)
            yield given.batch
        self._end_epoch()
        self._within = False

    def _end_epoch(self) -> None:
        self._epoch, self._index, self._began = self._epoch + 1, 0, None

    def _begun(self, loader: Iterable[Any], generators: list[Tensor] | None) -> Iterator[Any]:
        """Start a new epoch. `generators` are the loader's states in the run that is resumed."""
        if generators is not None:
            warn_if_not_resumable(loader)
            set_generators(loader, generators, complete=False)
        if self._frontier is None:
            self._began = epoch_start(loader)
            return iter(loader)
        # Replays of the previous epoch are queued. This epoch starts with the random states after them.
        with use_random_states(self._frontier):
            self._began = epoch_start(loader)
            source = iter(loader)
            self._frontier = random_states()
        return source

    def _gone_on(
        self, loader: Iterable[Any], generators: list[Tensor] | None, fast_forward: bool
    ) -> Iterator[Any]:
        """Continue the epoch of a loaded state. The current random states are restored at the end."""
        with keep_random_states():
            if not fast_forward:
                if self._began is not None:
                    set_random_states(self._began)
                return iter(loader)
            warn_if_not_resumable(loader)
            if self._began is not None:
                source = resume_epoch(loader, self._began, self._index, self._epoch)
                set_generators(loader, generators, complete=False)
                count, saved = len(own_generators(loader)), len(generators or [])
                if generators is not None and count != saved:
                    text = f"loader: {saved} of its generators were saved, and {count} are there"
                    warnings.warn(
                        f"{text}, so its batches may differ from those of an uninterrupted run", stacklevel=3
                    )
                return source
            before = random_states()
            source = resume_epoch(loader, before, self._index, self._epoch)
            if own_generators(loader) or not random_states_equal(before, random_states()):
                text = "loader: the random states with which its epoch began were not saved for this process"
                warnings.warn(
                    f"{text}, so its batches may differ from those of an uninterrupted run", stacklevel=3
                )
            return source

    def give(self, batch: Any, identity: Hashable) -> None:
        """Add a batch that an external loop has drawn to the pending ones."""
        require(not self._again, "give", identity, "first the batches to be replayed")
        identity = _known("identity", identity)
        self._drawn_outside = True
        self._give(DrawnBatch(self._next_step, identity, batch, random_states()))

    @property
    def batches_to_replay(self) -> int:
        """Number of batches of the next step if it is a replay; otherwise 0."""
        return sum(given.step == self._again[0].step for given in self._again)

    @property
    def is_replay(self) -> bool:
        """True if the pending step is a replay."""
        return bool(self.pending) and self.pending[0].step != self._next_step

    def replay_next(self) -> Any:
        """Return the next batch of the replay and restore its random states. It is then pending."""
        given = self._again.popleft()
        set_random_states(given.random)
        self._give(given)
        return given.batch

    def finish_replay(self) -> None:
        """Restore the random states from before the replay, if no replay is left."""
        if self._frontier is not None and not self._again:
            set_random_states(self._frontier)
            self._frontier = None

    def _give(self, given: DrawnBatch) -> None:
        self.pending.append(given)
        self._kept.append(given)

    def _new(self, source: Iterator[Any]) -> DrawnBatch | None:
        for batch in source:
            place = self._epoch, self._index
            identity = place if self._batch_id is None else _known("batch_id", self._batch_id(batch))
            self._index += 1
            if identity not in self.quarantined:
                return DrawnBatch(self._next_step, identity, batch, random_states())
        return None

    def take_pending(self) -> list[DrawnBatch]:
        """Return the pending batches. Advance the step number unless they are a replay."""
        hand, self.pending = self.pending, []
        # A replay keeps its earlier number.
        if not hand or hand[0].step == self._next_step:
            self._next_step += 1
        return hand

    def drop_pending(self) -> None:
        """Drop the pending batches without a step."""
        self._forget(self.pending)
        self.pending = []

    def keep_from_here(self, references: int = 0) -> None:
        """Forget all batches but the pending ones, because no rewind will replay them.

        The last `references` batches remain available to `healthy_before`.
        """
        before = [each for each in (*self._before, *self._kept) if each not in self.pending]
        self._before = before[-references:] if references else []
        self._kept = list(self.pending)

    def keep_last(self, steps: int) -> None:
        """Forget batches that are more than `steps` steps older than the pending step."""
        least = self.step - steps
        self._kept = [given for given in self._kept if given.step >= least]

    def quarantine(self, given: Sequence[DrawnBatch]) -> None:
        """Exclude these batches from now on."""
        self.quarantined |= dict.fromkeys(each.id for each in given)

    def healthy_before(self, given: Sequence[DrawnBatch], count: int) -> list[DrawnBatch]:
        """Return the last `count` stored batches before `given` that are not quarantined."""
        place = next((i for i, each in enumerate(self._kept) if each in given), len(self._kept))
        known = (*self._before, *self._kept[:place])
        return [each for each in known if each.id not in self.quarantined][-count:]

    def replay(self, given: Sequence[DrawnBatch]) -> None:
        """Queue `given`, the batches that were drawn last, before any other batch."""
        self._forget(given)
        self._queue(given)

    def replay_all(self, later: Sequence[DrawnBatch]) -> None:
        """Queue every batch since the last `keep_from_here`, followed by `later`.

        `later` are the batches that were drawn last, whose step is not completed.
        """
        self._forget(later)
        kept, self._kept = self._kept, []
        self._queue([*kept, *later])

    def _forget(self, given: Sequence[DrawnBatch]) -> None:
        self._kept = [each for each in self._kept if each not in given]

    def _queue(self, given: Sequence[DrawnBatch]) -> None:
        wanted = [each for each in given if each.id not in self.quarantined]
        if wanted and self._frontier is None:
            self._frontier = random_states()
        self._again.extendleft(reversed(wanted))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, with the batches to be replayed.

        Pending batches are included in these, unless an external loop has just drawn them.

        Warns:
            RuntimeWarning: a checkpoint refuses a batch. Only the first state with a batch is checked.
        """
        self._check_kept()
        hand = [] if self._drawn_outside and not self.is_replay else self.pending
        return {
            "epoch": self._epoch,
            "index": self._index,
            "next_step": self._next_step,
            "quarantined": list(self.quarantined),
            "began": None if self._began is None else _without_arrays(self._began),
            "generators": self._generators if self._loader is None else generator_states(self._loader),
            "frontier": None if self._frontier is None else _without_arrays(self._frontier),
            "again": [_plain(given) for given in (*hand, *self._again)],
        }

    def _check_kept(self) -> None:
        """Check one batch early, so that the problem is known before the first rewind."""
        if self._is_checked or not self._kept:
            return
        self._is_checked = True
        try:
            tree.encode(self._kept[-1].batch, ("batch",), {})
        except ValueError as error:
            said = f"{error}. After a rewind, batches are in this state, and a checkpoint refuses it"
            warnings.warn(said, RuntimeWarning, stacklevel=4)

    @staticmethod
    def common_state(state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a `state_dict` that all processes share, if no batches are to be replayed."""
        # Without replays, these random states belong to one process.
        frontier = state["frontier"] if state["again"] else None
        return {**state, "began": None, "generators": None, "frontier": frontier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, which may have passed through JSON.

        Raises:
            ValueError: a number or list is missing or invalid.
        """
        check_sizes(0, **{key: state.get(key) for key in ("epoch", "index", "next_step")})
        require(isinstance(state.get("again"), list | tuple), "again", state.get("again"), "a list")
        self._epoch, self._index = state["epoch"], state["index"]
        self._next_step = state["next_step"]
        self.quarantined = dict.fromkeys(map(hashable, state["quarantined"]))
        began = state["began"]
        self._began = None if began is None else _with_arrays(began)
        self._loader, self._generators = None, state["generators"]
        self._frontier = None if state["frontier"] is None else _with_arrays(state["frontier"])
        self._again = deque(map(_given, state["again"]))
        self.pending, self._kept, self._before = [], [], []
        self._within = False


def _known(key: str, identity: Any) -> Hashable:
    """Return a user-defined id as plain values. An id that compares by memory address never matches."""
    if isinstance(identity, list | tuple):
        return tuple(_known(key, each) for each in identity)
    allowed = "an integer, a string, or a tuple of these"
    require(isinstance(identity, int | str | np.integer), key, identity, allowed)
    return str(identity) if isinstance(identity, str) else int(identity)  # no subclasses


def _plain(given: DrawnBatch) -> dict[str, Any]:
    """Return a batch as plain values, with its device: a checkpoint restores tensors on the CPU."""
    plain = {
        "step": given.step,
        "id": given.id,
        "batch": given.batch,
        "random": _without_arrays(given.random),
    }
    return {**plain, "device": _device_of(given.batch)}


def _given(plain: Mapping[str, Any]) -> DrawnBatch:
    """Return the batch of a `_plain` value."""
    batch = _moved(plain["batch"], plain["device"])
    return DrawnBatch(plain["step"], hashable(plain["id"]), batch, _with_arrays(plain["random"]))


def _device_of(batch: Any) -> str | None:
    """Return the device of all tensors of a batch. None: the CPU, or several devices."""
    devices = {tensor.device for tensor in tensors_of(batch)}
    return str(*devices) if len(devices) == 1 and devices != {torch.device("cpu")} else None


def _moved(batch: Any, name: str | None) -> Any:
    """Return a batch on its original device, or on the current device if this machine lacks it."""
    if name is None:
        return batch
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    return to_device(batch, device)


def to_device(batch: Any, device: torch.device | None) -> Any:
    """Return a batch with its tensors on a device; None: where they are."""
    return _pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _without_arrays(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return random states without NumPy arrays, which a plain `torch.load` refuses."""
    name, keys, *rest = states["numpy"]
    return {**states, "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest)}


def _with_arrays(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the random states of a `_without_arrays` value."""
    name, keys, *rest = states["numpy"]
    return {**states, "numpy": (name, keys.numpy().astype(np.uint32), *rest)}
