"""TrainingResult: results of a run, per unit and in total."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from stackwise.model.rack import Rack
from stackwise.stability.guard import Alarm
from stackwise.stability.telemetry import StepRecord, mean_loss
from stackwise.training.evaluation import ValidationRecord
from stackwise.training.scope import Phase

__all__ = ["EpochLoss", "TrainingResult", "UnitResult", "epoch_losses", "training_loss", "unit_result"]


class EpochLoss(TypedDict):
    """Mean training loss of one epoch, in nats."""

    epoch: int
    loss: float


class UnitResult(TypedDict):
    """Result of one phase. Losses in nats, means over steps with targets.

    Keys:
        stack_idx, block_idx: indices of the unit; `block_idx` is relative to the Stack, and only of
            `blockwise` training.
        num_blocks: number of Blocks in the unit.
        parameters, trainable_parameters: counts of the unit, without embedding and head.
        num_batches: number of trained batches.
        first_record: index of its first step in `TrainingResult.records`.
        prefix_blocks: number of computed prefix Blocks, over all its batches.
        seconds: duration; for a resumed phase, since the resume.
    """

    stack_idx: NotRequired[int]
    block_idx: NotRequired[int]
    num_blocks: int
    avg_loss: float
    final_loss: float
    num_batches: int
    parameters: int
    trainable_parameters: int
    first_record: int
    prefix_blocks: int
    seconds: float


class TrainingResult(TypedDict):
    """Result of a run. Losses in nats, means over steps with targets.

    Keys:
        results: results of the units, in the order of training; not for `rackwise` training.
        polish: result of the final steps in which all units train together.
        total_stacks, total_blocks: number of units, for `stackwise` and `blockwise` training.
        validation: results of the evaluations every `eval_interval` steps, if enabled.
        alarms: alarms of the guard, if enabled; `step` is the number of the update that was due.
        skipped_steps: number of steps that were skipped because of alarms.
        records: records of every step of every unit, in order; a step without a target has the loss NaN.
        training_history: mean loss of each epoch; for local scopes, of the last unit.
    """

    training_architecture: str
    n_stacks: int
    blocks_per_stack: list[int]
    num_stacks: int
    total_stacks: NotRequired[int]
    total_blocks: NotRequired[int]
    results: NotRequired[list[UnitResult]]
    polish: NotRequired[UnitResult]
    parameters: int
    trainable_parameters: int
    num_batches: int
    avg_loss: float
    final_loss: float
    validation: NotRequired[list[ValidationRecord]]
    alarms: NotRequired[list[Alarm]]
    skipped_steps: NotRequired[int]
    training_history: list[EpochLoss]
    seconds: float
    tokens_per_second: float
    records: list[StepRecord]


def unit_result(
    rack: Rack,
    phase: Phase,
    records: Sequence[StepRecord],
    *,
    last: int,
    first_record: int,
    num_batches: int,
    prefix_blocks: int,
    seconds: float,
) -> UnitResult:
    """Return the result of a phase with steps `records`; `final_loss` is the mean of the `last` ones."""
    blocks = [rack.get_blocks()[i] for i in phase.unit.blocks]
    result = UnitResult(
        num_blocks=len(blocks),
        avg_loss=training_loss(records),
        final_loss=training_loss(records[-last:]),
        num_batches=num_batches,
        parameters=sum(block.get_parameter_count() for block in blocks),
        trainable_parameters=sum(block.get_trainable_parameter_count() for block in blocks),
        first_record=first_record,
        prefix_blocks=prefix_blocks,
        seconds=seconds,
    )
    if phase.unit.stack is not None:
        result["stack_idx"] = phase.unit.stack
    if phase.unit.block is not None:
        result["block_idx"] = phase.unit.block
    return result


def training_loss(records: Sequence[StepRecord]) -> float:
    """Return the mean loss in nats of the steps with targets; NaN if there are none."""
    return mean_loss([record for record in records if not math.isnan(record.loss)])


def epoch_losses(records: Sequence[StepRecord], epochs: Sequence[int]) -> list[EpochLoss]:
    """Return the mean loss of each epoch. `epochs` has the epoch of each record."""
    return [
        {
            "epoch": epoch,
            "loss": training_loss([r for r, e in zip(records, epochs, strict=True) if e == epoch]),
        }
        for epoch in sorted(set(epochs))
    ]
