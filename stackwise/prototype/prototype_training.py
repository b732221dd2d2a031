"""PrototypeTraining: what a representative run drives: a training, one update after the other."""

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
    """One update, of which the host knows no more than it must.

    Attributes:
        loss: scalar on the device, before the update.
        grad_norm: scalar on the device, global L2 norm before clipping.
        lr: of the update.
        tokens: that it was trained on.
        rows: of its batches, together.
        row_length: of the longest of them, as they came.
        empty: boolean scalar, wherever the data is or goes: whether there was nothing to predict.
        answered: boolean scalar on the device: whether gradients overflowed and the update was left out, to
            which a smaller loss scale is the answer; None: there is no loss scale.
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
    """A training under way.

    Attributes:
        name: of the model.
        notes: what a reader of the run ought to know.
    """

    name: str
    notes: list[str]

    @property
    def in_nats(self) -> bool:
        """Whether its losses are, as cross-entropy of tokens is; it is known once it was observed."""

    @property
    def model(self) -> nn.Module:
        """What trains."""

    @property
    def optimizer(self) -> Any:
        """What updates it."""

    @property
    def passes(self) -> int | None:
        """Passes over the data that have begun; None: each step has batches of its own."""

    def update(self, step: int) -> Update:
        """Train on the batches of `step`, in order from 0. The host does not wait."""

    def observe(self, step: int) -> Observation:
        """Look at the weights that the update of `step` will start from, and change nothing."""

    def validation_loss(self) -> float | None:
        """In nats, of the weights as they are; None: there is no validation data."""

    def close(self) -> None:
        """Put back what was changed for the training."""


def check_data(data: Data | None) -> None:
    """Refuse what can be gone through once: a second run would be trained on what the first has left.

    Raises:
        ValueError: an iterator.
    """
    kind = type(data).__name__
    again = "what gives its batches again to each run, as a list or a loader, or a function of the step"
    require(not isinstance(data, Iterator), "data", kind, again)
