"""Guard: detect a bad training step before its update; skip it, rewind, or stop with a diagnosis.

A step is judged on the device. On the CPU, the host learns of an alarm at once, on other devices some steps
later. Until the host has handled the alarm, every update is skipped. The skipped batches are replayed.
"""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from stackwise.config import GuardPolicy
from stackwise.stability.buffers import BrokenBuffers, Buffers
from stackwise.stability.gated_optimizer import GatedOptimizer
from stackwise.stability.guard.alarm import Alarm, AlarmKind, GuardError
from stackwise.stability.guard.attribution import attributed_module, first_names, median_norms
from stackwise.stability.guard.detector import ClippingDetector
from stackwise.stability.guard.diagnosis import BundleFolder
from stackwise.stability.guard.escalation import Escalation
from stackwise.stability.guard.examination import REFERENCES, Examination
from stackwise.stability.guard.finite_state import FiniteState
from stackwise.stability.guard.history import ReplayReference
from stackwise.stability.guard.replay_loader import DrawnBatch, ReplayLoader
from stackwise.stability.guard.snapshot import (
    Moment,
    Snapshot,
    Stateful,
    check_restorable,
    check_states,
)
from stackwise.stability.guard.step_detector import KINDS, Decision, GuardRecord, StepDetector
from stackwise.stability.telemetry.gradient_norm import GradientNames, gradient_norms
from stackwise.stability.telemetry.ring_buffer import RingBuffer
from stackwise.support.arguments import check_sizes, require
from stackwise.support.optimizer_state import is_optimizer, optimizers_in, parameters_of

__all__ = ["Guard"]

_LOG = logging.getLogger("stackwise.guard")
_SCALARS = len(Decision._fields) - 1  # columns of a row before the norms
_LAG = 4  # steps until the host reads a row from a device other than the CPU
_KEPT_RECORDS = 1024


@dataclass(frozen=True, eq=False)
class _Made:
    """Completed step whose result the host has not handled yet."""

    step: int
    batches: Sequence[DrawnBatch]
    names: tuple[str, ...]
    before: Moment | None  # None: no lag, or no batches to replay
    order: int
    buffers: BrokenBuffers | None

    @property
    def ids(self) -> tuple[Hashable, ...]:
        """Ids of the batches."""
        return tuple(given.id for given in self.batches)


class Guard:
    """Detects bad training steps and skips or rewinds them, for any model and torch optimizer.

    Args:
        model: model whose parameters are trained.
        optimizer: any optimizer of torch, a wrapper around one, or an object that contains several (see
            `optimizers_in`). With a `lag` it must skip updates on the device: AdamW, Adam or SGD of torch
            with `fused=True`, or an optimizer with the attribute `found_inf`.
        scheduler: learning-rate scheduler. It advances with each update, and not with a skipped one.
        policy: limits and responses.
        loss_of: function of (model, batch) that returns the loss as it is passed to `backward()`; in a step
            of n batches, the part of each. With it, a bad step is recomputed to find out if its batches are
            the cause, and which module. None: parameters are named by their norms.
        batch_id: function that identifies a batch by an integer, a string, or a tuple of these. A quarantined
            batch is then skipped in later epochs too. None: (epoch, index in the epoch).
        others: objects whose state a rewind restores, by name.
        bundles: folder for diagnostic bundles; None: none are written.
        group: processes that train together and decide as one; None: all processes.
        scaler: scaler of the loss in float16 training. While its scale is above 1, a gradient that overflows
            is no alarm: the scaler handles it, and the batch is not the cause. Requires `lag` 0.
        lag: number of steps until the host handles the result of a step. None: 0 on the CPU or with a scaler,
            otherwise 4. With 0, any optimizer is allowed, and the host waits at each step if the device is
            not the CPU.
        on_rewind: called after a rewind with the number of the next step, because checkpoints of later steps
            may contain bad weights (`CheckpointManager.rewind`). With several processes, each calls its own.

    Attributes:
        alarms: alarms in order.
        skipped: number of skipped updates. A rewind does not reset it.
        cleared: number of steps that were recomputed on suspicion and then taken unchanged.

    Warns:
        RuntimeWarning: once if gradients are clipped before the guard sees them, which hides every spike.

    Raises:
        ValueError: nothing to train, parameters on several devices, a list of optimizers, an optimizer that
            cannot skip an update, cannot be restored (see `check_restorable`) or needs a closure, a scheduler
            that needs a metric, an object in `others` without `state_dict()` and `load_state_dict()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Stateful | None = None,
        policy: GuardPolicy | None = None,
        loss_of: Callable[[nn.Module, Any], Tensor] | None = None,
        batch_id: Callable[[Any], Hashable] | None = None,
        others: Mapping[str, Stateful] | None = None,
        bundles: Path | str | None = None,
        group: distributed.ProcessGroup | None = None,
        scaler: torch.amp.GradScaler | None = None,
        lag: int | None = None,
        on_rewind: Callable[[int], object] | None = None,
    ) -> None:
        check_restorable(optimizer, scheduler, others or {})
        _check_step_arguments(optimizer, scheduler)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.policy = policy or GuardPolicy()
        self._others = dict(others or {})
        self._named = _named_parameters(model, optimizer)
        self._names = GradientNames(self._named)
        self._device = self._named[0][1].device
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self._scaler is not None:
            allowed = "other names: the scaler is restored as well"
            require("scaler" not in self._others, "others", "scaler", allowed)
            self._others["scaler"] = self._scaler
        self._lag = self._chosen_lag(lag)
        self._gated = GatedOptimizer(optimizer, on_device=self._lag > 0)
        self._group = group or _everyone()
        # Ids differ between processes: these would skip different batches, and wait for each other.
        allowed = "None in several processes: all skip the same index of an epoch"
        require(batch_id is None or self._group is None, "batch_id", batch_id, allowed)
        self._detector = StepDetector(self.policy, self._device, self._group)
        self._loader = ReplayLoader(batch_id)
        self._buffers = Buffers(model)
        self._buffers.keep()
        self._snapshot = Snapshot(model, optimizer, self._others, on_host=self.policy.snapshot_on_host)
        self._on_rewind = on_rewind
        self._last_skipped = True  # True if the update of the last alarm was skipped
        self._moment: Moment | None = None
        self._detector_state: dict[str, Any] = {}
        self._replay_reference = ReplayReference(self._device)
        self._order = self._snapshot_step = self._snapshot_order = 0
        self._has_batches = False  # True if batches() or give() is used
        self._rows = self._made_rows()
        self._arrived: deque[tuple[_Made, list[float]]] = deque()
        self._under_way: deque[_Made] = deque()
        self._open: _Made | None = None  # the current step, from check_step() to close_step()
        optimizers = [optimizer, *filter(is_optimizer, self._others.values())]
        self._finite_state = FiniteState(model, optimizers, self._group)
        self._examined_until = -1  # last step of a replay that examines the result of each update
        self._last_made: _Made | None = None
        self._overflowed = False
        self._records: deque[GuardRecord] = deque(maxlen=_KEPT_RECORDS)
        # Norms of the last healthy steps, with the step numbers.
        self._healthy_norms: deque[tuple[int, dict[str, float]]] = deque(maxlen=self.policy.recent)
        self.alarms: list[Alarm] = []
        self.skipped = self.cleared = 0
        self._escalation = Escalation(self.policy)
        self._bundles = BundleFolder(bundles, self.policy, self._group)
        # If possible, a rise that may be healthy is recomputed before it is an alarm.
        by_suspicion = self.policy.suspect_factor is not None and not self.policy.spikes_clipped
        self._recomputes = loss_of is not None and by_suspicion
        self._not_recomputed: int | None = None  # step that could not be recomputed
        self._examination = self._made_examination(loss_of)
        self._answering: int | None = None
        self._clipping = ClippingDetector()
        # Number of steps without a logit. None: no logit limit, a logit was passed, or the user was warned.
        self._without_logit = None if self.policy.logit_limit is None else 0

    @property
    def steps(self) -> int:
        """Number of the current step, or of the next one. Skipped steps are counted.

        After a rewind it is the number of the snapshot's step, because a replayed batch keeps its number.
        During the recomputation of a bad step, it is the number of that step.
        """
        return self._loader.step if self._answering is None else self._answering

    @property
    def consecutive_alarms(self) -> int:
        """Number of consecutive alarms, if the update of the last one was skipped; otherwise 0.

        A rewind resets it. Above 0, weights or optimizer state may be bad: save no checkpoint.
        """
        return self._escalation.consecutive_alarms if self._last_skipped else 0

    @property
    def quarantined(self) -> list[Hashable]:
        """Ids of the batches that are skipped from now on."""
        return list(self._loader.quarantined)

    @property
    def snapshot_bytes(self) -> int:
        """Size of the snapshot in bytes: one copy of parameters, buffers and optimizer state.

        Modules and optimizers in `others` are included.
        """
        return self._snapshot.nbytes

    def batches(self, loader: Iterable[Any], *, fast_forward: bool = False) -> Iterator[Any]:
        """Yield the batches of one epoch, including replays after a rewind, without quarantined batches.

        Batches since the last snapshot are stored by reference: do not write into them. Batches that an
        earlier loop drew without a step are dropped.

        Args:
            loader: loader of the batches, iterated once. After `load_state_dict` it must continue at its own
                position, unless `fast_forward` is set.
            fast_forward: after `load_state_dict`, read and discard the batches before the position of the
                state.

        Raises:
            ValueError: an invalid batch id; or a snapshot is due, and a parameter or buffer of a lazy module
                has no shape yet.
            GuardError: training cannot continue.
        """
        require(self._lag == 0 or not self._under_way, "batches", "outstanding steps", "no other loop before")
        self._loader.drop_pending()
        self._has_batches = True
        # A rewind must not undo actions of the loop between epochs, such as changes of learning rates.
        self.renew_snapshot()
        given = self._loader.batches(loader, fast_forward=fast_forward, ending=self._settle_all)
        for batch in given:
            if len(self._loader.pending) == 1:
                self._before_step()
            yield batch

    def step(self, loss: Tensor, *, logit: Tensor | None = None) -> Decision:
        """Judge, clip, update, advance the scheduler and zero the gradients. Call it after the backward pass.

        Args:
            loss: loss of the step, one element.
            logit: largest attention logit, one element; None: no signal.

        Returns:
            The decision, on the device. If its `found_inf` is 1, the update was skipped. Actions that
            accompany updates, such as an average of the weights, must then be skipped as well.

        Raises:
            ValueError: no gradient; a scheduler on a device other than the CPU without `batches`.
            GuardError: training cannot continue.
        """
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        decision = self.check_step(loss, logit=logit)
        if self.makes_update(decision):
            self._update()
        else:
            self.reset_scaler()
        try:
            self.close_step(decision)
        finally:
            self.optimizer.zero_grad()
        return decision

    # The parts of `step`, for a third-party loop that calls the optimizer itself.

    def check_step(
        self, loss: Tensor, *, logit: Tensor | None = None, scale: Tensor | None = None
    ) -> Decision:
        """Judge the current step. Call it after the last backward pass and before gradients are clipped.

        Args:
            loss: loss of the step, one element.
            logit: largest attention logit, one element; None: no signal.
            scale: current factor of the gradients, one element; None: they are not scaled.

        Raises:
            ValueError: as in `step`.
        """
        self._look_for_logits()
        self._see_parameters()
        if self._order == 1:  # the first update may have created state in attributes
            check_states(self.optimizer, self._others)
        # Without batches(), the start of a step is unknown, and no step is recomputed.
        if self._has_batches:
            self._buffers.note_written()
        self._finite_state.begin()
        broken = self._buffers.broken()
        with torch.no_grad():
            norms_P = self._norms()
            if scale is not None:
                norms_P = norms_P / scale.to(norms_P.device, torch.float32)
        require(len(norms_P) > 0, "gradients", "none", "backward() before step()")
        before = Moment(self.optimizer, self.scheduler) if self._lag and self._has_batches else None
        batches = tuple(self._loader.pending)
        self._open = _Made(self._loader.step, batches, self._names(), before, self._order, broken)
        decision = self.decide(loss, norms_P, logit)
        self._overflowed = False
        if self._scaler is not None and KINDS[int(decision.code.item())] == "non-finite gradient":
            self._overflowed = self._scaler.get_scale() > 1.0
        if self._overflowed:
            decision = decision._replace(code=torch.zeros_like(decision.code))
        return decision

    @torch.no_grad()
    def makes_update(self, decision: Decision) -> bool:
        """Prepare the update. Return True if the optimizer must be called now.

        With a lag, the result is always True: the optimizer skips a bad step on the device. If a scaler
        handles an overflow, it is True as well. Otherwise gradients are divided as decided. If the step is
        skipped, buffers are restored to their values before the step, or, without `batches`, after the
        previous step.
        """
        if self._overflowed:
            if self._open is not None and self._open.buffers is not None:
                self._buffers.restore(self._open.buffers.flags_B.any())
            return True
        if self._lag == 0 and decision.found_inf.item():
            self._buffers.restore()
            return False
        self._gated.gate(decision.found_inf, decision.divisor)
        if self._lag:
            self._buffers.restore(decision.found_inf.bool())
        return True

    def reset_scaler(self) -> None:
        """Discard the scaler's notes about a skipped step. Its scale and its step count stay unchanged."""
        # Without clipping, gradients may not be unscaled yet. The scaler then has no notes.
        if self._scaler is not None and _has_noted(self._scaler):
            state = self._scaler.state_dict()
            self._scaler.update()
            self._scaler.load_state_dict(state)

    def close_step(self, decision: Decision) -> None:
        """Handle the alarms that have arrived. Call it after the update, if any, and after the scheduler.

        Raises:
            GuardError: training cannot continue.
        """
        assert self._open is not None, "check_step() first"
        if self._scaler is None:
            self._gated.release()
        made, self._open = self._open, None
        self._loader.take_pending()
        allowed = "one for each batch of batches()"
        require(bool(made.batches) or not self._has_batches, "step", made.step, allowed)
        self._order += 1
        no_divisor = torch.ones_like(decision.found_inf)
        *scalars, norms_P = (no_divisor if each is None else each for each in decision)
        self._rows.write(made, scalars, norms_P)
        self._under_way.append(made)
        self._last_made = made
        if not self._has_batches:
            self._buffers.keep()
        self._settle(0 if self._examined_until >= 0 else self._lag)
        # A snapshot must not contain bad weights. With a lag, the examination would make the host wait.
        snapshot_next = self._lag == 0 and self._moment is not None and self._snapshot_is_due()
        if self._examined_until >= 0 or (snapshot_next and not self._escalation.consecutive_alarms):
            self._examine_state()

    def give(self, batch: Any, identity: Hashable) -> None:
        """Add a batch that a third-party loop has drawn. Such a loop uses this instead of `batches`.

        `batches_to_replay` must be 0.

        Args:
            batch: batch. It is stored by reference until the next snapshot.
            identity: identity of the batch, as `batch_id` returns it.
        """
        self._has_batches = True
        self._loader.give(batch, identity)
        if len(self._loader.pending) == 1:
            self._before_step()

    @property
    def batches_to_replay(self) -> int:
        """Number of batches of the next step if it is a replay; otherwise 0."""
        return self._loader.batches_to_replay

    @property
    def is_replay(self) -> bool:
        """True if the current step is a replay."""
        return self._loader.is_replay

    def replay(self) -> Any:
        """Return the next batch of the replay, and restore its random states."""
        batch = self._loader.replay_next()
        if len(self._loader.pending) == 1:
            self._before_step()
        return batch

    def finish_replay(self) -> None:
        """Restore the random states from before the replay. Call it after the last replayed step."""
        self._loader.finish_replay()

    def skip_empty_step(self) -> None:
        """Count a step in which no batch had a loss. A rewind replays it."""
        self._loader.take_pending()

    def drop_batches(self) -> None:
        """Drop the batches since the last step."""
        self._loader.drop_pending()

    def renew_snapshot(self) -> None:
        """Take a new snapshot at the next batch. Earlier steps can then not be replayed."""
        self._moment = None

    def decide(self, loss: Tensor, norms_P: Tensor, logit: Tensor | None = None) -> Decision:
        """Judge a step on the device. `step` calls this and acts on the decision.

        Args:
            loss: loss of the step, one element.
            norms_P: L2 norm of each gradient, before clipping.
            logit: largest attention logit.
        """
        if self._lag and not self._has_batches:
            allowed = (
                "none, or guard.batches(loader), or lag=0: the host does not know yet whether to advance it"
            )
            require(self.scheduler is None, "scheduler", type(self.scheduler).__name__, allowed)
        # Without batches(), the steps after a bad one could not be replayed and would be lost.
        latch = self._lag > 0 and self._has_batches
        broken = None if self._open is None else self._open.buffers
        return self._detector.decide(
            loss,
            norms_P,
            logit,
            latch=latch,
            suspect=self._recomputes_now,
            before_S=self._replay_reference.signals_of(self._loader.step),
            broken_buffers=None if broken is None else broken.flags_B.any().to(self._device),
        )

    @property
    def _recomputes_now(self) -> bool:
        """True if a rise of the next step's norm or loss makes the guard recompute the step."""
        able = self._has_batches and self._recomputes and not self._examination.is_random
        return able and self._loader.step != self._not_recomputed

    def settle(self) -> None:
        """Wait for the device, and handle every alarm of the steps up to now.

        Parameters and optimizer state are examined. A non-finite one is an alarm too.

        Raises:
            ValueError: called between a batch and its step, while results of earlier steps are outstanding.
            GuardError: training cannot continue.
        """
        self._check_settles()
        self._settle_all()

    def _check_settles(self) -> None:
        """Refuse to settle within a step while results are outstanding: an alarm could not be handled."""
        mixed = bool(self._loader.pending) and bool(self._under_way)
        require(
            not mixed, "settle", "outstanding steps and a pending batch", "a moment after step(), or lag=0"
        )

    def records(self) -> list[GuardRecord]:
        """Return the records since the last call, oldest first, at most 1024. Does not wait."""
        records = list(self._records)
        self._records.clear()
        return records

    def state_dict(self, *, closed: bool = False) -> dict[str, Any]:
        """Return the state that a resumed run needs in addition to model, optimizer and scheduler.

        The host waits for the device. The state contains histories, counters, quarantine, alarms, the
        position in the data, and batches to be replayed. The snapshot is not included: the resumed run takes
        a new one.

        Args:
            closed: allow pending batches, and return the state of the last closed step. Pending batches of
                `batches` are then to be replayed. Pending batches of `give` belong to the third-party loop.

        Raises:
            ValueError: called between a batch and its step, unless `closed`; with `closed`, if results of
                earlier steps are outstanding; or an alarm has just undone steps.
            GuardError: training cannot continue.
        """
        in_hand = bool(self._loader.pending)
        allowed = "a moment between step() and the next batch"
        require(closed or not in_hand, "state_dict", "a pending batch", allowed)
        self._check_settles()
        alarms = len(self.alarms)
        self._settle(0)
        # The caller may have saved weights and scheduler before the steps were undone.
        undone = "alarms that undid steps" if len(self.alarms) > alarms else ""
        require(not undone, "state_dict", undone, "settle() before any state is taken")
        return {
            "detector": self._detector.state_dict(),
            "loader": self._loader.state_dict(),
            "replay_reference": self._replay_reference.state_dict(),
            "alarms": [alarm.to_dict() for alarm in self.alarms],
            "reference": self._median_norms(),
            "skipped": self.skipped,
            "cleared": self.cleared,
            "escalation": self._escalation.state_dict(),
            "last_skipped": self._last_skipped,
            "written": self._bundles.written,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    @staticmethod
    def common_state(state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a `state_dict` that all processes share, for another number of processes.

        Batches to be replayed belong to one process each. If there are none, the stored results of replayed
        steps are dropped.
        """
        replay_reference = (
            state["replay_reference"] if state["loader"]["again"] else {"steps": [], "signals": []}
        )
        return {
            **state,
            "loader": ReplayLoader.common_state(state["loader"]),
            "replay_reference": replay_reference,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Load model, optimizer and scheduler first.

        Raises:
            ValueError: not a state of a guard.
        """
        known = (
            *("detector", "loader", "replay_reference", "alarms", "reference"),
            *("skipped", "cleared", "escalation", "last_skipped", "written"),
        )
        missing = [key for key in known if key not in state]
        require(not missing, "state", missing, "a result of state_dict()")
        self._detector.load_state_dict(state["detector"])
        self._loader.load_state_dict(state["loader"])
        self._replay_reference.load_state_dict(state["replay_reference"])
        self._examined_until = -1
        self.alarms = [Alarm.from_dict(alarm) for alarm in state["alarms"]]
        self._healthy_norms.clear()
        self._healthy_norms.append((-1, dict(state["reference"])))
        self.skipped, self.cleared = state["skipped"], state["cleared"]
        self._escalation.load_state_dict(state["escalation"])
        self._last_skipped = state["last_skipped"]
        self._bundles.written = state["written"]
        if self._scaler is not None and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])
        self._moment = None
        self._buffers.keep()

    def _before_step(self) -> None:
        self._buffers.keep()
        interval = self.policy.snapshot_interval
        if interval is None:
            self._loader.keep_last(REFERENCES + self._lag)
            return
        # Not while an alarm is unresolved. Without a snapshot, as after a resume, take one all the same:
        # skipped steps have changed no state.
        if self._escalation.consecutive_alarms and self._moment is not None:
            return
        if self._snapshot_is_due():
            named = (*self.model.named_parameters(), *self.model.named_buffers())
            lazy = [name for name, tensor in named if is_lazy(tensor)]
            require(not lazy, "parameters", lazy, "all with a shape, which a forward pass sets")
            self._snapshot.take()
            self._moment = Moment(self.optimizer, self.scheduler, self._others)
            self._detector_state = self._detector.state_dict()
            self._snapshot_step, self._snapshot_order = self._loader.step, self._order
            self._loader.keep_from_here(REFERENCES)
            self._replay_reference.forget(before=self._loader.step)

    def _snapshot_is_due(self) -> bool:
        interval = self.policy.snapshot_interval
        if interval is None:
            return False
        # Early enough that alarms cannot delay the snapshot beyond the interval.
        due = max(1, interval - self.policy.patience - self._lag)
        return self._moment is None or self._loader.step - self._snapshot_step >= due

    def _update(self) -> None:
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        if self.scheduler is not None and not self._overflowed:
            self.scheduler.step()  # type: ignore[attr-defined]

    def _settle_all(self) -> None:
        self._settle(0)
        self._examine_state()

    def _examine_state(self) -> None:
        """Rewind or stop if parameters or optimizer state are not finite.

        The first rewind replays the steps and examines the state after each update. If an update causes the
        fault in the replay, its batches are quarantined and training is rewound once more.
        """
        made = self._last_made
        if made is None:
            return
        parameters, states = self._finite_state.broken()
        if not parameters and not states:
            if made.step >= self._examined_until:
                self._examined_until = -1
            return
        located = self._examined_until >= 0
        kind: AlarmKind = "non-finite parameter" if parameters else "non-finite optimizer state"
        ids = made.ids if located else ()
        alarm = Alarm(made.step, kind, math.nan, where=first_names(parameters or states), batch=ids or None)
        rewinds = self._moment is not None and not self._loader.pending
        rewinds = rewinds and self._escalation.rewinds_broken_state(located=located)
        if rewinds:
            if located:
                self.skipped += 1
                self._loader.quarantine(made.batches)
            self._examined_until = max(made.step, self._examined_until)
            self._last_made = None
            self._rewind([])
            # With a lag, the snapshot may contain the bad state.
            rewinds = not any(self._finite_state.broken())
        self._record(replace(alarm, action="rewound" if rewinds else "raised"))
        if not rewinds:
            raise GuardError(self.alarms[-1], self.alarms)

    def _settle(self, may_stay: int) -> None:
        """Handle the results of all but the last `may_stay` steps, at the same step in every process."""
        self._arrived += self._rows.poll()
        due = len(self._rows) + len(self._arrived) - may_stay
        if due > len(self._arrived):
            self._arrived += self._rows.drain(due - len(self._arrived))
        for _ in range(due):
            made, row = self._arrived.popleft()
            if self._under_way and self._under_way[0] is made:  # otherwise the step is to be replayed
                self._under_way.popleft()
                self._read(made, row)

    def _read(self, made: _Made, row: list[float]) -> None:
        found_inf, divisor, code, loss, norm, logit, *limits = row[:_SCALARS]  # fields of a Decision
        norm_limit, proven_limit, loss_limit, logit_limit = limits
        norms = dict(zip(made.names, row[_SCALARS:], strict=False))
        kind, skipped = KINDS[int(code)], bool(found_inf)
        record = GuardRecord(
            made.step, loss, norm, norms, norm_limit, divisor, kind, skipped, logit, loss_limit, logit_limit
        )
        self._records.append(record)
        if self._without_logit is not None:
            self._without_logit = self._without_logit + 1 if math.isnan(logit) else None
        if kind is not None:
            alarm = self._alarm(made, kind, record)
            self._last_skipped = skipped
            if skipped:
                self._answer(made, alarm, norms, proven_limit)
            else:
                self._record(replace(alarm, action="clipped"))
        elif not skipped:  # otherwise an overflow that the scaler has handled
            self._healthy_norms.append((made.step, norms))
            self._look_for_clipping(norm, norms)
            if self.policy.snapshot_interval is not None and made.batches:
                self._replay_reference.record(made.step, norm, loss, logit)
            self._escalation.sound(made.ids)

    def _alarm(self, made: _Made, kind: AlarmKind, record: GuardRecord) -> Alarm:
        value, limit = {
            "logit growth": (record.logit, record.logit_limit),
            "loss spike": (record.loss, record.loss_limit),
            "gradient spike": (record.total_norm, record.limit),
            "non-finite gradient": (record.total_norm, math.inf),
            "non-finite loss": (record.loss, math.inf),
            "non-finite buffer": (record.loss, math.inf),
        }[kind]
        where = attributed_module(record.parameter_norms, self._median_norms())
        if kind == "non-finite buffer":
            own = [] if made.buffers is None else made.buffers.names()
            # It may be a buffer of another process.
            value, where = (math.nan if own else value), first_names(own)
        return Alarm(
            made.step, kind, value, None if math.isinf(limit) else limit, where, batch=made.ids or None
        )

    def _look_for_logits(self) -> None:
        """Warn once if a logit limit is set and no logit is passed."""
        steps, limit = self._without_logit, self.policy.logit_limit
        if steps is not None and steps >= self.policy.minimum:
            self._without_logit = None
            advice = "step(loss, logit=...) takes what stackwise.stability.telemetry.AttentionLogit sees"
            said = f"logit_limit: got {limit}, and no attention logit in {steps} steps; {advice}"
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    def _look_for_clipping(self, norm: float, norms: Mapping[str, float]) -> None:
        """Warn once if gradients are clipped before the guard sees them."""
        if self._clipping.detects(norm, norms):
            said = (
                f"gradients: got a norm of {norm:.6g} at each of the last steps, as after clipping, which "
                "hides every spike; allowed: as the backward pass left them, and clipped by the guard: "
                "GuardPolicy(clip=...), or AcceleratedGuard(max_grad_norm=...)"
            )
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    def _answer(self, made: _Made, alarm: Alarm, norms: Mapping[str, float], proven_limit: float) -> None:
        """Handle an alarm whose update was skipped. With a lag, the updates after it were skipped too.

        The step is recomputed. Then it is taken, retried or quarantined, or training is rewound or stopped.
        """
        later = self._unwind(made)
        replayed = [*made.batches, *later]
        plainly = made.step == self._not_recomputed  # its recomputation has failed before
        self._answering = made.step
        try:
            alarm = self._examination.located(() if plainly else made.batches, alarm, norms, proven_limit)
        finally:
            self._answering = None
        if alarm.is_finite_spike and alarm.reproduced and alarm.value <= proven_limit:
            self.cleared += 1
            self._detector.trust()
            self._loader.replay(replayed)
            return
        if self._examination.failed and alarm.is_finite_spike:
            self._not_recomputed = made.step
            self._loader.replay(replayed)
            return
        self.skipped += 1
        answer = self._escalation.answer(alarm, can_rewind=self._moment is not None)
        if alarm.is_finite_spike and alarm.reproduced is not False:
            self._learn(alarm)
        if answer.innocent:
            later = replayed
        else:
            self._loader.quarantine(made.batches)
        alarm = replace(alarm, action=answer.action)
        if answer.first or answer.action == "raised":
            alarm = self._bundles.write(self.model, made.batches, alarm, norms, self._loss_scale)
        self._record(alarm)
        if answer.action == "rewound":
            self._rewind(later)
            return
        self._loader.replay(later)
        if answer.action == "raised":
            raise GuardError(alarm, self.alarms)

    def _learn(self, spike: Alarm) -> None:
        """Let later spikes of this size pass."""
        # Without a recomputation, the next step shows no more. Data of a new kind raise the loss for many
        # steps: one skipped step is enough, and consecutive ones would rewind a healthy run.
        at_once = spike.reproduced is None or spike.kind == "loss spike" or self._escalation.exhausted
        self._detector.learn(at_once=at_once)

    def _record(self, alarm: Alarm) -> None:
        """Store an alarm, and log it in the first process."""
        self.alarms.append(alarm)
        if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0:
            _LOG.warning("guard: %s", alarm)

    def _unwind(self, made: _Made) -> list[DrawnBatch]:
        """Undo the host's part of the skipped steps after `made`. Return their batches."""
        if made.before is None:
            return []
        made.before.restore(self.optimizer, self.scheduler)
        self._detector.unlatch()
        if self._snapshot_order > made.order:
            # The snapshot was taken after the bad step, with the state before it.
            self._moment = Moment(self.optimizer, self.scheduler, self._others)
            self._snapshot_step = made.step + 1
        later = [given for other in self._under_way for given in other.batches]
        self._under_way.clear()
        return later

    def _rewind(self, later: Sequence[DrawnBatch]) -> None:
        assert self._moment is not None
        self._snapshot.restore()
        self._moment.restore(self.optimizer, self.scheduler, self._others)
        self._detector.rewind(self._detector_state)
        before = [each for each in self._healthy_norms if each[0] < self._snapshot_step]
        self._healthy_norms = deque(before, self._healthy_norms.maxlen)
        # The history may be too short to detect a fault that persists.
        self._replay_reference.start_replay()
        self._loader.replay_all(later)
        if self._on_rewind is not None:
            self._on_rewind(self.steps)

    @property
    def _loss_scale(self) -> float:
        """Factor of the loss in the backward pass."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _see_parameters(self) -> None:
        """Update the list of parameters if the optimizer has other ones, for example after unfreezing."""
        if [id(p) for p in parameters_of(self.optimizer)] == [id(p) for _, p in self._named]:
            return
        self._named[:] = _named_parameters(self.model, self.optimizer)  # the examination has the same list
        self._names = GradientNames(self._named)
        self._arrived += self._rows.drain()
        self._rows = self._made_rows()
        self.renew_snapshot()

    def _chosen_lag(self, lag: int | None) -> int:
        at_once = self._device.type == "cpu" or self._scaler is not None
        lag = lag if lag is not None else 0 if at_once else _LAG
        check_sizes(0, lag=lag)
        # With a scaler, the host must know if the step is skipped before it advances the scheduler.
        require(self._scaler is None or lag == 0, "lag", lag, "0 with a scaler")
        return lag

    def _made_rows(self) -> RingBuffer[_Made]:
        return RingBuffer(max(4, 2 * (self._lag + 1)), _SCALARS + len(self._named), self._device)

    def _made_examination(self, loss_of: Callable[[nn.Module, Any], Tensor] | None) -> Examination:
        # Weak: a reference cycle would hold snapshot and optimizer until the next garbage collection.
        me = weakref.proxy(self)
        return Examination(
            self.model,
            self._named,
            loss_of,
            loader=lambda: me._loader,
            buffers=self._buffers,
            group=self._group,
            loss_scale=lambda: me._loss_scale,
        )

    def _median_norms(self) -> dict[str, float]:
        return median_norms(norms for _, norms in self._healthy_norms)

    def _norms(self) -> Tensor:
        """Return the norm of each gradient, in the order of `self._names()`."""
        return gradient_norms(p for _, p in self._named)


def _named_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """Return the optimized parameters with their names in the model.

    Raises:
        ValueError: no parameters, or parameters on several devices.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    optimized = parameters_of(optimizer)
    require(bool(optimized), "optimizer", "no parameters", "at least one")
    devices = {p.device for p in optimized}
    require(len(devices) == 1, "parameters", sorted(map(str, devices)), "all on one device")
    return [(names.get(id(p), f"parameter {i}"), p) for i, p in enumerate(optimized)]


def _check_step_arguments(optimizer: torch.optim.Optimizer, scheduler: Stateful | None) -> None:
    """Refuse an optimizer or a scheduler whose `step()` needs an argument."""
    lbfgs = any(isinstance(each, torch.optim.LBFGS) for each in optimizers_in(optimizer))
    require(not lbfgs, "optimizer", type(optimizer).__name__, "one whose step() needs no closure")
    follows = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    allowed = "one whose step() takes nothing; call this one yourself, after an evaluation"
    require(not follows, "scheduler", type(scheduler).__name__, allowed)


def _has_noted(scaler: torch.amp.GradScaler) -> bool:
    """Return True if gradients were unscaled since the scaler's last update."""
    return any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values())


def _everyone() -> distributed.ProcessGroup | None:
    """Return the group of all processes; None if there is only one."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.group.WORLD if distributed.get_world_size() > 1 else None
