"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from stackwise.argument import check_choice, check_sizes, require

__all__ = ["get_lr_with_warmup"]

_KINDS = ("cosine", "linear", "constant")


def get_lr_with_warmup(
    step: int,
    warmup_steps: int,
    total_steps: int,
    base_lr: float,
    min_lr: float = 0.0,
    schedule: str = "cosine",
) -> float:
    """Learning rate of one step.

    It rises linearly over the first `warmup_steps` steps and reaches `base_lr` at the last of them;
    from the step after, it goes from `base_lr` to exactly `min_lr` at the last step (or stays, for
    "constant"). `warmup_steps=0` starts at `base_lr`; a run of one step is at `base_lr`.

    Args:
        step: 0 to total_steps - 1; beyond, the last value holds.
        warmup_steps: 0 to total_steps.
        total_steps: length of the run, at least 1.
        base_lr: the peak.
        min_lr: the end, at most base_lr.
        schedule: "cosine" (Loshchilov & Hutter 2017), "linear" or "constant".

    Raises:
        ValueError: an argument out of range.
    """
    check_choice("schedule", schedule, _KINDS)
    check_sizes(total_steps=total_steps)
    require(0 <= warmup_steps <= total_steps, "warmup_steps", warmup_steps, f"0 to total_steps={total_steps}")
    require(0 <= min_lr <= base_lr, "min_lr", min_lr, f"0 to base_lr={base_lr}")
    require(step >= 0, "step", step, ">= 0")
    step = min(step, total_steps - 1)
    if step < warmup_steps:
        return base_lr * ((step + 1) / warmup_steps)
    if schedule == "constant" or total_steps == 1:
        return base_lr
    if step == total_steps - 1:
        return min_lr
    progress = (step - warmup_steps) / (total_steps - 1 - warmup_steps)
    fall = progress if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return max(min_lr, base_lr - (base_lr - min_lr) * fall)
