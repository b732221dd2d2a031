"""TrainerSpec: description of a training loop under test.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stackwise.subject.lightning_run import is_lightning_module
from stackwise.subject.trainer_adapter import FunctionRun, adapted, with_one_optimizer
from stackwise.support.arguments import (
    check_fields,
    check_flags,
    check_functions,
    check_number,
    check_sizes,
    check_texts,
    require,
)
from stackwise.support.random_state import seeded

__all__ = ["TrainerSpec", "TrainingRun", "labels_in", "with_labels"]

Batch = Any
# Tables of so few rows tell kinds of tokens apart.
_TOKEN_TYPES = 4

_SUBJECTS = (
    "a function without arguments that returns an object with model, optimizer and step(batch), a "
    "transformers.Trainer, a Lightning module or a TrainerSpec. For a function (model, optimizer, batch) -> "
    "loss, use TrainerSpec.from_function"
)
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
    """Training run, as the checks of training loops use it.

    The three members below are required. Optional members enable more checks:

    - `scheduler`, `scaler`: learning-rate scheduler, or a list, tuple or dict of them, and gradient scaler;
    - `loss(batch) -> Tensor`: the differentiable scalar that a step minimises, without a step;
    - `accumulate(batches) -> float`: one optimizer step from several micro-batches;
    - `epoch(number) -> Iterable[batch]`: training data in the order of an epoch;
    - `evaluate(batches) -> float`: mean loss of batches in nats per target, without training;
    - `perplexity(batches) -> float`: exp of that mean, as the run reports it;
    - `save(folder)`, `load(folder)`: write to and read from an empty folder everything that a resumed run
      needs. An asynchronous `save` returns a future, on which the checks wait before they load;
    - `position() -> Any`: position in the data. If it is (epoch, index of the next batch), the checks can
      drive the run on its own data;
    - `checkpoint(folder, step) -> path`, `latest(folder) -> path | None`: checkpoints of several steps;
    - `shuffles`, `n_examples`: claims about the data: a new order in each epoch, and the number of examples;
    - `averages_batches`: names of the methods, "accumulate" or "evaluate", that give each batch equal weight,
      as the trainers of some libraries do. Differences for this reason are warnings;
    - `grad_norm`: gradient norm of the last step, before clipping;
    - `alarms`, or a `guard` with alarms: the `Alarm`s so far;
    - `data_part() -> (index, count)`: part of a batch that this rank uses, if not (rank, ranks);
    - `fit()`: the whole training from its start.

    Attributes:
        model: the model.
        optimizer: the optimizer, or a list, tuple, dict or object that holds several.
    """

    model: nn.Module
    optimizer: Any

    def step(self, batch: Batch) -> Any:
        """Make one optimizer step, and return the loss before it: a number or a scalar tensor."""


@dataclass(frozen=True)
class TrainerSpec:
    """Description of a training loop under test: set-up of a run, batches and claims.

    `TrainerSpec.of(factory)` infers the attributes from a run. Declare the others by keyword.

    Attributes:
        build: sets up a new run. It is called with a fixed seed.
        name: name in test ids and reports.
        vocab_size: upper limit of the token ids in batches.
        make_batch: (batch_size, seq_len, generator) -> a batch on the CPU. None: a dict of random
            `input_ids` (B, T), `attention_mask` of ones, and `labels`, a copy of the ids, not shifted.
        batch_size: B of the checks.
        seq_len: T of the checks.
        max_norm: gradient norm to which the step clips. None: no claim.
        learning_rate: step number from 0 -> learning rate. None: no claim.
        average_decay: number of an update of an average of the weights, from 0 -> its decay d. The update is
            average = d * average + (1 - d) * weights. None: no claim.
        frozen: prefixes of the names of parameters that do not train. (): all train. None: no claim.
        decayed: (name, parameter) -> True if weight decay applies to it. None: no claim.
        total_steps: number of updates that `fit` makes. None: no claim.
        never_waits: True if a step never makes the host wait for the device. None: no claim.
        ignored_label: label of a position without a target. None: every position has a target. This is the
            default of `of` for batches (ids, targets).
        distributed: sets up a run in each rank of an initialised process group. None: not distributed.
        factory: "MODULE:FACTORY" or "path/to/file.py:FACTORY" of this spec or run, for checks in another
            process. None: those checks do not apply.
        notes: inferred and assumed facts, in one line.
    """

    build: Callable[[], TrainingRun]
    name: str
    vocab_size: int
    make_batch: Callable[[int, int, torch.Generator], Batch] | None = None
    batch_size: int = 4
    seq_len: int = 16
    max_norm: float | None = None
    learning_rate: Callable[[int], float] | None = None
    average_decay: Callable[[int], float] | None = None
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
        """Return the spec of a training loop, inferred from a run and one step of it.

        Args:
            subject: one of

                - a function that returns a TrainingRun, a `transformers.Trainer` before its training, or one
                  of the following;
                - a Lightning module;
                - an object with a method `trainer_spec`, such as an ArchitectureTrainer;
                - a TrainerSpec.
            **declared: attributes of TrainerSpec that replace the inferred ones.

        Raises:
            TypeError: `subject` is or returns something else.
            ValueError: the step raised an exception, which is the cause.
        """
        check_fields(cls.__name__, declared, (field.name for field in fields(cls)))
        if is_lightning_module(subject):
            original = copy.deepcopy(subject)
            name = type(subject).__name__
            return cls.of(lambda: copy.deepcopy(original), **{"name": name, **declared})
        made = subject
        if callable(subject) and not isinstance(subject, TrainerSpec | TrainingRun):
            _refuse_arguments(subject)
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
            raise TypeError(_refusal(made, is_built=made is subject))
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
        """Return the spec of a function for one training step.

        Args:
            step: (model, optimizer, batch) -> the loss before the step.
            create_model: returns a new model.
            create_optimizer: model -> its optimizer.
            **declared: attributes of TrainerSpec that replace the inferred ones.
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
        """Return the spec with the declared attributes, and the others inferred from `run`."""
        own = str(getattr(named, "__name__", type(run).__name__))
        name = type(run).__name__ if own == "<lambda>" else own
        attributes: dict[str, Any] = {"build": build, "name": name}
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
        batch = spec.batch()
        is_pair = not isinstance(batch, Mapping) and labels_in(batch) is not None
        # A loop over pairs (ids, targets) usually has a target at every position.
        return replace(spec, ignored_label=None) if is_pair and "ignored_label" not in declared else spec

    def _try(self, run: TrainingRun) -> None:
        """Make one step, so that a run that cannot use the batch fails here and not in each check."""
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
                wanted = "what make_batch made; make_batch must return a batch that step() accepts"
            raise ValueError(
                f"trainer: {self.name}: step(batch) raised {type(error).__name__}: {error}; it got {wanted}"
            ) from error

    def __post_init__(self) -> None:
        for name, text in (("name", self.name), ("notes", self.notes), ("factory", self.factory)):
            require(isinstance(text, str) or (text is None and name == "factory"), name, text, "a string")
        for function in ("make_batch", "learning_rate", "average_decay", "decayed", "distributed"):
            check_functions(**{function: getattr(self, function)})
        check_flags(optional=True, never_waits=self.never_waits)
        if self.frozen is not None:
            check_texts(frozen=self.frozen)
            object.__setattr__(self, "frozen", tuple(self.frozen))  # a spec is hashable
        label = self.ignored_label
        require(label is None or type(label) is int, "ignored_label", label, "an integer or None")
        check_sizes(vocab_size=self.vocab_size, batch_size=self.batch_size, seq_len=self.seq_len)
        if self.total_steps is not None:
            check_sizes(total_steps=self.total_steps)
        if self.max_norm is not None:
            check_number("max_norm", self.max_norm, "a finite number > 0", lambda norm: norm > 0)
        require(callable(self.build), "build", self.build, "a function that takes no arguments")

    @cached_property
    def n_parameters(self) -> int:
        """Number of parameters of the model. The first access sets up a run. 0 if `build` returns no run."""
        with seeded(0):
            run = self.build()
        return sum(p.numel() for p in run.model.parameters()) if isinstance(run, TrainingRun) else 0

    def create(self, device: torch.device | str = "cpu", seed: int = 0) -> TrainingRun:
        """Return a new run, set up with `seed`. The caller's random state does not change."""
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
        """Return a batch on `device` that depends only on `seed`."""
        batch_size = self.batch_size if batch_size is None else batch_size
        seq_len = self.seq_len if seq_len is None else seq_len
        generator = torch.Generator().manual_seed(seed)
        if self.make_batch is not None:
            return _moved(self.make_batch(batch_size, seq_len, generator), device)
        ids = torch.randint(self.vocab_size, (batch_size, seq_len), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        return _moved(batch, device)


def _refusal(made: Any, *, is_built: bool) -> str:
    """Return the reason why an object is no training loop.

    Args:
        made: the object.
        is_built: True if the user passed it directly, and not a function that returns it.
    """
    kind = type(made).__name__
    if is_built and (isinstance(made, TrainingRun) or adapted(made) is not None):
        example = kind if isinstance(made, TrainingRun) else f"lambda: {kind}(...)"
        return (
            f"trainer: got a {kind} that is built already; wanted a function, because each check builds a "
            f"new trainer: TrainerSpec.of({example})"
        )
    members = {"model": "model", "optimizer": "optimizer", "step": "step(batch)"}
    missing = [text for name, text in members.items() if not hasattr(made, name)]
    lacks = f", which has no {' and no '.join(missing)}" if len(missing) < len(members) else ""
    return f"trainer: got {kind}{lacks}; wanted {_SUBJECTS}"


def _refuse_arguments(function: Callable[..., Any]) -> None:
    """Raise a TypeError if a function needs arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # none to see
        return
    try:
        signature.bind()
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"trainer: {name}: {error}; wanted {_SUBJECTS}") from None


def labels_in(batch: Batch) -> Tensor | None:
    """Return the labels of a batch; None if none are known.

    They are `labels` of a dict, or `targets` (B, T) of a pair (ids, targets) with token ids (B, T).
    """
    match batch:
        case {"labels": Tensor() as labels}:
            return labels
        case [Tensor() as ids, Tensor() as targets]:
            is_tokens = ids.ndim == 2 and not (ids.is_floating_point() or targets.is_floating_point())
            return targets if is_tokens and targets.shape == ids.shape else None
    return None


def with_labels(batch: Batch, labels: Tensor) -> Batch:
    """Return a copy of a batch with other labels, of the same kind as `labels_in` finds."""
    return {**batch, "labels": labels} if isinstance(batch, Mapping) else type(batch)((batch[0], labels))


def _moved(batch: Batch, device: torch.device | str) -> Batch:
    def moves(leaf: Any) -> bool:
        """Return True for an object with `to`. Parts of a packed sequence belong on different devices."""
        return callable(getattr(leaf, "to", None))

    def moved(leaf: Any) -> Any:
        if moves(leaf):
            return leaf.to(device)
        if isinstance(leaf, Mapping):  # a mapping that torch's tree functions do not know
            return {key: _moved(value, device) for key, value in leaf.items()}
        return leaf

    return tree_map(moved, batch, is_leaf=moves)


def _described(batch: Mapping[str, Tensor]) -> str:
    """Return the content of the default batch as text."""
    return "a dict of " + ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())


def _vocab_size(model: nn.Module) -> int:
    """Return the model's vocab_size, otherwise the size of its smallest embedding of tokens."""
    for owner in (getattr(model, "config", None), model):
        said = getattr(owner, "vocab_size", None)
        if isinstance(said, int) and said > 0:
            return said
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not sizes:
        raise TypeError("trainer: its model has no nn.Embedding; declare vocab_size= or make_batch=")
    return min((size for size in sizes if size > _TOKEN_TYPES), default=max(sizes))
