"""GuardCallback for transformers: runs a `Trainer` under the guard."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from stackwise.stability.adapters.outer_loop import OuterLoop, Schedulers, check_engine, scale_of
from stackwise.stability.adapters.state_file import read_state, write_state
from stackwise.stability.guard import Alarm, Guard, GuardPolicy
from stackwise.stability.guard.snapshot import Stateful
from stackwise.stability.telemetry import AttentionLogit
from stackwise.support.arguments import require

try:
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped, unused-ignore]
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        f"{__name__} needs transformers and accelerate: pip install transformers accelerate"
    ) from error

__all__ = ["GuardCallback"]


class GuardCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Callback that judges each step of a `transformers.Trainer` before its gradients are clipped.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[GuardCallback(GuardPolicy())])
        trainer.train()

    A skipped step does not change weights, optimizer and scheduler. `state.global_step` includes it, because
    it counts batches. A rewind replays steps inside the `on_step_end` of the last one. Other callbacks are
    not called for replayed steps, and these are not counted. `max_grad_norm` of the arguments clips, as
    without a guard. While an alarm is unresolved, no checkpoint is saved: a due checkpoint is deferred.

    Args:
        policy: limits and responses, without `clip`: the Trainer clips.
        locate: recompute a bad step with `compute_loss`, to name its module and to find out if it is bad in
            the recomputation too. False: parameters are named by their norms.
        others: objects whose state a rewind restores, by name.
        bundles: folder for diagnostic bundles; None: none are written.
        lag: see `Guard`.
        logits: observe the model with `AttentionLogit`; None: if the policy has a `logit_limit`.

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
        lag: int | None = None,
        logits: bool | None = None,
    ) -> None:
        self.policy = policy or GuardPolicy()
        require(
            self.policy.clip is None, "clip", self.policy.clip, "None: TrainingArguments.max_grad_norm clips"
        )
        self._locate, self._others, self._bundles, self._lag = locate, others, bundles, lag
        self._logits = self.policy.logit_limit is not None if logits is None else logits
        self._watch: AttentionLogit | None = None
        self._trainer: Any = None
        self._loop: OuterLoop | None = None
        self._optimizer: Any = None
        self._own_step: Any = None  # if it is not the method of the class
        self._resume: Any = None
        self._trial: Any = None  # of a hyperparameter search
        self._deferred: set[str] = set()  # actions that are due when the alarm is resolved
        self._updates: int | None = None  # updates per epoch
        self.guard: Guard | None = None

    def attach(self, trainer: Any) -> Self:
        """Attach to a trainer that was created without this callback.

        Raises:
            ValueError: the callback is attached to another trainer.
        """
        require(
            self._trainer is None or self._trainer is trainer,
            "trainer",
            "another one",
            "one for each callback",
        )
        if self._trainer is None:
            self._trainer = trainer
            if not any(each is self for each in trainer.callback_handler.callbacks):
                trainer.add_callback(self)
            self._training_step, self._train = trainer.training_step, trainer.train
            trainer.training_step, trainer.train = self._watched_step, self._watched_train
            self._log_save_evaluate = trainer._maybe_log_save_evaluate
            trainer._maybe_log_save_evaluate = self._watched_log_save_evaluate
        return self

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Attach to the trainer, which is complete now."""
        if self._trainer is None:
            self.attach(_caller(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Create the guard. Model, optimizer and scheduler are ready.

        Raises:
            ValueError: the callback was added to a trainer without `attach`, or the engine does not expose
                the gradients.
        """
        trainer = self._trainer
        allowed = (
            "Trainer(callbacks=[GuardCallback(...)]), or GuardCallback(...).attach(trainer) before train()"
        )
        require(trainer is not None, "trainer", None, allowed)
        self._release()
        accelerator = trainer.accelerator
        check_engine(accelerator)
        self._optimizer = trainer.optimizer
        optimizer = self._optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        self.guard = Guard(
            trainer.model,
            optimizer,
            scheduler=None if trainer.lr_scheduler is None else Schedulers([trainer.lr_scheduler]),
            policy=self.policy,
            loss_of=self._loss_of if self._locate else None,
            others=self._others,
            bundles=self._bundles,
            scaler=getattr(accelerator, "scaler", None),
            lag=self._lag,
        )
        self._watch = AttentionLogit(trainer.model) if self._logits else None
        self._restore(args)
        logit = None if self._watch is None else self._watch.take
        self._loop = OuterLoop(self.guard, self._run_replay, logit=logit, log=self._log)
        self._watch_updates()
        self._updates = _updates_per_epoch(kwargs.get("train_dataloader"), args.gradient_accumulation_steps)
        self._deferred = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Handle the alarms of the steps up to now.

        Raises:
            GuardError: training cannot continue.
        """
        assert self._loop is not None
        # No alarm may be outstanding when a state is saved or evaluated.
        ends = control.should_save or control.should_evaluate or control.should_training_stop
        self._loop.close(settle=ends)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Handle every alarm.

        Raises:
            GuardError: training cannot continue.
        """
        assert self._loop is not None
        self._loop.settle()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Renew the snapshot: a schedule may depend on the evaluation, which a rewind must not undo."""
        if self.guard is not None and self._trainer.is_in_train:
            self.guard.renew_snapshot()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Write the guard's state into the new checkpoint. Warn if this fails."""
        guard, trainer = self.guard, self._trainer
        if guard is not None and not args.save_only_model:
            folder = Path(trainer._get_output_dir(self._trial)) / f"checkpoint-{state.global_step}"
            guarded = guard.state_dict()
            try:
                write_state(guarded, folder, args.process_index)
            except (OSError, ValueError) as error:
                warnings.warn(f"{folder}: no state of the guard: {error}", RuntimeWarning, stacklevel=2)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Warn if the last checkpoint was not written."""
        if self._deferred:
            told = "no checkpoint, as training ended with an unresolved alarm; the previous one is the newest"
            warnings.warn(f"step {state.global_step}: {told}", RuntimeWarning, stacklevel=2)

    # Replacements of the trainer's methods.

    def _watched_train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._resume = resume_from_checkpoint
        self._trial = args[0] if args else kwargs.get("trial")
        try:
            return self._train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._release()

    def _watched_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loop, trainer = self._loop, self._trainer
        if loop is None:
            loss: Tensor = self._training_step(model, inputs, *args, **kwargs)
            return loss
        n_items = args[0] if args else kwargs.get("num_items_in_batch")
        loop.give(
            {
                "inputs": inputs,
                "num_items_in_batch": n_items,
                "n_batches": int(trainer.current_gradient_accumulation_steps),
            },
            self._identity(loop.n_given),
        )
        loss = self._training_step(model, inputs, *args, **kwargs)
        loop.add_loss(loss)
        if trainer.accelerator.sync_gradients:
            loop.judge(scale_of(getattr(trainer.accelerator, "scaler", None), loss.device))
        return loss

    def _watched_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._loop is not None:
            self._defer_saving(self._trainer.control)
        self._log_save_evaluate(*args, **kwargs)

    def _defer_saving(self, control: Any) -> None:
        """Defer checkpoints while an alarm is unresolved.

        Weights may be bad, and a rewind would not undo a checkpoint. This is not done in `on_step_end`,
        because later callbacks may request a checkpoint too.
        """
        assert self._loop is not None
        if not (control.should_save or control.should_evaluate or self._deferred):
            return
        self._loop.settle()
        args = self._trainer.args
        if not self._loop.has_open_alarm:
            for name in self._deferred:
                setattr(control, name, True)
            self._deferred = set()
        elif control.should_save or (control.should_evaluate and args.save_strategy == "best"):
            # The best evaluation needs a checkpoint.
            finds_best = args.metric_for_best_model is not None
            for name in ("should_save", "should_evaluate") if finds_best else ("should_save",):
                if getattr(control, name):
                    self._deferred.add(name)
                    setattr(control, name, False)

    def _watch_updates(self) -> None:
        optimizer, loop = self._optimizer, self._loop
        assert loop is not None
        original = optimizer.step

        @wraps(original)  # a scheduler checks for its mark on the function
        def step(*args: Any, **kwargs: Any) -> Any:
            # As after an overflow: the trainer then does not advance its scheduler.
            optimizer._is_overflow = not loop.makes_update
            if loop.makes_update:
                return original(*args, **kwargs)
            loop.guard.reset_scaler()
            return None

        self._own_step = vars(optimizer).get("step")
        optimizer.step = step

    def _run_replay(self, count: int) -> None:
        """Run a replayed step, as `_run_epoch` runs a step."""
        assert self.guard is not None
        trainer, model = self._trainer, self._trainer.model_wrapped
        accelerator = trainer.accelerator
        before = trainer.current_gradient_accumulation_steps
        trainer.current_gradient_accumulation_steps = count
        for number in range(1, count + 1):
            given = self.guard.replay()
            accelerator.gradient_state._set_sync_gradients(number == count)
            with nullcontext() if number == count else accelerator.no_sync(model):
                trainer.training_step(model, given["inputs"], given["num_items_in_batch"])
        trainer.current_gradient_accumulation_steps = before
        max_norm = trainer.args.max_grad_norm
        if max_norm and max_norm > 0:
            if hasattr(trainer, "_clip_grad_norm"):
                trainer._clip_grad_norm(model)
            else:  # before transformers 5
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
        trainer.optimizer.step()
        scheduled = "metrics" not in inspect.signature(trainer.lr_scheduler.step).parameters
        if scheduled and not accelerator.optimizer_step_was_skipped:
            trainer.lr_scheduler.step()
        model.zero_grad()

    def _loss_of(self, model: nn.Module, given: Any) -> Tensor:
        """Return the part of a micro-batch in the loss of its step, as in `training_step`."""
        trainer, n_items = self._trainer, given["num_items_in_batch"]
        inputs = trainer._prepare_inputs(given["inputs"])
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=n_items).mean()
        is_part = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_part is None:
            of_model = trainer.model_accepts_loss_kwargs and n_items is not None
            is_part = of_model or trainer.compute_loss_func is not None
        return loss if is_part else loss / given["n_batches"]

    def _identity(self, number: int) -> tuple[int, int]:
        """Return (epoch, index in the epoch) of a micro-batch, from the number of updates only."""
        step, per_update = self._trainer.state.global_step, self._trainer.args.gradient_accumulation_steps
        epoch, update = (0, step) if self._updates is None else divmod(step, self._updates)
        return epoch, update * per_update + number

    def _restore(self, args: Any) -> None:
        """Load the guard's state from the checkpoint from which training resumes."""
        assert self.guard is not None
        if not self._resume:
            return
        latest: Callable[[str], Any] = get_last_checkpoint
        folder = latest(args.output_dir) if self._resume is True else self._resume
        state = read_state(Path(folder), args.process_index)
        if state is None and (of_first := read_state(Path(folder), 0)) is not None:
            # Saved by fewer processes. All need the same history, because they decide as one.
            state = Guard.common_state(of_first)
        if state is None:
            warnings.warn(
                f"{folder}: no state of a guard: it starts without a history", RuntimeWarning, stacklevel=2
            )
        else:
            self.guard.load_state_dict(state)

    def _log(self, alarm: Alarm, count: int) -> None:
        """Add an alarm to the log history."""
        assert self.guard is not None
        control = self._trainer.control
        should_log = control.should_log
        self._trainer.log(
            {
                "guard_alarm": str(alarm),
                "guard_alarm_step": alarm.step,
                "guard_alarms": count,
                "guard_skipped": self.guard.skipped,
            }
        )
        control.should_log = should_log  # the regular log of this step is still due

    def _release(self) -> None:
        """Restore the optimizer."""
        optimizer = self._optimizer
        if optimizer is not None:
            vars(optimizer).pop("step", None)
            if self._own_step is not None:
                optimizer.step = self._own_step
            optimizer._is_overflow = False
        if self._watch is not None:
            self._watch.remove()
        self._optimizer = self._loop = self._watch = None


def _caller(callback: GuardCallback) -> Any:
    """Return the trainer that calls `on_init_end`: it does not pass itself to its callbacks."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and any(each is callback for each in found.callback_handler.callbacks):
            return found
        frame = frame.f_back
    raise ValueError("trainer: got None; allowed: GuardCallback(...).attach(trainer)")


def _updates_per_epoch(loader: Any, per_update: int) -> int | None:
    """Return the number of updates in an epoch; None if the loader has no length."""
    try:
        return max(1, math.ceil(len(loader) / per_update))
    except TypeError:
        return None
