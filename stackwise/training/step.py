"""TrainStep: some batches forwards, backwards and into the weights, while the host waits for none of it.

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
    """What is computed at one time; a step may take several.

    Attributes:
        targets: on the device.
        hidden: computes what the Blocks before those of the phase say of it, (B, T, C), as its turn comes: of
            several not all are held at once. None: there are no such Blocks.
    """

    targets: Targets
    hidden: Callable[[], Tensor] | None = None


class StepOutcome(NamedTuple):
    """Tensors on the device.

    Attributes:
        loss: in nats, before the update.
        mean: the same; NaN where nothing is predicted, of which there is no mean.
        grad_norm: global L2 norm of the gradient, before clipping.
        skipped: whether either is not finite, and the update was left out.
        norms_P: of the gradient of each parameter that has one.
        names: of these parameters.
    """

    loss: Tensor
    mean: Tensor
    grad_norm: Tensor
    skipped: Tensor
    norms_P: Tensor
    names: tuple[str, ...]


class TrainStep:
    """The step that `settings` describe: precision, clipping, optimizer, compiled or not.

    Args:
        model: on its device. With `precision: bf16_weights` its parameters are bfloat16 from here on, until
            `optimizer.finish()`.
        settings: `training` of a configuration.
        rack: the whole that `model` is a part of, for what its optimizer has by Stack or by name.
        optimized: whose parameters the optimizer takes; None: those of `model`.
        processes: that train together; None: this one alone.

    Attributes:
        model: what the next call trains.
        optimizer: of all its parameters.
        loss_scale: of float16; None: of another precision.

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
        # The loss is compiled with the model: logits are then reduced as they are widened.
        self.take(model)

    def take(self, model: nn.Module) -> None:
        """Train `model` from here on, as `SharedRack.wrap` gives it or with more Blocks than before."""
        self.model = model
        # Anew for each model: of one function the compiler keeps few graphs, and runs others as they are.
        self._total = compiled(_total) if self.settings.compile else _total
        # On other devices the norms are one fused kernel group as it is.
        on_cpu = self.settings.compile and self.device.type == "cpu"
        self._norms = compiled(norms_by_rows) if on_cpu else None

    def __call__(self, batches: Sequence[MicroBatch], lr: float) -> StepOutcome:
        """Train on the mean over everything that `batches` of all processes predict, at rate `lr`."""
        self.set_rate(lr)
        loss, mean = self.backward(batches)
        parameters = self._with_gradient()
        norms_P = self.gradient_norms()
        norm = global_norm(norms_P)
        skipped = ~(loss.isfinite() & norm.isfinite())
        divisor = self.loss_scale.divisor() if self.loss_scale else None
        # Both attributes are read by the fused optimizers; the gradients are scaled in their pass.
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
        """Give every group its part of the learning rate `lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_multiplier"]

    def backward(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Gradients of a step, times the loss scale where there is one; its `loss` and `mean`, scalars."""
        loss = torch.zeros((), device=self.device)
        with watching(self._logit_bound):
            count = self._count(batches)
            for share, summed in self._shares(self.model, batches, self._total, count):
                self._scaled(summed).backward()  # type: ignore[no-untyped-call]
                loss = loss + share.detach()
        loss = self.processes.sum(loss)
        return loss, loss / count.clamp(max=1)

    def logit(self) -> Tensor | None:
        """What the attention logits of the last `backward` are at most, in any process: `LogitBound`.

        None without `training.watch_logits`. Every process has to call.
        """
        return None if self._logit_bound is None else self.processes.maximum(self._logit_bound.take())

    def again(self, batches: Sequence[MicroBatch]) -> Tensor:
        """A step of which the last backward pass is the caller's, as it is written: not compiled.

        Where there is a loss scale the caller's has it as well. Every process has to call, and to call
        `backward()` on what it gets. With DDP each has the gradient of its own batches, so that the one whose
        batches broke is known.

        Returns:
            the loss of the step, as if all processes had these batches; its gradient is that of the last of
            `batches`.
        """
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        loss = last = torch.zeros((), device=self.device)
        shares = self._shares(model, batches, _total, self._count(batches))
        for place, (share, last) in enumerate(shares, start=1):
            if place < len(batches):
                self._scaled(last).backward()  # type: ignore[no-untyped-call]
            loss = loss + share.detach()
        # Not what the last of them is, but what all are together.
        return last + (loss * self.processes.world_size - last).detach()

    def _scaled(self, loss: Tensor) -> Tensor:
        return self.loss_scale.scale(loss) if self.loss_scale else loss

    def gradient_norms(self) -> Tensor:
        """L2 norm of each gradient as it is without a loss scale: float32, in the order of the optimizer."""
        norms_P = self._gradient_norms(self._with_gradient())
        return norms_P / self.loss_scale.divisor() if self.loss_scale else norms_P

    def _with_gradient(self) -> list[nn.Parameter]:
        # Asked anew each time: Stacks may have come and gone.
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p for p in parameters if p.grad is not None]

    def _count(self, batches: Sequence[MicroBatch]) -> Tensor:
        """How much `batches` of all processes predict."""
        return self.processes.sum(torch.stack([batch.targets.count for batch in batches]).sum())

    def _shares(
        self, model: nn.Module, batches: Sequence[MicroBatch], total: Callable[..., Tensor], count: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each batch its share of the loss of the step, and what its backward pass is to begin from."""
        count = count.clamp(min=1)
        # What is sharded has its dtype from FSDP.
        precision = "fp32" if is_sharded(model) else self.settings.precision
        for place, batch in enumerate(batches, start=1):
            with gradient_sync(model, place == len(batches)):
                share = self._whole(model, batch, total, precision) / count
                # Gradients are averaged over the processes, and are to be summed.
                yield share, share * self.processes.world_size

    def _whole(
        self, model: nn.Module, batch: MicroBatch, total: Callable[..., Tensor], precision: str
    ) -> Tensor:
        """The loss of a batch; behind it autocast has given up its copies of weights."""
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
