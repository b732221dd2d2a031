"""TransformersRun: a `transformers.Trainer` as a run, with its own step, data, evaluation and checkpoints."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.support.dataloader import iterate_epoch
from stackwise.support.random_state import random_states, use_random_states

__all__ = ["TransformersRun", "is_transformers_trainer"]

Batch = Any

# Length of a schedule if the data has no length.
_UNPLANNED = 1000


def is_transformers_trainer(made: Any) -> bool:
    """Return True for an object with the methods of a `transformers.Trainer`."""
    return all(hasattr(made, name) for name in ("training_step", "create_optimizer", "accelerator", "args"))


class TransformersRun:
    """Run of a `transformers.Trainer`, one optimizer step at a time, in the order of its inner loop.

    Callbacks are not called, and no noise is added to embeddings. Members that the Trainer cannot support are
    None:

    - `epoch` needs a train dataset or an own `get_train_dataloader`. `position` also needs a
      dataset length, `gradient_accumulation_steps=1` and `ignore_data_skip=False`.
    - `save`, `load`, `checkpoint` and `latest` need checkpoints that can be resumed: no `save_only_model`.
    - `evaluate` needs labels, or a model that returns a loss without them.

    The evaluation loop averages the losses of batches (`averages_batches`).

    Args:
        trainer: the Trainer, before its training.
    """

    averages_batches = ("evaluate",)

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._loader = _train_loader(trainer)
        # Epoch of the resume, and the random states before it.
        self._resumed: tuple[int | None, dict[str, Any]] = None, {}
        _recompute(trainer)
        trainer.is_in_train = True  # as in `train`; otherwise evaluation casts the weights
        trainer.create_optimizer()
        self._wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        total_steps = _total_steps(trainer, self._loader)
        trainer.create_scheduler(num_training_steps=total_steps)
        # Values that a resume compares.
        trainer.state.max_steps, trainer.state.train_batch_size = total_steps, trainer._train_batch_size
        trainer.state.compute_steps(trainer.args, total_steps)
        self.model: nn.Module = trainer.model
        self.optimizer: torch.optim.Optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.scheduler = trainer.lr_scheduler
        self.scaler = getattr(trainer.accelerator, "scaler", None)
        self.grad_norm: Tensor | None = None
        self._scheduled = "metrics" not in inspect.signature(self.scheduler.step).parameters
        for name in self._unsupported():
            setattr(self, name, None)

    def _unsupported(self) -> Iterator[str]:
        """Yield the names of the members that this Trainer cannot support."""
        arguments, length = self.trainer.args, _length(self._loader)
        if getattr(arguments, "save_only_model", False):
            yield from ("save", "load", "checkpoint", "latest")
        if not (self.trainer.label_names or self.trainer.can_return_loss):
            yield "evaluate"
        if self._loader is None:
            yield "epoch"
        if length is None or arguments.gradient_accumulation_steps > 1 or arguments.ignore_data_skip:
            yield "position"

    def step(self, batch: Batch) -> Tensor:
        """Make one update from one micro-batch."""
        return self.accumulate([batch])

    def accumulate(self, batches: list[Batch]) -> Tensor:
        """Make one update from several micro-batches."""
        trainer = self.trainer
        batches, n_items = trainer.get_batch_samples(iter(batches), len(batches), trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(batches)
        losses = []
        for number, batch in enumerate(batches, start=1):
            trainer.accelerator.gradient_state._set_sync_gradients(number == len(batches))
            losses.append(trainer.training_step(self._wrapped, batch, n_items))
        if (max_norm := trainer.args.max_grad_norm) and max_norm > 0:
            self.grad_norm = trainer.accelerator.clip_grad_norm_(self._wrapped.parameters(), max_norm)
        trainer.optimizer.step()
        if self._scheduled and not trainer.accelerator.optimizer_step_was_skipped:
            trainer.lr_scheduler.step()
        self._wrapped.zero_grad()
        trainer.state.global_step += 1
        return torch.stack(losses).sum()

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of `compute_loss`."""
        trainer = self.trainer
        context: AbstractContextManager[Any] = trainer.compute_loss_context_manager()
        with context:
            loss: Tensor = trainer.compute_loss(self._wrapped, trainer._prepare_inputs(batch))
        return loss

    def evaluate(self, batches: list[Batch]) -> float:
        """Return the loss of `evaluation_loop`, which is the mean over batches."""
        # An iterator has no length, so no progress bar is drawn.
        output = self.trainer.evaluation_loop(iter(batches), "Evaluation", prediction_loss_only=True)
        if "eval_loss" not in output.metrics:
            wanted = ", ".join(self.trainer.label_names)
            raise ValueError(f"evaluate: the batches have no loss; wanted {wanted} in each")
        return float(output.metrics["eval_loss"])

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yield the batches of an epoch of `get_train_dataloader`."""
        assert self._loader is not None
        epoch, states = self._resumed
        if number != epoch:
            yield from iterate_epoch(self._loader, number, self._set_epoch)
            return
        # The Trainer's resume skips batches first, and then restores the random states.
        with use_random_states(states):
            batches = iterate_epoch(self._loader, number, self._set_epoch)
            first = list(islice(batches, 1))
        yield from first
        yield from batches

    def _set_epoch(self, number: int) -> None:
        # The loader does not pass the epoch to a wrapped batch sampler.
        wrapped = getattr(getattr(self._loader, "batch_sampler", None), "batch_sampler", None)
        for each in (self._loader, wrapped):
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(number)

    def position(self) -> tuple[int, int]:
        """Return the position from which a resume continues, computed from the number of updates."""
        assert isinstance(self._loader, Sized)
        epoch, number = divmod(int(self.trainer.state.global_step), len(self._loader))
        return epoch, number

    def checkpoint(self, folder: str | os.PathLike[str], step: int) -> Path:
        """Write the checkpoint of `step` updates, and remove old ones as `save_total_limit` requires."""
        trainer, state, arguments = self.trainer, self.trainer.state, self.trainer.args
        before = state.global_step, arguments.output_dir, arguments.push_to_hub
        state.global_step, arguments.output_dir, arguments.push_to_hub = step, os.fspath(folder), False
        try:
            trainer._save_checkpoint(self._wrapped, None)
        finally:
            state.global_step, arguments.output_dir, arguments.push_to_hub = before
        return Path(folder) / f"checkpoint-{step}"

    def latest(self, folder: str | os.PathLike[str]) -> Path | None:
        """Return the checkpoint that `resume_from_checkpoint=True` uses."""
        from transformers.trainer_utils import get_last_checkpoint

        found = get_last_checkpoint(os.fspath(folder))  # type: ignore[no-untyped-call]
        return None if found is None else Path(found)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint."""
        self.checkpoint(folder, int(self.trainer.state.global_step))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Resume from the newest checkpoint in a folder, or from the folder itself."""
        found = os.fspath(self.latest(folder) or folder)
        trainer, states = self.trainer, random_states()
        trainer._load_from_checkpoint(found)
        trainer._load_optimizer_and_scheduler(found)
        trainer._load_scaler(found)
        trainer.state = type(trainer.state).load_from_json(str(Path(found) / "trainer_state.json"))
        trainer._load_rng_state(found)
        if self.position is not None and (place := self.position())[1]:
            self._resumed = place[0], states


def _recompute(trainer: Any) -> None:
    """Enable activation checkpointing as `train` does. The second name is that of transformers 4."""
    arguments, model = trainer.args, trainer.model
    if getattr(arguments, "activation_checkpointing", False) and hasattr(
        model, "activation_checkpointing_enable"
    ):
        options = dict(arguments.activation_checkpointing_kwargs or {})
        kept = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None, **kept)
    elif getattr(arguments, "gradient_checkpointing", False):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=arguments.gradient_checkpointing_kwargs
        )


def _train_loader(trainer: Any) -> Any:
    """Return the training data loader, or None without training data."""
    try:
        return trainer.get_train_dataloader()
    except ValueError:
        if trainer.train_dataset is not None:
            raise
        return None


def _total_steps(trainer: Any, loader: Any) -> int:
    """Return the number of updates for the schedule."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    if (length := _length(loader)) is None:
        return _UNPLANNED
    updates = max(math.ceil(length / int(trainer.args.gradient_accumulation_steps)), 1)
    return math.ceil(float(trainer.args.num_train_epochs) * updates)


def _length(loader: Any) -> int | None:
    """Return the number of batches per epoch, or None if the loader has no length."""
    try:
        return len(loader) or None
    except TypeError:
        return None
