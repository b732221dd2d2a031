"""PhaseGuard: inspects each step of a phase before its update, and skips non-finite and spiking steps.

A skipped step leaves no trace: the next step has the same number, learning rate, masks and random
numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from stackwise.config import TrainingConfig
from stackwise.model.rack import Rack
from stackwise.stability.guard import Alarm, Decision, Guard, GuardPolicy
from stackwise.stability.guard.replay_loader import ReplayLoader
from stackwise.stability.telemetry import StepRecord, global_norm
from stackwise.support.random_state import random_states, random_states_equal, set_random_states
from stackwise.training.batch_stream import BatchStream
from stackwise.training.processes import Processes
from stackwise.training.step import MicroBatch, TrainStep

__all__ = ["PhaseGuard", "RackPart", "StepBatches", "guard_policy", "new_bundle_folder"]

_REMEMBERED = 64  # steps, far above any lag

# "epoch", "place": of the first batch; "drew": True if the loader used random numbers; "batches": of the
# step. A mapping, because it is written into checkpoints and bundles.
StepBatches = Mapping[str, Any]


def guard_policy(settings: TrainingConfig) -> GuardPolicy:
    """Return the policy `settings.guard`, which must not be None, with the training's gradient clipping."""
    assert settings.guard is not None
    return settings.guard.model_copy(update={"clip": settings.grad_clip})


def new_bundle_folder(directory: str | Path, processes: Processes) -> Path:
    """Return the first of `run-1`, `run-2` and so on that does not exist in `directory`.

    Collective: every process has to call it.
    """
    folder, number = Path(directory), 1
    while (folder / f"run-{number}").exists():
        number += 1
    return folder / f"run-{processes.as_in_main(number)}"  # other ranks may check later


@dataclass(frozen=True)
class _Made:
    """Facts of a step that the host stores."""

    number: int
    lr: float
    tokens: int


class StepCount:
    """Number of updates of a phase, and the random states at the start of the next step.

    The guard treats it as a scheduler: it advances with each update, and is restored by a rewind.

    Attributes:
        done: number of updates.
    """

    def __init__(self) -> None:
        self.done = 0
        self._begins: dict[str, Any] | None = None  # None: use the random states of the process
        self._ended: dict[str, Any] | None = None

    def draw(self) -> None:
        """Set the random states before a batch is drawn from the loader."""
        if self._begins is not None:
            set_random_states(self._begins)

    def begin(self, *, drew: bool) -> None:
        """Set the random states before the forward pass of a step.

        Args:
            drew: True if the loader used random numbers for the batches: the step continues from the current
                random states.
        """
        if drew or self._begins is None:
            self._begins = random_states()
        else:
            set_random_states(self._begins)

    def end(self) -> None:
        """Store the random states after the backward pass of a step."""
        self._ended = random_states()

    def step(self) -> None:
        """Count an update. The next step begins with the random states at the end of this one."""
        self.done, self._begins = self.done + 1, self._ended

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the random states."""
        return {"done": self.done, "begins": self._begins}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.done, self._begins = state["done"], state["begins"]


class RackPart(nn.Module):
    """Some modules of a Rack, with their names in the Rack. It has no forward pass.

    Args:
        rack: Rack that defines the names.
        modules: modules of the Rack to include.
        parameters: additional parameters, such as those of an optimizer.
    """

    def __init__(self, rack: Rack, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        wanted = {id(module) for module in modules}
        named = [(name, module) for name, module in rack.named_modules() if id(module) in wanted]
        kept = {id(p) for _, module in named for p in module.parameters(recurse=False)}
        kept |= {id(p) for p in parameters}
        buffers = {id(buffer) for _, module in named for buffer in module.buffers(recurse=False)}
        # Not as attributes: nn.Module would register them as its own modules.
        self._by_name = {
            "modules": dict(named),
            "parameters": {name: p for name, p in rack.named_parameters() if id(p) in kept},
            "buffers": {name: buffer for name, buffer in rack.named_buffers() if id(buffer) in buffers},
        }

    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """Yield the included modules with their names in the Rack."""
        return iter(self._by_name["modules"].items())

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """Yield the included parameters with their names in the Rack."""
        return iter(self._by_name["parameters"].items())

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """Yield the included buffers with their names in the Rack."""
        return iter(self._by_name["buffers"].items())


class PhaseGuard(Guard):
    """Guard of a `TrainStep`, which also yields the batches of each step.

    Args:
        part: modules that the phase computes.
        step: step that trains them.
        settings: training settings; `guard` must not be None.
        computed: maps a step number in the phase and its batches to micro-batches.
        went_back: called after a rewind with the remaining number of updates of the phase.
        unit: name of the unit that is trained.
        first: number of updates before the phase.
        bundles: folder for diagnostic bundles; None: no bundles are written.
        lag: see `Guard`.

    Attributes:
        count: counter of the updates.
    """

    def __init__(
        self,
        part: RackPart,
        step: TrainStep,
        settings: TrainingConfig,
        *,
        computed: Callable[[int, Sequence[Mapping[str, Tensor]]], list[MicroBatch]],
        went_back: Callable[[int], None],
        unit: str,
        first: int = 0,
        bundles: Path | None = None,
        lag: int | None = None,
    ) -> None:
        self.count = StepCount()
        self._step, self._computed, self._went_back = step, computed, went_back
        self._unit, self._first, self._keeps_norms = unit, first, settings.telemetry.parameter_norms
        self._steps_made: dict[int, _Made] = {}
        self._ready: list[StepRecord] = []
        self._told: list[Alarm] = []
        self._n_told = 0
        # No reference cycle: the Blocks of a unit must be freed together with its guard.
        me, count = weakref.proxy(self), self.count
        others: dict[str, Any] = {} if step.loss_scale is None else {"loss_scale": step.loss_scale}
        super().__init__(
            part,
            cast("torch.optim.Optimizer", step.optimizer),
            scheduler=count,
            policy=guard_policy(settings),
            loss_of=lambda _, batch: step.again(computed(count.done, batch["batches"])),
            others=others,
            bundles=bundles,
            lag=lag,
            on_rewind=lambda _: me._went(count.done),
        )
        # Positions in the data, which are equal in all processes.
        self._loader = ReplayLoader(lambda batch: (batch["epoch"], batch["place"]))

    def steps_of(self, stream: Iterator[Any], places: BatchStream) -> Iterator[StepBatches]:
        """Yield the batches of each step, without end. Some are replayed; quarantined ones are skipped.

        Args:
            stream: iterator over `places`.
            places: stream that stores the position in the data.
        """
        return self.batches(_taken(self.count, stream, places))

    def train(self, batch: StepBatches, lr: float) -> bool:
        """Train one step on batches from `steps_of`.

        Returns:
            True if the update was applied, as far as the host has been notified.

        Raises:
            GuardError: the guard cannot recover the training.
        """
        number = self.count.done
        self.count.begin(drew=batch["drew"])
        micro_batches = self._computed(number, batch["batches"])
        tokens = sum(each.targets.input_ids.numel() for each in micro_batches)
        self._steps_made[self.steps] = _Made(number, lr, tokens * self._step.processes.world_size)
        self._step.set_rate(lr)
        loss, self._mean = self._step.backward(micro_batches)
        self.count.end()
        self.step(loss, logit=self._step.logit())
        self._take_in()
        return self.count.done == number + 1

    def decide(self, loss: Tensor, norms_P: Tensor, logit: Tensor | None = None) -> Decision:
        """See `Guard.decide`. An overflow that the loss scale handles skips the step, and is not an alarm."""
        scale = self._step.loss_scale
        if scale is None:
            decision = super().decide(loss, norms_P, logit)
            return decision._replace(loss=self._mean)
        norm, factor = global_norm(norms_P), scale.divisor()
        answered = loss.isfinite() & ~norm.isfinite() & ~scale.exhausted()
        # A norm of 0 raises no alarm, and does not enter the history.
        decision = super().decide(loss, torch.where(answered, 0.0, norms_P), logit)
        divisor = factor if decision.divisor is None else factor * decision.divisor
        scale.update(answered, counts=decision.found_inf == 0)
        left_out = torch.maximum(decision.found_inf, answered.float())
        return decision._replace(
            found_inf=left_out, divisor=divisor, loss=self._mean, norm=norm, norms_P=norms_P
        )

    @property
    def _loss_scale(self) -> float:
        scale = self._step.loss_scale
        return 1.0 if scale is None else float(scale.divisor())

    def _norms(self) -> Tensor:
        return self._step.gradient_norms()

    def settle(self) -> None:
        """See `Guard.settle`."""
        super().settle()
        self._take_in()

    def arrived(self) -> list[StepRecord]:
        """Return records of updates, each once. After a rewind, records of replayed steps follow."""
        self._take_in()
        records, self._ready = self._ready, []
        return records

    def raised(self) -> list[Alarm]:
        """Return the alarms since the last call. Their `step` is the number of the update in the run."""
        self._take_in()
        alarms, self._told = self._told, []
        return alarms

    def state_dict(self, *, closed: bool = False) -> dict[str, Any]:
        """Return the state of `Guard` and of the update counter.

        The state is equal in all processes, except for batches to replay, and for random numbers that were
        used since the last update. The `BatchStream` stores the start of the epoch.
        """
        state, count = super().state_dict(closed=closed), deepcopy(self.count.state_dict())
        begins = count["begins"]
        if begins is not None and random_states_equal(begins, random_states()):
            count["begins"] = None  # equal to those of the process, which are saved separately
        return {**state, "loader": ReplayLoader.common_state(state["loader"]), "count": count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Guard.load_state_dict`."""
        super().load_state_dict(state)
        self.count.load_state_dict(state["count"])
        self._n_told = len(self.alarms)

    def _take_in(self) -> None:
        for record in self.records():
            made = self._steps_made[record.step]
            if record.skipped and record.kind is not None:
                continue
            self._ready.append(
                StepRecord(
                    self._first + made.number,
                    record.loss,
                    record.total_norm,
                    made.lr,
                    record.skipped,
                    made.tokens,
                    record.parameter_norms if self._keeps_norms else None,
                    self._unit,
                )
            )
        for alarm in self.alarms[self._n_told :]:
            number = self._first + self._steps_made[alarm.step].number
            self._told.append(replace(alarm, step=number))
        self._n_told = len(self.alarms)
        # Forget steps that can no longer be replayed and have been reported.
        for known in [step for step in self._steps_made if step < self.steps - _REMEMBERED]:
            del self._steps_made[known]

    def _went(self, done: int) -> None:
        self._take_in()
        self._ready = [record for record in self._ready if record.step < self._first + done]
        self._went_back(done)


def _taken(count: StepCount, stream: Iterator[Any], places: BatchStream) -> Iterator[StepBatches]:
    while True:
        count.draw()
        before = random_states()
        _, batches = next(stream)
        epoch, place = places.place
        drew = not random_states_equal(before, random_states())
        yield {"epoch": epoch, "place": place, "drew": drew, "batches": [dict(each) for each in batches]}
