"""Learning-rate schedule: the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import get_args

from stackwise.config import ScheduleKind, TrainingConfig
from stackwise.support.arguments import check_choice, check_sizes, require

__all__ = ["get_lr_with_warmup", "learning_rate"]

_KINDS = get_args(ScheduleKind)


def get_lr_with_warmup(
    step: int,
    warmup_steps: int,
    total_steps: int,
    base_lr: float,
    min_lr: float = 0.0,
    schedule: str = "cosine",
    decay_fraction: float = 0.2,
) -> float:
    """Return the learning rate of one step.

    The rate rises linearly over the first `warmup_steps` steps and reaches `base_lr` at the last of them.
    After the warm-up it falls from `base_lr` to exactly `min_lr` at the last step. "constant" stays at
    `base_lr`. "wsd" stays at `base_lr` until the last `decay_fraction` of the run, rounded to steps and at
    least one, in which it falls linearly to `min_lr`. If the warm-up overlaps these steps, the fall starts
    after it and is steeper. "inverse_sqrt" is `base_lr * sqrt(w / (step + 1))`, at least `min_lr`, with w
    being `warmup_steps`, or 1 without a warm-up.

    `warmup_steps=0` starts at `base_lr`. A run of one step uses `base_lr`, and so does the last step of a run
    that consists of the warm-up.

    Args:
        step: 0 to total_steps - 1; a larger step has the last value.
        warmup_steps: 0 to total_steps.
        total_steps: length of the run, at least 1.
        base_lr: peak learning rate.
        min_lr: final learning rate, at most base_lr.
        schedule: "cosine" (Loshchilov & Hutter 2017), "linear", "constant", "wsd" (Hu et al. 2024,
            arXiv:2404.06395) or "inverse_sqrt" (Vaswani et al. 2017).
        decay_fraction: fraction of the run, above 0 and at most 1; for "wsd".

    Raises:
        ValueError: an argument out of range.
    """
    check_choice("schedule", schedule, _KINDS)
    check_sizes(total_steps=total_steps)
    require(0 <= warmup_steps <= total_steps, "warmup_steps", warmup_steps, f"0 to total_steps={total_steps}")
    require(0 <= min_lr <= base_lr, "min_lr", min_lr, f"0 to base_lr={base_lr}")
    require(0 < decay_fraction <= 1, "decay_fraction", decay_fraction, "above 0, at most 1")
    require(step >= 0, "step", step, ">= 0")
    last = total_steps - 1
    step = min(step, last)
    if step < warmup_steps:
        return base_lr * ((step + 1) / warmup_steps)
    if schedule == "inverse_sqrt":
        return max(min_lr, base_lr * math.sqrt(max(warmup_steps, 1) / (step + 1)))
    if schedule == "constant" or total_steps == 1:
        return base_lr
    if step == last:
        return min_lr
    start = warmup_steps
    if schedule == "wsd":
        start = max(start, last - max(1, round(decay_fraction * total_steps)))
    progress = max(0, step - start) / (last - start)
    fall = 0.5 * (1 - math.cos(math.pi * progress)) if schedule == "cosine" else progress
    return max(min_lr, base_lr - (base_lr - min_lr) * fall)


def learning_rate(settings: TrainingConfig, step: int, total_steps: int | None = None) -> float:
    """Return the learning rate of `step`, counted from 0, in a schedule of `total_steps`.

    Args:
        settings: `max_steps`, `schedule` and `optimizer.lr` are read.
        step: number of the step in the schedule.
        total_steps: length of the schedule, such as that of a unit with `polish_steps`; its warm-up has the
            same share. None: `max_steps`.
    """
    schedule = settings.schedule
    total_steps = settings.max_steps if total_steps is None else total_steps
    warmup_steps = settings.max_steps // 10 if schedule.warmup_steps is None else schedule.warmup_steps
    return get_lr_with_warmup(
        step,
        warmup_steps * total_steps // settings.max_steps,
        total_steps,
        settings.optimizer.lr,
        schedule.min_lr,
        schedule.kind,
        schedule.decay_fraction,
    )
