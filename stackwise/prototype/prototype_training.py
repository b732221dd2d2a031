"""PrototypeTraining: protocol of a training that runs one update after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from stackwise.prototype.observation import Observation
from stackwise.support.arguments import require
from stackwise.training.batch_stream import Batch, BatchStream, as_mapping

__all__ = ["Data", "PrototypeTraining", "StepBatches", "Update", "check_data", "shape_of"]

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


class StepBatches:
    """Micro-batches of each step.

    Args:
        data: micro-batches, or step -> batch of the entire update.
        accumulation_steps: number of micro-batches per step, if `data` is iterated.
        batch_size: number of rows of a micro-batch, if `data` is a function. The last one may be smaller.
    """

    def __init__(self, data: Data, accumulation_steps: int, batch_size: int) -> None:
        self._batch_size = batch_size
        self._stream: BatchStream | None = None
        if callable(data) and not hasattr(data, "__iter__"):
            self._of_step = data
        else:
            self._stream = BatchStream(data, accumulation_steps)

    @property
    def passes(self) -> int | None:
        """Number of started passes over the data. None: each step has its own batches."""
        return None if self._stream is None else self._stream.place[0] + 1

    def of(self, step: int) -> Sequence[Mapping[str, Tensor]]:
        """Return the micro-batches of a step. Call it once per step, in order.

        Raises:
            ValueError: not a batch, a batch without rows, or data that is exhausted.
        """
        if self._stream is not None:
            return next(self._stream)[1]
        whole, size = as_mapping(self._of_step(step)), self._batch_size
        n_rows = len(whole["input_ids"])
        require(n_rows > 0, "data: rows of a batch", n_rows, "at least 1")
        starts = range(0, n_rows, size)
        return [{key: each[start : start + size] for key, each in whole.items()} for start in starts]


def shape_of(batches: Sequence[Mapping[str, Tensor]]) -> tuple[int, int]:
    """Return the total number of rows of micro-batches, and the length of the longest row."""
    shapes = [batch["input_ids"].shape for batch in batches]
    return sum(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
