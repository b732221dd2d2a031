"""Trainer adapters: what others call a trainer, as a run with model, optimizer and step(batch)."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FunctionRun", "LightningRun", "TransformersRun", "adapted", "is_lightning_module"]

Batch = Any


def adapted(made: Any) -> tuple[Callable[[Any], Any], dict[str, Any]] | None:
    """How to drive `made`, which another library would: by what it can do, not by its name.

    Returns:
        (what makes a run of such an object, attributes of a TrainerSpec), or None: it is nothing known.

    Raises:
        TypeError: it is, but asks for something that cannot be driven from outside.
    """
    if is_lightning_module(made):
        return LightningRun, {"notes": "a Lightning module: training_step and configure_optimizers"}
    if all(hasattr(made, name) for name in ("training_step", "create_optimizer", "accelerator", "args")):
        max_norm = getattr(made.args, "max_grad_norm", None) or None
        return TransformersRun, {
            "max_norm": max_norm,
            "notes": f"a transformers Trainer, its own step; clips to {max_norm}",
        }
    return None


def is_lightning_module(made: Any) -> bool:
    """Whether it is a module that says how it is trained."""
    return isinstance(made, nn.Module) and all(
        callable(getattr(made, name, None)) for name in ("training_step", "configure_optimizers")
    )


class FunctionRun:
    """A bare function that makes one step.

    Args:
        model: what is trained.
        optimizer: what updates it.
        function: (model, optimizer, batch) -> the loss before the step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        function: Callable[[nn.Module, torch.optim.Optimizer, Batch], Any],
    ) -> None:
        self.model, self.optimizer, self._function = model, optimizer, function

    def step(self, batch: Batch) -> Any:
        """One call of the function."""
        return self._function(self.model, self.optimizer, batch)


class TransformersRun:
    """A `transformers.Trainer`, one optimizer step at a time, in the order of its own inner loop.

    Its evaluation averages over batches, not over targets, and is not asked.

    Args:
        trainer: not trained yet.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        trainer.create_optimizer()
        self._wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.create_scheduler(num_training_steps=_total_steps(trainer))
        self.model: nn.Module = trainer.model
        self.optimizer: torch.optim.Optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.scheduler = trainer.lr_scheduler
        self.scaler = getattr(trainer.accelerator, "scaler", None)

    def step(self, batch: Batch) -> Tensor:
        """One update from one micro-batch."""
        return self.accumulate([batch])

    def accumulate(self, batches: list[Batch]) -> Tensor:
        """One update from several."""
        trainer = self.trainer
        batches, n_items = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(batches)
        losses = []
        for number, batch in enumerate(batches, start=1):
            trainer.accelerator.gradient_state._set_sync_gradients(number == len(batches))
            losses.append(trainer.training_step(self._wrapped, batch, n_items))
        if trainer.args.max_grad_norm:
            trainer.accelerator.clip_grad_norm_(self._wrapped.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        if not trainer.accelerator.optimizer_step_was_skipped:
            trainer.lr_scheduler.step()
        self._wrapped.zero_grad()
        trainer.state.global_step += 1
        return torch.stack(losses).sum()

    def loss(self, batch: Batch) -> Tensor:
        """Of `compute_loss`."""
        trainer = self.trainer
        context: AbstractContextManager[Any] = trainer.compute_loss_context_manager()
        with context:
            loss: Tensor = trainer.compute_loss(self._wrapped, trainer._prepare_inputs(batch))
        return loss

    def save(self, folder: str | os.PathLike[str]) -> None:
        """As its checkpoints are."""
        folder = os.fspath(folder)
        self.trainer.save_model(folder, _internal_call=True)
        self.trainer._save_optimizer_and_scheduler(folder)
        self.trainer._save_scaler(folder)
        self.trainer._save_rng_state(folder)
        self.trainer.state.save_to_json(str(Path(folder) / "trainer_state.json"))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """As it resumes."""
        folder = os.fspath(folder)
        self.trainer._load_from_checkpoint(folder)
        self.trainer._load_optimizer_and_scheduler(folder)
        self.trainer._load_scaler(folder)
        self.trainer.state = type(self.trainer.state).load_from_json(str(Path(folder) / "trainer_state.json"))
        self.trainer._load_rng_state(folder)


def _total_steps(trainer: Any) -> int:
    """What its schedule is planned for."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    if trainer.train_dataset is None:
        return 1000
    return int(trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1])


class LightningRun:
    """A Lightning module under automatic optimization, with one optimizer and without a trainer.

    Each step calls `training_step`, `backward`, `on_after_backward`, `on_before_optimizer_step` and the
    optimizer; a scheduler is stepped where its interval is "step". Clipping is the trainer's.

    Args:
        module: a LightningModule, or a module with `training_step` and `configure_optimizers`.

    Raises:
        TypeError: manual optimization, or more than one optimizer.
    """

    def __init__(self, module: nn.Module) -> None:
        if not getattr(module, "automatic_optimization", True):
            raise TypeError(
                "trainer: got a Lightning module with manual optimization; wanted automatic_optimization, or "
                "TrainerSpec.from_function"
            )
        self.model = module
        for name in ("log", "log_dict"):  # without a trainer there is nobody to log to
            setattr(module, name, lambda *_, **__: None)
        self.optimizer, self.scheduler, self._per_step = _configured(module.configure_optimizers())  # type: ignore[operator]
        self._number = 0

    def step(self, batch: Batch) -> Tensor:
        """One batch, one update."""
        self.model.train()
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        backward = getattr(self.model, "backward", None)
        loss.backward() if backward is None else backward(loss)  # type: ignore[no-untyped-call]
        self._call("on_after_backward")
        self._call("on_before_optimizer_step", self.optimizer)
        self.optimizer.step()
        if self._per_step:
            self.scheduler.step()
        self._number += 1
        return loss.detach()

    def loss(self, batch: Batch) -> Tensor:
        """Of `training_step`: what it returns, or its "loss"."""
        output = self.model.training_step(batch, self._number)  # type: ignore[operator]
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step: returned {type(output).__name__}; wanted a loss")
        return loss

    def _call(self, hook: str, *arguments: Any) -> None:
        function = getattr(self.model, hook, None)
        if function is not None:
            function(*arguments)


def _configured(returned: Any) -> tuple[torch.optim.Optimizer, Any, bool]:
    """What `configure_optimizers` returned: the optimizer, its scheduler, whether that counts steps."""
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
        return optimizer, scheduler["scheduler"], scheduler.get("interval", "epoch") == "step"
    return optimizer, scheduler, False


def _only(found: Any) -> Any:
    if isinstance(found, Iterable) and not isinstance(found, Mapping):
        found = list(found)
        if len(found) > 1:
            raise TypeError(
                f"configure_optimizers: returned {len(found)}; wanted one optimizer and scheduler"
            )
        return found[0] if found else None
    return found


def copies(module: nn.Module) -> Callable[[], nn.Module]:
    """A factory of copies of `module` as it is now."""
    original = copy.deepcopy(module)
    return lambda: copy.deepcopy(original)
