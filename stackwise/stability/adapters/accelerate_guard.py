"""AcceleratedGuard: the guard in a training loop with accelerate, including gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stackwise.stability.adapters.outer_loop import check_engine, scale_of
from stackwise.stability.guard import Decision, Guard, GuardPolicy
from stackwise.stability.guard.snapshot import Stateful
from stackwise.support.arguments import check_number, require

try:
    from accelerate import Accelerator  # type: ignore[import-untyped, unused-ignore]
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped, unused-ignore]
except ImportError as error:
    raise ImportError(f"{__name__} needs accelerate: pip install accelerate") from error

__all__ = ["AcceleratedGuard"]


class AcceleratedGuard:
    """`Guard` with the calls of accelerate: one decision for all processes, once in each accumulated step.

        guard = AcceleratedGuard(accelerator, model, optimizer, scheduler, max_grad_norm=1.0, loss_of=loss_of)
        for batch in guard.batches(loader):
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                guard.step(loss)

    `accelerator.register_for_checkpointing(guard)` adds its state to `save_state`.

    Args:
        accelerator: accelerator that has prepared the next three arguments.
        model: prepared model.
        optimizer: prepared optimizer.
        scheduler: prepared scheduler; None: no scheduler.
        max_grad_norm: norm for `accelerator.clip_grad_norm_`, after the decision; None: no clipping.
        policy: limits and responses, without `clip`.
        loss_of: function of (model, batch) that returns the loss as it is passed to `accelerator.backward`.
            The model is without the wrappers of accelerate for several processes. None: parameters are named
            by their norms.
        batch_id: see `Guard`.
        others: see `Guard`.
        bundles: see `Guard`.
        lag: see `Guard`.
        on_rewind: see `Guard`.

    Attributes:
        guard: guard with the alarms, records and all other state.

    Raises:
        ValueError: an object that was not prepared; a policy that clips; a scheduler that needs a metric; an
            engine that does not expose the gradients.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        max_grad_norm: float | None = None,
        policy: GuardPolicy | None = None,
        loss_of: Callable[[nn.Module, Any], Tensor] | None = None,
        batch_id: Callable[[Any], Hashable] | None = None,
        others: Mapping[str, Stateful] | None = None,
        bundles: Path | str | None = None,
        lag: int | None = None,
        on_rewind: Callable[[int], object] | None = None,
    ) -> None:
        prepared = isinstance(optimizer, AcceleratedOptimizer)
        require(prepared, "optimizer", type(optimizer).__name__, "a result of accelerator.prepare()")
        follows = isinstance(getattr(scheduler, "scheduler", scheduler), ReduceLROnPlateau)
        allowed = "one whose step() takes nothing; call this one yourself, after an evaluation"
        require(not follows, "scheduler", "ReduceLROnPlateau", allowed)
        policy = policy or GuardPolicy()
        require(policy.clip is None, "clip", policy.clip, "None: max_grad_norm clips")
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm, "a number above 0, or None", lambda norm: norm > 0)
        self._sharded = check_engine(accelerator)
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._scheduler, self._max_grad_norm = scheduler, max_grad_norm
        inner: Any = optimizer
        while isinstance(inner, AcceleratedOptimizer):
            inner = inner.optimizer
        n_batches = accelerator.gradient_accumulation_steps
        part_of = None if loss_of is None else lambda model, batch: loss_of(model, batch) / n_batches
        self.guard = Guard(
            accelerator.unwrap_model(model),
            inner,
            scheduler=scheduler,
            policy=policy,
            loss_of=part_of,
            batch_id=batch_id,
            others=others,
            bundles=bundles,
            scaler=accelerator.scaler,
            lag=lag,
            on_rewind=on_rewind,
        )
        self._loss: Tensor | None = None
        self._logit: Tensor | None = None
        self._n_given = 0
        self._sizes: dict[int, int] = {}  # number of batches of shorter steps, by step number
        self._loader: Any = None
        self._iteration: int | None = None  # epoch count of the loader in a loaded state
        accelerator.register_save_state_pre_hook(self._before_saving)

    def batches(self, loader: Iterable[Any], *, fast_forward: bool = False) -> Iterator[Any]:
        """Yield the batches of one epoch; see `Guard.batches`.

        Replays are accumulated as in the first execution. After `load_state_dict`, the epoch of a prepared
        loader is set to the saved one.
        """
        state: Any = self._accelerator.gradient_state
        opened: Any = None
        self._loader = loader
        if self._iteration is not None and _counts_epochs(loader):
            # In a new process the loader counts epochs from 0, and shuffles by this count.
            self._loader.set_epoch(self._iteration)
        self._iteration = None
        try:
            for batch in self.guard.batches(loader, fast_forward=fast_forward):
                self._n_given += 1
                if self.guard.is_replay:
                    if not state.in_dataloader and hasattr(loader, "begin"):
                        opened = loader
                        opened.begin()
                    if state.in_dataloader:
                        # As in the first execution: gradients are reduced at the last batch of the loader.
                        size = self._sizes.get(self.guard.steps)
                        state.active_dataloader.end_of_dataloader = self._n_given == size
                yield batch
        finally:
            if opened is not None:
                opened.end()

    def step(self, loss: Tensor, *, logit: Tensor | None = None) -> Decision | None:
        """Clip, update, advance the scheduler and zero the gradients. Call it after `accelerator.backward`.

        Args:
            loss: loss of the batch, one element, as it was passed to `accelerator.backward`.
            logit: largest attention logit of the batch, one element; None: no signal. The logit of the step
                is the largest of its batches.

        Returns:
            The decision; None while gradients are accumulated.

        Raises:
            ValueError: as in `Guard.step`.
            GuardError: training cannot continue.
        """
        accelerator = self._accelerator
        part = loss.detach() / accelerator.gradient_accumulation_steps
        self._loss = part if self._loss is None else self._loss + part
        if logit is not None:
            logit = logit.detach()
            # fmax ignores NaN, the logit of a batch without observed attention.
            self._logit = logit if self._logit is None else torch.fmax(self._logit, logit)
        if not accelerator.sync_gradients:
            return None
        total, self._loss = self._loss, None
        logit, self._logit = self._logit, None
        scale = scale_of(accelerator.scaler, loss.device)
        if self._n_given != accelerator.gradient_accumulation_steps:
            self._sizes[self.guard.steps] = self._n_given
        self._n_given = 0
        decision = self.guard.check_step(total, logit=logit, scale=scale)
        if self.guard.makes_update(decision):
            if self._max_grad_norm is not None:
                accelerator.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
        try:
            self.guard.close_step(decision)
        finally:
            self._optimizer.zero_grad()
        return decision

    def settle(self) -> None:
        """Wait for the device and handle every alarm; see `Guard.settle`."""
        self.guard.settle()

    def _before_saving(self, models: list[nn.Module], weights: list[Any], _folder: str) -> None:
        """Handle alarms before a checkpoint is saved, because they may undo steps."""
        alarms = len(self.guard.alarms)
        self.settle()
        if len(self.guard.alarms) > alarms:
            undone = "alarms that undid steps"
            require(
                not self._sharded, "save_state", undone, "guard.settle() before it: shards are saved already"
            )
            weights[:] = [self._accelerator.get_state_dict(model, unwrap=False) for model in models]

    def state_dict(self) -> dict[str, Any]:
        """Return the state; see `Guard.state_dict`.

        Within an accumulation it is the state of the previous step, like the weights. A resumed run replays
        the batches of the unfinished step. Running statistics, which are saved with the weights, then include
        these batches twice.

        Raises:
            ValueError: called within an accumulation with a lag, before the host knows the result of the
                previous step.
        """
        counted = int(self._loader.iteration) if _counts_epochs(self._loader) else self._iteration
        return {
            **self.guard.state_dict(closed=True),
            # Pairs, because JSON turns numeric keys into strings.
            "sizes": [list(pair) for pair in self._sizes.items()],
            "iteration": counted,
        }

    @staticmethod
    def common_state(state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part that all processes share; see `Guard.common_state`.

        Sizes of steps and the loader's epoch count are equal in all processes.
        """
        return Guard.common_state(state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; see `Guard.load_state_dict`."""
        self.guard.load_state_dict(state_dict)
        self._sizes = dict(state_dict["sizes"])
        self._loader, self._iteration = None, state_dict["iteration"]
        self._loss, self._logit, self._n_given = None, None, 0
        accelerator = self._accelerator
        accelerator.step -= accelerator.step % accelerator.gradient_accumulation_steps


def _counts_epochs(loader: Any) -> bool:
    """Return True if a loader shuffles by its own epoch count, as prepared loaders do."""
    return hasattr(loader, "iteration") and callable(getattr(loader, "set_epoch", None))
