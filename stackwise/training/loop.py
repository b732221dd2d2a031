"""TrainingLoop: phase after phase, step after step.

Nothing in a step makes the host wait for the device: loss, gradient norm and whether they are
finite stay there; a non-finite step is left out by the fused optimizer itself, and is noticed when
the records are read, every `log_interval` steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import Tensor, nn

from stackwise.config import TrainingConfig
from stackwise.model.surgery import set_identity
from stackwise.stability.telemetry import StepBuffer, StepRecord
from stackwise.training.batch_stream import Batch, batch_stream
from stackwise.training.block_store import BlockStore
from stackwise.training.checkpoint import CheckpointManager
from stackwise.training.distributed import SharedRack
from stackwise.training.master import MasterAdamW
from stackwise.training.objective import Objective
from stackwise.training.phase_model import PhaseModel, blocks_of, only_training
from stackwise.training.precision import autocast, float8_layers, frozen_precision
from stackwise.training.prefix import PrefixOutputs, batch_key
from stackwise.training.recompute import recomputing
from stackwise.training.record_log import RecordLog
from stackwise.training.result import UnitResult, unit_result
from stackwise.training.scope import Phase
from stackwise.training.step import MicroBatch, TrainStep
from stackwise.training.throughput import ThroughputMeter

__all__ = ["NonFiniteStepError", "TrainingLoop"]

_SEARCH = 32  # halvings: from the first loss scale, 2**16, to one below all that float16 can hold


class NonFiniteStepError(ArithmeticError):
    """A step had a non-finite loss or gradient. Its update was left out.

    Attributes:
        record: the first such step.
    """

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        super().__init__(
            f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}; its update was "
            "left out"
        )


@dataclass
class TrainingLoop:
    """A Rack, what it learns from, and what came of it so far.

    Attributes:
        shared: the Rack, and the processes that train it.
        meter: of tokens and of waiting for data.
        logs: what else gets every record.
        learning_rate: of a step in a schedule of so many steps.
        records: every step, of all phases.
        epochs: the pass over the data of each step since the last phase began that does not continue one.
        tokens: that were trained on, by all processes.
    """

    shared: SharedRack
    settings: TrainingConfig
    objective: Objective
    dataloader: Iterable[Batch]
    learning_rate: Callable[[int, int], float]
    store: BlockStore
    prefix: PrefixOutputs
    meter: ThroughputMeter
    checkpoints: CheckpointManager | None = None
    logs: Sequence[RecordLog] = ()
    records: list[StepRecord] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.rack, self.processes = self.shared.rack, self.shared.processes
        self.device = self.store.device
        self._train_step: TrainStep | None = None
        self._left_out = 0  # steps in a row
        self._head = nn.ModuleList([self.rack.final_norm, self.rack.lm_head])
        fresh = self._head.state_dict() if self.settings.scope.head == "per_unit" else {}
        self._fresh_head = {name: tensor.clone() for name, tensor in fresh.items()}

    def run(self, phase: Phase, following: Phase | None = None) -> UnitResult:
        """Go through a phase; what the `following` one needs is read ahead meanwhile.

        Raises:
            ValueError: nothing to train, or no data.
            NonFiniteStepError: the loss or the gradient stopped being finite.
        """
        settings, first = self.settings, len(self.records)
        computed, began = self.prefix.statistics.computed, time.perf_counter()
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
        return unit_result(
            self.rack,
            phase,
            self.records[first:],
            last=settings.log_interval,
            first_record=first,
            num_batches=phase.steps * settings.accumulation_steps,
            prefix_blocks=self.prefix.statistics.computed - computed,
            seconds=time.perf_counter() - began,
        )

    def _train(self, phase: Phase) -> None:
        """All steps. What they needed is given up before the Blocks leave."""
        model, done = self._model(phase), False
        try:
            step = self._begin(phase, model)
            with recomputing(self.rack, self.settings.recompute, layers=list(model.blocks)):
                for number in range(phase.steps):
                    self._step(phase, number, step)
            done = True
        finally:
            if not (done and phase.is_continued):
                used, self._train_step = self._train_step, None
                if used is not None and isinstance(used.optimizer, MasterAdamW):
                    used.optimizer.finish()  # however it ends, the weights are float32 again

    def _model(self, phase: Phase) -> PhaseModel:
        blocks = blocks_of(self.rack)
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
        # Twice the interval: the rows of one are on their way to the host while the next are written.
        rows = 2 * min(settings.log_interval, phase.steps)
        n_norms = len(list(self.rack.parameters())) if settings.telemetry.parameter_norms else 0
        self._buffer = StepBuffer(rows, self.device, n_norms)
        if phase.continues and self._train_step is not None:
            self._train_step.take(self.shared.wrap(model))
            return self._train_step
        stream = batch_stream(self.dataloader, settings.accumulation_steps, phase.first_step)
        self._stream = self.meter.waiting(stream)
        self.epochs.clear()
        # What joins later is in the optimizer from the start, and has no gradient until then.
        optimized = self.rack if phase.is_continued else model
        self._train_step = TrainStep(model, settings, self.rack, optimized, self.processes)
        self._train_step.take(self.shared.wrap(model))
        return self._train_step

    def _step(self, phase: Phase, number: int, step: TrainStep) -> None:
        settings, done = self.settings, len(self.records) + len(self._buffer)
        epoch, batches = next(self._stream)
        lr = self.learning_rate(phase.schedule_start + number, phase.schedule_steps)
        micro_batches = self._micro_batches(phase, phase.first_step + number, batches)
        outcome = step(micro_batches, lr)
        tokens = sum(each.targets.input_ids.numel() for each in micro_batches) * self.processes.world_size
        norms = settings.telemetry.parameter_norms
        self._buffer.write(
            done,
            lr,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            skipped=outcome.skipped,
            tokens=tokens,
            unit=phase.unit.name,
            norms_P=outcome.norms_P if norms else None,
            names=outcome.names if norms else None,
        )
        self.epochs.append(epoch)
        saving = self.checkpoints is not None and (done + 1) % settings.save_interval == 0
        last = number == phase.steps - 1
        if self._buffer.full or saving or last:
            self._read(self._buffer.drain())
        elif (number + 1) % settings.log_interval == 0:
            self._read(self._buffer.poll())
        if self.checkpoints and (saving or (last and phase.is_last)):
            masters = step.optimizer if isinstance(step.optimizer, MasterAdamW) else None
            with masters.full_precision() if masters else nullcontext():
                whole = self.shared.gather()
                if self.processes.is_main:
                    self.checkpoints.save(done + 1, whole)

    def _micro_batches(
        self, phase: Phase, step: int, batches: Sequence[Mapping[str, Tensor]]
    ) -> list[MicroBatch]:
        made, seed = [], self.processes.seed(self.settings.seed)
        for place, batch in enumerate(batches):
            targets = self.objective.targets(batch, (seed, step, place))
            key = batch_key(targets) if phase.n_prefix and self.prefix.byte_budget else ""
            targets = targets.sent(self.device)
            hidden_BTC = None
            if phase.n_prefix:
                with autocast(frozen_precision(self.settings.precision), self.device):
                    hidden_BTC = self.prefix(key, targets, phase.n_prefix)
            made.append(MicroBatch(targets, hidden_BTC))
        return made

    def _read(self, arrived: Sequence[StepRecord]) -> None:
        """Show records to whoever looks, also one that ends the run, and take them in."""
        for record in arrived:
            self.meter.count(record.tokens or 0)
        if arrived and self.logs:
            figures = self.meter.read().to_dict()
            for log in self.logs:
                log.write(arrived, figures)
        for record in arrived:
            self._left_out = self._left_out + 1 if record.skipped else 0
            # A loss scale is found by steps that are left out; one that small is of no use to any gradient.
            searching = self.settings.precision == "fp16" and math.isfinite(record.loss)
            if record.skipped and not (searching and self._left_out <= _SEARCH):
                raise NonFiniteStepError(record)
            self.records.append(record)
            self.tokens += record.tokens or 0
