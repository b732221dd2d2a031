"""LightningRun: a Lightning module as a run, with its hooks in Lightning's order, without a trainer."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stackwise.support.dataloader import iterate_epoch
from stackwise.support.random_state import random_states, set_random_states

__all__ = ["LightningRun", "is_lightning_module", "step_arguments"]

Batch = Any

_FILE = "last.ckpt"
# Further keys of a checkpoint.
_BATCHES, _RANDOM_STATES = "batches", "random_states"
# Number of steps if the length of the training is unknown.
_UNPLANNED = 1000
# A method that these packages define is a default, not one of the module.
_LIBRARIES = ("lightning", "pytorch_lightning")


def is_lightning_module(made: Any) -> bool:
    """Return True for a module with `training_step` and `configure_optimizers`."""
    return isinstance(made, nn.Module) and all(
        callable(getattr(made, name, None)) for name in ("training_step", "configure_optimizers")
    )


def step_arguments(function: Callable[..., Any], batch: Any, number: int) -> tuple[Any, ...]:
    """Return the arguments of a step such as `training_step`, with the batch number if it takes one."""
    kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_number = sum(kind in positional for kind in kinds) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds
    return (batch, number) if takes_number else (batch,)


class LightningRun:
    """Run of a Lightning module with automatic optimization and one optimizer, without a trainer.

    Each update calls the hooks of a batch in Lightning's order: `training_step`, zeroed gradients,
    `backward`, `on_before_optimizer_step`, `configure_gradient_clipping`, the optimizer (by `optimizer_step`
    if the module defines it), and a scheduler with the interval "step". Train and eval modes are not changed.
    `evaluate` needs a `validation_step`, `epoch` a `train_dataloader`.

    Features of the trainer are not available: its clipping, callbacks, strategies and precision. Checkpoints
    also contain random states, which Lightning does not save. `accumulate` averages over
    batches; `evaluate` averages over rows.

    Args:
        module: a LightningModule, or a module with `training_step` and `configure_optimizers`.

    Raises:
        TypeError: manual optimization, or more than one optimizer.
    """

    averages_batches = ("accumulate", "evaluate")

    def __init__(self, module: nn.Module) -> None:
        if not getattr(module, "automatic_optimization", True):
            raise TypeError(
                "trainer: got a Lightning module with manual optimization; wanted automatic_optimization, or "
                "TrainerSpec.from_function"
            )
        self.model = module
        self._attached = _Attached()
        self._log: _Log | None = None
        self._attach()
        self.optimizer, self.scheduler, self._period = _configured(module.configure_optimizers())  # type: ignore[operator]
        self._number = 0
        self._loader: Any = None
        for name, hook in (("evaluate", "validation_step"), ("epoch", "train_dataloader")):
            if self._own(hook) is None:
                setattr(self, name, None)

    def step(self, batch: Batch) -> Tensor:
        """Make one update from one batch."""
        return self.accumulate([batch])

    def accumulate(self, batches: list[Batch]) -> Tensor:
        """Make one update from the mean loss of several batches, and return that loss."""
        losses: list[Tensor] = []
        for number, batch in enumerate(batches):
            first, last = number == 0, number == len(batches) - 1

            def closure(batch: Batch = batch, first: bool = first, last: bool = last) -> Tensor:
                losses.append(self._backward(batch, len(batches), first, last))
                return losses[-1]

            self._call("on_train_batch_start", batch, self._number)
            if not last:
                closure()
            elif (own := self._own("optimizer_step")) is not None:
                own(self._attached.current_epoch, self._number, self.optimizer, closure)
            else:
                self.optimizer.step(closure)  # type: ignore[arg-type]
            if last:
                self._attached.global_step += 1
                self._schedule()
            self._call("on_train_batch_end", {"loss": losses[-1]}, batch, self._number)
            self._number += 1
        return torch.stack(losses).mean()

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss that `training_step` returns, or its item "loss"."""
        step: Any = self.model.training_step
        output = step(*step_arguments(step, batch, self._number))
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step: returned {type(output).__name__}; wanted a loss")
        return loss

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint in Lightning's layout, with `on_save_checkpoint`."""
        checkpoint: dict[str, Any] = {
            "epoch": self._attached.current_epoch,
            "global_step": self._attached.global_step,
            "pytorch-lightning_version": _version(),
            "state_dict": self.model.state_dict(),
            "callbacks": {},
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [] if self.scheduler is None else [self.scheduler.state_dict()],
            _BATCHES: self._number,
            _RANDOM_STATES: random_states(),
        }
        if hparams := getattr(self.model, "hparams", None):
            checkpoint["hyper_parameters"] = dict(hparams)
        self._call("on_save_checkpoint", checkpoint)
        torch.save(checkpoint, Path(folder) / _FILE)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore a checkpoint as Lightning does, with `on_load_checkpoint` first."""
        checkpoint = torch.load(Path(folder) / _FILE, map_location="cpu", weights_only=False)
        self._call("on_load_checkpoint", checkpoint)
        strict = bool(getattr(self.model, "strict_loading", True))
        self.model.load_state_dict(checkpoint["state_dict"], strict=strict)
        self.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(checkpoint["lr_schedulers"][0])
        self._attached.current_epoch = checkpoint["epoch"]
        self._attached.global_step = checkpoint["global_step"]
        self._number = checkpoint.get(_BATCHES, checkpoint["global_step"])
        if _RANDOM_STATES in checkpoint:
            set_random_states(checkpoint[_RANDOM_STATES])

    def _backward(self, batch: Batch, n_batches: int, first: bool, last: bool) -> Tensor:
        """Run Lightning's closure: loss, gradients and, before an update, its hooks."""
        with torch.enable_grad():
            loss = self.loss(batch)
            if first:
                self._call("on_before_zero_grad", self.optimizer)
                if (own := self._own("optimizer_zero_grad")) is not None:
                    own(self._attached.current_epoch, self._number, self.optimizer)
                else:
                    self.optimizer.zero_grad()
            scaled = loss / n_batches
            self._call("on_before_backward", scaled)
            own = self._own("backward")
            scaled.backward() if own is None else own(scaled)  # type: ignore[no-untyped-call]
        self._call("on_after_backward")
        if last:
            self._call("on_before_optimizer_step", self.optimizer)
            if (own := self._own("configure_gradient_clipping")) is not None:
                own(self.optimizer, gradient_clip_val=None, gradient_clip_algorithm=None)
        return loss.detach()

    def _schedule(self) -> None:
        # A scheduler of a metric is stepped when the metric is logged.
        if self._period == 0 or isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if self._attached.global_step % self._period == 0:
            own = self._own("lr_scheduler_step")
            self.scheduler.step() if own is None else own(self.scheduler, None)

    def evaluate(self, batches: list[Batch]) -> float:
        """Return the mean over rows of the loss that `validation_step` logs or returns."""
        modes = {module: module.training for module in self.model.modules()}
        own = self._own("on_validation_model_eval")
        self._log = log = _Log()
        try:
            with torch.inference_mode():
                self.model.eval() if own is None else own()
                self._call("on_validation_start")
                self._call("on_validation_epoch_start")
                for number, batch in enumerate(batches):
                    log.rows = _rows(batch)
                    self._call("on_validation_batch_start", batch, number)
                    step: Any = self.model.validation_step
                    output = step(*step_arguments(step, batch, number))
                    log.returned(output)
                    self._call("on_validation_batch_end", output, batch, number)
                log.rows = None
                self._call("on_validation_epoch_end")
                self._call("on_validation_end")
                return log.loss()
        finally:
            self._log = None
            for module, mode in modes.items():
                module.training = mode
            if (own := self._own("on_validation_model_train")) is not None:
                own()

    def epoch(self, number: int) -> Iterator[Batch]:
        """Return an iterator over an epoch of `train_dataloader`, which is called once."""
        if self._loader is None:
            self._loader = self.model.train_dataloader()  # type: ignore[operator]
        return iterate_epoch(self._loader, number, self._set_epoch)

    def _set_epoch(self, number: int) -> None:
        samplers = getattr(self._loader, "sampler", None), getattr(self._loader, "batch_sampler", None)
        for each in (*samplers, getattr(samplers[1], "sampler", None)):
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(number)

    def _attach(self) -> None:
        """Attach a minimal trainer to the module, for logging, clipping and progress."""
        module: Any = self.model
        module.log, module.log_dict, module.clip_gradients = self._noted, self._noted_all, _clip
        if not isinstance(getattr(type(module), "trainer", None), property) and hasattr(module, "trainer"):
            return  # the module has an own attribute `trainer`
        module.trainer = self._attached

    def _noted(self, name: str, value: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
        if self._log is not None:
            self._log.note(name, value, batch_size)

    def _noted_all(
        self, values: Mapping[str, Any], *_: Any, batch_size: int | None = None, **__: Any
    ) -> None:
        for name, value in values.items():
            self._noted(name, value, batch_size=batch_size)

    def _own(self, hook: str) -> Callable[..., Any] | None:
        """Return the method if the module defines it, and None for Lightning's default."""
        function = getattr(self.model, hook, None)
        if not callable(function):
            return None
        library = str(getattr(function, "__module__", "")).partition(".")[0]
        return None if library in _LIBRARIES else function

    def _call(self, hook: str, *arguments: Any) -> None:
        function = self._own(hook)
        if function is not None:
            function(*arguments)


class _Attached:
    """Minimal trainer that a module can use."""

    global_step = 0
    current_epoch = 0
    accumulate_grad_batches = 1
    estimated_stepping_batches = _UNPLANNED
    max_steps = _UNPLANNED
    world_size = num_nodes = num_devices = 1
    global_rank = local_rank = 0
    is_global_zero = training = True
    sanity_checking = validating = testing = predicting = False
    logger = None
    barebones = False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.{name}: stackwise runs the module without a Trainer, so trainer.{name} is missing. "
            "Pass a function that returns a run of your own to TrainerSpec.of"
        )


class _Log:
    """Values that an evaluation logs and returns, by name, each with its number of rows."""

    def __init__(self) -> None:
        self.rows: int | None = None
        self._values: dict[str, list[tuple[Any, int]]] = {}
        self._returned: list[tuple[Any, int]] = []

    def note(self, name: str, value: Any, batch_size: int | None) -> None:
        if self.rows is None:  # for the epoch
            self._values[name] = [(value, 1)]
        else:
            self._values.setdefault(name, []).append((value, batch_size or self.rows))

    def returned(self, output: Any) -> None:
        if isinstance(output, Mapping):
            output = next((value for name, value in output.items() if "loss" in str(name).lower()), None)
        if isinstance(output, Tensor) and output.numel() == 1 and self.rows:
            self._returned.append((output, self.rows))

    def loss(self) -> float:
        """Return the mean over rows of the logged loss, otherwise of the returned loss."""
        named = [name for name in self._values if "loss" in name.lower()]
        if len(named) > 1:
            named = [name for name in named if "val" in name.lower()] or named
        values = self._values[named[0]] if named else self._returned
        if not values:
            raise ValueError(
                'validation_step: no loss was returned, nor logged under a name with "loss" in it'
            )
        if callable(compute := getattr(values[-1][0], "compute", None)):
            return float(compute())
        return sum(float(value) * rows for value, rows in values) / sum(rows for _, rows in values)


def _configured(returned: Any) -> tuple[torch.optim.Optimizer, Any, int]:
    """Return optimizer, scheduler and updates per scheduler step (0: one step per epoch)."""
    optimizers, schedulers = returned, None
    if isinstance(returned, Mapping):
        optimizers, schedulers = returned["optimizer"], returned.get("lr_scheduler")
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list):
        optimizers, schedulers = returned
    elif isinstance(returned, list | tuple) and len(returned) == 1 and isinstance(returned[0], Mapping):
        return _configured(returned[0])
    optimizer, scheduler = _only(optimizers), _only(schedulers)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"configure_optimizers: returned {type(returned).__name__}; wanted one optimizer")
    if isinstance(scheduler, Mapping):
        per_step = scheduler.get("interval", "epoch") == "step"
        return optimizer, scheduler["scheduler"], int(scheduler.get("frequency", 1)) if per_step else 0
    return optimizer, scheduler, 0


def _only(found: Any) -> Any:
    if isinstance(found, Iterable) and not isinstance(found, Mapping):
        found = list(found)
        if len(found) > 1:
            raise TypeError(
                f"configure_optimizers: returned {len(found)}; wanted one optimizer and scheduler"
            )
        return found[0] if found else None
    return found


def _clip(
    optimizer: torch.optim.Optimizer,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    """Clip gradients as `LightningModule.clip_gradients` does."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not gradient_clip_val or gradient_clip_val <= 0:
        return
    if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)).lower() == "value":
        nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    else:
        nn.utils.clip_grad_norm_(parameters, gradient_clip_val)


def _rows(batch: Any) -> int:
    """Return the number of rows of the first tensor, as Lightning counts them."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((_rows(part) for part in parts if isinstance(part, Tensor | Mapping | list | tuple)), 1)


def _version() -> str:
    """Return the version of the loaded Lightning, for checkpoints."""
    found = (getattr(sys.modules.get(name), "__version__", None) for name in reversed(_LIBRARIES))
    return next((str(version) for version in found if version), "2.0.0")
