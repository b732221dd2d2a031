"""Batches: epochs of numbered batches with a position that can be saved."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from stackwise.support.arguments import check_sizes, require

__all__ = ["IGNORED", "Batch", "Batches"]

IGNORED = -100  # label of an ignored position, as in torch and Hugging Face

Batch = dict[str, Tensor]


class Batches(IterableDataset[Batch]):
    """Iterable of batches. Each pass is one epoch. Batch `i` of epoch `e` depends only on `e` and `i`.

    A step of `world_size` processes uses `world_size * batch_size` rows. Process `rank` gets the rows from
    `rank * batch_size` on. A single process with a batch of this total size reads the same rows in the same
    order.

    Inside a `DataLoader` (`batch_size=None`), worker `w` of `n` creates every `n`-th batch, and the loader
    restores their order. A worker is a copy, so call `set_epoch` in the main process before each pass. It
    does not reach persistent workers (`persistent_workers`).

    Args:
        batch_size: rows of a batch of one process.
        n_batches: number of batches of an epoch. None: unlimited.
        rank: rank of this process.
        world_size: number of processes that share the rows.

    Raises:
        ValueError: a size below 1, or a rank out of range.
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
        self._place: tuple[int, int] | None = None  # position of the next batch; None: (_epoch, 0)
        self._loaded = False  # True if the next pass starts at _place

    @abstractmethod
    def batch(self, epoch: int, i: int) -> Batch:
        """Return batch `i` of `epoch`, both counted from 0."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return plain values that identify the batches. They are equal in all processes."""

    def __len__(self) -> int:
        if self.n_batches is None:
            raise TypeError("n_batches: got None, so the batches have no end")
        return self.n_batches

    @property
    def epoch(self) -> int:
        """Epoch of the next pass. Without `set_epoch`, each pass is the next epoch."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the first batch of `epoch`.

        If a state of this epoch was just loaded, the next pass is the rest of the epoch.
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
        """Return the position of the next batch, and the identity of the batches. It is equal in all ranks.

        After the last batch of an epoch, the state belongs to this epoch until the pass is complete. If it is
        loaded, the next pass has no batches, and the pass after it is the next epoch.
        """
        epoch, i = self._place or (self._epoch, 0)
        return {"epoch": epoch, "batch": i, "data": self.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass the rest of the epoch of `state`.

        The number of processes may change if their batches have the same total size. Within the first epoch,
        the number of batches may be larger than before, for example after an increase of `max_steps`.

        Raises:
            ValueError: the state belongs to other batches. The message lists the differences.
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
