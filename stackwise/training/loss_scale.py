"""LossScale: what the loss is multiplied by so that float16 gradients do not vanish, found while training."""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.support.arguments import check_number, check_sizes
from stackwise.training.precision import compute_dtype

__all__ = ["LossScale", "create_loss_scale"]

_SMALLEST = 2.0**-16  # 32 halvings of the first: below it all that float16 can hold is lost


class LossScale:
    """A dynamic loss scale (Micikevicius et al. 2018, arXiv:1710.03740), as `torch.amp.GradScaler` has it.

    A step with it, in the only right order:

    1. `scale(loss).backward()`
    2. the global norm of the gradients, divided by `divisor()`: the norm that is recorded
    3. whether loss and norm are finite: `found_inf`
    4. `optimizer.grad_scale = divisor() * clip_divisor(norm, max_norm)`
    5. `optimizer.step()`, which divides the gradients, or leaves the step out
    6. `update(found_inf)`

    Nothing makes the host wait: `GradScaler.step` would, and its `unscale_` reads and writes all
    gradients once more for what the optimizer's own pass does as well.

    Args:
        device: of the loss.
        initial: the first scale. 2**16 suits the mean over tokens of a loss in nats.
        growth_factor: by which it grows after `growth_interval` sound steps in a row.
        backoff_factor: by which it shrinks after a step that was left out.
        growth_interval: in steps.

    Raises:
        ValueError: a scale that is not positive, a growth factor that is not above 1, a backoff factor that
            is not between 0 and 1, or an interval below 1.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        initial: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        check_number("initial", initial, "a number above 0", lambda value: value > 0)
        check_number("growth_factor", growth_factor, "a number above 1", lambda value: value > 1)
        check_number("backoff_factor", backoff_factor, "above 0, below 1", lambda value: 0 < value < 1)
        check_sizes(growth_interval=growth_interval)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        self._scale = torch.tensor(initial, dtype=torch.float32, device=device)
        self._sound_steps = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """What the backward pass starts from."""
        return loss * self._scale

    def divisor(self) -> Tensor:
        """What gradients of the scaled loss, and their norm, are divided by: float32, on the device."""
        return self._scale

    @torch.no_grad()
    def update(self, found_inf: Tensor, counts: Tensor | None = None) -> None:
        """Shrink the scale after a step that was left out; grow it after many that were not.

        Args:
            found_inf: scalar, not zero where the step was left out; the same in every process.
            counts: boolean scalar, false where the step is as if it had not been; None: it counts.
        """
        before = self._scale, self._sound_steps
        # New tensors: who holds the divisor of this step keeps it.
        left_out = found_inf != 0
        sound_steps = self._sound_steps + 1
        grown = self._scale * self._growth_factor
        grows = (sound_steps == self._growth_interval) & grown.isfinite()
        kept = torch.where(grows, grown, self._scale)
        self._scale = torch.where(left_out, self._scale * self._backoff_factor, kept)
        starts_anew = left_out | (sound_steps == self._growth_interval)
        self._sound_steps = torch.where(starts_anew, torch.zeros_like(sound_steps), sound_steps)
        if counts is not None:
            self._scale = torch.where(counts, self._scale, before[0])
            self._sound_steps = torch.where(counts, self._sound_steps, before[1])

    def exhausted(self) -> Tensor:
        """Whether a smaller scale is of no use to any gradient: a boolean scalar on the device."""
        return self._scale < _SMALLEST

    def state_dict(self) -> dict[str, float]:
        """The scale, and the sound steps since it last changed. The host waits for both."""
        return {"scale": self._scale.item(), "sound_steps": self._sound_steps.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self._scale = torch.full_like(self._scale, state["scale"])
        self._sound_steps = torch.full_like(self._sound_steps, int(state["sound_steps"]))


def create_loss_scale(
    precision: str, device: torch.device, *, initial: float = 2.0**16, growth_interval: int = 2000
) -> LossScale | None:
    """The loss scale of a precision; None for all but "fp16".

    bfloat16 has the exponents of float32: a scale would change nothing, but leave out steps that are sound.
    """
    if compute_dtype(precision) != torch.float16:
        return None
    return LossScale(device, initial=initial, growth_interval=growth_interval)
