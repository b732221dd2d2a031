"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

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
    "constant"). `warmup_steps=0` starts at `base_lr`.

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
    if schedule not in _KINDS:
        raise ValueError(f"schedule: got {schedule!r}; allowed: {', '.join(_KINDS)}")
    if not 0 <= warmup_steps <= total_steps or total_steps < 1:
        raise ValueError(f"warmup_steps: got {warmup_steps}; allowed: 0 to total_steps={total_steps} (>= 1)")
    if step < 0:
        raise ValueError(f"step: got {step}; allowed: >= 0")
    if step < warmup_steps:
        return base_lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return base_lr
    decay_steps = total_steps - 1 - warmup_steps
    progress = 1.0 if decay_steps <= 0 else min(1.0, (step - warmup_steps) / decay_steps)
    fall = progress if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return base_lr + (min_lr - base_lr) * fall
