"""Sequence: a training run with other operations between its steps, compared with the straight run.

A straight run makes steps only. Saving, loading, evaluating and reading data between two steps must not
change the steps that follow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.probe.run_state import Trace, drive, next_batches, number_in, state_of
from stackwise.checks.result import listed
from stackwise.checks.runs.averages import averages_of
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainerSpec, TrainingRun
from stackwise.support.arguments import require
from stackwise.support.random_state import (
    keep_random_states,
    random_states,
    seeded,
    set_random_states,
)
from stackwise.support.system_errors import reraise_if_out_of_memory

__all__ = [
    "INTERRUPTIONS",
    "OPERATIONS",
    "STEP",
    "Finding",
    "Sequence",
    "Sequences",
    "compare_runs",
    "is_close",
]

STEP = "step"
# Operation -> (members of the run that it needs, text).
OPERATIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "evaluate": (("evaluate",), "it is evaluated"),
    "save": (("save",), "it is saved"),
    "resume": (("save", "load"), "it is saved, and a new run loads the checkpoint and continues"),
    "resume later": (
        ("save", "load"),
        "it is saved and makes two further steps, and a new run loads the checkpoint and continues",
    ),
    "rewind": (("save", "load"), "it is saved, makes two further steps, and loads the checkpoint"),
}
INTERRUPTIONS = ("resume", "resume later", "rewind")
# Operation -> a simpler one that it contains.
_SIMPLER = {"resume later": "resume", "rewind": "resume", "resume": "save"}
# Steps of a run without own data, and further steps after the end of the first epoch.
_STEPS, _AFTER_EPOCH = 6, 4
# Batches of an epoch above which a run does not reach the end of the epoch.
_LONGEST_EPOCH = 24
_RANDOM_SEQUENCES = 6
_SHRINKING = 40
# Relative differences that other kernels cause, such as those for another layout in memory.
_ROUNDING = 1e-5
# Allowed differences, in multiples of those that a change of the weights by rounding causes.
_ROUNDINGS = 100.0

Sequence = tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """Shortest sequence found whose run differs from the straight run.

    Attributes:
        sequence: the operations.
        difference: the first difference in words.
    """

    sequence: Sequence
    difference: str

    @property
    def text(self) -> str:
        """Return the operations other than steps in words, with the number of steps before each."""
        places = [(place, each) for place, each in enumerate(self.sequence) if each != STEP]
        parts = []
        for place, each in places:
            n = self.sequence[:place].count(STEP)
            parts.append(f"after {n} step{'s' * (n != 1)} {OPERATIONS[each][1]}")
        return " and ".join(parts)

    @property
    def code(self) -> str:
        """Return Python code that repeats the comparison; `trainer` is the subject."""
        return f"compare_runs(trainer, {list(self.sequence)})"


@dataclass
class _Record:
    """Everything that is compared at the end of a run.

    Attributes:
        trace: losses, learning rates and batches of the steps, and the state after them.
        averages: tensors of weight averages, by path.
        evaluation: result of evaluate(batches), or None.
    """

    trace: Trace
    averages: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float | None = None

    def differs(self, other: _Record, rounded: _Record | None = None) -> str:
        """Return the first difference in words, or "".

        Args:
            other: another record.
            rounded: record of a run whose weights differ by rounding. Differences of the size that this
                causes do not count.
        """
        ours, theirs = self.trace, other.trace
        near = self if rounded is None else rounded
        for step, (batch, another) in enumerate(zip(ours.batches, theirs.batches, strict=False)):
            if not is_close(batch, another):
                return f"step {step} reads another batch"
            if not is_close(ours.losses[step], theirs.losses[step], near.trace.losses[step]):
                return (
                    f"the loss of step {step} is {theirs.losses[step]:.6g} instead of {ours.losses[step]:.6g}"
                )
            if not is_close(ours.rates[step], theirs.rates[step]):
                wanted, got = ours.rates[step], theirs.rates[step]
                return f"the learning rates after step {step} are {got} instead of {wanted}"
        if len(ours.batches) != len(theirs.batches):
            return f"{len(theirs.batches)} steps instead of {len(ours.batches)}: there is no further batch"
        if names := _different(ours.state, theirs.state, near.trace.state):
            return f"{listed(names, 1)} after the last step"
        if names := _different(self.averages, other.averages, near.averages):
            return f"the average {listed(names, 1)} after the last step"
        if not is_close(self.evaluation, other.evaluation, near.evaluation):
            return f"evaluate(batches) gives {other.evaluation} instead of {self.evaluation}"
        return ""


def compare_runs(trainer: Any, sequence: list[str], *, device: str = "cpu", seed: int = 0) -> str:
    """Compare a run that executes a sequence of operations with one that only makes the steps.

    Args:
        trainer: anything that `TrainerSpec.of` understands.
        sequence: "step" and the operations between the steps: "evaluate", "save", "resume", "resume later"
            and "rewind".
        device: device of the model.
        seed: seed of weights and batches.

    Returns:
        The first difference in words, or "".

    Raises:
        ValueError: an unknown operation, or one that needs a method which the run lacks.
    """
    for each in sequence:
        allowed = f"{STEP!r}, {', '.join(map(repr, OPERATIONS))}"
        require(each == STEP or each in OPERATIONS, "sequence", each, allowed)
    sequences = Sequences(TrainerSubject(TrainerSpec.of(trainer), torch.device(device), seed))
    for each in sequence:
        missing = each != STEP and each not in sequences.possible
        require(not missing, "sequence", each, f"operations of this run: {', '.join(sequences.possible)}")
    return sequences.difference(tuple(sequence))


class Sequences:
    """Sequences of a training run, each executed on a run of its own.

    Args:
        subject: the training run.
    """

    def __init__(self, subject: TrainerSubject) -> None:
        self.subject = subject
        # Records by number of steps.
        self._straight: dict[int, _Record] = {}
        self._rounded: dict[int, _Record] = {}

    @cached_property
    def possible(self) -> list[str]:
        """Return the operations for which the run has the methods."""
        run = self.subject.run()
        return [name for name, (needs, _) in OPERATIONS.items() if self.subject.has(run, *needs)]

    @cached_property
    def n_steps(self) -> int:
        """Return the number of steps of a run, which goes beyond the end of a short epoch."""
        return _STEPS if self.epoch_length is None else self.epoch_length + _AFTER_EPOCH

    @cached_property
    def epoch_length(self) -> int | None:
        """Return the number of batches of the first epoch. None: no own data, or too many batches."""
        run: Any = self.subject.run()
        with self.subject.fixed_randomness():
            if next_batches(run) is None:
                return None
            length = len(list(islice(run.epoch(run.position()[0]), _LONGEST_EPOCH + 1)))
        return length if 0 < length <= _LONGEST_EPOCH else None

    @cached_property
    def repeats(self) -> bool:
        """Return True if two straight runs with one seed agree."""
        again = self._executed((STEP,) * self.n_steps)
        return not self._of_steps(self.n_steps).differs(again)

    def find(self, operations: tuple[str, ...]) -> tuple[Finding | None, int]:
        """Return the first difference of sequences with some operations, and the number of sequences."""
        count = 0
        for sequence in self._planned([each for each in self.possible if each in operations]):
            count += 1
            if self._differs(sequence):
                return self._shrunk(sequence), count
        return None, count

    def difference(self, sequence: Sequence) -> str:
        """Return the first difference between a sequence and the straight run in words, or "".

        Raises:
            Exception: an operation raises.
        """
        n = sequence.count(STEP)
        straight, record = self._of_steps(n), self._executed(sequence)
        found = straight.differs(record)
        if not found:
            return ""
        if n not in self._rounded:
            self._rounded[n] = self._executed((STEP,) * n, rounded=True)
        return straight.differs(record, self._rounded[n])

    def is_rounding(self, wanted: Trace, got: Trace, n_before: int) -> bool:
        """Return True if two traces of the steps after the first `n_before` differ by rounding."""
        n = len(wanted.losses)
        rounded = self._executed((STEP,) * (n_before + n), rounded=True).trace
        near = Trace(rounded.losses[-n:], rounded.rates[-n:], rounded.batches[-n:], rounded.state)
        return not _Record(wanted).differs(_Record(got), _Record(near))

    def _planned(self, operations: list[str]) -> Iterator[Sequence]:
        """Yield each operation at several places, then random sequences of two or three operations."""
        n, length = self.n_steps, self.epoch_length
        ends = [] if length is None else [length - 1, length, length + 2]
        places = sorted({place for place in (1, n // 2, *ends) if 0 < place < n})
        for operation in operations:
            for place in places:
                yield self._with({place: operation})
        rng = random.Random(f"{self.subject.seed}")  # noqa: S311  not for secrets
        for _ in range(_RANDOM_SEQUENCES if operations else 0):
            chosen = rng.sample(places, min(rng.choice((2, 3)), len(places)))
            yield self._with({place: rng.choice(operations) for place in chosen})

    def _with(self, operations: Mapping[int, str]) -> Sequence:
        sequence: list[str] = []
        for place in range(self.n_steps):
            if place in operations:
                sequence.append(operations[place])
            sequence.append(STEP)
        return tuple(sequence)

    def _differs(self, sequence: Sequence) -> bool:
        """Return True if the run differs. A run that raises is not compared."""
        try:
            return bool(self.difference(sequence))
        except Exception as error:  # other checks report that a method raises
            reraise_if_out_of_memory(error)
            return False

    def _shrunk(self, sequence: Sequence) -> Finding:
        executions, again = 0, True
        while again:
            again = False
            for simpler in _simpler(sequence):
                executions += 1
                if executions > _SHRINKING:
                    break
                if self._differs(simpler):
                    sequence, again = simpler, True
                    break
        return Finding(sequence, self.difference(sequence))

    def _of_steps(self, n: int) -> _Record:
        if n not in self._straight:
            self._straight[n] = self._executed((STEP,) * n)
        return self._straight[n]

    def _executed(self, sequence: Sequence, *, rounded: bool = False) -> _Record:
        """Execute a sequence on a new run, with weights that differ by rounding if `rounded`."""
        subject = self.subject
        run: Any = subject.run()
        if rounded:
            _change_by_rounding(run)
        trace = Trace()
        with subject.fixed_randomness():
            batches = self._batches(run, 0)
            for operation in sequence:
                if operation == STEP:
                    made = drive(run, batches, 1, with_state=False)
                    trace.losses += made.losses
                    trace.rates += made.rates
                    trace.batches += made.batches
                elif operation in INTERRUPTIONS:
                    run = self._interrupted(run, operation, batches)
                    batches = self._batches(run, len(trace.batches))
                else:
                    with keep_random_states():
                        self._apply(run, operation)
            trace.state = state_of(run)
            record = _Record(trace, averages_of(run))
            if subject.has(run, "evaluate"):
                record.evaluation = number_in(run.evaluate([subject.batch(101), subject.batch(102)]))
        return record

    def _batches(self, run: TrainingRun, n_steps: int) -> Iterator[Any]:
        """Return the batches of the run after some steps: its own from its position on, or given ones."""
        own = next_batches(run)
        return own if own is not None else _numbered(self.subject.batch, n_steps)

    def _apply(self, run: Any, operation: str) -> None:
        if operation == "evaluate":
            run.evaluate([self.subject.batch(101), self.subject.batch(102)])
        elif operation == "save":
            with TemporaryDirectory() as folder:
                run.save(Path(folder))

    def _interrupted(self, run: Any, operation: str, batches: Iterator[Any]) -> Any:
        """Save, and return the run that loads the checkpoint. The random states are those of the save."""
        subject = self.subject
        with TemporaryDirectory() as folder:
            run.save(Path(folder))
            states = random_states()
            if operation != "resume":
                drive(run, batches, 2, with_state=False)
            if operation != "rewind":
                run = subject.run()  # the data of a run may depend on its seed
            with seeded(subject.seed + 1, subject.device):
                run.load(Path(folder))
            set_random_states(states)
        return run


def _numbered(batch: Callable[[int], Any], number: int) -> Iterator[Any]:
    while True:
        yield batch(number)
        number += 1


def _simpler(sequence: Sequence) -> Iterator[Sequence]:
    """Yield sequences with fewer or simpler operations, then with fewer steps."""
    others = [place for place, each in enumerate(sequence) if each != STEP]
    if len(others) > 1:
        yield from (sequence[:place] + sequence[place + 1 :] for place in others)
    for place in others:
        if (simpler := _SIMPLER.get(sequence[place])) is not None:
            yield (*sequence[:place], simpler, *sequence[place + 1 :])
    if sequence[-1] == STEP and len(sequence) > others[-1] + 2:
        for kept in (others[-1] + 2, len(sequence) - 1):
            yield sequence[:kept]
    if sequence[0] == STEP and sequence[1] == STEP:
        yield sequence[1:]


@torch.no_grad()
def _change_by_rounding(run: TrainingRun) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in run.model.parameters():
        if p.is_floating_point():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            p.mul_(1 + torch.finfo(p.dtype).eps * noise)


def _different(wanted: Mapping[str, Any], got: Mapping[str, Any], near: Mapping[str, Any]) -> list[str]:
    return [
        name for name in {**wanted, **got} if not is_close(wanted.get(name), got.get(name), near.get(name))
    ]


def is_close(a: Any, b: Any, near: Any = None) -> bool:
    """Return True if values are equal up to rounding. NaN is equal to NaN.

    Args:
        a: a value.
        b: another value.
        near: value of a run whose weights differ by rounding.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        b = b.to(a.device)
        if not a.is_floating_point() or torch.equal(a, b):
            return bool(torch.equal(a, b))
        allowed = _ROUNDING * _largest(a)
        if isinstance(near, Tensor) and near.shape == a.shape:
            allowed += _ROUNDINGS * _largest(near.to(a) - a)
        return torch.allclose(a, b, rtol=0.0, atol=allowed, equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        allowed = _ROUNDING * abs(a) + (_ROUNDINGS * abs(near - a) if isinstance(near, float) else 0.0)
        return abs(a - b) <= allowed or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(is_close(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(is_close(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return bool(a == b)


def _largest(x: Tensor) -> float:
    return float(x.nan_to_num().abs().max()) if x.numel() else 0.0
