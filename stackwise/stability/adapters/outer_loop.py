"""OuterLoop: runs the steps of a third-party loop, which draws batches and updates itself, under a guard.

The loop draws each batch once. Replays run when the last step is closed, so the loop's counters include only
the batches that it has drawn, and the loop does not notice the replays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stackwise.stability.guard import Alarm, Decision, Guard
from stackwise.support.arguments import require

__all__ = ["OuterLoop", "Schedulers", "check_engine", "scale_of"]

_ENGINES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")  # engines of accelerate with gradients in the parameters


class OuterLoop:
    """Connection between the hooks of a loop and its guard.

    Args:
        guard: guard of the loop.
        run_replay: function that runs a step of the requested number of batches from `guard.replay()`, up
            to the scheduler, and zeroes the gradients. It calls `add_loss` and `judge` like other steps.
        logit: function that returns the largest attention logit since its last call; None: logits are not
            observed.
        log: called with each new alarm and the number of alarms up to it, also if training stops.

    Attributes:
        guard: guard of the loop.
        again: True during a replay.
        n_given: number of batches of the current step.
        decision: decision about the current step; None: not judged yet.
        makes_update: True if the optimizer must be called.
    """

    def __init__(
        self,
        guard: Guard,
        run_replay: Callable[[int], None],
        *,
        logit: Callable[[], Tensor] | None,
        log: Callable[[Alarm, int], None],
    ) -> None:
        self.guard, self._run_replay, self._logit, self._log = guard, run_replay, logit, log
        self._logged = len(guard.alarms)
        self.again = False
        self.n_given = 0
        self.decision: Decision | None = None
        self.makes_update = True
        self._loss: Tensor | None = None

    def give(self, batch: Any, identity: Hashable) -> None:
        """Register a batch that the loop has drawn, before its forward pass. A replayed batch is known."""
        if not self.again:
            self.guard.give(batch, identity)
            if self.n_given == 0:
                self._forget_logits()
        self.n_given += 1

    def add_loss(self, loss: Tensor) -> None:
        """Add the part of a batch, one element, to the loss of the step."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    @property
    def has_loss(self) -> bool:
        """True if a batch of the current step had a loss."""
        return self._loss is not None

    @property
    def has_open_alarm(self) -> bool:
        """True if no update followed the last handled alarm: weights may be bad."""
        return self.guard.consecutive_alarms > 0

    def judge(self, scale: Tensor | None = None) -> None:
        """Judge a step after its last backward pass and before clipping; see `Guard.check_step`."""
        assert self._loss is not None, "add_loss() first"
        loss, self._loss = self._loss, None
        logit = None if self._logit is None else self._logit()
        self.decision = self.guard.check_step(loss, logit=logit, scale=scale)
        self.makes_update = self.guard.makes_update(self.decision)

    def close(self, *, settle: bool = False) -> None:
        """Handle alarms and run all replays. Call it after a step, when its gradients are zeroed.

        Args:
            settle: wait for all alarms of the steps up to now.

        Raises:
            GuardError: training cannot continue.
        """
        try:
            self._close()
            self._run_replays(settle)
        finally:
            self._log_alarms()

    def skip_empty_step(self) -> None:
        """Count a step in which no batch had a loss, instead of `close`. A rewind replays it."""
        self._forget_step()
        self.guard.skip_empty_step()

    def drop(self) -> None:
        """Drop the batches since the last step."""
        self._forget_step()
        self.guard.drop_batches()

    def settle(self) -> None:
        """Wait for all alarms of the steps up to now, and run all replays.

        Raises:
            GuardError: training cannot continue.
        """
        try:
            self._run_replays(settle=True)
        finally:
            self._log_alarms()

    def _log_alarms(self) -> None:
        for alarm in self.guard.alarms[self._logged :]:
            self._logged += 1
            self._log(alarm, self._logged)

    def _close(self) -> None:
        assert self.decision is not None, "judge() first"
        decision = self.decision
        self._forget_step()
        self.guard.close_step(decision)

    def _forget_step(self) -> None:
        self.decision = self._loss = None
        self.makes_update, self.n_given = True, 0

    def _forget_logits(self) -> None:
        """Discard logits from before the step, for example from a recomputation."""
        if self._logit is not None:
            self._logit()

    def _run_replays(self, settle: bool) -> None:
        while True:
            if settle:
                self.guard.settle()
            count = self.guard.batches_to_replay
            if not count:
                break
            self.again = True
            self._forget_logits()
            try:
                self._run_replay(count)
            finally:
                self.again = False
            if self.decision is None:
                self.skip_empty_step()
            else:
                self._close()
        self.guard.finish_replay()


class Schedulers:
    """Schedulers that a loop advances itself, with one common state. They may need a metric."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        """Return the states by index."""
        return {str(number): each.state_dict() for number, each in enumerate(self._schedulers)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states."""
        for number, each in enumerate(self._schedulers):
            each.load_state_dict(state_dict[str(number)])


def check_engine(accelerator: Any) -> bool:
    """Refuse an `accelerate.Accelerator` that does not expose the gradients.

    Returns:
        True if weights are sharded.

    Raises:
        ValueError: DeepSpeed, FSDP1 and other engines.
    """
    engine: str = accelerator.distributed_type.value
    sharded = engine == "FSDP"
    known = engine in _ENGINES and (not sharded or getattr(accelerator, "is_fsdp2", False))
    wanted = "one process, DDP or FSDP2, whose gradients are those of the parameters"
    require(known, "distributed_type", engine, wanted)
    return sharded


def scale_of(scaler: Any, device: torch.device) -> Tensor | None:
    """Return the current loss scale of a `torch.amp.GradScaler`, one element; None without a scaler."""
    if scaler is None:
        return None
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale
