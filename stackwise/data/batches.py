"""Batches: epochs of numbered batches, and the exact place in them."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from stackwise.support.arguments import check_sizes, require

__all__ = ["IGNORED", "Batch", "Batches"]

IGNORED = -100  # label of a position that is not predicted, as in torch and Hugging Face

Batch = dict[str, Tensor]


class Batches(IterableDataset[Batch]):
    """Each pass is one epoch; batch `i` of epoch `e` is a function of `e` and `i` alone.

    A step of `world_size` processes takes `world_size * batch_size` rows; process `rank` gets rows
    `rank * batch_size` and following. One process with a batch of them all would see the same rows in the
    same order.

    Inside a `DataLoader` (`batch_size=None`), worker `w` of `n` makes every `n`-th batch, which the loader
    puts in order again. A worker is a copy: call `set_epoch` here before each pass. With workers that
    stay (`persistent_workers`) it would not reach them.

    Args:
        batch_size: rows of a batch of one process.
        n_batches: of an epoch; None: there is no end.
        rank: of this process.
        world_size: how many processes share the rows.

    Raises:
        ValueError: a size below 1, or a rank beyond the processes.
    """

    def __init__(self, batch_size: int, n_batches: int | None, *, rank: int = 0, world_size: int = 1) -> None:
        check_sizes(batch_size=batch_size, world_size=world_size)
        check_sizes(0, rank=rank)
        require(rank < world_size, "rank", rank, f"0 to {world_size - 1}, with world_size={world_size}")
        if n_batches is not None:
            check_sizes(n_batches=n_batches)
        self.batch_size, self.n_batches = batch_size, n_batches
        self.rank, self.world_size = rank, world_size
        self._epoch = 0
        self._place: tuple[int, int] | None = None  # where the next batch is from; None: (_epoch, 0)
        self._loaded = False  # whether the next pass begins at _place

    @abstractmethod
    def batch(self, epoch: int, i: int) -> Batch:
        """Batch `i` of `epoch`, both counted from 0."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Plain values that say which batches these are: the same in every process."""

    def __len__(self) -> int:
        if self.n_batches is None:
            raise TypeError("n_batches: got None, so the batches have no end")
        return self.n_batches

    @property
    def epoch(self) -> int:
        """The epoch of the next pass. Without `set_epoch`, each pass is the next epoch."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one of `epoch`, from its first batch.

        Of the epoch that a state just loaded is of, it is the rest.
        """
        check_sizes(0, epoch=epoch)
        if self._loaded and epoch == self._epoch:
            return
        self._epoch, self._place, self._loaded = epoch, None, False

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = (self._place or (self._epoch, 0)) if self._loaded else (self._epoch, 0)
        self._epoch, self._loaded = epoch + 1, False
        self._place = epoch, first
        worker = get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in itertools.count(first + (mine - first) % workers, workers):
            if self.n_batches is not None and i >= self.n_batches:
                break
            batch = self.batch(epoch, i)
            self._place = epoch, i + 1
            yield batch
        self._place = None

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is from, and what the batches are; the same of every rank.

        Behind the last batch of an epoch, before the pass has ended, it is still of that epoch: the pass that
        a load continues has no batch then, and the one after it is the next epoch.
        """
        epoch, i = self._place or (self._epoch, 0)
        return {"epoch": epoch, "batch": i, "data": self.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass the rest of the epoch that `state` belongs to.

        It fits any number of processes whose batches have the same size together. Within the first epoch,
        there may be more batches than before, as after an increase of `max_steps`.

        Raises:
            ValueError: the state belongs to other batches. Names the differences.
        """
        known = state.keys() >= {"epoch", "batch", "data"}
        require(known, "state", sorted(state), "a state that state_dict() gave")
        ours, theirs = self.identity(), dict(state["data"])
        if state["epoch"] == 0 and (theirs.get("n_batches") or 0) < (ours.get("n_batches") or 0):
            theirs["n_batches"] = ours["n_batches"]
        differing = [
            f"{key}={theirs.get(key)!r} where these have {ours.get(key)!r}"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
        if differing:
            raise ValueError(f"state: it is of other batches: {'; '.join(differing)}")
        check_sizes(0, epoch=state["epoch"], batch=state["batch"])
        within = self.n_batches is None or state["batch"] <= self.n_batches
        require(within, "batch", state["batch"], f"0 to {self.n_batches}")
        self._epoch = state["epoch"]
        self._place = state["epoch"], state["batch"]
        self._loaded = True
