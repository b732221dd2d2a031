"""TrainerSpec: a training step under test, and how to drive it from outside.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from stackwise.argument import check_number, check_sizes, require
from stackwise.seed import seeded

__all__ = ["TrainerSpec", "TrainingRun"]

Batch = Any


@runtime_checkable
class TrainingRun(Protocol):
    """A model in training, as every question about a training step sees it.

    Only the three members below are needed. A run may have more, and each question says which it needs:

    - `scheduler`, `scaler`: the learning rate scheduler, the gradient scaler;
    - `loss(batch) -> Tensor`: the scalar that a step minimises, differentiable, without a step;
    - `accumulate(batches) -> float`: one optimizer step from several micro-batches;
    - `epoch(number) -> Iterable[batch]`: the training data in the order of that epoch;
    - `evaluate(batches) -> float`: the mean loss in nats per target of batches, without training;
    - `save(folder)`, `load(folder)`: everything that a resumed run needs, to and from an empty folder;
    - `position() -> Any`: what says where in its data the run is.

    Attributes:
        model: what is trained.
        optimizer: what updates it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch: Batch) -> Any:
        """One optimizer step on `batch`; returns the loss before it, a number or a scalar tensor."""


@dataclass(frozen=True)
class TrainerSpec:
    """A training step under test: how to set a run up, what goes in, what it claims.

    `TrainerSpec.of(factory)` fills in what can be seen from outside; what it cannot see is declared by
    keyword.

    Attributes:
        build: sets up a fresh run; called under a fixed seed.
        name: in test ids and reports.
        vocab_size: token ids of batches are below it.
        make_batch: (batch_size, seq_len, generator) -> a batch on the CPU; None: a dict of random
            `input_ids` (B, T), `attention_mask` of ones and `labels`, a copy of the ids, not shifted.
        batch_size: B of the questions.
        seq_len: T of the questions.
        max_norm: the gradient norm that the step claims to clip to; None: nothing is claimed.
        learning_rate: step number from 0 -> the learning rate that it claims; None: nothing is claimed.
        frozen: names of parameters that are meant not to train.
        ignored_label: of a position that is not to be predicted.
        factory: "MODULE:FACTORY" or "path/to/file.py:FACTORY" that gives this spec, or the run, in
            another process; None: what needs one is not asked.
        notes: what was inferred or assumed, in one line.
    """

    build: Callable[[], TrainingRun]
    name: str
    vocab_size: int
    make_batch: Callable[[int, int, torch.Generator], Batch] | None = None
    batch_size: int = 4
    seq_len: int = 16
    max_norm: float | None = None
    learning_rate: Callable[[int], float] | None = None
    frozen: tuple[str, ...] = ()
    ignored_label: int = -100
    factory: str | None = None
    notes: str = ""

    @classmethod
    def of(cls, subject: Any, **declared: Any) -> TrainerSpec:
        """Describe `subject` by setting it up once.

        Args:
            subject: a function that returns a TrainingRun (or a TrainerSpec), or a TrainerSpec.
            **declared: attributes of TrainerSpec that are not to be inferred.

        Raises:
            TypeError: `subject` is, or returns, something else.
        """
        name = declared.get("name")
        if callable(subject) and not isinstance(subject, TrainerSpec):
            with seeded(0):
                made = subject()
            if isinstance(made, TrainingRun):
                own = str(getattr(subject, "__name__", type(made).__name__))
                attributes = {
                    "build": subject,
                    "name": name or (type(made).__name__ if own == "<lambda>" else own),
                    "vocab_size": _vocab_size(made.model),
                }
                return cls(**(attributes | declared))
            subject = made
        if not isinstance(subject, TrainerSpec):
            raise TypeError(
                f"trainer: got {type(subject).__name__}; wanted a function that takes no arguments and "
                "returns an object with model, optimizer and step(batch), or a TrainerSpec"
            )
        return replace(subject, **declared) if declared else subject

    def __post_init__(self) -> None:
        check_sizes(vocab_size=self.vocab_size, batch_size=self.batch_size, seq_len=self.seq_len)
        if self.max_norm is not None:
            check_number("max_norm", self.max_norm, "a finite number > 0", lambda norm: norm > 0)
        require(callable(self.build), "build", self.build, "a function that takes no arguments")

    def create(self, device: torch.device | str = "cpu", seed: int = 0) -> TrainingRun:
        """A fresh run, set up under `seed`. The caller's random state is untouched."""
        with seeded(seed, device):
            run = self.build()
        if not isinstance(run, TrainingRun):
            raise TypeError(
                f"{self.name}: build() returned {type(run).__name__}; wanted model, optimizer and step(batch)"
            )
        return run

    def batch(
        self,
        batch_size: int | None = None,
        seq_len: int | None = None,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Batch:
        """A batch on `device`, a function of `seed` alone."""
        batch_size = self.batch_size if batch_size is None else batch_size
        seq_len = self.seq_len if seq_len is None else seq_len
        generator = torch.Generator().manual_seed(seed)
        if self.make_batch is not None:
            return _moved(self.make_batch(batch_size, seq_len, generator), device)
        ids = torch.randint(self.vocab_size, (batch_size, seq_len), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        return _moved(batch, device)


def _moved(batch: Batch, device: torch.device | str) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, Iterable) and not isinstance(batch, str):
        return type(batch)(_moved(value, device) for value in batch)  # type: ignore[call-arg]
    return batch


def _vocab_size(model: nn.Module) -> int:
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not sizes:
        raise TypeError("trainer: its model has no nn.Embedding; declare vocab_size= or make_batch=")
    return max(sizes)
