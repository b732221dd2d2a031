"""TrainStep: forward pass, backward pass and update for some micro-batches, without host synchronisation.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stackwise.config import TrainingConfig
from stackwise.model.compilation import compiled
from stackwise.model.rack import Rack
from stackwise.stability.telemetry import clip_divisor, global_norm, gradient_norms, norms_by_rows
from stackwise.support.logit_bound import LogitBound, watching
from stackwise.training.distributed import gradient_sync, is_sharded
from stackwise.training.loss_scale import create_loss_scale
from stackwise.training.optimizer import create_optimizer
from stackwise.training.phase_model import PhaseModel
from stackwise.training.precision import autocast
from stackwise.training.processes import Processes
from stackwise.training.targets import Targets

__all__ = ["MicroBatch", "StepOutcome", "TrainStep"]


class MicroBatch(NamedTuple):
    """Batch of one forward and backward pass. A step may use several.

    Attributes:
        targets: targets on the device.
        hidden: computes the output (B, T, C) of the Blocks before the phase. It is called once the
            micro-batch is processed, so that outputs of several ones are not in memory together. None: no
            such Blocks.
    """

    targets: Targets
    hidden: Callable[[], Tensor] | None = None


class StepOutcome(NamedTuple):
    """Results of a step: tensors on the device.

    Attributes:
        loss: loss in nats, before the update.
        mean: the same, but NaN if there is no target.
        grad_norm: global L2 norm of the gradient, before clipping.
        skipped: True if loss or norm is not finite, and the update was skipped.
        norms_P: gradient norm of each parameter that has a gradient.
        names: names of these parameters.
    """

    loss: Tensor
    mean: Tensor
    grad_norm: Tensor
    skipped: Tensor
    norms_P: Tensor
    names: tuple[str, ...]


class TrainStep:
    """Training step of `settings`: precision, clipping, optimizer and compilation.

    Args:
        model: model on its device. With `precision: bf16_weights` its parameters are bfloat16 from here until
            `optimizer.finish()`.
        settings: `training` section of a configuration.
        rack: Rack that contains `model`, for optimizer settings by Stack or by name.
        optimized: module with the parameters of the optimizer; None: `model`.
        processes: processes that train together; None: only this one.

    Attributes:
        model: model that the next call trains.
        optimizer: optimizer of all its parameters.
        loss_scale: loss scale of float16; None for another precision.

    Raises:
        ValueError: nothing to train.
    """

    def __init__(
        self,
        model: PhaseModel,
        settings: TrainingConfig,
        rack: Rack | None = None,
        optimized: nn.Module | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.settings = settings
        self.device = next(model.parameters()).device
        self.processes = processes or Processes(self.device)
        self.optimizer = create_optimizer(
            optimized or model,
            settings.optimizer,
            masters=settings.precision == "bf16_weights",
            compile=settings.compile,
            rack=rack,
        )
        self.loss_scale = create_loss_scale(settings.precision, self.device)
        self._logit_bound = LogitBound(self.device) if settings.watch_logits else None
        self._names = {id(p): name for name, p in (rack or optimized or model).named_parameters()}
        # The loss is compiled together with the model: logits are reduced while they are converted.
        self.take(model)

    def take(self, model: nn.Module) -> None:
        """Train `model` from here on: the result of `SharedRack.wrap`, or a model with more Blocks."""
        self.model = model
        # New for each model: the compiler limits the graphs of a function, and runs further ones uncompiled.
        self._total = compiled(_total) if self.settings.compile else _total
        # On other devices the norms already are one group of fused kernels.
        on_cpu = self.settings.compile and self.device.type == "cpu"
        self._norms = compiled(norms_by_rows) if on_cpu else None

    def __call__(self, batches: Sequence[MicroBatch], lr: float) -> StepOutcome:
        """Train on the mean over all targets of `batches` of all processes, at learning rate `lr`."""
        self.set_rate(lr)
        loss, mean = self.backward(batches)
        parameters = self._with_gradient()
        norms_P = self.gradient_norms()
        norm = global_norm(norms_P)
        skipped = ~(loss.isfinite() & norm.isfinite())
        divisor = self.loss_scale.divisor() if self.loss_scale else None
        # The fused optimizers read both attributes, and scale the gradients in their pass.
        if self.settings.grad_clip is not None:
            clip = clip_divisor(norm, self.settings.grad_clip)
            divisor = clip if divisor is None else clip * divisor
        self.optimizer.grad_scale, self.optimizer.found_inf = divisor, skipped.float()
        self.optimizer.step()
        if self.loss_scale:
            self.loss_scale.update(self.optimizer.found_inf)
        self.optimizer.zero_grad()
        names = tuple(self._names[id(p)] for p in parameters)
        return StepOutcome(loss, mean, norm, skipped, norms_P, names)

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of every group to `lr` times its multiplier."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]

    def backward(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Compute the gradients of a step, times the loss scale. Return the scalars `loss` and `mean`."""
        loss = torch.zeros((), device=self.device)
        with watching(self._logit_bound):
            count = self._count(batches)
            for share, summed in self._shares(self.model, batches, self._total, count):
                self._scaled(summed).backward()  # type: ignore[no-untyped-call]
                loss = loss + share.detach()
        loss = self.processes.sum(loss)
        return loss, loss / count.clamp(max=1)

    def logit(self) -> Tensor | None:
        """Return an upper bound of the attention logits of the last `backward`, in any process: `LogitBound`.

        None without `training.watch_logits`. Collective: every process has to call.
        """
        return None if self._logit_bound is None else self.processes.maximum(self._logit_bound.take())

    def again(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Recompute a step, uncompiled, except for its last backward pass, which the caller runs.

        With a loss scale, the caller applies it as well. Every process has to call this method, and
        `backward()` on the result. With DDP each process has the gradient of its own batches, so that a
        non-finite batch can be attributed to its process.

        Returns:
            The loss of the step, as if all processes had these batches; its gradient is that of the last of
            `batches`.
        """
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        loss = last = torch.zeros((), device=self.device)
        shares = self._shares(model, batches, _total, self._count(batches))
        for place, (share, last) in enumerate(shares, start=1):
            if place < len(batches):
                self._scaled(last).backward()  # type: ignore[no-untyped-call]
            loss = loss + share.detach()
        # The value of the sum over all batches, with the gradient of the last one.
        return last + (loss * self.processes.world_size - last).detach()

    def _scaled(self, loss: Tensor) -> Tensor:
        return self.loss_scale.scale(loss) if self.loss_scale else loss

    def gradient_norms(self) -> Tensor:
        """Return the L2 norm of each gradient without the loss scale: float32, in the optimizer's order."""
        norms_P = self._gradient_norms(self._with_gradient())
        return norms_P / self.loss_scale.divisor() if self.loss_scale else norms_P

    def _with_gradient(self) -> list[nn.Parameter]:
        # Determined for each step: Stacks may have joined or left.
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p for p in parameters if p.grad is not None]

    def _count(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Return the number of targets in `batches` of all processes."""
        return self.processes.sum(torch.stack([batch.targets.count for batch in batches]).sum())

    def _shares(
        self, model: nn.Module, batches: Sequence[MicroBatch], total: Callable[..., Tensor], count: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, per batch, its share of the step's loss, and the tensor for its backward pass."""
        count = count.clamp(min=1)
        # FSDP sets the dtype of a sharded model.
        precision = "fp32" if is_sharded(model) else self.settings.precision
        for place, batch in enumerate(batches, start=1):
            with gradient_sync(model, place == len(batches)):
                share = self._whole(model, batch, total, precision) / count
                # Gradients are averaged over the processes, but have to be summed.
                yield share, share * self.processes.world_size

    def _whole(
        self, model: nn.Module, batch: MicroBatch, total: Callable[..., Tensor], precision: str
    ) -> Tensor:
        """Return the loss of a batch. After it, autocast has freed its copies of weights."""
        hidden_BTC = None if batch.hidden is None else batch.hidden()
        with autocast(precision, self.device):
            return total(model, batch.targets, hidden_BTC)

    def _gradient_norms(self, parameters: list[nn.Parameter]) -> Tensor:
        gradients = [p.grad for p in parameters]
        if self._norms is None or not gradients or is_sharded(self.model):
            return gradient_norms(parameters)
        with torch.no_grad():
            norms_P: Tensor = self._norms(gradients)
            return norms_P


def _total(model: nn.Module, targets: Targets, hidden_BTC: Tensor | None) -> Tensor:
    total: Tensor = model(targets, hidden_BTC)
    return total
