"""PhaseGuard: judges the steps of a phase before their updates, and leaves out those that break.

A step that is left out is as if its batches had not been there: number, learning rate, masks and random
choices of the next one are those that it had.
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
from stackwise.stability.guard.batch_feed import BatchFeed
from stackwise.stability.telemetry import StepRecord, global_norm
from stackwise.support.random_state import random_states, random_states_equal, set_random_states
from stackwise.training.batch_stream import BatchStream
from stackwise.training.processes import Processes
from stackwise.training.step import MicroBatch, TrainStep

__all__ = ["PhaseGuard", "RackPart", "StepBatches", "guard_policy", "new_bundle_folder"]

_REMEMBERED = 64  # steps, far above any lag

# "epoch", "place": of the first; "drew": whether the loader made a random choice; "batches": of the step.
# A mapping, as it is written into checkpoints and bundles.
StepBatches = Mapping[str, Any]


def guard_policy(settings: TrainingConfig) -> GuardPolicy:
    """Return the policy `settings.guard`, which must be there, with the clipping of the training."""
    assert settings.guard is not None
    return settings.guard.model_copy(update={"clip": settings.grad_clip})


def new_bundle_folder(directory: str | Path, processes: Processes) -> Path:
    """`run-1`, `run-2` and so on: the first in `directory` that is not there; every process has to call."""
    folder, number = Path(directory), 1
    while (folder / f"run-{number}").exists():
        number += 1
    return folder / f"run-{processes.as_in_main(number)}"  # the others may look later


@dataclass(frozen=True)
class _Made:
    """What the host knows of a step."""

    number: int
    lr: float
    tokens: int


class StepCount:
    """How many updates of a phase are made, and the random states that the next step begins with.

    To the guard it is the scheduler: advanced with each update, and put back with what is undone.

    Attributes:
        done: updates.
    """

    def __init__(self) -> None:
        self.done = 0
        self._begins: dict[str, Any] | None = None  # None: with those of the process
        self._ended: dict[str, Any] | None = None

    def draw(self) -> None:
        """Before a batch is taken from the loader."""
        if self._begins is not None:
            set_random_states(self._begins)

    def begin(self, *, drew: bool) -> None:
        """Before the forward pass of a step.

        Args:
            drew: the loader made random choices for its batches: it begins with what they have left.
        """
        if drew or self._begins is None:
            self._begins = random_states()
        else:
            set_random_states(self._begins)

    def end(self) -> None:
        """Behind the backward pass of a step."""
        self._ended = random_states()

    def step(self) -> None:
        """Its update is made."""
        self.done, self._begins = self.done + 1, self._ended

    def state_dict(self) -> dict[str, Any]:
        """Both."""
        return {"done": self.done, "begins": self._begins}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.done, self._begins = state["done"], state["begins"]


class RackPart(nn.Module):
    """Some modules of a Rack, by the names that they have in it. Not to be called.

    Args:
        rack: whose names.
        modules: which of it.
        parameters: further ones, as of an optimizer.
    """

    def __init__(self, rack: Rack, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        wanted = {id(module) for module in modules}
        named = [(name, module) for name, module in rack.named_modules() if id(module) in wanted]
        kept = {id(p) for _, module in named for p in module.parameters(recurse=False)}
        kept |= {id(p) for p in parameters}
        buffers = {id(buffer) for _, module in named for buffer in module.buffers(recurse=False)}
        # Not as attributes of a module, which would be modules of this one.
        self._by_name = {
            "modules": dict(named),
            "parameters": {name: p for name, p in rack.named_parameters() if id(p) in kept},
            "buffers": {name: buffer for name, buffer in rack.named_buffers() if id(buffer) in buffers},
        }

    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """As in the Rack."""
        return iter(self._by_name["modules"].items())

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """As in the Rack."""
        return iter(self._by_name["parameters"].items())

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """As in the Rack."""
        return iter(self._by_name["buffers"].items())


class PhaseGuard(Guard):
    """Guards a `TrainStep`, and gives its batches.

    Args:
        part: the modules that the phase computes.
        step: which trains them.
        settings: `guard` is there.
        computed: what is computed of batches in the step of a number in the phase.
        went_back: called with how many updates of the phase are left after a rewind.
        unit: what trains.
        first: how many updates came before the phase.
        bundles: folder for diagnostic bundles; None: none are written.
        lag: see `Guard`.

    Attributes:
        count: of updates.
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
        # Nothing that the guard holds may hold it: Blocks of a unit go when their guard goes, and not later.
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
        # Places of the data, which are the same in every process.
        self._feed = BatchFeed(lambda batch: (batch["epoch"], batch["place"]))

    def steps_of(self, stream: Iterator[Any], places: BatchStream) -> Iterator[StepBatches]:
        """The batches of step after step, without end: some again, none that is in quarantine.

        Args:
            stream: of what `places` gives.
            places: where they are.
        """
        return self.batches(_taken(self.count, stream, places))

    def train(self, batch: StepBatches, lr: float) -> bool:
        """Make a step of what `steps_of` gave.

        Returns:
            whether its update stands, as far as the host knows.

        Raises:
            GuardError: training is broken for good.
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
        """As of `Guard`; an overflow that the loss scale answers is left out, and is no alarm."""
        scale = self._step.loss_scale
        if scale is None:
            decision = super().decide(loss, norms_P, logit)
            return decision._replace(loss=self._mean)
        norm, factor = global_norm(norms_P), scale.divisor()
        answered = loss.isfinite() & ~norm.isfinite() & ~scale.exhausted()
        # A norm of 0 is no alarm, and not remembered.
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
        """As of `Guard`."""
        super().settle()
        self._take_in()

    def arrived(self) -> list[StepRecord]:
        """Records of updates that were made, each once, and behind a rewind those of what is made again."""
        self._take_in()
        records, self._ready = self._ready, []
        return records

    def raised(self) -> list[Alarm]:
        """Alarms since the last call. Their `step` counts updates, those before the phase as well."""
        self._take_in()
        alarms, self._told = self._told, []
        return alarms

    def state_dict(self, *, closed: bool = False) -> dict[str, Any]:
        """As of `Guard`, and where the count is.

        It is the same in every process, but for batches to be given again, and where something has made
        random choices since the last update. Where the epoch began is known to the `BatchStream`.
        """
        state, count = super().state_dict(closed=closed), deepcopy(self.count.state_dict())
        begins = count["begins"]
        if begins is not None and random_states_equal(begins, random_states()):
            count["begins"] = None  # those of the process, which are kept beside this
        return {**state, "feed": BatchFeed.common_state(state["feed"]), "count": count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of `Guard`."""
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
        # What is not made again, and has been told of, is forgotten.
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
