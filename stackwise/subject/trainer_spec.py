"""TrainerSpec: a training step under test, and how to drive it from outside.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stackwise.subject.lightning_run import copies, is_lightning_module
from stackwise.subject.trainer_adapter import FunctionRun, adapted, with_one_optimizer
from stackwise.support.arguments import check_number, check_sizes, require
from stackwise.support.random_state import seeded

__all__ = ["TrainerSpec", "TrainingRun", "labels_in", "with_labels"]

Batch = Any
# Tables of so few rows tell kinds of tokens apart.
_TOKEN_TYPES = 4

_CAPABILITIES = (
    "scheduler",
    "scaler",
    "loss",
    "accumulate",
    "epoch",
    "evaluate",
    "perplexity",
    "save",
    "load",
    "position",
    "fit",
)


@runtime_checkable
class TrainingRun(Protocol):
    """A model in training, as every question about a training step sees it.

    Only the three members below are needed. A run may have more, and each question says which it needs:

    - `scheduler`, `scaler`: the learning rate scheduler, the gradient scaler;
    - `loss(batch) -> Tensor`: the scalar that a step minimises, differentiable, without a step;
    - `accumulate(batches) -> float`: one optimizer step from several micro-batches;
    - `epoch(number) -> Iterable[batch]`: the training data in the order of that epoch;
    - `evaluate(batches) -> float`: the mean loss in nats per target of batches, without training;
    - `perplexity(batches) -> float`: exp of that mean, as the run reports it;
    - `save(folder)`, `load(folder)`: everything that a resumed run needs, to and from an empty folder;
    - `position() -> Any`: where in its data the run is; of two integers (epoch, batch of it that comes next)
      the run can be driven on its own data;
    - `checkpoint(folder, step) -> path`, `latest(folder) -> path | None`: checkpoints of several steps;
    - `shuffles`, `n_examples`: claims of its data: a new order each epoch, and how many examples it has;
    - `averages_batches`: which of `accumulate` and `evaluate` weigh all batches the same, whatever they hold,
      as the trainers of some libraries do: what differs for that reason alone warns;
    - `grad_norm`: of the last step, before clipping;
    - `alarms`, or a `guard` that has them: the `Alarm`s so far;
    - `data_part() -> (index, count)`: the part of a batch that this rank takes, if not (rank, ranks);
    - `fit()`: a whole training from its start, of as many updates as it is meant to have.

    Attributes:
        model: what is trained.
        optimizer: what updates it. A run with several optimizers has a list, tuple or dict of them, or an
            object that holds them.
    """

    model: nn.Module
    optimizer: Any

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
        frozen: names of parameters that are meant not to train, as prefixes; (): all are meant to; None:
            nothing is claimed.
        decayed: (name, parameter) -> whether weight decay is meant to reach it; None: nothing is claimed.
        total_steps: how many updates `fit` is meant to make; None: nothing is claimed.
        never_waits: whether a step claims never to make the host wait for the device; None: nothing is
            claimed.
        ignored_label: label of a position that is not to be predicted; None: there is none. None is also the
            default of `of` for batches (ids, targets).
        distributed: sets a run up in each rank of an initialised process group; None: nothing is distributed.
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
    frozen: tuple[str, ...] | None = None
    decayed: Callable[[str, nn.Parameter], bool] | None = None
    total_steps: int | None = None
    never_waits: bool | None = None
    ignored_label: int | None = -100
    distributed: Callable[[], TrainingRun] | None = None
    factory: str | None = None
    notes: str = ""

    @classmethod
    def of(cls, subject: Any, **declared: Any) -> TrainerSpec:
        """Describe `subject` by setting it up once and trying one step.

        Args:
            subject: a function that returns a TrainingRun, a `transformers.Trainer` (not trained yet), a
                Lightning module, an object with a method `trainer_spec`, or a TrainerSpec; or one of the
                last three itself.
            **declared: attributes of TrainerSpec that are not to be inferred.

        Raises:
            TypeError: `subject` is, or returns, something else.
            ValueError: its step raises, which is the cause: it does not take the batch.
        """
        if is_lightning_module(subject):
            return cls.of(copies(subject), **{"name": type(subject).__name__, **declared})
        made = subject
        if callable(subject) and not isinstance(subject, TrainerSpec | TrainingRun):
            with seeded(0):
                made = subject()
            if isinstance(made, TrainingRun):
                return cls._infer(subject, subject, made, {}, declared)
            if (found := adapted(made)) is not None:
                adapt, attributes = found
                with seeded(0):
                    run = adapt(made)
                return cls._infer(subject, lambda: adapt(subject()), run, attributes, declared)
        if not isinstance(made, TrainerSpec) and callable(getattr(made, "trainer_spec", None)):
            made = made.trainer_spec()
        if not isinstance(made, TrainerSpec):
            if made is subject and adapted(made) is not None:
                kind = type(made).__name__
                raise TypeError(
                    f"trainer: got a {kind} that is built already; wanted a function that makes one, such as "
                    f"lambda: {kind}(...), for each question starts with a fresh one"
                )
            raise TypeError(
                f"trainer: got {type(made).__name__}; wanted a function that takes no arguments and "
                "returns an object with model, optimizer and step(batch), a transformers.Trainer, a "
                "Lightning module or a TrainerSpec; of a function (model, optimizer, batch) -> loss, "
                "TrainerSpec.from_function makes one"
            )
        return replace(made, **declared) if declared else made

    @classmethod
    def from_function(
        cls,
        step: Callable[[nn.Module, torch.optim.Optimizer, Batch], Any],
        create_model: Callable[[], nn.Module],
        create_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(
            model.parameters(), lr=1e-3
        ),
        **declared: Any,
    ) -> TrainerSpec:
        """Describe a bare function that makes one step.

        Args:
            step: (model, optimizer, batch) -> the loss before the step.
            create_model: makes a fresh model.
            create_optimizer: model -> its optimizer.
            **declared: attributes of TrainerSpec that are not to be inferred.
        """

        def build() -> TrainingRun:
            model = create_model()
            return FunctionRun(model, create_optimizer(model), step)

        with seeded(0):
            run = build()
        return cls._infer(step, build, run, {"notes": "a function (model, optimizer, batch)"}, declared)

    @classmethod
    def _infer(
        cls,
        named: Any,
        build: Callable[[], TrainingRun],
        run: TrainingRun,
        found: dict[str, Any],
        declared: dict[str, Any],
    ) -> TrainerSpec:
        """What is declared wins; only the rest is inferred, from `run`."""
        own = str(getattr(named, "__name__", type(run).__name__))
        attributes: dict[str, Any] = {
            "build": build,
            "name": type(run).__name__ if own == "<lambda>" else own,
        }
        if "vocab_size" not in declared:
            attributes["vocab_size"] = 1 if "make_batch" in declared else _vocab_size(run.model)
        attributes |= found | declared
        if "notes" not in declared:
            can = [name for name in _CAPABILITIES if getattr(run, name, None) is not None]
            read = [f"vocabulary {attributes['vocab_size']}"] if "make_batch" not in declared else []
            parts = [str(found.get("notes", "")), *read, f"found: {', '.join(['step', *can])}"]
            attributes["notes"] = "; ".join(filter(None, parts))
        spec = cls(**attributes)
        spec._try(with_one_optimizer(run, spec.name))
        if (
            "ignored_label" in declared
            or isinstance(batch := spec.batch(), Mapping)
            or labels_in(batch) is None
        ):
            return spec
        # A loop over pairs (ids, targets) usually has a target at every position.
        return replace(spec, ignored_label=None)

    def _try(self, run: TrainingRun) -> None:
        """Take one step, so that a run which cannot take our batch says so once."""
        device = next((p.device for p in run.model.parameters()), torch.device("cpu"))
        batch = self.batch(device=device)
        try:
            with seeded(0, device):
                run.step(batch)
        except Exception as error:
            batches = "batches (batch_size, seq_len, generator) that step(batch) takes"
            if self.make_batch is None:
                wanted = f"{_described(batch)}; declare make_batch=, for {batches}"
            else:
                wanted = f"what make_batch made; wanted {batches}"
            raise ValueError(
                f"trainer: {self.name}: step(batch) raised {type(error).__name__}: {error}; it got {wanted}"
            ) from error

    def __post_init__(self) -> None:
        check_sizes(vocab_size=self.vocab_size, batch_size=self.batch_size, seq_len=self.seq_len)
        if self.total_steps is not None:
            check_sizes(total_steps=self.total_steps)
        if self.max_norm is not None:
            check_number("max_norm", self.max_norm, "a finite number > 0", lambda norm: norm > 0)
        require(callable(self.build), "build", self.build, "a function that takes no arguments")

    @cached_property
    def n_parameters(self) -> int:
        """Number of parameters of the model, in a run that is set up once to count them. 0: it is no run."""
        with seeded(0):
            run = self.build()
        return sum(p.numel() for p in run.model.parameters()) if isinstance(run, TrainingRun) else 0

    def create(self, device: torch.device | str = "cpu", seed: int = 0) -> TrainingRun:
        """A fresh run, set up under `seed`. The caller's random state is untouched."""
        with seeded(seed, device):
            run = self.build()
        if not isinstance(run, TrainingRun):
            raise TypeError(
                f"{self.name}: build() returned {type(run).__name__}; wanted model, optimizer and step(batch)"
            )
        view: TrainingRun = with_one_optimizer(run, self.name)
        return view

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


def labels_in(batch: Batch) -> Tensor | None:
    """Return the labels of a batch; None if none are known.

    They are `labels` of a dict, or `targets` (B, T) of a pair (ids, targets) with token ids (B, T).
    """
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
        return labels if isinstance(labels, Tensor) else None
    if (
        isinstance(batch, list | tuple)
        and len(batch) == 2
        and all(isinstance(each, Tensor) for each in batch)
    ):
        ids, targets = batch
        tokens = ids.ndim == 2 and not (ids.is_floating_point() or targets.is_floating_point())
        return targets if tokens and targets.shape == ids.shape else None
    return None


def with_labels(batch: Batch, labels: Tensor) -> Batch:
    """Return a copy of a batch with other labels, of the same kind as `labels_in` finds."""
    return {**batch, "labels": labels} if isinstance(batch, Mapping) else type(batch)((batch[0], labels))


def _moved(batch: Batch, device: torch.device | str) -> Batch:
    def moves(leaf: Any) -> bool:
        """What can be moved as a whole is: the parts of a packed sequence belong on different devices."""
        return callable(getattr(leaf, "to", None))

    def moved(leaf: Any) -> Any:
        if moves(leaf):
            return leaf.to(device)
        if isinstance(leaf, Mapping):  # of a kind that torch does not look into
            return {key: _moved(value, device) for key, value in leaf.items()}
        return leaf

    return tree_map(moved, batch, is_leaf=moves)


def _described(batch: Mapping[str, Tensor]) -> str:
    """What is in the batch that is made where none is declared."""
    return "a dict of " + ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())


def _vocab_size(model: nn.Module) -> int:
    """What the model says, else the smallest table of embeddings, whose ids all tables have."""
    for owner in (getattr(model, "config", None), model):
        said = getattr(owner, "vocab_size", None)
        if isinstance(said, int) and said > 0:
            return said
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not sizes:
        raise TypeError("trainer: its model has no nn.Embedding; declare vocab_size= or make_batch=")
    return min((size for size in sizes if size > _TOKEN_TYPES), default=max(sizes))
