"""PrototypeTraining: protocol of a training that runs one update after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from stackwise.prototype.observation import Observation
from stackwise.support.arguments import require
from stackwise.training.batch_stream import Batch

__all__ = ["Data", "PrototypeTraining", "Update", "check_data"]

Data = Iterable[Batch] | Callable[[int], Batch]


class Update(NamedTuple):
    """One update, with values that stay on the device as long as possible.

    Attributes:
        loss: scalar on the device, before the update.
        grad_norm: scalar on the device, global L2 norm before clipping.
        lr: learning rate of the update.
        tokens: number of training tokens.
        rows: total number of rows of its batches.
        row_length: length of the longest row, as the data returned it.
        empty: boolean scalar on any device, true if the batches had no target.
        answered: boolean scalar on the device, true if gradients overflowed, the update was skipped and the
            loss scale was lowered. None: no loss scale.
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float
    tokens: int
    rows: int
    row_length: int
    empty: Tensor
    answered: Tensor | None = None


class PrototypeTraining(Protocol):
    """Running training.

    Attributes:
        name: name of the model.
        notes: notes for the reader of the run.
    """

    name: str
    notes: list[str]

    @property
    def in_nats(self) -> bool:
        """True if the losses are in nats, as the cross-entropy of tokens is.

        Known after the first observation.
        """

    @property
    def model(self) -> nn.Module:
        """Model that is trained."""

    @property
    def optimizer(self) -> Any:
        """Optimizer of the model."""

    @property
    def passes(self) -> int | None:
        """Number of started passes over the data. None: each step has its own batches."""

    def update(self, step: int) -> Update:
        """Train on the batches of `step`, in order from 0, without waiting for the device."""

    def observe(self, step: int) -> Observation:
        """Observe the weights before the update of `step`, without changing anything."""

    def validation_loss(self) -> float | None:
        """Return the validation loss of the current weights in nats. None: no validation data."""

    def close(self) -> None:
        """Restore everything that was changed for the training."""


def check_data(data: Data | None) -> None:
    """Raise ValueError for data that can be iterated only once, because a second run would continue it.

    Raises:
        ValueError: an iterator.
    """
    kind = type(data).__name__
    again = "what gives its batches again to each run, as a list or a loader, or a function of the step"
    require(not isinstance(data, Iterator), "data", kind, again)
