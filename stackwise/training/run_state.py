"""Run state: the records of a run as tensors and plain values, and the checks before a resume.

Shapes: N steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stackwise.config import StackWiseConfig
from stackwise.stability.telemetry import StepRecord
from stackwise.training.schedule import learning_rate

__all__ = ["check_same_run", "records_of", "state_of_guard_from", "state_of_records"]

# Keys that may change when a run is resumed: intervals, places, devices and the use of memory.
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
    "training.objective.logits_chunk",
    "training.distributed",
    "training.telemetry",
    "training.bundle_dir",
    "training.guard.bundle_weights",
    "training.guard.max_bundles",
    "training.guard.snapshot_on_host",
)

# May increase, with a warning if that changes the learning rate.
_LENGTH = "training.max_steps"
# May change with a warning: a run that ended because of a fault continues with another policy.
_GUARD = ("training.guard", "training.watch_logits")

_ROWS = "training.batch_size of all processes together"


def state_of_records(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the records as numbers, without the norms of parameters, which only the logs store."""
    units = sorted({record.unit for record in records if record.unit is not None})
    place: dict[str | None, int] = {unit: index for index, unit in enumerate(units)}
    counts = [-1 if record.tokens is None else record.tokens for record in records]
    rows = [
        (r.step, r.loss, r.grad_norm, r.lr, r.skipped, count, place.get(r.unit, -1))
        for r, count in zip(records, counts, strict=True)
    ]
    # float64 has every integer up to 2**53.
    return {"rows_N7": torch.tensor(rows, dtype=torch.float64).reshape(-1, 7), "units": units}


def records_of(state: Mapping[str, Any]) -> list[StepRecord]:
    """Return the records that were passed to `state_of_records`, without norms of parameters."""
    return [
        StepRecord(
            int(step),
            loss,
            grad_norm,
            lr,
            bool(skipped),
            tokens=None if tokens < 0 else int(tokens),
            unit=None if unit < 0 else state["units"][int(unit)],
        )
        for step, loss, grad_norm, lr, skipped, tokens, unit in state["rows_N7"].tolist()
    ]


def state_of_guard_from(done: int, new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a guard that was enabled at a step of a run.

    Args:
        done: number of updates of the phase, one per step of the data.
        new: state of a new guard.
    """
    return {
        **new,
        "loader": {**new["loader"], "next_step": done},
        "count": {**new["count"], "done": done},
    }


def check_same_run(
    ours: StackWiseConfig,
    theirs: Mapping[str, Any],
    folder: object,
    processes: tuple[int, int] = (1, 1),
    step: int = 0,
) -> None:
    """Refuse to resume a run with a configuration that would change its result.

    `training.max_steps` may increase in rackwise training without growth. Otherwise units that are finished,
    and Stacks that have joined, would not fit the new length.

    Args:
        ours: configuration of the resumed run.
        theirs: configuration in the checkpoint, as plain values.
        folder: folder of the checkpoint, for messages.
        processes: number of processes now, and in the checkpoint. The number of rows in a step has to agree.
        step: number of finished steps.

    Raises:
        ValueError: names each key that differs.

    Warns:
        UserWarning: the guard differs, or more steps change the learning rate.
    """
    mine, saved = dict(_leaves(ours.to_dict())), dict(_leaves(theirs))
    for leaves, count in zip((mine, saved), processes, strict=True):
        leaves[_ROWS] = leaves.pop("training.batch_size", 0) * count
    differing = [
        key
        for key in sorted(mine.keys() | saved.keys())
        if mine.get(key) != saved.get(key) and not any(_within(key, each) for each in _free_keys(ours, saved))
    ]
    whole = ours.training.training_architecture == "rackwise" and not ours.training.scope.growth
    longer = whole and _LENGTH in differing and mine[_LENGTH] > saved.get(_LENGTH, 0)
    if longer:
        differing.remove(_LENGTH)
    refused = [
        f"{key}: got {mine.get(key)!r}; allowed: {saved.get(key)!r}"
        + (" or more" if key == _LENGTH and whole else "")
        for key in differing
        if not _is_of_guard(key)
    ]
    if refused:
        raise ValueError(
            f"training.resume: {folder} was written with another configuration: " + "; ".join(refused)
        )
    if longer:
        _warn_of_schedule(ours, theirs, step)
    _warn_of_guard(mine, saved, [key for key in differing if _is_of_guard(key)], folder)


def _warn_of_guard(
    mine: Mapping[str, Any], saved: Mapping[str, Any], differing: Sequence[str], folder: object
) -> None:
    """Warn if keys of the guard differ."""
    told = [f"{key}: got {mine.get(key)!r}, was {saved.get(key)!r}" for key in differing]
    on, was_on = (any(key.startswith("training.guard.") for key in each) for each in (mine, saved))
    if on != was_on:
        told = [f"training.guard: turned {'on' if on else 'off'}"]
    if told:
        said = f"training.resume: {folder} was written with another guard: {'; '.join(told)}"
        warnings.warn(f"{said}; the run continues with the current guard", stacklevel=5)


def _is_of_guard(key: str) -> bool:
    return any(_within(key, each) for each in _GUARD)


def _free_keys(ours: StackWiseConfig, saved: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that may change."""
    if ours.data.dataset_path is None or saved.get("data.dataset_path") is None:
        return _FREE
    return (*_FREE, "data.dataset_path")  # the place in the data contains a digest of the tokens


def _warn_of_schedule(ours: StackWiseConfig, theirs: Mapping[str, Any], done: int) -> None:
    """Warn if the learning rate of the next step, or of the last one, depends on the length of the run."""
    now, before = ours.training, StackWiseConfig.from_dict(theirs).training
    step = min(done, before.max_steps - 1)
    rate, old_rate = learning_rate(now, step), learning_rate(before, step)
    if rate != old_rate:
        warnings.warn(
            f"{_LENGTH}: got {now.max_steps}, was {before.max_steps}: the schedule {now.schedule.kind!r} "
            f"depends on it, and the run continues with the new one. The learning rate of step {step} is "
            f"{rate:.4g} in the new schedule and {old_rate:.4g} in the old one",
            stacklevel=5,
        )


def _within(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def _leaves(tree: Mapping[Any, Any], path: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        here = f"{path}.{key}".lstrip(".")
        found += _leaves(value, here) if isinstance(value, Mapping) and value else [(here, value)]
    return found
