"""BatchFeed: which batches were given, which are to be given again, and which never again."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from stackwise.argument import check_sizes, require
from stackwise.checkpoint import tree
from stackwise.random_states import random_states, set_random_states
from stackwise.stability.guard.alarm import hashable

__all__ = ["BatchFeed", "GivenBatch"]


@dataclass(frozen=True, eq=False)
class GivenBatch:
    """A batch as it was given.

    Attributes:
        step: the number of the step that it was given for; it keeps it.
        id: by which it is known.
        batch: itself, not a copy.
        random: the random states that it was given with. It is given again with the same.
    """

    step: int
    id: Hashable
    batch: Any
    random: dict[str, Any]


class BatchFeed:
    """The batches of a loader in their order, some of them again, without those in quarantine.

    A step may take several batches: what was given since the last `take_hand` is in hand.

    Args:
        batch_id: by which a batch is known: an integer, a string, or a tuple of these; None: by (epoch,
            place in it), both counted from 0.
    """

    def __init__(self, batch_id: Callable[[Any], Hashable] | None = None) -> None:
        self._batch_id = batch_id
        self.quarantined: dict[Hashable, None] = {}  # by id, in the order in which they came
        self.hand: list[GivenBatch] = []
        self._again: deque[GivenBatch] = deque()
        self._kept: list[GivenBatch] = []
        self._before: list[GivenBatch] = []  # those that are kept though they are given no more
        self._frontier: dict[str, Any] | None = None  # random states of the next batch that is new
        self._epoch, self._index = 0, 0  # of the next batch that is new
        self._next_step = 0
        self._drawn_outside = False
        self._is_checked = False  # whether a checkpoint takes the batches
        self._within = False  # an epoch that `batches` began here

    @property
    def step(self) -> int:
        """Number of the step in hand, or else of the one that is next."""
        first = self.hand[0] if self.hand else self._again[0] if self._again else None
        return self._next_step if first is None else first.step

    def batches(
        self, loader: Iterable[Any], *, fast_forward: bool = False, ending: Callable[[], object]
    ) -> Iterator[Any]:
        """The rest of an epoch of `loader`; a new one, where a loop before was left. See `Guard.batches`.

        Args:
            loader: gone through once.
            fast_forward: read over as many batches as were given in this epoch.
            ending: called when the loader has no more; what it puts back is then given.

        Raises:
            ValueError: an id of another kind.
        """
        if self._within:
            self._epoch, self._index = self._epoch + 1, 0
        self._within = True
        source = iter(loader)
        if fast_forward:
            for _ in islice(source, self._index):
                pass
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
            self.hand.append(given)
            self._kept.append(given)
            yield given.batch
        self._epoch, self._index = self._epoch + 1, 0
        self._within = False

    def give(self, batch: Any, identity: Hashable) -> None:
        """A batch that somebody else has drawn is in hand."""
        require(not self._again, "give", identity, "first those that are to be given again")
        identity = _known("identity", identity)
        self._drawn_outside = True
        self._give(GivenBatch(self._next_step, identity, batch, random_states()))

    @property
    def next_again(self) -> int:
        """How many batches the next step has, where it is one that is to be made again; else 0."""
        return sum(given.step == self._again[0].step for given in self._again)

    @property
    def gives_again(self) -> bool:
        """Whether the step in hand is one that is made again."""
        return bool(self.hand) and self.hand[0].step != self._next_step

    def give_next(self) -> Any:
        """The next one that is to be given again, with its random states; it is in hand."""
        given = self._again.popleft()
        set_random_states(given.random)
        self._give(given)
        return given.batch

    def take_up(self) -> None:
        """Random states as they were before batches were given again; there are none left."""
        if self._frontier is not None and not self._again:
            set_random_states(self._frontier)
            self._frontier = None

    def _give(self, given: GivenBatch) -> None:
        self.hand.append(given)
        self._kept.append(given)

    def _new(self, source: Iterator[Any]) -> GivenBatch | None:
        for batch in source:
            place = self._epoch, self._index
            identity = place if self._batch_id is None else _known("batch_id", self._batch_id(batch))
            self._index += 1
            if identity not in self.quarantined:
                return GivenBatch(self._next_step, identity, batch, random_states())
        return None

    def take_hand(self) -> list[GivenBatch]:
        """The batches of the step that was just made."""
        hand, self.hand = self.hand, []
        # One that is given again has a number from before.
        if not hand or hand[0].step == self._next_step:
            self._next_step += 1
        return hand

    def drop_hand(self) -> None:
        """Nobody makes a step of what is in hand."""
        self._stand_back(self.hand)
        self.hand = []

    def keep_from_here(self, references: int = 0) -> None:
        """What was given until now need not be given again after a rewind.

        The last `references` batches are kept all the same, for `sound_before`.
        """
        before = [each for each in (*self._before, *self._kept) if each not in self.hand]
        self._before = before[-references:] if references else []
        self._kept = list(self.hand)

    def keep_last(self, steps: int) -> None:
        """Of what was given before the step in hand only the batches of so many steps are needed."""
        least = self.step - steps
        self._kept = [given for given in self._kept if given.step >= least]

    def quarantine(self, given: Sequence[GivenBatch]) -> None:
        """Give these never again."""
        self.quarantined |= dict.fromkeys(each.id for each in given)

    def sound_before(self, given: Sequence[GivenBatch], count: int) -> list[GivenBatch]:
        """The last `count` that were kept, given before `given`, and are not in quarantine."""
        place = next((i for i, each in enumerate(self._kept) if each in given), len(self._kept))
        known = (*self._before, *self._kept[:place])
        return [each for each in known if each.id not in self.quarantined][-count:]

    def give_again(self, given: Sequence[GivenBatch]) -> None:
        """Go on with these, which were given last, and then with what comes after them."""
        self._stand_back(given)
        self._put_first(given)

    def give_all_again(self, later: Sequence[GivenBatch]) -> None:
        """Go on with everything since `keep_from_here`; `later` is what was given last and not made."""
        self._stand_back(later)
        kept, self._kept = self._kept, []
        self._put_first([*kept, *later])

    def _stand_back(self, given: Sequence[GivenBatch]) -> None:
        self._kept = [each for each in self._kept if each not in given]

    def _put_first(self, given: Sequence[GivenBatch]) -> None:
        wanted = [each for each in given if each.id not in self.quarantined]
        if wanted and self._frontier is None:
            self._frontier = random_states()
        self._again.extendleft(reversed(wanted))

    def state_dict(self) -> dict[str, Any]:
        """Where it is, with the batches that are to be given again.

        A step in hand was not begun: its batches are to be given again, unless somebody else has drawn them.

        Warns:
            RuntimeWarning: of the first state, where no checkpoint would take a batch.
        """
        self._check_kept()
        hand = [] if self._drawn_outside and not self.gives_again else self.hand
        return {
            "epoch": self._epoch,
            "index": self._index,
            "next_step": self._next_step,
            "quarantined": list(self.quarantined),
            "frontier": None if self._frontier is None else _told(self._frontier),
            "again": [
                {"step": g.step, "id": g.id, "batch": g.batch, "random": _told(g.random)}
                for g in (*hand, *self._again)
            ],
        }

    def _check_kept(self) -> None:
        """Before there is anything to be given again, so that it is not found out behind a rewind."""
        if self._is_checked or not self._kept:
            return
        self._is_checked = True
        try:
            tree.encode(self._kept[-1].batch, ("batch",), {})
        except ValueError as error:
            said = f"{error}. Behind a rewind batches are in this state, which a checkpoint then refuses"
            warnings.warn(said, RuntimeWarning, stacklevel=4)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, also where it went through JSON.

        Raises:
            ValueError: a number that is none.
        """
        check_sizes(0, **{key: state.get(key) for key in ("epoch", "index", "next_step")})
        require(isinstance(state.get("again"), list | tuple), "again", state.get("again"), "a list")
        self._epoch, self._index = state["epoch"], state["index"]
        self._next_step = state["next_step"]
        self.quarantined = dict.fromkeys(map(hashable, state["quarantined"]))
        self._frontier = None if state["frontier"] is None else _untold(state["frontier"])
        self._again = deque(
            GivenBatch(g["step"], hashable(g["id"]), g["batch"], _untold(g["random"])) for g in state["again"]
        )
        self.hand, self._kept, self._before = [], [], []
        self._within = False


def _known(key: str, identity: Any) -> Hashable:
    """An id of anybody's as plain values. What is known by where it is in memory is never met again."""
    if isinstance(identity, list | tuple):
        return tuple(_known(key, each) for each in identity)
    allowed = "an integer, a string, or a tuple of these"
    require(isinstance(identity, int | str | np.integer), key, identity, allowed)
    return str(identity) if isinstance(identity, str) else int(identity)  # not what is derived from these


def _told(states: Mapping[str, Any]) -> dict[str, Any]:
    """Random states without an array of numpy's, which a plain `torch.load` refuses."""
    name, keys, *rest = states["numpy"]
    return {**states, "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest)}


def _untold(states: Mapping[str, Any]) -> dict[str, Any]:
    """What `_told` was given; also of a state from before, which has the array."""
    name, keys, *rest = states["numpy"]
    return {**states, "numpy": (name, np.asarray(keys).astype(np.uint32), *rest)}
