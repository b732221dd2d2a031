"""TrainingResult: what a run did, unit by unit and in all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from stackwise.model.rack import Rack
from stackwise.stability.guard import Alarm
from stackwise.stability.telemetry import StepRecord, mean_loss
from stackwise.training.evaluation import ValidationRecord
from stackwise.training.phase_model import blocks_of
from stackwise.training.scope import Phase

__all__ = ["EpochLoss", "TrainingResult", "UnitResult", "epoch_losses", "training_loss", "unit_result"]


class EpochLoss(TypedDict):
    """Mean training loss of one pass over the data, in nats."""

    epoch: int
    loss: float


class UnitResult(TypedDict):
    """What one phase did. Losses in nats, means over steps that predict something.

    Keys:
        stack_idx, block_idx: which unit; the second within the Stack, and of `blockwise` training only.
        num_blocks: of the unit.
        parameters, trainable_parameters: of the unit, without embedding and head.
        num_batches: that it trained on.
        first_record: index of its first step in `TrainingResult.records`.
        prefix_blocks: how many Blocks were computed in front of it, over all its batches.
        seconds: that it took; of a run that went on, since then.
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
    """What a run did. Losses in nats, means over steps that predict something.

    Keys:
        results: of each unit, in the order of training; not of `rackwise` training.
        polish: of the steps that all units trained together in the end.
        total_stacks, total_blocks: how many units there are, of `stackwise` and `blockwise` training.
        validation: of every `eval_interval` steps, where that is asked for.
        alarms: of the guard, where there is one; `step` is the number of the update that was to be made.
        skipped_steps: how many were left out because of them.
        records: of every step of every unit, in their order; NaN is the loss of one that predicts nothing.
        training_history: by pass over the data; of local scopes that of the last unit.
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
    """The result of a phase whose steps are `records`; `final_loss` is the mean of the `last` of them."""
    blocks = [blocks_of(rack)[i] for i in phase.unit.blocks]
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
    """Mean loss in nats of the steps that predict something; NaN: none does."""
    return mean_loss([record for record in records if not math.isnan(record.loss)])


def epoch_losses(records: Sequence[StepRecord], epochs: Sequence[int]) -> list[EpochLoss]:
    """The mean loss of each pass, of steps that belong to the pass beside them."""
    return [
        {
            "epoch": epoch,
            "loss": training_loss([r for r, e in zip(records, epochs, strict=True) if e == epoch]),
        }
        for epoch in sorted(set(epochs))
    ]
