"""GuardCallback for Lightning: runs `Trainer.fit` under the guard."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.stability.adapters.outer_loop import OuterLoop, Schedulers, scale_of
from stackwise.stability.guard import Alarm, Guard, GuardPolicy
from stackwise.stability.guard.snapshot import Stateful
from stackwise.stability.telemetry import AttentionLogit
from stackwise.subject.lightning_run import step_arguments
from stackwise.support.arguments import require

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]
    except ImportError as error:
        raise ImportError(f"{__name__} needs Lightning: pip install lightning") from error

__all__ = ["GuardCallback"]

_HELD = "held"  # interval of a scheduler that must not advance
# Methods by which a ModelCheckpoint saves; the first selects checkpoints, with or without a metric.
_SAVES = ("_save_topk_checkpoint", "_save_last_checkpoint")
_NOT_SAVED = "no checkpoint, as training ended with an unresolved alarm; the previous one is the newest"


class GuardCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Callback that judges each step of a Lightning trainer before its gradients are clipped.

        trainer = Trainer(max_epochs=3, callbacks=[GuardCallback(GuardPolicy())])
        trainer.fit(module, loader)

    A skipped step does not change weights, optimizer and schedulers. `trainer.global_step` includes it,
    because it counts batches. A rewind replays steps inside `on_train_batch_end`, at most from the start of
    the epoch. Replayed steps are neither counted nor logged. The host waits for the decision in each step.
    While an alarm is unresolved, no `ModelCheckpoint` saves: a due checkpoint is deferred.

    Args:
        policy: limits and responses, without `clip`: `gradient_clip_val` clips.
        locate: recompute a bad step with `training_step`, to name its module and to find out if it is bad in
            the recomputation too. False: parameters are named by their norms.
        others: objects whose state a rewind restores, by name.
        bundles: folder for diagnostic bundles; None: none are written.
        logits: observe `training_step` with `AttentionLogit`; None: if the policy has a `logit_limit`.

    Attributes:
        guard: guard of the current training, or of the last one; None: no training yet.

    Raises:
        ValueError: a policy that clips.
    """

    def __init__(
        self,
        policy: GuardPolicy | None = None,
        *,
        locate: bool = True,
        others: Mapping[str, Stateful] | None = None,
        bundles: Path | str | None = None,
        logits: bool | None = None,
    ) -> None:
        self.policy = policy or GuardPolicy()
        require(
            self.policy.clip is None, "clip", self.policy.clip, "None: gradient_clip_val of the trainer clips"
        )
        self._locate, self._others, self._bundles = locate, others, bundles
        self._logits = self.policy.logit_limit is not None if logits is None else logits
        self._watch: AttentionLogit | None = None
        self._trainer: Any = None
        self._module: Any = None
        self._own_step: Any = None  # if it is not the method of the class
        self._loop: OuterLoop | None = None
        self._restored: dict[str, Any] | None = None
        self._held: list[tuple[Any, str]] = []
        self._scaler_state: dict[str, Any] | None = None
        self._saving: list[Any] = []  # callbacks whose checkpoints are deferred during alarms
        self._deferred: dict[Any, set[str]] = {}  # names of the deferred methods, by callback
        self.guard: Guard | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the guard. Optimizer and schedulers are ready.

        Raises:
            ValueError: a training that cannot be guarded from a callback.
        """
        automatic = pl_module.automatic_optimization
        require(automatic, "automatic_optimization", automatic, "True, or a Guard in training_step")
        count = len(trainer.optimizers)
        require(count == 1, "optimizers", count, "one")
        optimizer = trainer.optimizers[0]
        lbfgs = isinstance(optimizer, torch.optim.LBFGS)
        require(not lbfgs, "optimizer", type(optimizer).__name__, "one that calls its closure once")
        strategy = type(trainer.strategy).__name__
        kept = strategy.startswith(("DeepSpeed", "FSDP"))
        require(not kept, "strategy", strategy, "one device, DDP, or ModelParallelStrategy")
        iterates = "dataloader_iter" in inspect.signature(pl_module.training_step).parameters
        require(not iterates, "training_step", "dataloader_iter", "a batch")
        for config in trainer.lr_scheduler_configs:
            follows = config.reduce_on_plateau and config.interval == "step"
            require(not follows, "interval of ReduceLROnPlateau", config.interval, "'epoch'")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        unscales = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
        require(
            not unscales,
            "optimizer",
            "a fused one",
            "one that is not fused, or another precision than 16-mixed",
        )
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._trainer, self._module = trainer, pl_module
        self.guard = Guard(
            pl_module,
            optimizer,
            scheduler=Schedulers(schedulers) if schedulers else None,
            policy=self.policy,
            loss_of=self._loss_of if self._locate else None,
            others=self._others,
            bundles=self._bundles,
            scaler=scaler,
            lag=0,
        )
        if self._restored is not None:
            self.guard.load_state_dict(self._restored)
            self._restored = None
        logit = self._watched_logit()
        self._loop = OuterLoop(self.guard, self._run_replay, logit=logit, log=self._log)
        self._watch_saving()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Renew the snapshot: schedulers by epochs have advanced, which a rewind must not undo."""
        assert self.guard is not None
        assert self._loop is not None
        self._loop.drop()  # batch without a step, if the module stopped the epoch
        self.guard.renew_snapshot()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Register a batch that was drawn."""
        assert self._loop is not None
        given = {"batch": _own(batch), "batch_idx": batch_idx}
        self._loop.give(given, (trainer.current_epoch, batch_idx))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:  # noqa: ARG002
        """Add the loss of a batch, which is divided by the batches of a step, without the loss scale."""
        assert self._loop is not None
        scale = scale_of(getattr(trainer.precision_plugin, "scaler", None), loss.device)
        self._loop.add_loss(loss.detach() if scale is None else loss.detach() / scale)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: ARG002
        """Judge the step. If it is bad, delete its gradients."""
        loop = self._loop
        assert loop is not None
        if not loop.has_loss:  # training_step returned None
            return
        loop.judge()
        if self._is_last():
            # They advance after the replays.
            self._hold("epoch")
        if loop.makes_update:
            return
        self._hold("step")
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            self._scaler_state = scaler.state_dict()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Handle the alarm of the step.

        Raises:
            GuardError: training cannot continue.
        """
        loop = self._loop
        assert loop is not None
        if loop.decision is None:
            if not (loop.has_loss or trainer.fit_loop._should_accumulate()):
                loop.skip_empty_step()  # training_step returned None
            return
        self._release_scaler()
        trainer.optimizers[0].zero_grad(set_to_none=True)
        by_epochs = [config for config, interval in self._held if interval == "epoch"]
        ends = trainer.should_stop or trainer.fit_loop.epoch_loop._is_training_done
        try:
            loop.close(settle=ends)
        finally:
            self._release()
        for config in by_epochs:
            if (trainer.current_epoch + 1) % config.frequency == 0:
                self._module.lr_scheduler_step(config.scheduler, None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Examine the result of the last step.

        Raises:
            GuardError: training cannot continue.
        """
        assert self._loop is not None
        self._loop.settle()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Restore the module. Callbacks that save are restored after their own `on_exception`."""
        self._watch_no_more()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Restore the module and other callbacks. Warn if a checkpoint was not written."""
        self._watch_no_more()
        if self._deferred:
            warnings.warn(f"step {trainer.global_step}: {_NOT_SAVED}", RuntimeWarning, stacklevel=2)
        for callback in list(self._saving):
            self._let_save(callback)

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state for Lightning's checkpoints; empty before a training.

        Within an accumulation it is the state of the previous step, because Lightning resumes without the
        later batches.
        """
        return {} if self.guard is None else self.guard.state_dict(closed=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict` when training starts."""
        self._restored = state_dict or None

    def _run_replay(self, count: int) -> None:
        """Run a replayed step, as `automatic_optimization` runs a step."""
        assert self.guard is not None
        guard, trainer, module = self.guard, self._trainer, self._module
        strategy, optimizer = trainer.strategy, trainer.optimizers[0]
        last = 0

        def closure() -> Tensor | None:
            nonlocal last
            total: Tensor | None = None
            with torch.enable_grad():
                for number in range(1, count + 1):
                    given = guard.replay()
                    last = given["batch_idx"]
                    blocks = number < count and hasattr(strategy, "block_backward_sync")
                    with strategy.block_backward_sync() if blocks else nullcontext():
                        loss = _loss_in(strategy.training_step(*self._arguments(given)))
                        if number == 1:
                            optimizer.zero_grad()
                        if loss is not None:
                            total = loss / trainer.accumulate_grad_batches
                            strategy.backward(total, optimizer)
            return None if total is None else total.detach()

        self._release_scaler()
        self._let_step()
        with self._not_logged():
            module.optimizer_step(trainer.current_epoch, last, module.optimizers(), closure)
        self._release_scaler()
        made = not any(interval == "step" for _, interval in self._held)
        for config in trainer.lr_scheduler_configs:
            if made and config.interval == "step" and (last + 1) % config.frequency == 0:
                module.lr_scheduler_step(config.scheduler, None)
        optimizer.zero_grad(set_to_none=True)

    def _loss_of(self, model: nn.Module, given: Any) -> Tensor:  # noqa: ARG002
        with self._not_logged(), self._trainer.precision_plugin.train_step_context():
            loss = _loss_in(self._module.training_step(*self._arguments(given)))
        if loss is None:  # without effect on the gradients
            return torch.zeros((), device=self._module.device, requires_grad=True)
        return loss / int(self._trainer.accumulate_grad_batches)

    def _arguments(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        return step_arguments(self._module.training_step, _own(given["batch"]), given["batch_idx"])

    def _watched_logit(self) -> Callable[[], Tensor] | None:
        """Observe `training_step`, because Lightning calls it instead of the module."""
        self._watch_no_more()
        if not self._logits:
            return None
        module, original = self._module, self._module.training_step
        call = _TrainingStep(module, original)

        @wraps(original)  # Lightning inspects its parameters
        def training_step(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        self._watch, self._own_step = AttentionLogit(call), vars(module).get("training_step")
        module.training_step = training_step
        return self._watch.take

    def _watch_saving(self) -> None:
        """Defer checkpoints while an alarm is unresolved.

        Weights may be bad, and a rewind would not undo a checkpoint.
        """
        for callback in list(self._saving):
            self._let_save(callback)
        for callback in self._trainer.checkpoint_callbacks:
            if all(callable(getattr(callback, name, None)) for name in _SAVES):
                self._saving.append(callback)
                for name in _SAVES:
                    setattr(callback, name, self._waiting(callback, name, getattr(callback, name)))
                callback.on_exception = self._not_among_alarms(callback, callback.on_exception)
                callback.on_train_batch_end = self._then_deferred(callback, callback.on_train_batch_end)

    def _waiting(self, callback: Any, name: str, save: Callable[..., None]) -> Callable[..., None]:
        @wraps(save)
        def waiting(*args: Any, **kwargs: Any) -> None:
            assert self._loop is not None
            if self._loop.has_open_alarm:
                # Lightning saves the last one only if another was written.
                names = _SAVES if callback.save_last else (name,)
                self._deferred.setdefault(callback, set()).update(names)
            else:
                save(*args, **kwargs)

        return waiting

    def _not_among_alarms(self, callback: Any, on_exception: Callable[..., None]) -> Callable[..., None]:
        @wraps(on_exception)
        def unless_among_alarms(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self._let_save(callback)
            if self._loop is None or not self._loop.has_open_alarm:
                on_exception(trainer, *args, **kwargs)
            elif getattr(callback, "_should_save_on_exception", lambda _: False)(trainer):
                warnings.warn(f"step {trainer.global_step}: {_NOT_SAVED}", RuntimeWarning, stacklevel=2)

        return unless_among_alarms

    def _then_deferred(self, callback: Any, on_train_batch_end: Callable[..., None]) -> Callable[..., None]:
        @wraps(on_train_batch_end)
        def and_what_was_put_off(trainer: Any, *args: Any, **kwargs: Any) -> None:
            on_train_batch_end(trainer, *args, **kwargs)
            assert self._loop is not None
            if not self._loop.has_open_alarm:
                self._save_deferred(callback, self._deferred.pop(callback, set()))

        return and_what_was_put_off

    def _save_deferred(self, callback: Any, names: set[str]) -> None:
        """Write a deferred checkpoint after all callbacks of a batch, because it contains their states."""
        trainer, before = self._trainer, callback._last_global_step_saved
        if before == trainer.global_step:
            return
        # A choice by metric waits for the next metric: this one was measured during alarms.
        chosen = callback.monitor is not None
        for name in _SAVES:
            if name in names and not (chosen and name == _SAVES[0]):
                getattr(callback, name)(trainer, callback._monitor_candidates(trainer))
        if chosen:  # the next metric may be computed in this step
            callback._last_global_step_saved = before

    def _let_save(self, callback: Any) -> None:
        self._saving.remove(callback)
        self._deferred.pop(callback, None)
        for name in (*_SAVES, "on_exception", "on_train_batch_end"):
            vars(callback).pop(name, None)

    def _watch_no_more(self) -> None:
        if self._watch is None:
            return
        self._watch.remove()
        self._watch = None
        del self._module.training_step
        if self._own_step is not None:
            self._module.training_step = self._own_step

    def _is_last(self) -> bool:
        """Return True if the current batch is the last one of its epoch."""
        assert self._loop is not None
        trainer = self._trainer
        return not self._loop.again and bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())

    def _hold(self, interval: str) -> None:
        """Prevent Lightning from advancing schedulers of an interval after this step."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == interval and not config.reduce_on_plateau:
                self._held.append((config, interval))
                config.interval = _HELD

    def _let_step(self) -> None:
        """Let schedulers by steps advance."""
        for config, interval in self._held:
            if interval == "step":
                config.interval = interval
        self._held = [(config, interval) for config, interval in self._held if interval != "step"]

    def _release(self) -> None:
        for config, interval in self._held:
            config.interval = interval
        self._held = []

    def _release_scaler(self) -> None:
        """Restore the scaler's state from before a skipped step."""
        if self._scaler_state is not None:
            self._trainer.precision_plugin.scaler.load_state_dict(self._scaler_state)
            self._scaler_state = None

    @contextmanager
    def _not_logged(self) -> Iterator[None]:
        """Disable the module's logging in the block, because it has logged these batches."""
        module = self._module
        module.log = module.log_dict = lambda *_, **__: None
        try:
            yield
        finally:
            del module.log, module.log_dict

    def _log(self, alarm: Alarm, count: int) -> None:
        """Send an alarm to the loggers of the trainer."""
        assert self.guard is not None
        values = {
            "guard_alarm_step": alarm.step,
            "guard_alarms": count,
            "guard_skipped": self.guard.skipped,
        }
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=self._trainer.global_step)


class _TrainingStep(nn.Module):
    """Wrapper of a module's function as a module, whose calls can be observed."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._function = module, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _own(batch: Any) -> Any:
    """Return a batch in a new container with the same parts: `training_step` may remove some of them."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | MutableSequence) else batch


def _loss_in(output: Any) -> Tensor | None:
    """Return the loss in the output of `training_step`; None: the batch is skipped."""
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    fits = loss is None or isinstance(loss, Tensor)
    require(fits, "training_step", type(loss).__name__, "a loss, also in a replay, or None")
    return loss
