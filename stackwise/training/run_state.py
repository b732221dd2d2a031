"""RunState: what a run has been through so far, as tensors and plain values.

Shapes: N steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stackwise.config import StackWiseConfig
from stackwise.stability.telemetry import StepRecord

__all__ = ["check_same_run", "records_of", "state_of_guard_from", "state_of_records"]

# What may differ when a run goes on: how often something is looked at, where it computes, and what holds it.
_FREE = (
    "training.resume",
    "training.device",
    "training.compile",
    "training.log_interval",
    "training.eval_interval",
    "training.eval_batches",
    "training.checkpoint_dir",
    "training.save_interval",
    "training.checkpoint",
    "training.scope.cache_bytes",
    "training.scope.cache_dir",
    "training.scope.offload",
    "training.scope.offload_dir",
    "training.recompute",
    "training.distributed",
    "training.telemetry",
    "training.guard.bundle_dir",
    "training.guard.bundle_weights",
    "training.guard.max_bundles",
    "training.guard.snapshot_on_host",
)

# May differ as well, and is told: a run that ended for what was broken goes on by another policy.
_GUARD = "training.guard"

_ROWS = "training.batch_size of all processes together"


def state_of_records(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Records by column; the norms of parameters are left to the logs."""
    units = sorted({record.unit for record in records if record.unit is not None})
    place = {unit: index for index, unit in enumerate(units)}
    return {
        "step_N": torch.tensor([record.step for record in records], dtype=torch.int64),
        "numbers_N3": torch.tensor(
            [(record.loss, record.grad_norm, record.lr) for record in records], dtype=torch.float64
        ).reshape(-1, 3),
        "skipped_N": torch.tensor([record.skipped for record in records], dtype=torch.bool),
        "tokens_N": torch.tensor(
            [-1 if record.tokens is None else record.tokens for record in records], dtype=torch.int64
        ),
        "unit_N": torch.tensor(
            [-1 if record.unit is None else place[record.unit] for record in records], dtype=torch.int64
        ),
        "units": units,
    }


def records_of(state: Mapping[str, Any]) -> list[StepRecord]:
    """The records that `state_of_records` was given, without norms of parameters."""
    units = state["units"]
    columns = (state[key].tolist() for key in ("step_N", "numbers_N3", "skipped_N", "tokens_N", "unit_N"))
    return [
        StepRecord(
            step,
            loss,
            grad_norm,
            lr,
            skipped,
            tokens=None if tokens < 0 else tokens,
            unit=None if unit < 0 else units[unit],
        )
        for step, (loss, grad_norm, lr), skipped, tokens, unit in zip(*columns, strict=True)
    ]


def state_of_guard_from(done: int, new: Mapping[str, Any]) -> dict[str, Any]:
    """State of a guard that is there from a step on, and was not before it.

    Args:
        done: updates of the phase, each of the batches of one step.
        new: the state of a guard that has seen nothing.
    """
    return {
        **new,
        "feed": {**new["feed"], "next_step": done},
        "count": {**new["count"], "done": done},
    }


def check_same_run(
    ours: StackWiseConfig, theirs: Mapping[str, Any], folder: object, processes: tuple[int, int] = (1, 1)
) -> None:
    """Refuse to go on with a run by a configuration that would have led it elsewhere.

    Args:
        ours: of the run that is to go on.
        theirs: that of the checkpoint, as plain values.
        folder: of the checkpoint, for the message.
        processes: how many there are, and how many there were. The rows that all take together are to be as
            many.

    Raises:
        ValueError: naming each key that differs.

    Warns:
        UserWarning: the guard is another one, or is turned on or off.
    """
    mine, saved = dict(_leaves(ours.to_dict())), dict(_leaves(theirs))
    for leaves, count in zip((mine, saved), processes, strict=True):
        leaves[_ROWS] = leaves.pop("training.batch_size", 0) * count
    # Shards are tokens already: no tokenizer is asked, whatever was given.
    path = ours.data.dataset_path
    free = _FREE if path is None or not Path(path).is_dir() else (*_FREE, "data.tokenizer")
    differing = [
        key
        for key in sorted(mine.keys() | saved.keys())
        if mine.get(key) != saved.get(key) and not any(_within(key, each) for each in free)
    ]
    refused = [
        f"{key}: got {mine.get(key)!r}; allowed: {saved.get(key)!r}"
        for key in differing
        if not _within(key, _GUARD)
    ]
    if refused:
        raise ValueError(f"training.resume: {folder} is of another run: " + "; ".join(refused))
    told = [f"{key}: got {mine.get(key)!r}, was {saved.get(key)!r}" for key in differing]
    on, was_on = (any(_within(key, _GUARD) and key != _GUARD for key in each) for each in (mine, saved))
    if on != was_on:
        told = [f"{_GUARD}: turned {'on' if on else 'off'}"]
    if told:
        said = f"training.resume: {folder} is of a run with another guard: {'; '.join(told)}"
        warnings.warn(f"{said}; from here on it holds as it is given now", stacklevel=4)


def _within(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def _leaves(tree: Mapping[Any, Any], path: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        here = f"{path}.{key}".lstrip(".")
        found += _leaves(value, here) if isinstance(value, Mapping) and value else [(here, value)]
    return found
