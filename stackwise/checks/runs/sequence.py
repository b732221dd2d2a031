"""Sequence: a training run with other operations between its steps, compared with an uninterrupted run.

An uninterrupted run only makes steps. Saving, loading and evaluating between two steps must not change the
steps that follow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from stackwise.checks.probe.call import reason_of
from stackwise.checks.probe.run_state import (
    ROUNDING,
    Trace,
    different,
    next_batches,
    number_in,
    save,
    saved_tensors,
    state_of,
    wait_for,
)
from stackwise.checks.runs.averages import averages_in, averages_of
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_adapter import with_one_optimizer
from stackwise.subject.trainer_spec import TrainerSpec, TrainingRun
from stackwise.support.arguments import require
from stackwise.support.random_state import (
    keep_random_states,
    random_states,
    seeded,
    set_random_states,
)
from stackwise.support.system_errors import (
    false_if_raised,
    reraise_if_out_of_memory,
    reraise_unless_failure,
)

__all__ = [
    "INTERRUPTIONS",
    "OPERATIONS",
    "STEP",
    "Finding",
    "Sequences",
    "compare_runs",
    "resumed",
]

STEP = "step"
# Operation -> (members of the run that it needs, text).
OPERATIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "evaluate": (("evaluate",), "the run is evaluated"),
    "save": (("save",), "the run is saved"),
    "resume": (("save", "load"), "the run is saved, and a new run loads the checkpoint and continues"),
    "resume later": (("save", "load"), "a new run loads the older one of two checkpoints and continues"),
    "rewind": (("save", "load"), "the run is saved, makes two more steps, and loads the checkpoint"),
}
INTERRUPTIONS = ("resume", "resume later", "rewind")
# Operation -> a simpler operation that it contains.
_SIMPLER = {"resume later": "resume", "rewind": "resume", "resume": "save"}
# Numbers of steps: of a run without its own data, at least, and after the end of the first epoch.
_STEPS, _LEAST_STEPS, _AFTER_EPOCH = 6, 3, 4
# A run goes beyond the end of its first epoch if the epoch has at most this number of batches.
_LONGEST_EPOCH = 24
_RANDOM_SEQUENCES = 2
_SHRINKING = 40
# Steps that "resume later" and "rewind" make after the save: one before and one after a second save.
_FURTHER_STEPS = 2

_RAISES = "the sequence raises "

# Names of operations, in order.
Operations = tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """Shortest sequence found whose run differs from an uninterrupted run.

    Attributes:
        sequence: the operations.
        difference: the first difference in words, or the exception that the sequence raises.
        lost: state that a checkpoint does not restore: name -> value at the save and after the load.
        is_random: True if there is no difference after the random states are restored.
    """

    sequence: Operations
    difference: str
    lost: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    is_random: bool = False

    @property
    def text(self) -> str:
        """Return the operations other than steps in words, with the number of steps before each."""
        counts = accumulate(each == STEP for each in self.sequence)
        pairs = [(n, each) for n, each in zip(counts, self.sequence, strict=True) if each != STEP]
        return " and ".join(f"after {n} step{'s' * (n != 1)} {OPERATIONS[each][1]}" for n, each in pairs)

    @property
    def code(self) -> str:
        """Return Python code that repeats the comparison; `trainer` is the subject."""
        return f"compare_runs(trainer, {list(self.sequence)})"


def compare_runs(trainer: Any, sequence: list[str], *, device: str = "cpu", seed: int = 0) -> str:
    """Compare a run that executes a sequence of operations with one that only makes the steps.

    Args:
        trainer: anything that `TrainerSpec.of` accepts.
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
    """Sequences of operations, each executed on a new run.

    Args:
        subject: the training run.
    """

    def __init__(self, subject: TrainerSubject) -> None:
        self.subject = subject
        # Records of uninterrupted runs, by number of steps, and True if the first weights differ by rounding.
        self._uninterrupted: dict[tuple[int, bool], Trace] = {}

    @cached_property
    def possible(self) -> list[str]:
        """Return the operations for which the run has the methods."""
        run = self.subject.run()
        return [name for name, (needs, _) in OPERATIONS.items() if self.subject.has(run, *needs)]

    @cached_property
    def n_steps(self) -> int:
        """Return the number of steps of each run. If possible, they go beyond the end of a short epoch."""
        length, total = self.epoch_length, self.subject.spec.total_steps
        counts = [_STEPS] if length is None else [length + _AFTER_EPOCH, length - _FURTHER_STEPS, _STEPS]
        most = max(counts) if total is None else total - _FURTHER_STEPS
        counts = [n for n in counts if _LEAST_STEPS < n <= most]

        @false_if_raised
        def can_make(n: int) -> bool:
            """Return True if an uninterrupted run can make `n` steps. Data or schedule may end earlier."""
            return len(self._straight_run(n).batches) == n

        return next((n for n in counts if can_make(n + _FURTHER_STEPS)), _LEAST_STEPS)

    @cached_property
    def epoch_length(self) -> int | None:
        """Return the number of batches of the first epoch. None: the run has no data, or too many batches."""
        run: Any = self.subject.run()
        with self.subject.fixed_randomness():
            if next_batches(run) is None:
                return None
            length = len(list(islice(run.epoch(run.position()[0]), _LONGEST_EPOCH + 1)))
        return length if 0 < length <= _LONGEST_EPOCH else None

    @cached_property
    def repeats(self) -> bool:
        """Return True if two uninterrupted runs with the same seed agree."""
        again = self._executed((STEP,) * self.n_steps)
        return not self._straight_run(self.n_steps).differs(again, rounding=ROUNDING)

    def find(self, operations: tuple[str, ...]) -> tuple[Finding | None, int]:
        """Return the first difference of sequences with some operations, and the number of sequences run."""
        number = 0
        possible = [each for each in self.possible if each in operations]
        for number, sequence in enumerate(self._planned(possible), start=1):
            if self._problem(sequence):
                return self._finding(self._shrunk(sequence)), number
        return None, number

    def difference(self, sequence: Operations, *, keeps_randomness: bool = False) -> str:
        """Return the first difference between a sequence and an uninterrupted run in words, or "".

        Args:
            sequence: the operations.
            keeps_randomness: restore the random states of the save after each load.

        Raises:
            Exception: an operation raises.
        """
        found = self._executed(sequence, keeps_randomness=keeps_randomness)
        return self._compared(found, sequence.count(STEP))

    def _compared(self, found: Trace, n: int) -> str:
        """Return the first difference of a run of `n` steps from an uninterrupted one, in words, or ""."""
        straight = self._straight_run(n)
        if not straight.differs(found, rounding=ROUNDING):
            return ""
        return straight.differs(found, self._straight_run(n, rounded=True), rounding=ROUNDING)

    def _finding(self, sequence: Operations) -> Finding:
        problem = self._problem(sequence)
        if problem.startswith(_RAISES):
            return Finding(sequence, problem)
        lost = self._executed(sequence).lost
        return Finding(sequence, problem, lost, not self.difference(sequence, keeps_randomness=True))

    def _problem(self, sequence: Operations) -> str:
        """Return the difference, or the exception, of a sequence as text, or ""."""
        try:
            return self.difference(sequence)
        except BaseException as error:
            reraise_unless_failure(error)
            reraise_if_out_of_memory(error)
            return f"{_RAISES}{reason_of(error)}"

    def _planned(self, operations: list[str]) -> Iterator[Operations]:
        """Yield each operation at several places, pairs of operations, then random sequences of three.

        An operation that contains a simpler one is executed at fewer places.
        """
        n, length = self.n_steps, self.epoch_length
        ends = [] if length is None else [length - 1, length, length + 2]
        places = sorted({place for place in (1, n // 2, *ends) if 0 < place < n})
        for operation in operations:
            for place in places[::2] if _SIMPLER.get(operation) in operations else places:
                yield self._with({place: operation})
        rng = random.Random(self.subject.seed)  # noqa: S311  not for secrets
        later = range(1, n)
        for first, second in zip(operations, operations[1:] + operations[:1], strict=True):
            for pair in ((first, first), (first, second)):
                yield self._with(dict(zip(sorted(rng.sample(later, 2)), pair, strict=True)))
        for _ in range(_RANDOM_SEQUENCES if operations and n > 3 else 0):
            yield self._with({place: rng.choice(operations) for place in rng.sample(later, 3)})

    def _with(self, operations: Mapping[int, str]) -> Operations:
        places = range(self.n_steps)
        return tuple(each for place in places for each in (operations.get(place), STEP) if each)

    def _shrunk(self, sequence: Operations) -> Operations:
        executions = 0
        while True:
            for simpler in islice(_simpler(sequence), _SHRINKING - executions):
                executions += 1
                if self._problem(simpler):
                    sequence = simpler
                    break
            else:
                return sequence

    def _straight_run(self, n: int, *, rounded: bool = False) -> Trace:
        """Return the record of an uninterrupted run, whose first weights may differ by rounding."""
        if (n, rounded) not in self._uninterrupted:
            self._uninterrupted[n, rounded] = self._executed((STEP,) * n, rounded=rounded)
        return self._uninterrupted[n, rounded]

    @cached_property
    def _moving_averages(self) -> set[str]:
        """Return the paths of the averages that training changes. A reference model does not change."""
        before, after = averages_of(self.subject.run()), self._straight_run(self.n_steps).averages
        return set(different(before, after))

    def _executed(
        self, sequence: Operations, *, rounded: bool = False, keeps_randomness: bool = False
    ) -> Trace:
        """Execute a sequence on a new run, whose first weights may be changed by rounding."""
        subject = self.subject
        run: Any = subject.run()
        if rounded:
            _change_by_rounding(run)
        trace = Trace()
        with subject.fixed_randomness(), torch.enable_grad():
            batches = self._batches(run, 0)
            for operation in sequence:
                if operation == STEP:
                    trace.drive(run, batches, 1)
                elif operation in INTERRUPTIONS:
                    run = self._interrupted(run, operation, batches, trace, keeps_randomness)
                    batches = self._batches(run, len(trace.batches))
                elif operation == "save":
                    with TemporaryDirectory() as folder:
                        save(run, Path(folder))
                else:
                    with keep_random_states():  # an evaluation may draw its batches
                        run.evaluate(self._evaluated)
            _record_end(trace, run, self._evaluated)
        return trace

    def resumed_elsewhere(self, resume: Callable[..., Trace]) -> str:
        """Return the first difference of a run that another process continues, in words, or "".

        Args:
            resume: function of `folder`, `batches`, `evaluated` and `n_steps`, like `resumed`.
        """
        n, n_rest = self.n_steps, min(self.n_steps - 1, _STEPS // 2)
        run: Any = self.subject.run()
        with TemporaryDirectory() as folder, self.subject.fixed_randomness(), torch.enable_grad():
            trace = Trace()
            trace.drive(run, self._batches(run, 0), n - n_rest)
            save(run, Path(folder))
            own = next_batches(run) is not None
            batches = None if own else [self.subject.batch(number) for number in range(n - n_rest, n)]
            rest = resume(folder=folder, batches=batches, evaluated=self._evaluated, n_steps=n_rest)
        for part in ("losses", "rates", "batches"):
            setattr(rest, part, getattr(trace, part) + getattr(rest, part))
        return self._compared(rest, n)

    @property
    def _evaluated(self) -> list[Any]:
        return [self.subject.batch(101), self.subject.batch(102)]

    def _batches(self, run: TrainingRun, n_steps: int) -> Iterator[Any]:
        """Return the batches after some steps: the run's own data from its position on, or random ones."""
        own = next_batches(run)
        return own if own is not None else map(self.subject.batch, count(n_steps))

    def _interrupted(
        self, run: Any, operation: str, batches: Iterator[Any], trace: Trace, keeps_randomness: bool
    ) -> Any:
        """Save the run, and return a new run that loads the checkpoint. Record lost state in the trace."""
        subject = self.subject
        with TemporaryDirectory() as folder, TemporaryDirectory() as second:
            saving = run.save(Path(folder))
            saved, states = state_of(run), random_states()
            if operation != "resume":
                Trace().drive(run, batches, 1)
                if operation == "resume later":
                    save(run, Path(second))
                Trace().drive(run, batches, 1)
            wait_for(saving)
            if operation != "rewind":
                run = subject.run()  # with the same seed, on which its data may depend
                self._spoil(run)
            with seeded(subject.seed + 1, subject.device):
                run.load(Path(folder))
                states = states if keeps_randomness else random_states()
            set_random_states(states)
        loaded = state_of(run)
        for name in different(saved, loaded, rounding=ROUNDING):
            # The next step may freeze parameters. The end of an epoch is the start of the next one.
            if not name.startswith("position()") and not name.endswith("takes gradients"):
                trace.lost.setdefault(name, (saved.get(name), loaded.get(name)))
        return run

    @cached_property
    def _other_weights(self) -> dict[str, Any]:
        """Return weights and buffers of a model with another seed. Weights from a file do not differ."""
        model = self.subject.spec.create(self.subject.device, self.subject.seed + 1).model
        return {name: tensor.detach().clone() for name, tensor in saved_tensors(model)}

    @torch.no_grad()
    def _spoil(self, run: Any) -> None:
        """Change weights and averages of a new run. Loading a checkpoint must replace them."""
        for name, tensor in saved_tensors(run.model):
            if name in self._other_weights:
                tensor.copy_(self._other_weights[name])
        for path, tensor in averages_in(run).items():
            if path in self._moving_averages and tensor.is_floating_point():
                tensor.add_(torch.ones_like(tensor))


def resumed(
    build: Callable[[], TrainingRun],
    *,
    folder: str,
    batches: list[Any] | None,
    evaluated: list[Any],
    n_steps: int,
    device: str,
    seed: int,
) -> Trace:
    """Build a run, load a checkpoint, make some steps and return their record.

    Args:
        build: function that builds the run.
        folder: folder of the checkpoint.
        batches: a batch for each step. None: the run's own data.
        evaluated: batches for `evaluate` after the last step.
        n_steps: number of steps.
        device: device of the batches.
        seed: seed of the run.
    """
    with seeded(seed, device):
        run: Any = with_one_optimizer(build(), "the run")
    trace = Trace()
    # A new process has a different random state, so load() must restore the saved one if steps use it.
    with seeded(seed + 1, device), torch.enable_grad():
        run.load(Path(folder))
        own = next_batches(run) if batches is None else iter(batches)
        assert own is not None
        trace.drive(run, own, n_steps)
        _record_end(trace, run, evaluated)
    return trace


def _record_end(trace: Trace, run: Any, evaluated: list[Any]) -> None:
    """Add the state after the last step to a record."""
    trace.state = state_of(run) | {
        f"the mode of {name or 'the model'}": module.training for name, module in run.model.named_modules()
    }
    trace.averages = averages_of(run)
    if callable(getattr(run, "evaluate", None)):
        trace.evaluation = number_in(run.evaluate(evaluated))


def _simpler(sequence: Operations) -> Iterator[Operations]:
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
