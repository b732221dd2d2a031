"""TrainStep: one batch forwards, backwards and into the weights, without the host waiting for any of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stackwise.config import TrainingConfig
from stackwise.model.compilation import compiled
from stackwise.model.rack import Rack
from stackwise.stability.telemetry import global_norm, gradient_norms, norm_by_rows
from stackwise.training.objective import next_token_loss
from stackwise.training.optimizer import clip_divisor, create_optimizer
from stackwise.training.precision import autocast

__all__ = ["StepOutcome", "TrainStep"]


class StepOutcome(NamedTuple):
    """Scalars on the device.

    Attributes:
        loss: in nats, before the update.
        grad_norm: global L2 norm of the gradient, before clipping.
        skipped: whether either is not finite, and the update was left out.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


class TrainStep:
    """The step that `settings` describe: precision, clipping, optimizer, compiled or not.

    Args:
        rack: on its device. With `precision: bf16_weights` its trainable parameters are bfloat16 from
            here on, until `optimizer.finish()`.
        settings: `training` of a configuration.

    Raises:
        ValueError: nothing to train.
    """

    def __init__(self, rack: Rack, settings: TrainingConfig) -> None:
        self.rack, self.settings = rack, settings
        self.device = rack.embedding.weight.device
        self.optimizer = create_optimizer(
            rack,
            settings.optimizer,
            masters=settings.precision == "bf16_weights",
            compile=settings.compile,
        )
        # The loss is compiled with the model: logits are then reduced as they are widened.
        self._loss = compiled(next_token_loss) if settings.compile else next_token_loss
        # On other devices the norms are one fused kernel group as it is.
        on_cpu = settings.compile and self.device.type == "cpu"
        self._norm = compiled(norm_by_rows) if on_cpu else None

    def __call__(self, batch: Mapping[str, Tensor], lr: float) -> StepOutcome:
        """Train on `batch` (see `next_token_loss`) at learning rate `lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]
        with autocast(self.settings.precision, self.device):
            loss = self._loss(self.rack, batch)
        loss.backward()
        # Asked anew each time: Stacks may have come and gone.
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = self._global_norm(parameters)
        skipped = ~(loss.isfinite() & norm.isfinite())
        # Both attributes are read by the fused optimizers; the gradients are scaled in their pass.
        if self.settings.grad_clip is not None:
            self.optimizer.grad_scale = clip_divisor(norm, self.settings.grad_clip)
        self.optimizer.found_inf = skipped.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepOutcome(loss.detach(), norm, skipped)

    def _global_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._norm is None or not gradients:
            return global_norm(gradient_norms(parameters))
        with torch.no_grad():
            norm: Tensor = self._norm(gradients)
            return norm
