"""LossScale: dynamic loss scale, so that float16 gradients do not underflow."""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.support.arguments import check_number, check_sizes
from stackwise.training.precision import compute_dtype

__all__ = ["LossScale", "create_loss_scale"]

_SMALLEST = 2.0**-16  # 32 halvings of the initial scale: below it every float16 gradient underflows


class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018, arXiv:1710.03740), like `torch.amp.GradScaler`.

    A step has to call, in this order:

    1. `scale(loss).backward()`
    2. the global norm of the gradients, divided by `divisor()`: the norm that is recorded
    3. `found_inf`: 1 if the loss or the norm is not finite
    4. `optimizer.grad_scale = divisor() * clip_divisor(norm, max_norm)`
    5. `optimizer.step()`, which divides the gradients, or skips the step
    6. `update(found_inf)`

    No host synchronisation is needed. `GradScaler.step` would synchronise, and its `unscale_` reads and
    writes all gradients once more, which the optimizer's own pass does anyway.

    Args:
        device: device of the loss.
        initial: initial scale. 2**16 suits the mean over tokens of a loss in nats.
        growth_interval: number of consecutive finite steps after which the scale doubles. A skipped step
            halves it.

    Raises:
        ValueError: a scale that is not positive, or an interval below 1.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        initial: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> None:
        check_number("initial", initial, "a number above 0", lambda value: value > 0)
        check_sizes(growth_interval=growth_interval)
        self._growth_interval = growth_interval
        self._scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self._sound_steps = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, on which the backward pass is called."""
        return loss * self._scale

    def divisor(self) -> Tensor:
        """Return the divisor of the scaled gradients and of their norm: float32, on the device."""
        return self._scale

    @torch.no_grad()
    def update(self, found_inf: Tensor, counts: Tensor | None = None) -> None:
        """Shrink the scale after a skipped step. Grow it after many consecutive finite steps.

        Args:
            found_inf: scalar, nonzero if the step was skipped; equal in all processes.
            counts: boolean scalar, False if the step must not change the scale; None: True.
        """
        before = self._scale, self._sound_steps
        # New tensors: a caller may still use the divisor of this step.
        left_out = found_inf != 0
        sound_steps = self._sound_steps + 1
        grown = self._scale * 2
        grows = (sound_steps == self._growth_interval) & grown.isfinite()
        kept = torch.where(grows, grown, self._scale)
        self._scale = torch.where(left_out, self._scale / 2, kept)
        starts_anew = left_out | (sound_steps == self._growth_interval)
        self._sound_steps = torch.where(starts_anew, torch.zeros_like(sound_steps), sound_steps)
        if counts is not None:
            self._scale = torch.where(counts, self._scale, before[0])
            self._sound_steps = torch.where(counts, self._sound_steps, before[1])

    def exhausted(self) -> Tensor:
        """Return True if a smaller scale cannot help any gradient: a boolean scalar on the device."""
        return self._scale < _SMALLEST

    def state_dict(self) -> dict[str, float]:
        """Return the scale, and the number of finite steps since its last change. Synchronises the host."""
        return {"scale": self._scale.item(), "sound_steps": self._sound_steps.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state that `state_dict` returned."""
        self._scale = torch.full_like(self._scale, state["scale"])
        self._sound_steps = torch.full_like(self._sound_steps, int(state["sound_steps"]))


def create_loss_scale(precision: str, device: torch.device) -> LossScale | None:
    """Return the loss scale of a precision; None for every precision except "fp16".

    bfloat16 has the exponent range of float32. A scale would have no benefit, and would skip healthy steps.
    """
    if compute_dtype(precision) != torch.float16:
        return None
    return LossScale(device)
