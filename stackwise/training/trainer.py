"""ArchitectureTrainer: trains a Rack on data, and returns a TrainingResult."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from operator import length_hint
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from stackwise.benchmark.flops.closed_form import model_flops
from stackwise.benchmark.flops.peak_rate import peak_flops
from stackwise.checkpoint import Termination
from stackwise.config import StackWiseConfig
from stackwise.model.attention import Attention
from stackwise.model.kernel import KernelAttention
from stackwise.model.latent import LatentAttention
from stackwise.model.rack import Rack
from stackwise.model.surgery import residual_ends
from stackwise.stability.guard import GuardError
from stackwise.subject.trainer_spec import TrainerSpec
from stackwise.support.arguments import require
from stackwise.support.mode import evaluating
from stackwise.support.random_state import seeded
from stackwise.training.batch_stream import Batch, check_apart, check_restarts
from stackwise.training.block_store import BlockStore, hidden_states
from stackwise.training.checkpoint import RackCheckpoints
from stackwise.training.distributed import SharedRack, check_rows
from stackwise.training.evaluation import Evaluation
from stackwise.training.guard import new_bundle_folder
from stackwise.training.loop import NonFiniteStepError, TrainingLoop
from stackwise.training.objective import Objective
from stackwise.training.precision import check_precision, check_weights
from stackwise.training.prefix import PrefixOutputs
from stackwise.training.processes import Processes
from stackwise.training.progress import TrainingProgress
from stackwise.training.record_log import JsonLinesLog, RecordLog, TensorBoardLog, check_places
from stackwise.training.result import TrainingResult, epoch_losses, training_loss
from stackwise.training.run import RackRun
from stackwise.training.schedule import learning_rate
from stackwise.training.scope import Phase, plan_phases
from stackwise.training.targets import Targets
from stackwise.training.throughput import ThroughputMeter

__all__ = ["ArchitectureTrainer"]


class ArchitectureTrainer:
    """Trainer of a Rack. Equal seeds give bit-identical weights.

    Args:
        config: `training` is read; `model` is only stored in checkpoints.
        progress: show progress; None: only if standard error is a terminal.
        processes: `Processes.from_environment(config.training)`, for a run under torchrun; None: only this
            process.
        logs: receivers of every record in rank 0, in addition to those of `training.telemetry`. The caller
            closes them.
        on_checkpoint: called with the folder of each complete checkpoint, for example to copy it.

    Raises:
        ConfigError: the configuration is inconsistent.
        ValueError: a device that this machine does not have, a precision that it does not support, or a
            strategy without `processes`.
    """

    def __init__(
        self,
        config: StackWiseConfig,
        *,
        progress: bool | None = None,
        processes: Processes | None = None,
        logs: Sequence[RecordLog] = (),
        on_checkpoint: Callable[[Path], None] | None = None,
    ) -> None:
        config.validate()
        self.config, self.logs, self.on_checkpoint = config, logs, on_checkpoint
        self.processes = Processes.alone(config.training) if processes is None else processes
        self.device = self.processes.device
        check_precision(config.training.precision, self.device)
        shown = Console(stderr=True).is_terminal if progress is None else progress
        self.progress = shown and self.processes.is_main

    def train_architecture(
        self, rack: Rack, dataloader: Iterable[Batch], validation: Iterable[Batch] | None = None
    ) -> TrainingResult:
        """Train `rack` in place, as one or unit by unit, each for `training.max_steps` steps.

        Args:
            rack: moved to the configured device; with `offload` its Blocks stay in their offload place. With
                "fsdp" it stays on its device, and shards of a copy are on the devices during the training.
            dataloader: batches with `input_ids` (B, N), as in `Objective.targets`, or (B, N) tensors.
                Restarted when it is exhausted, and for every unit.
            validation: like `dataloader`; evaluated every `training.eval_interval` steps. It must not be the
                same loader if that supports one iteration at a time. With a `checkpoint_dir` it must not
                share an object that stores its position with `dataloader`.

        Raises:
            ValueError: attention that does not fit the objective (the loss would leak), nothing to train,
                no data or data that cannot be iterated twice, ids outside the vocabulary, disabled gradients
                (`torch.no_grad`), a log of another run, `eval_interval` without separate validation data, a
                `checkpoint_dir` for a Rack that the configuration does not describe, `keep_best` if no saved
                step is evaluated, or processes with different Racks or rows of the data.
            NonFiniteStepError: the loss or the gradient became non-finite, and there is no guard.
            GuardError: the guard could not recover; weights are from before the alarm's step.
            TrainingTerminated: SIGTERM or Ctrl-C arrived, and the run is saved in `checkpoint_dir`.
            OSError: the last checkpoint could not be written.
        """
        settings, scope = self.config.training, self.config.training.scope
        objective = Objective(settings.objective, rack.vocab_size)
        objective.check(rack)
        grad = torch.is_grad_enabled()
        require(grad, "torch.is_grad_enabled()", grad, "True: outside torch.no_grad() and inference_mode()")
        check_weights(rack, settings.precision)
        phases = self._phases(rack)
        check_restarts(dataloader, sum(not phase.continues for phase in phases))
        check_rows(dataloader, self.processes)
        self._check_validation(validation, dataloader)
        self._check_best(phases)
        checkpoints = self._checkpoints(rack)
        resumed = checkpoints.resume(rack) if checkpoints is not None and settings.resume else None
        rack.zero_grad()
        shared = SharedRack(rack, self.processes, settings, objective)
        self._place(shared.rack)
        start = time.perf_counter()
        with (
            seeded(self.processes.seed(settings.seed), self.device),
            closing(BlockStore(shared.rack, self.device, scope.offload, self.offload_dir)) as store,
            closing(PrefixOutputs(shared.rack, store, scope.cache_bytes, scope.cache_dir)) as prefix,
            self._logs(phases, resumed, None if checkpoints is None else checkpoints.begin_run()) as logs,
            self._termination() as terminates,
            checkpoints or nullcontext(),
        ):
            loop = TrainingLoop(
                shared,
                settings,
                objective,
                dataloader,
                learning_rate=self.learning_rate,
                store=store,
                prefix=prefix,
                meter=self._meter(rack),
                checkpoints=checkpoints,
                logs=logs,
                validation=validation if settings.eval_interval else None,
                terminates=terminates,
                bundles=self._bundles(),
            )
            if checkpoints is not None and resumed is not None:
                checkpoints.restore({"run": loop}, resumed)
            try:
                loop.run(phases)
            except (NonFiniteStepError, GuardError):  # in every process at the same step
                shared.gather()
                raise
            finally:
                rack.train()
            shared.gather()
        self.processes.wait()  # until rank 0 has written its files
        return self._result(rack, loop, phases, time.perf_counter() - start, resumed or 0)

    def learning_rate(self, step: int, total_steps: int | None = None) -> float:
        """Return the learning rate of `step`, counted from 0, in a schedule of `total_steps`.

        None: `max_steps`. A schedule of another length, such as that of units with `polish_steps`, has a
        warm-up of the same fraction.
        """
        return learning_rate(self.config.training, step, total_steps)

    def evaluate(self, rack: Rack, dataloader: Iterable[Batch]) -> float:
        """Return the mean loss in nats of all targets in one epoch of `dataloader`, in eval mode.

        Each of several processes passes its share of the data, or all of it. The mean is over all of them,
        and every process has to call. With "fsdp" the Rack stays on its device, and its Blocks are copied one
        by one.

        Masks of the objective depend only on the index of the batch: two calls use the same masks. The
        training mode of each module is restored. NaN if there is no target.

        Raises:
            ValueError: attention that does not fit the objective.
        """
        settings = self.config.training
        objective = Objective(settings.objective, rack.vocab_size)
        objective.check(rack)
        was_on = rack.final_norm.weight.device
        self._place(rack)
        evaluation = Evaluation(objective, settings, self.processes, alone=True)

        def total(targets: Targets) -> Tensor:
            hidden_BTC = hidden_states(rack, targets, self.device)
            return evaluation.objective.total(rack.final_norm, rack.lm_head, hidden_BTC, targets)

        try:
            with evaluating(rack):
                return evaluation.mean_loss(total, dataloader)
        finally:
            if settings.distributed.strategy == "fsdp":  # its Blocks are still on this device
                self._place_ends(rack, was_on)

    def trainer_spec(self) -> TrainerSpec:
        """Return this training as a `TrainerSpec` for `check_trainer`. It builds a new Rack."""
        settings = self.config.training
        key = "training.training_architecture"
        architecture = settings.training_architecture
        require(architecture == "rackwise", key, architecture, "'rackwise', to be checked")
        require(settings.precision != "float8", "training.precision", "float8", "any other, to be checked")
        return TrainerSpec(
            build=lambda: RackRun(self.config, self.learning_rate, self.evaluate),
            name=type(self).__name__,
            vocab_size=self.config.model.vocab_size,
            max_norm=settings.grad_clip,
            learning_rate=self.learning_rate,
            never_waits=True,
            notes=f"precision {settings.precision}" + (", compiled" if settings.compile else ""),
        )

    def _phases(self, rack: Rack) -> list[Phase]:
        """Return the phases of the plan that have trainable parameters."""
        settings = self.config.training
        own_heads = settings.scope.head == "per_unit"
        require(
            not (own_heads and rack.tie_embeddings),
            "training.scope.head",
            "per_unit",
            "'shared' for a Rack with tie_embeddings: its head is the embedding, which all units have",
        )
        require(
            not settings.watch_logits or any(_has_logits(module) for module in rack.modules()),
            "training.watch_logits",
            settings.watch_logits,
            "false for a Rack without softmax attention, which has no logits",
        )
        blocks = rack.get_blocks()
        trains = [any(p.requires_grad for p in block.parameters()) for block in blocks]
        phases = plan_phases(rack.blocks_per_stack, settings)
        if settings.training_architecture != "rackwise":
            phases = [phase for phase in phases if any(trains[i] for i in phase.unit.blocks)]
            if not phases:
                raise ValueError("model: every Block is frozen; unfreeze a Stack to train it")
            # From right to left, the head trains with the first unit that can train.
            phases[0] = replace(phases[0], trains_head=True)
            phases[-1] = replace(phases[-1], is_last=True)
        names = {id(p): name for name, p in rack.named_parameters()}
        for weight in residual_ends(blocks[i] for phase in phases for i in phase.enters):
            frozen = f"false while {names[id(weight)]} is frozen: a Block enters with zeros there"
            require(weight.requires_grad, "training.scope.growth", True, frozen)
        return phases

    def _check_validation(self, validation: Iterable[Batch] | None, dataloader: Iterable[Batch]) -> None:
        interval = self.config.training.eval_interval
        given = "data to evaluate: train_architecture(rack, dataloader, validation)"
        require(interval is None or validation is not None, "training.eval_interval", interval, given)
        if interval is not None and validation is not None:
            once = isinstance(validation, Iterator)
            kind = type(validation).__name__
            require(not once, "validation", kind, "what gives its batches again each time, as a list")
            some = length_hint(validation, 1) > 0
            require(some, "validation", "no batch", "at least one, with training.eval_interval")
            check_apart(dataloader, validation, saves=self.config.training.checkpoint_dir is not None)
            check_rows(validation, self.processes)

    def _check_best(self, phases: list[Phase]) -> None:
        settings, kept = self.config.training, self.config.training.checkpoint
        if settings.eval_interval is None or not kept.keep_best:
            return
        steps, saves = sum(phase.steps for phase in phases), settings.save_interval
        both = math.lcm(saves, settings.eval_interval)
        some = both <= steps or steps % settings.eval_interval == 0
        every = kept.keep_every
        by_step = every is not None and not any(step % every for step in (saves, steps))
        all_stay = by_step or math.ceil(steps / saves) <= kept.keep_last
        evaluated = f"0, or an eval_interval that divides a step that is saved: {saves}, ..., or {steps}"
        require(some or all_stay, "training.checkpoint.keep_best", kept.keep_best, evaluated)

    def _checkpoints(self, rack: Rack) -> RackCheckpoints | None:
        directory = self.config.training.checkpoint_dir
        if directory is None:
            return None
        checkpoints = RackCheckpoints(directory, self.config, on_complete=self.on_checkpoint)
        checkpoints.check(rack)
        if not self.config.training.resume:
            checkpoints.refuse_old_run()
        return checkpoints

    @contextmanager
    def _termination(self) -> Iterator[Callable[[int], int] | None]:
        """Handle SIGTERM and Ctrl-C, if a checkpoint folder is configured and this is the main thread."""
        saves = self.config.training.checkpoint_dir is not None
        if not saves or threading.current_thread() is not threading.main_thread():
            yield None
            return
        interval = self.config.training.log_interval
        with Termination() as termination:

            def exit_code(steps: int) -> int:
                # All processes stop at the same step. The exchange between them synchronises the host.
                if self.processes.world_size > 1 and (
                    steps % interval or not termination.requested_anywhere()
                ):
                    return 0
                return termination.exit_code

            yield exit_code

    @property
    def offload_dir(self) -> Path | None:
        """Folder of offloaded Blocks, with a subfolder for each of several processes. None: not on disk."""
        directory, processes = self.config.training.scope.offload_dir, self.processes
        if directory is None:
            return None
        return Path(directory) / f"rank-{processes.rank}" if processes.world_size > 1 else Path(directory)

    def _place(self, rack: Rack) -> None:
        """Move the Rack to the device, except Blocks that are offloaded or will be sharded."""
        settings = self.config.training
        elsewhere = settings.scope.offload != "none" or settings.distributed.strategy == "fsdp"
        if elsewhere:
            self._place_ends(rack, self.device)
        else:
            rack.to(self.device)

    @staticmethod
    def _place_ends(rack: Rack, device: torch.device) -> None:
        ends: list[nn.Module] = [rack.embedding, rack.final_norm, rack.lm_head]
        for part in ends:
            part.to(device)

    @contextmanager
    def _logs(self, phases: list[Phase], resumed: int | None, run: str | None) -> Iterator[list[RecordLog]]:
        """Open the logs of the main process, and close them at the end.

        Args:
            phases: phases of the run.
            resumed: number of steps of the resumed checkpoint. Log entries of later steps are replaced. None:
                the run begins.
            run: identity of the run, or None without checkpoints.
        """
        telemetry = self.config.training.telemetry
        opened = list(self.logs) if self.processes.is_main else []
        first_step = (resumed or 0) if self.config.training.resume else None
        with ExitStack() as logs:
            if self.processes.is_main:
                check_places(telemetry, resumes=self.config.training.resume)
            if telemetry.jsonl is not None and self.processes.is_main:
                opened.append(logs.enter_context(JsonLinesLog(telemetry.jsonl, first_step, run)))
            if telemetry.tensorboard is not None and self.processes.is_main:
                opened.append(logs.enter_context(TensorBoardLog(telemetry.tensorboard, first_step, run)))
            if self.progress:
                total_steps = sum(phase.steps for phase in phases)
                opened.append(logs.enter_context(TrainingProgress(total_steps)))
            yield opened

    def _bundles(self) -> Path | None:
        directory = self.config.training.bundle_dir
        return None if directory is None else new_bundle_folder(directory, self.processes)

    def _meter(self, rack: Rack) -> ThroughputMeter:
        """Return a throughput meter. Utilisation is defined only if the complete Rack trains."""
        settings, flops, peak = self.config.training, None, peak_flops(self.device)
        if settings.training_architecture == "rackwise" and not settings.scope.growth:
            count = model_flops(rack, batch_size=1, seq_len=settings.seq_len, mode="train")
            flops = None if count is None else count.per_token()
        peak = None if peak is None else peak * self.processes.world_size
        return ThroughputMeter(self.device, flops_per_token=flops, peak_flops=peak)

    def _result(
        self, rack: Rack, loop: TrainingLoop, phases: list[Phase], seconds: float, resumed: int
    ) -> TrainingResult:
        settings, records, units = self.config.training, loop.records, loop.units
        result = TrainingResult(
            training_architecture=settings.training_architecture,
            n_stacks=len(rack.stacks),
            blocks_per_stack=rack.blocks_per_stack,
            num_stacks=len(rack.stacks),
            parameters=rack.get_parameter_count(),
            trainable_parameters=rack.get_trainable_parameter_count(),
            num_batches=sum(unit["num_batches"] for unit in units),
            avg_loss=training_loss(records),
            final_loss=units[-1]["final_loss"],
            training_history=epoch_losses(records[-len(loop.epochs) :], loop.epochs),
            seconds=seconds,
            tokens_per_second=sum(record.tokens or 0 for record in records[resumed:]) / seconds,
            records=records,
        )
        if settings.eval_interval is not None:
            result["validation"] = loop.validation_records
        if settings.guard is not None:
            result["alarms"] = loop.alarms
            result["skipped_steps"] = sum(alarm.action != "clipped" for alarm in loop.alarms)
        if settings.training_architecture == "rackwise":
            return result
        if settings.scope.polish_steps:
            result["polish"] = units.pop()
        result["results"] = units
        total = "total_stacks" if settings.training_architecture == "stackwise" else "total_blocks"
        result[total] = sum(phase.unit.stack is not None for phase in phases)  # type: ignore[literal-required]
        return result


def _has_logits(module: nn.Module) -> bool:
    return isinstance(module, Attention | LatentAttention) and not isinstance(module, KernelAttention)
