"""ArchitectureTrainer: the training loop, top to bottom.

Nothing in a step makes the host wait for the device: loss, gradient norm and whether they are
finite stay there; a non-finite step is left out by the fused optimizer itself, and is noticed when
the records are read, every `log_interval` steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypedDict

import torch
from rich.console import Console
from torch import Tensor

from stackwise.config import StackWiseConfig
from stackwise.device import resolve_device
from stackwise.model.mode import evaluating
from stackwise.model.rack import Rack
from stackwise.seed import seeded
from stackwise.stability.telemetry import StepBuffer, StepRecord, mean_loss
from stackwise.trainer_spec import TrainerSpec
from stackwise.training.checkpoint import CheckpointManager
from stackwise.training.master import MasterAdamW
from stackwise.training.objective import next_token_total, require_causal
from stackwise.training.precision import autocast
from stackwise.training.progress import TrainingProgress
from stackwise.training.run import RackRun
from stackwise.training.schedule import get_lr_with_warmup
from stackwise.training.step import TrainStep

__all__ = ["ArchitectureTrainer", "NonFiniteStepError", "TrainingResult"]

Batch = Mapping[str, Tensor] | Tensor | Sequence[Tensor]


class NonFiniteStepError(ArithmeticError):
    """A step had a non-finite loss or gradient. Its update was left out: the weights are sound.

    Attributes:
        record: the first such step.
    """

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        super().__init__(
            f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}; its update was "
            "left out, and the weights are finite"
        )


class EpochLoss(TypedDict):
    """Mean training loss of one pass over the data, in nats."""

    epoch: int
    loss: float


class TrainingResult(TypedDict):
    """What a run did. Losses in nats; `records` has every step."""

    training_architecture: str
    n_stacks: int
    blocks_per_stack: list[int]
    num_stacks: int
    parameters: int
    trainable_parameters: int
    num_batches: int
    avg_loss: float
    final_loss: float
    training_history: list[EpochLoss]
    seconds: float
    tokens_per_second: float
    records: list[StepRecord]


class ArchitectureTrainer:
    """Trains a Rack as `config.training` says; the same seed gives the same weights, bit for bit.

    Args:
        config: `training` is read; `model` only to store it beside checkpoints.
        progress: show progress; None: where standard error is a terminal.

    Raises:
        ConfigError: the configuration contradicts itself.
    """

    def __init__(self, config: StackWiseConfig, *, progress: bool | None = None) -> None:
        config.validate()
        self.config = config
        self.device = resolve_device(config.training.device)
        self.progress = Console(stderr=True).is_terminal if progress is None else progress

    def train_architecture(self, rack: Rack, dataloader: Iterable[Batch]) -> TrainingResult:
        """Train `rack` in place for `training.max_steps` steps of the next-token loss.

        Args:
            rack: moved to the configured device.
            dataloader: batches with `input_ids` (B, N) of N - 1 predictions each, as `next_token_loss`
                takes them, or bare (B, N) tensors. Started again when it ends.

        Raises:
            ValueError: a bidirectional Stack (the loss would leak), nothing to train, no data, or a
                `checkpoint_dir` for a Rack that the configuration does not describe.
            NonFiniteStepError: the loss or the gradient stopped being finite.
        """
        settings = self.config.training
        require_causal(rack)
        checkpoints = None
        if settings.checkpoint_dir is not None:
            checkpoints = CheckpointManager(settings.checkpoint_dir, self.config)
            checkpoints.check(rack)
            if checkpoints.steps():
                raise ValueError(
                    f"training.checkpoint_dir: {settings.checkpoint_dir} already holds checkpoints of steps "
                    f"{checkpoints.steps()}; allowed: a folder without any, so that no two runs mix"
                )
        rack.to(self.device).train()
        rack.zero_grad()
        train_step = TrainStep(rack, settings)
        masters = train_step.optimizer if isinstance(train_step.optimizer, MasterAdamW) else None
        buffer = StepBuffer(settings.log_interval, self.device)
        records: list[StepRecord] = []
        epochs: list[int] = []
        tokens = 0
        start = time.perf_counter()

        with seeded(settings.seed, self.device), _finished(masters), self._progress() as progress:
            for step, (epoch, batch) in zip(range(settings.max_steps), _forever(dataloader), strict=False):
                batch = self._on_device(batch)
                lr = self.learning_rate(step)
                outcome = train_step(batch, lr)
                buffer.write(step, lr, **outcome._asdict())
                epochs.append(epoch)
                tokens += batch["input_ids"][:, 1:].numel()
                saving = checkpoints is not None and (step + 1) % settings.save_interval == 0
                last = step == settings.max_steps - 1
                if buffer.full or saving or last:
                    records += _sound(buffer.drain())
                    if progress:
                        progress.update(records[-1], tokens)
                if checkpoints and (saving or last):
                    with masters.full_precision() if masters else nullcontext():
                        checkpoints.save(step + 1, rack)

        seconds = time.perf_counter() - start
        return TrainingResult(
            training_architecture=settings.training_architecture,
            n_stacks=len(rack.stacks),
            blocks_per_stack=[rack.get_stack(i).num_blocks for i in range(len(rack.stacks))],
            num_stacks=len(rack.stacks),
            parameters=rack.get_parameter_count(),
            trainable_parameters=rack.get_trainable_parameter_count(),
            num_batches=len(records),
            avg_loss=mean_loss(records),
            final_loss=mean_loss(records[-settings.log_interval :]),
            training_history=[
                {
                    "epoch": epoch,
                    "loss": mean_loss([r for r, e in zip(records, epochs, strict=True) if e == epoch]),
                }
                for epoch in sorted(set(epochs))
            ],
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            records=records,
        )

    def learning_rate(self, step: int) -> float:
        """Learning rate of `step`, counted from 0."""
        settings = self.config.training
        warmup_steps = settings.schedule.warmup_steps
        return get_lr_with_warmup(
            step,
            settings.max_steps // 10 if warmup_steps is None else warmup_steps,
            settings.max_steps,
            settings.optimizer.lr,
            settings.schedule.min_lr,
            settings.schedule.kind,
        )

    @torch.no_grad()
    def evaluate(self, rack: Rack, dataloader: Iterable[Batch]) -> float:
        """Mean loss in nats of all tokens of one pass of `dataloader`, in eval mode.

        Each module's mode is put back. NaN where there is nothing to predict.

        Raises:
            ValueError: a bidirectional Stack.
        """
        require_causal(rack)
        rack.to(self.device)
        precision = self.config.training.precision
        total, count = torch.zeros(2, dtype=torch.float64, device=self.device)
        with evaluating(rack):
            for batch in map(_as_mapping, dataloader):
                with autocast("fp32" if precision == "fp32" else "bf16", self.device):
                    batch_total, batch_count = next_token_total(rack, self._on_device(batch))
                total, count = total + batch_total, count + batch_count
        return float(total / count)

    def trainer_spec(self) -> TrainerSpec:
        """What `check_trainer` asks of this training, with a fresh Rack of the configuration."""
        settings = self.config.training
        return TrainerSpec(
            build=lambda: RackRun(self.config, self.learning_rate, self.evaluate),
            name=type(self).__name__,
            vocab_size=self.config.model.vocab_size,
            max_norm=settings.grad_clip,
            learning_rate=self.learning_rate,
            never_waits=True,
            notes=f"precision {settings.precision}" + (", compiled" if settings.compile else ""),
        )

    def _on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch, copied from pinned memory so that the host does not wait for the copy."""
        pinning = self.device.type == "cuda"
        return {
            key: (value.pin_memory() if pinning and not value.is_cuda else value).to(
                self.device, non_blocking=True
            )
            for key, value in batch.items()
        }

    def _progress(self) -> TrainingProgress | nullcontext[None]:
        return TrainingProgress(self.config.training.max_steps) if self.progress else nullcontext()


@contextmanager
def _finished(masters: MasterAdamW | None) -> Iterator[None]:
    """However training ends, the weights are float32 again."""
    try:
        yield
    finally:
        if masters is not None:
            masters.finish()


def _sound(records: list[StepRecord]) -> list[StepRecord]:
    for record in records:
        if record.skipped:
            raise NonFiniteStepError(record)
    return records


def _forever(dataloader: Iterable[Batch]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    epoch = 0
    while True:
        if hasattr(dataloader, "set_epoch"):
            dataloader.set_epoch(epoch)
        batch = None
        for batch in dataloader:
            yield epoch, _as_mapping(batch)
        if batch is None:
            raise ValueError("dataloader: got no batch" + (" in a later epoch" if epoch else ""))
        epoch += 1


def _as_mapping(batch: Batch) -> Mapping[str, Tensor]:
    if isinstance(batch, tuple | list) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return batch
    raise ValueError(
        f"dataloader: got a batch of {type(batch).__name__}; allowed: ids, or a dict with input_ids"
    )
