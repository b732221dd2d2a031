"""TrainingLoop: runs the phases of a training, step by step.

No step synchronises the host with the device: loss, gradient norm and the flag for non-finite values stay on
the device. The fused optimizer skips a non-finite step by itself. The host detects it when it reads the
records, every `log_interval` steps. With a guard, the batches of a non-finite or spiking step are skipped as
well: see `PhaseGuard`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from stackwise.config import TrainingConfig
from stackwise.model.rack import Rack
from stackwise.model.surgery import set_identity
from stackwise.stability.guard import Alarm, GuardError
from stackwise.stability.telemetry import StepBuffer, StepRecord
from stackwise.support.arguments import require
from stackwise.support.device import release_freed_memory
from stackwise.support.mode import evaluating
from stackwise.training.batch_stream import Batch, BatchStream
from stackwise.training.block_store import BlockStore
from stackwise.training.checkpoint import RackCheckpoints
from stackwise.training.distributed import SharedRack, is_sharded, reshard
from stackwise.training.evaluation import Evaluation, ValidationRecord
from stackwise.training.guard import PhaseGuard, RackPart, StepBatches
from stackwise.training.master import MasterAdamW
from stackwise.training.objective import Objective
from stackwise.training.phase_model import PhaseModel, only_training
from stackwise.training.precision import autocast, float8_layers, frozen_precision
from stackwise.training.prefix import PrefixOutputs, batch_key
from stackwise.training.recompute import recomputing
from stackwise.training.record_log import RecordLog
from stackwise.training.result import UnitResult, unit_result
from stackwise.training.run_state import records_of, state_of_guard_from, state_of_records
from stackwise.training.scope import Phase
from stackwise.training.step import MicroBatch, TrainStep
from stackwise.training.targets import IGNORED, Targets
from stackwise.training.throughput import ThroughputMeter

__all__ = ["NonFiniteStepError", "TrainingLoop", "TrainingTerminated"]

_SILENT = 16  # steps without a target, after which the data is considered to have none
_SEARCH = 32  # halvings: from the initial loss scale, 2**16, to a scale that underflows in float16


class NonFiniteStepError(ArithmeticError):
    """A step had a non-finite loss or gradient. Its update was skipped.

    Attributes:
        record: record of the first such step.
    """

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        super().__init__(
            f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}; its update was "
            "left out"
        )


class TrainingTerminated(SystemExit):
    """The process was requested to end. The run is saved and can be resumed.

    Args:
        steps: number of finished steps.
        directory: folder of the checkpoints.
        exit_code: 75 after SIGTERM, 130 after Ctrl-C.
    """

    def __init__(self, steps: int, directory: Path, exit_code: int) -> None:
        super().__init__(exit_code)
        self.steps, self.directory, self.exit_code = steps, directory, exit_code

    def __str__(self) -> str:
        saved = f"ended on request after {self.steps} steps, saved in {self.directory}"
        return f"{saved}; training.resume=true continues the run"


@dataclass
class TrainingLoop:
    """Training of a Rack on a loader, with the current results.

    Attributes:
        shared: the Rack, and the processes that train it.
        meter: throughput meter, which counts tokens and the time spent waiting for data.
        validation: data that is evaluated every `eval_interval` steps; None: no evaluation.
        validation_records: results of the evaluations.
        logs: additional receivers of every record.
        learning_rate: maps (step, length of the schedule) to a learning rate.
        records: records of every step of all phases.
        epochs: epoch of each step since the start of the last phase that does not continue another one.
        tokens: number of trained tokens with padding: those of this process, times the number of processes.
        units: results of finished phases.
        alarms: alarms of the guard. Their `step` is the number of the update that was due.
        bundles: folder for diagnostic bundles of the guard; None: no bundles are written.
        terminates: maps a number of steps to the exit code if the run is to be saved and terminated then,
            otherwise to 0. None: the run is never terminated early.
        guard_lag: number of steps until the host is notified of an alarm; None: the default of `Guard`.
    """

    shared: SharedRack
    settings: TrainingConfig
    objective: Objective
    dataloader: Iterable[Batch]
    learning_rate: Callable[[int, int], float]
    store: BlockStore
    prefix: PrefixOutputs
    meter: ThroughputMeter
    checkpoints: RackCheckpoints | None = None
    validation: Iterable[Batch] | None = None
    validation_records: list[ValidationRecord] = field(default_factory=list)
    logs: Sequence[RecordLog] = ()
    records: list[StepRecord] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    tokens: int = 0
    units: list[UnitResult] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    bundles: Path | None = None
    terminates: Callable[[int], int] | None = None
    guard_lag: int | None = None

    def __post_init__(self) -> None:
        self.rack, self.processes = self.shared.rack, self.shared.processes
        self.device = self.store.device
        self._train_step: TrainStep | None = None
        self._guard: PhaseGuard | None = None
        self._given: int | None = None  # data steps that the last guarded phase used, with skipped ones
        self._left_out = 0  # consecutive skipped steps
        self._begun = 0.0  # time of the last request for records without a wait
        self._made: float | None = None  # time at which the next records were complete; None: now
        self._done = 0  # finished steps of the phase
        self._due = (False, 0)  # (save, exit code) after consecutive alarms
        self._told: Mapping[str, Any] = {}  # values of rank 0 for the checkpoint
        self._resumed: Mapping[str, Any] | None = None  # until the interrupted phase has restarted
        self._head = nn.ModuleList([self.rack.final_norm, self.rack.lm_head])
        fresh = self._head.state_dict() if self.settings.scope.head == "per_unit" else {}
        self._fresh_head = {name: tensor.clone() for name, tensor in fresh.items()}

    def run(self, phases: Sequence[Phase]) -> None:
        """Run the phases, or the remaining ones after a resume.

        Raises:
            ValueError: nothing to train, no data, or data without a target.
            NonFiniteStepError: the loss or the gradient became non-finite, and there is no guard.
            GuardError: the guard cannot recover the training.
            TrainingTerminated: termination was requested, and the run is saved.
            OSError: termination was requested, and the run could not be saved.
        """
        # Memory that a phase has freed is fragmented. Release it before the next phase allocates.
        gives_back = self.settings.scope.offload != "none"
        for place in range(len(self.units), len(phases)):
            if gives_back:
                release_freed_memory()
            self._run(phases[place], phases[place + 1] if place + 1 < len(phases) else None)

    def _run(self, phase: Phase, following: Phase | None) -> None:
        """Run a phase. The Blocks of the `following` one are prefetched in the meantime."""
        settings, began = self.settings, time.perf_counter()
        if self._resumed is None:
            self._done, self._first_record = 0, len(self.records)
            self._computed = self.prefix.statistics.computed
        self.prefix.forget(min((*phase.trained, *phase.enters)))
        float8 = self.settings.precision == "float8"
        with (
            self.store.resident(phase.path[phase.n_prefix :]),
            only_training(self.rack, phase),
            float8_layers(self.rack) if float8 else nullcontext(),
        ):
            if following is not None:
                self.store.expect(following.path[following.n_prefix :])
            self._train(phase)
        blocks, seconds = self.processes.as_in_main(
            (self.prefix.statistics.computed - self._computed, time.perf_counter() - began)
        )
        self.units.append(
            unit_result(
                self.rack,
                phase,
                self.records[self._first_record :],
                last=settings.log_interval,
                first_record=self._first_record,
                num_batches=phase.steps * settings.accumulation_steps,
                prefix_blocks=blocks,
                seconds=seconds,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the saved state, except weights, optimizer and random states. It is equal in all processes.

        Only `tokens` may differ, if processes have batches of different sizes.
        """
        assert self._train_step is not None, "a step was made"
        scale = self._train_step.loss_scale
        return {
            "units": [dict(unit) for unit in self.units],
            "done": self._done,
            "first_record": self._first_record,
            "prefix_blocks": self._told["prefix_blocks"],
            "records": state_of_records(self.records),
            "epochs": list(self.epochs),
            "tokens": self.tokens,
            "left_out": self._left_out,
            "validation": [record.to_dict() for record in self.validation_records],
            "fresh_head": dict(self._fresh_head),
            "loss_scale": None if scale is None else scale.state_dict(),
            "stream": self._batches.state_dict(),
            "meter": self._told["meter"],
            "alarms": [alarm.to_dict() for alarm in self.alarms],
            "guard": None if self._guard is None else self._guard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. The next call of `run` continues after its step."""
        self.units[:] = [cast("UnitResult", dict(unit)) for unit in state["units"]]
        self._done, self._first_record = state["done"], state["first_record"]
        self._computed = -state["prefix_blocks"]
        self.records[:], self.epochs[:] = records_of(state["records"]), state["epochs"]
        self.tokens, self._left_out = state["tokens"], state["left_out"]
        self.validation_records[:] = [ValidationRecord(**each) for each in state["validation"]]
        self._fresh_head = dict(state["fresh_head"])
        self.meter.load_state_dict(state["meter"])
        self.alarms[:] = map(Alarm.from_dict, state["alarms"])
        self._resumed = state

    def _train(self, phase: Phase) -> None:
        """Run all steps of the phase. Their memory is freed before the Blocks are offloaded."""
        model, done = self._model(phase), False
        try:
            step = self._begin(phase, model)
            with recomputing(self.rack, self.settings.recompute, layers=list(model.blocks)):
                if self._guard is not None:
                    self._train_guarded(phase, step, self._guard)
                for number in range(self._done, phase.steps):
                    self._step(phase, number, step)
            done = True
        finally:
            self._guard = None
            if not (done and phase.is_continued):
                used, self._train_step = self._train_step, None
                if used is not None and isinstance(used.optimizer, MasterAdamW):
                    used.optimizer.finish()  # also after an error the weights become float32

    def _model(self, phase: Phase) -> PhaseModel:
        blocks = self.rack.get_blocks()
        if self._resumed is None:
            for i in phase.enters:
                set_identity(blocks[i])
            if phase.fresh_head:
                self._head.load_state_dict(self._fresh_head)
        self.rack.train()
        for i in phase.path[: phase.n_prefix]:
            blocks[i].eval()
        return PhaseModel(self.rack, self.objective, phase)

    def _begin(self, phase: Phase, model: PhaseModel) -> TrainStep:
        settings = self.settings
        # Two intervals: the rows of one are copied to the host while the next ones are written.
        rows = 2 * min(settings.log_interval, phase.steps)
        n_norms = len(list(self.rack.parameters())) if settings.telemetry.parameter_norms else 0
        self._buffer = StepBuffer(rows, self.device, n_norms)
        if phase.continues and self._train_step is not None:
            self._train_step.take(self.shared.wrap(model))
            self._guard = self._new_guard(phase, model, self._train_step)
            return self._train_step
        resumed, self._resumed = self._resumed, None
        first_step = phase.first_step if resumed is None else 0
        if first_step and self._given is not None:
            first_step = self._given  # the data steps of the previous phase, with skipped ones
        self._batches = BatchStream(self.dataloader, settings.accumulation_steps, first_step)
        self._stream = self.meter.waiting(self._batches)
        # Parameters that join later are in the optimizer from the start, without a gradient until then.
        optimized = self.rack if phase.is_continued or phase.continues else model
        self._train_step = TrainStep(model, settings, self.rack, optimized, self.processes)
        if resumed is None:
            self.epochs.clear()
        else:
            self._go_on(resumed, self._train_step, reads=self._done < phase.steps or phase.is_continued)
        self._train_step.take(self.shared.wrap(model))
        self._guard = self._new_guard(phase, model, self._train_step)
        if self._guard is not None and resumed is not None:
            # A guard that was enabled for the resume has no history of earlier steps.
            saved = resumed["guard"] or state_of_guard_from(self._done, self._guard.state_dict())
            self._guard.load_state_dict(saved)
        return self._train_step

    def _new_guard(self, phase: Phase, model: PhaseModel, step: TrainStep) -> PhaseGuard | None:
        """Return a guard without a history: other Blocks have other losses and norms."""
        if self.settings.guard is None:
            return None
        optimized = (p for group in step.optimizer.param_groups for p in group["params"])
        first = self._first_record
        passes = len(self.epochs) - self._done  # entries of steps before the phase

        def computed(number: int, batches: Sequence[Mapping[str, Tensor]]) -> list[MicroBatch]:
            return self._micro_batches(phase, phase.first_step + number, batches)

        def went_back(done: int) -> None:
            self.tokens -= sum(record.tokens or 0 for record in self.records[first + done :])
            del self.records[first + done :], self.epochs[passes + done :]
            self.validation_records[:] = [
                each for each in self.validation_records if each.steps <= first + done
            ]
            if self.checkpoints is not None:
                self.checkpoints.rewind(first + done)

        several = self.settings.training_architecture != "rackwise" or self.settings.scope.growth
        folder = phase.unit.name.replace(" ", "-") if several else ""
        return PhaseGuard(
            RackPart(self.rack, model.modules(), optimized),
            step,
            self.settings,
            computed=computed,
            went_back=went_back,
            unit=phase.unit.name,
            first=first,
            bundles=None if self.bundles is None else self.bundles / folder,
            lag=self.guard_lag,
        )

    def _go_on(self, state: Mapping[str, Any], step: TrainStep, *, reads: bool) -> None:
        """Restore data position, loss scale and objects after the step of `state`; random states last."""
        assert self.checkpoints is not None, "the state is of a checkpoint"
        self._batches.load_state_dict(state["stream"], reads=reads)
        if step.loss_scale is not None:
            step.loss_scale.load_state_dict(state["loss_scale"])
        self.checkpoints.restore(self._shared_objects(step), len(self.records))

    def _shared_objects(self, step: TrainStep) -> dict[str, Any]:
        """Return the objects that are saved once for all processes, or as one shard per process.

        The weights are in a file of their own. With the names of the parameters, any number of processes can
        load the optimizer's state, also if each has a shard.
        """
        return {"names": RackPart(self.rack, (), self.rack.parameters()), "optimizer": step.optimizer}

    def _save(self, step: TrainStep) -> None:
        assert self.checkpoints is not None
        now = [each.loss for each in self.validation_records[-1:] if each.steps == len(self.records)]
        objects = {"run": self, **self._shared_objects(step)}
        # Values that differ between processes are saved from rank 0, so that any number of processes can
        # resume.
        computed = self.prefix.statistics.computed - self._computed
        self._told = self.processes.as_in_main({"prefix_blocks": computed, "meter": self.meter.state_dict()})
        with _full_precision(step, self.rack):
            whole = self.shared.gather()
            self.checkpoints.save(len(self.records), whole, objects, metric=now[0] if now else None)

    def _step(self, phase: Phase, number: int, step: TrainStep) -> None:
        settings, done = self.settings, len(self.records) + len(self._buffer)
        epoch, batches = next(self._stream)
        lr = self.learning_rate(phase.schedule_start + number, phase.schedule_steps)
        micro_batches = self._micro_batches(phase, phase.first_step + number, batches)
        outcome = step(micro_batches, lr)
        tokens = sum(each.targets.input_ids.numel() for each in micro_batches) * self.processes.world_size
        norms = settings.telemetry.parameter_norms
        self._buffer.write_step(
            done,
            lr,
            loss=outcome.mean,
            grad_norm=outcome.grad_norm,
            skipped=outcome.skipped,
            tokens=tokens,
            unit=phase.unit.name,
            norms_P=outcome.norms_P if norms else None,
            names=outcome.names if norms else None,
        )
        self.epochs.append(epoch)
        self._done = number + 1
        self._attend(phase, step)

    def _train_guarded(self, phase: Phase, step: TrainStep, guard: PhaseGuard) -> None:
        """Run all steps of the phase. Some are replayed, and some are skipped."""
        passes = len(self.epochs) - self._done
        batches = guard.steps_of(self._stream, self._batches)
        try:
            while self._done < phase.steps:
                batch: StepBatches = next(batches)
                number = guard.count.done
                lr = self.learning_rate(phase.schedule_start + number, phase.schedule_steps)
                if guard.train(batch, lr):
                    # If the host is notified late, the list still has epochs of steps that were undone.
                    self.epochs[passes + number :] = [batch["epoch"]]
                    self._done = number + 1
                    self._attend(phase, step)
                else:
                    self._done = guard.count.done
                    self._read(guard.arrived())
                    # A rewind may have ended the consecutive alarms.
                    if self.records:
                        self._leave(phase, step)
            self._given = guard.steps
        except GuardError as error:
            self._read(guard.arrived())
            raise GuardError(self.alarms[-1], self.alarms) from error

    def _arrived(self, *, wait: bool) -> list[StepRecord] | None:
        """Return the records to read; None: an awaited step raised an alarm, and the run was rolled back."""
        guard = self._guard
        if guard is None:
            if wait:
                return self._buffer.drain()
            # If the copy has already arrived, the steps of an interval were complete when their copy began.
            begun, self._begun = self._begun, self.meter.now()
            self._made = begun if self._buffer.is_ahead else None
            return self._buffer.previous()
        if wait:
            guard.settle()
            if guard.count.done != self._done:
                self._done = guard.count.done
                self._read(guard.arrived())
                return None
        return guard.arrived()

    def _attend(self, phase: Phase, step: TrainStep) -> None:
        """After an update: read records, evaluate, save and end the run if due."""
        settings, done = self.settings, self._first_record + self._done
        saving = self.checkpoints is not None and done % settings.save_interval == 0
        last = self._done == phase.steps
        interval = settings.eval_interval
        evaluates = self.validation is not None and interval is not None and done % interval == 0
        waits = evaluates or saving or last
        if waits or self._done % settings.log_interval == 0:
            arrived = self._arrived(wait=waits)
            if arrived is None:
                return
            evaluated = {}
            if evaluates and self._broken(arrived) is None:
                evaluated = {"validation_loss": self._evaluate(phase, step, done)}
            self._read(arrived, evaluated)
            self._check_predicts(ends=last and phase.is_last)
        self._leave(phase, step, saves=saving)

    def _check_predicts(self, *, ends: bool) -> None:
        """Raise if no token was a target, after `_SILENT` steps or when the run `ends`."""
        steps = len(self.records)
        predicts = any(not math.isnan(record.loss) for record in self.records)
        allowed = f"at least one in {steps}: tokens behind others, neither padding nor labelled {IGNORED}"
        early = steps < _SILENT and not ends
        require(predicts or early, "dataloader: steps with something to predict", 0, allowed)

    def _leave(self, phase: Phase, step: TrainStep, *, saves: bool = False) -> None:
        """Save if `saves` or at the end of the run. End the run if requested.

        Both are deferred while an alarm is unresolved.
        """
        done = self._first_record + self._done
        ends = self._done == phase.steps and phase.is_last
        saves, leaves = saves or self._due[0], self._due[1]
        if ends:
            leaves = 0
        elif self.terminates is not None:
            leaves = self.terminates(done) or leaves
        if not self.checkpoints or not (saves or leaves or ends):
            return
        arrived = self._arrived(wait=True)
        if arrived is None:
            return
        self._read(arrived)
        # While an alarm is unresolved the weights may be bad. The alarms end soon, or the run does.
        if self._guard is not None and self._guard.consecutive_alarms:
            if ends:
                reason = "training ended with an unresolved alarm; the previous one is the newest"
                warnings.warn(f"step {done}: no checkpoint, as {reason}", RuntimeWarning, stacklevel=2)
            self._due = saves, leaves
            return
        self._due = False, 0
        self._save(step)
        if leaves:
            self.checkpoints.close()  # raises if nothing is saved: the exit code promises a resumable run
            raise TrainingTerminated(len(self.records), self.checkpoints.directory, leaves)

    def _micro_batches(
        self, phase: Phase, step: int, batches: Sequence[Mapping[str, Tensor]]
    ) -> list[MicroBatch]:
        made, seed = [], self.processes.seed(self.settings.seed)
        for place, batch in enumerate(batches):
            targets = self.objective.targets(batch, (seed, step, place))
            key = batch_key(targets) if phase.n_prefix and self.prefix.byte_budget else ""
            targets = targets.sent(self.device)
            hidden = partial(self._hidden, key, targets, phase.n_prefix) if phase.n_prefix else None
            made.append(MicroBatch(targets, hidden))
        return made

    def _hidden(self, key: str, targets: Targets, depth: int) -> Tensor:
        with autocast(frozen_precision(self.settings.precision), self.device):
            return self.prefix(key, targets, depth)

    def _evaluate(self, phase: Phase, step: TrainStep, steps: int) -> float:
        """Return the validation loss of the phase's modules, with the weights of a checkpoint."""
        assert self.validation is not None
        evaluation = Evaluation(self.objective, self.settings, self.processes)

        def total(targets: Targets) -> Tensor:
            hidden_BTC = self.prefix.computed(targets, phase.n_prefix) if phase.n_prefix else None
            summed: Tensor = step.model(targets, hidden_BTC, evaluation.objective)
            return summed

        with self.meter.paused(), evaluating(self.rack), _full_precision(step, self.rack):
            loss = evaluation.mean_loss(
                total,
                self.validation,
                limit=self.settings.eval_batches,
                precision="fp32" if is_sharded(step.model) else None,  # FSDP sets the compute dtype
            )
            reshard(step.model)
        self.validation_records.append(ValidationRecord(steps, loss, phase.unit.name))
        return loss

    def _read(self, arrived: Sequence[StepRecord], evaluated: Mapping[str, float] | None = None) -> None:
        """Pass records to the logs, including one that ends the run, and store them."""
        alarms = [] if self._guard is None else self._guard.raised()
        self.alarms += alarms
        made, self._made = self._made, None
        for record in arrived:
            self.meter.count(record.tokens or 0)
        if (arrived or alarms) and self.logs:
            figures = {**self.meter.read(made).to_dict(), **(evaluated or {})}
            for log in self.logs:
                log.write(arrived, figures, alarms)
        broken = self._broken(arrived)
        for record in arrived:
            if record is broken:
                raise NonFiniteStepError(record)
            self._left_out = self._left_out + 1 if record.skipped else 0
            self.records.append(record)
            self.tokens += record.tokens or 0

    def _broken(self, arrived: Sequence[StepRecord]) -> StepRecord | None:
        """Return the first record that ends the run, or None."""
        if self._guard is not None:  # the guard raises by itself
            return None
        left_out = self._left_out
        for record in arrived:
            left_out = left_out + 1 if record.skipped else 0
            # Skipped steps search the loss scale. After `_SEARCH` halvings a smaller scale cannot help.
            searching = self.settings.precision == "fp16" and math.isfinite(record.loss)
            if record.skipped and not (searching and left_out <= _SEARCH):
                return record
        return None


def _full_precision(step: TrainStep, rack: Rack) -> AbstractContextManager[None]:
    """Use the final weights of the run inside the context: float32 masters with a `MasterAdamW`."""
    masters = step.optimizer if isinstance(step.optimizer, MasterAdamW) else None
    return masters.full_precision(rack) if masters else nullcontext()
