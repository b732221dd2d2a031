"""Ranks: a training run in two processes (gloo), and a record of each process.

Shapes: B rows of a batch; each rank gets a part of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.probe.another_process import Recipe, run_in_processes
from stackwise.checks.probe.applicable import UnmeasuredError, needed
from stackwise.checks.probe.backward import gradients_at
from stackwise.checks.probe.batch import mapped, tensors_in
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.run_state import number_in
from stackwise.checks.probe.update import each_update, norm
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_adapter import with_one_optimizer
from stackwise.subject.trainer_spec import TrainingRun, labels_in, with_labels
from stackwise.support.hooks import temporary_hooks
from stackwise.support.random_state import keep_random_states, seeded
from stackwise.support.system_errors import false_if_raised

__all__ = ["N_RANKS", "Ranks", "Record", "assembled", "dense", "has_evaluation_set", "run_ranks"]

N_RANKS = 2
N_STEPS = 2
_SECONDS = 300.0
# Batches of an epoch that are read to compare the data of the ranks.
_LONGEST_EPOCH = 200
# Labels of a row of the last rank, if the numbers of targets are unequal.
_FEW_TARGETS = 3
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_SAME_SIZE = ("allreduce", "broadcast", "reduce")

Tensors = dict[str, Tensor]


@dataclass
class Record:
    """Record of one process.

    Attributes:
        initial, final: parameters by name, without the prefixes of wrappers, before and after all steps.
        accumulated: parameters after a further update from two micro-batches. {}: no `accumulate`.
        gradients: gradients at the optimizer in the first step.
        norm: `grad_norm` of the run after the first step, before clipping. None: the run has none.
        evaluation: `evaluate` of the first batch before all steps. None: the run has no such method.
        evaluation_set: `evaluate` without batches. None: the run cannot evaluate a set of its own.
        evaluated: the tokens of each row that the model reads in this evaluation.
        rows: the tokens of each row of the first epoch, in order. None: no `epoch`, or a long one.
        n_parts: number of parts of the batch, of which this rank has one.
        is_spoiled: True if the first layer of the model returned NaN in the last step, as the caller asked.
    """

    initial: Tensors = field(default_factory=dict)
    final: Tensors = field(default_factory=dict)
    accumulated: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    norm: float | None = None
    evaluation: float | None = None
    evaluation_set: float | None = None
    evaluated: list[tuple[Any, ...]] = field(default_factory=list)
    rows: list[tuple[Any, ...]] | None = None
    n_parts: int = 1
    is_spoiled: bool = False


@dataclass(frozen=True)
class Ranks:
    """Result of all ranks.

    Attributes:
        records: record of each rank. Empty if a rank failed.
        errors: error of each failed rank.
        collectives: collectives of each rank, in order, until it failed.
        known: True if all ranks were set up.
    """

    records: list[Record]
    errors: dict[int, str]
    collectives: list[list[str]]
    known: bool

    def disagreement(self) -> int | None:
        """Return the index of the first collective that differs between ranks, or None."""
        return _disagreement(self.collectives)

    def calls_at(self, place: int) -> str:
        """Return the collective of each rank at an index, as text."""
        return ", ".join(f"rank {rank}: {calls[place]}" for rank, calls in enumerate(self.collectives))


def run_ranks(
    subject: TrainerSubject,
    *,
    unequal: bool = False,
    spoiled: bool = False,
    has_set: bool = False,
) -> Ranks:
    """Run two steps on two ranks, once for all checks.

    Args:
        subject: the training run.
        unequal: the last rank has few targets, and the others have many.
        spoiled: in the last step, the first layer of the model of the last rank returns NaN.
        has_set: also evaluate the evaluation set of the run, which may be large.

    Raises:
        UnmeasuredError: this is not possible.
    """
    needed(subject.spec.distributed, "TrainerSpec.distributed")
    recipe = Recipe.of(subject.spec, "distributed")
    recipe = needed(recipe, "TrainerSpec.factory, or a function distributed that can be pickled")
    rows = {len(leaf) if leaf.ndim else 0 for leaf in tensors_in(whole_batch(subject, 0, unequal))}
    is_divisible = len(rows) == 1 and min(rows) % N_RANKS == 0
    needed(is_divisible, "batches whose tensors all have one row for each example")
    ranks = _run(subject, recipe, unequal, spoiled, has_set)
    errors = "; ".join(ranks.errors.values())
    needed(ranks.known, f"a run that a new process can set up; errors: {errors}")
    return ranks


@lru_cache(maxsize=4)
def _run(subject: TrainerSubject, recipe: Recipe, unequal: bool, spoiled: bool, has_set: bool) -> Ranks:
    common = {
        "batches": [whole_batch(subject, number, unequal) for number in range(N_STEPS)],
        "seed": subject.seed,
        "evaluates": _can_evaluate(subject),
        "has_set": has_set,
        "accumulates": not spoiled,
    }
    with TemporaryDirectory() as folder:
        logs = [Path(folder) / f"collectives-{rank}" for rank in range(N_RANKS)]
        outcomes = run_in_processes(
            "stackwise.checks.probe.ranks:run_rank",
            recipe,
            [
                {"rank": rank, "log": log, "is_spoiled": spoiled and rank == N_RANKS - 1, **common}
                for rank, log in enumerate(logs)
            ],
            seconds=_SECONDS,
            # Ranks in different collectives would wait for ever.
            stop=lambda: _disagreement([_read(log) for log in logs]) is not None,
        )
        collectives = [_read(log) for log in logs]
    errors = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
    records = [] if errors else [outcome.value for outcome in outcomes]
    return Ranks(records, errors, collectives, all(outcome.built for outcome in outcomes))


def run_rank(
    build: Callable[[], TrainingRun], rank: int, log: Path, batches: list[Any], seed: int, **options: bool
) -> Record:
    """Run the steps of one rank. The options are those of `observe`."""
    from torch import distributed

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(N_RANKS)}
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{log.parent}/meeting",
        rank=rank,
        world_size=N_RANKS,
        timeout=timedelta(seconds=_SECONDS / 2),
    )
    try:
        with seeded(seed):
            run: Any = with_one_optimizer(build(), "distributed")
        index, count = run.data_part() if callable(getattr(run, "data_part", None)) else (rank, N_RANKS)
        parts = [_part(batch, index, count) for batch in batches]
        with seeded(seed + 1 + rank):
            record = observe(run, parts, _Collectives(log), **options)
        record.n_parts = count
        # The first rank that leaves the barrier closes its connections. All records are complete by then.
        with suppress(RuntimeError):
            distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return record


def dense(subject: TrainerSubject, *, unequal: bool = False, has_set: bool = False) -> Record:
    """Run the same steps in one process, on the batches of all ranks."""
    run: Any = subject.run()
    batches = [whole_batch(subject, number, unequal) for number in range(N_STEPS)]
    with seeded(subject.seed):
        norm = _gradient_norm(subject, batches[0]) if callable(getattr(run, "loss", None)) else None
        record = observe(run, batches, None, evaluates=_can_evaluate(subject), has_set=has_set)
    record.norm = norm
    return record


@false_if_raised
def _can_evaluate(subject: TrainerSubject) -> bool:
    """Return True if the run can evaluate a batch in one process.

    An evaluation that raises on one rank only would leave the ranks in different collectives.
    """
    run: Any = subject.run()
    with seeded(subject.seed):
        return number_in(run.evaluate([whole_batch(subject, 0)])) is not None


@false_if_raised
def has_evaluation_set(subject: TrainerSubject) -> bool:
    """Return True if `evaluate()` without batches works in one process and gives the same result twice."""
    run: Any = subject.run()
    with seeded(subject.seed):
        first = number_in(run.evaluate())
        return first is not None and first == number_in(run.evaluate())


def _gradient_norm(subject: TrainerSubject, batch: Any) -> float:
    """Return the norm of the gradient for the batch of all ranks, before clipping."""
    run: Any = subject.run()
    trained = [p for p in run.model.parameters() if p.requires_grad]
    with WithoutDropout():
        run.model.train()
        gradients = gradients_at(run.loss(batch), trained)
    return norm(g for g in gradients if g is not None)


def observe(
    run: Any,
    batches: list[Any],
    collectives: _Collectives | None,
    *,
    evaluates: bool,
    has_set: bool,
    accumulates: bool = False,
    is_spoiled: bool = False,
) -> Record:
    """Record evaluations, then steps without dropout, which differs between ranks, then an accumulation.

    Args:
        run: the training run of a rank, or of one process.
        batches: one batch for each step.
        collectives: log of the collectives of a rank. None: one process.
        evaluates: evaluate the first batch.
        has_set: evaluate the evaluation set of the run.
        accumulates: make an update from all batches after the steps.
        is_spoiled: the first layer returns NaN in the last step.
    """
    record = Record(initial=_parameters(run.model))
    with keep_random_states():
        if evaluates:
            record.evaluation = number_in(run.evaluate(batches[:1]))
        if has_set:
            with _rows_read(run.model, record.evaluated):
                record.evaluation_set = number_in(run.evaluate())
        with suppress(Exception):  # other checks report an epoch that raises
            epoch = list(islice(run.epoch(0), _LONGEST_EPOCH + 1))
            if len(epoch) <= _LONGEST_EPOCH:
                record.rows = [row for batch in epoch for row in _rows_in(batch)]

    def keep(_: Any) -> None:
        if not record.gradients:
            named = run.model.named_parameters()
            record.gradients = {_plain(n): _whole(p.grad) for n, p in named if p.grad is not None}

    with WithoutDropout(), each_update(run.optimizer, keep):
        for number, batch in enumerate(batches):
            spoils = is_spoiled and number == len(batches) - 1
            with collectives or nullcontext(), _spoiled(run.model, record) if spoils else nullcontext():
                run.step(batch)
            norm = getattr(run, "grad_norm", None)
            if number == 0 and norm is not None:
                record.norm = float(norm)
    record.final = _parameters(run.model)
    if collectives is not None:
        if accumulates and callable(getattr(run, "accumulate", None)):
            with WithoutDropout(), collectives:
                run.accumulate(batches)
            record.accumulated = _parameters(run.model)
        collectives.end()
    return record


@contextmanager
def _spoiled(model: nn.Module, record: Record) -> Iterator[None]:
    """Inside, the first layer of a model returns NaN."""

    def hook(_: Any, __: Any, output: Any) -> Any:
        if record.is_spoiled or not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        record.is_spoiled = True
        return output * math.nan

    layers = [module for module in model.modules() if not any(True for _ in module.children())]
    with temporary_hooks(layer.register_forward_hook(hook) for layer in layers):
        yield


def _rows_in(batch: Any) -> list[tuple[Any, ...]]:
    """Return the elements of each row of the first tensor of a batch."""
    first = next(tensors_in(batch), None)
    return [] if first is None or not first.ndim else [tuple(row.flatten().tolist()) for row in first]


@contextmanager
def _rows_read(model: nn.Module, rows: list[tuple[Any, ...]]) -> Iterator[None]:
    """Inside, add each row that a call of the model receives to `rows`."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        rows.extend(_rows_in([*args, *kwargs.values()]))

    with temporary_hooks([model.register_forward_pre_hook(hook, with_kwargs=True)]):
        yield


def assembled(parts: list[Tensor], shape: torch.Size) -> Tensor | None:
    """Return the tensor of `shape`, if the ranks have copies of it, or parts along one dimension."""
    if all(part.shape == shape for part in parts):
        return parts[0]
    for dim in range(len(shape)):
        others = {part.shape[:dim] + part.shape[dim + 1 :] for part in parts if part.ndim == len(shape)}
        if others == {shape[:dim] + shape[dim + 1 :]} and sum(p.shape[dim] for p in parts) == shape[dim]:
            return torch.cat(parts, dim=dim)
    return None


def whole_batch(subject: TrainerSubject, number: int, unequal: bool = False) -> Any:
    """Return batch `number` of all ranks together.

    Raises:
        UnmeasuredError: `unequal`, and a batch has no labels that can be ignored.
    """
    batch = subject.batch(number, batch_size=N_RANKS * subject.spec.batch_size)
    labels, ignored = labels_in(batch), subject.spec.ignored_label
    if not unequal:
        return batch
    if labels is None or ignored is None:
        raise UnmeasuredError("needs batches with labels, and ignored_label")
    labels = labels.clone()
    labels[-subject.spec.batch_size :, _FEW_TARGETS:] = ignored
    return with_labels(batch, labels)


def _part(batch: Any, index: int, count: int) -> Any:
    def part(tensor: Tensor) -> Tensor:
        size = len(tensor) // count
        return tensor[index * size : (index + 1) * size]

    return mapped(part, batch)


def _parameters(model: nn.Module) -> Tensors:
    return {_plain(name): _whole(p) for name, p in model.named_parameters()}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _whole(tensor: Tensor) -> Tensor:
    """Return a copy, or the full tensor of a DTensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _read(log: Path) -> list[str]:
    """Return the complete lines of a log that may still be written."""
    return log.read_text().split("\n")[:-1] if log.exists() else []


def _disagreement(collectives: list[list[str]]) -> int | None:
    steps = enumerate(zip(*collectives, strict=False))
    return next((number for number, entries in steps if len(set(entries)) > 1), None)


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs the name of each collective before it starts, with its size if ranks must agree on it."""

    def __init__(self, log: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log.open("w")

    def end(self) -> None:
        self.log.write("the end\n")
        self.log.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = function.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(("send", "recv", "wait")):
            name = name.partition(".")[0].rstrip("_")
            sizes = [list(leaf.shape) for leaf in tensors_in(list(args))]
            self.log.write(f"{name}{sizes if sizes and name.startswith(_SAME_SIZE) else ''}\n")
            self.log.flush()
        return function(*args, **(kwargs or {}))
