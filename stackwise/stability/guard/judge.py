"""Judge: the verdict over a training step, on the device, before its update is made.

A number of a step is unusual if it is above its ordinary limit: far above the last healthy steps. An unusual
number is a spike unless the run has shown numbers of its size before (`SpikeMemory`). If the guard can
recompute steps, it recomputes every unusual step. If the recomputed numbers are the same, the step is a spike
only if its norm or loss is far above all earlier ones of the run.

Shapes: P parameters with a gradient; S signals: norm, loss, attention logit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from stackwise.config import GuardPolicy
from stackwise.stability.guard.alarm import AlarmKind
from stackwise.stability.guard.log_history import LogHistory, Statistics
from stackwise.stability.guard.spike_memory import SpikeMemory
from stackwise.stability.telemetry.gradient_norm import clip_divisor, global_norm
from stackwise.support.arguments import require

__all__ = ["KINDS", "Decision", "Judge"]

# By code; the worst of several processes is the largest. 0: the step is sound.
KINDS: tuple[AlarmKind | None, ...] = (
    None,
    "logit growth",
    "loss spike",
    "gradient spike",
    "non-finite buffer",
    "non-finite gradient",
    "non-finite loss",
)
_LOGIT, _LOSS, _SPIKE, _BUFFER, _GRADIENT, _NO_LOSS = range(1, 7)
_REPEATED_FACTOR = 10.0  # a spike passes up to this multiple of the largest unusual number before


class Decision(NamedTuple):
    """What is to be done with a step: tensors on the device, scalars but for the last.

    Attributes:
        found_inf: float32, 1 where the update is to be left out, else 0: as fused optimizers read it.
        divisor: float32, what gradients are to be divided by; None: nothing is clipped.
        code: of what is wrong, in `KINDS`.
        loss: as it was given.
        norm: global L2 norm of the gradient.
        logit: the largest attention logit; NaN: it was not given.
        norm_limit: the largest norm that passed; infinite: any finite one.
        proven_limit: largest value of the spiking signal that passes if a recomputation has it again.
        loss_limit: the largest loss that passed; infinite: any finite one.
        logit_limit: the same of the attention logit.
        norms_P: of the gradients.
    """

    found_inf: Tensor
    divisor: Tensor | None
    code: Tensor
    loss: Tensor
    norm: Tensor
    logit: Tensor
    norm_limit: Tensor
    proven_limit: Tensor
    loss_limit: Tensor
    logit_limit: Tensor
    norms_P: Tensor


class Judge:
    """Holds each step against the sound ones before it. The host waits for none of it.

    Args:
        policy: what counts as broken.
        device: where gradients are.
        group: of processes that train together: what is broken in one is broken in all, and of a sound step
            all remember the largest signals of any. None: this one alone.
    """

    def __init__(
        self,
        policy: GuardPolicy,
        device: torch.device,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        self._policy, self._device, self._group = policy, device, group
        self._history = LogHistory(
            device, signals=3, recent=policy.recent, history=policy.history, minimum=policy.minimum
        )
        wide = self._history.logs_SH.dtype
        self._memory = SpikeMemory(signals=3, device=device, dtype=wide)
        no_limit = (policy.loss_factor or math.inf, policy.logit_factor or math.inf)
        self._rises_S = torch.tensor((policy.factor, *no_limit), dtype=wide, device=device).log()
        # Without a loss_factor the ordinary limit of the loss is infinite.
        proven = (policy.proven_factor, policy.loss_factor or 1.0, 1.0)
        self._proven_factors_S = torch.tensor(proven, dtype=wide, device=device)
        # Attention logits cannot be recomputed, and their steady growth is a fault: they have no memory.
        self._remembered_S = torch.tensor([True, True, False], device=device)
        self._spikes_S = torch.tensor([_SPIKE, _LOSS, _LOGIT], device=device)
        self._not_finite_2 = torch.tensor([_GRADIENT, _NO_LOSS], device=device)
        self._no_logit = torch.full((), math.nan, device=device)
        self._clipped = torch.zeros((), device=device)  # spikes in a row
        self._latched: Tensor | None = None
        self._trusted = False

    @torch.no_grad()
    def decide(
        self,
        loss: Tensor,
        norms_P: Tensor,
        logit: Tensor | None = None,
        *,
        latch: bool = False,
        suspect: bool = False,
        before_S: Tensor | None = None,
        broken_buffers: Tensor | None = None,
    ) -> Decision:
        """Judge a step, and remember it where it is sound.

        Args:
            loss: one element.
            norms_P: L2 norm of each gradient, before clipping.
            logit: the largest attention logit of the step, one element.
            latch: leave out every step from the first broken one until `unlatch`.
            suspect: the host recomputes unusual steps: a rise of the norm by `suspect_factor` is a spike, and
                the memory does not raise any limit.
            before_S: norm, loss and logit of the first, healthy execution of a replayed step; NaN: unknown.
                They replace the level, with a scatter of 0, if the history is too short.
            broken_buffers: boolean scalar, True if a buffer is not finite any more. None: none was examined.

        Raises:
            ValueError: a loss or logit of several elements.
        """
        loss, norm = self._scalar("loss", loss), global_norm(norms_P)
        logit = self._no_logit if logit is None else self._scalar("logit", logit)
        values_S = torch.stack([norm, loss, logit])
        known = self._known(before_S)
        ordinary_S = self._ordinary_limits(known)
        proven_S = limits_S = self._raised(ordinary_S, self._memory.unusual_S, _REPEATED_FACTOR)
        if suspect:
            proven_S = self._proven_limits(known, proven_S)
            limits_S = proven_S if self._trusted else self._suspect_limits(known, ordinary_S)
        norm_limit, loss_limit, logit_limit = limits_S.unbind()
        self._trusted = False
        if self._policy.logit_factor is not None and logit is not self._no_logit:
            logit_limit = torch.minimum(logit_limit, self._far_logit_limit())
        if self._policy.logit_limit is not None:
            logit_limit = logit_limit.clamp(max=self._policy.logit_limit)
        limits_S = torch.stack([norm_limit, loss_limit, logit_limit])
        spike = ((values_S > limits_S) * self._spikes_S).amax()
        not_finite = (~values_S[:2].isfinite() * self._not_finite_2).amax()
        code = torch.maximum(spike, not_finite)
        if broken_buffers is not None:
            code = torch.maximum(code, broken_buffers.to(code) * _BUFFER)
        if self._group is not None:
            # NaN is no logit; all else that is not finite is in the code.
            numbers_S = values_S.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
            largest = torch.cat([code[None].to(numbers_S), numbers_S])
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, self._group)
            code, values_S = largest[0].to(code.dtype), largest[1:]
        divisor = None
        if self._policy.clip is not None:
            divisor = clip_divisor(norm, self._policy.clip)
        left_out = code > 0
        held = self._latched if self._latched is not None else torch.zeros_like(left_out)
        if self._policy.spikes_clipped:
            clips = (code == _SPIKE) & (self._clipped < self._policy.spikes_clipped)
            counted = torch.where(code > 0, self._clipped + clips, 0.0)
            # A step that is held back by an earlier alarm is judged again.
            self._clipped = torch.where(held, self._clipped, counted)
            left_out = left_out & ~clips
            to_level = torch.where(clips, (norm / known.level_S[0].exp()).float(), 1.0)
            divisor = to_level if divisor is None else torch.maximum(divisor, to_level)
        spike = left_out & ~held & ((code == _SPIKE) | (code == _LOSS))
        left_out = left_out | held
        if latch:
            self._latched = left_out
        sound = (code == 0) & ~left_out
        # By the history alone, which all processes have alike.
        unusual_S = self._remembered_S & self._history.statistics().enough_S & (values_S > ordinary_S)
        self._history.accept(values_S, sound)
        self._memory.note(values_S, unusual_S, spike)
        if not suspect:  # no recomputation will tell more
            self._memory.learn(at_once=True)
        self._memory.accept(values_S, unusual_S, sound)
        return Decision(
            left_out.float(),
            divisor,
            code,
            loss,
            norm,
            logit,
            norm_limit,
            torch.where(code == _LOSS, proven_S[1], proven_S[0]),
            loss_limit,
            logit_limit,
            norms_P,
        )

    def trust(self) -> None:
        """Judge the next step by the limits of a step whose recomputation had the same numbers."""
        self._trusted = True

    def learn(self, *, at_once: bool) -> None:
        """Remember the last skipped spike, so that later spikes of its size pass.

        Args:
            at_once: True: from the next step on. False: after the next healthy step, so that consecutive
                spikes are all skipped.
        """
        self._memory.learn(at_once=at_once)

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Return to the histories of an earlier `state_dict`, but keep the spikes learned since then."""
        memory_4S = self._memory.state()
        self.load_state_dict(state)
        self._memory.load(memory_4S)
        self._memory.forget_pending()

    def unlatch(self) -> None:
        """Judge the next step by itself again."""
        self._latched = None

    def state_dict(self) -> dict[str, Any]:
        """The histories. Tensors of their own."""
        logs_SH = self._history.logs_SH.clone()
        return {
            "logs": logs_SH,
            "memory": self._memory.state(),
            "clipped": self._clipped.clone(),
            "trusted": self._trusted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            ValueError: no histories.
        """
        logs_SH = state.get("logs")
        fits = isinstance(logs_SH, Tensor) and logs_SH.ndim == 2 and len(logs_SH) == len(self._spikes_S)
        require(fits, "state['logs']", type(logs_SH).__name__, "histories, as state_dict() gave them")
        assert isinstance(logs_SH, Tensor)
        self._history.load(logs_SH)
        self._memory.load(state["memory"])
        self._clipped = state["clipped"].to(self._clipped, copy=True)
        self._trusted = bool(state["trusted"])
        self._latched = None

    def _known(self, before_S: Tensor | None) -> Statistics:
        """What a step is held against: sound ones before it; where there are too few, what it had itself."""
        history = self._history.statistics()
        if before_S is None:
            return history
        # Where the history is long enough it is that of the first time, which tells more than one number.
        known_S = (before_S > 0) & before_S.isfinite() & ~history.enough_S
        return Statistics(
            torch.where(known_S, before_S.log(), history.level_S),
            torch.where(known_S, 0.0, history.scatter_S),
            known_S | history.enough_S,
        )

    def _ordinary_limits(self, known: Statistics) -> Tensor:
        """Limits by the recent history alone; infinite if there is none, or a signal has no factor."""
        margin_S = torch.maximum(self._policy.deviations * known.scatter_S, self._rises_S)
        return torch.where(known.enough_S, (known.level_S + margin_S).exp(), math.inf)

    def _suspect_limits(self, known: Statistics, ordinary_S: Tensor) -> Tensor:
        """Limits above which a step is recomputed. That costs little, so the norm's limit ignores scatter."""
        norm_limit = known.level_S[0].exp() * (self._policy.suspect_factor or self._policy.factor)
        norm_limit = torch.where(known.enough_S[0], norm_limit, math.inf)
        return torch.cat([norm_limit[None], ordinary_S[1:]])

    def _proven_limits(self, known: Statistics, limits_S: Tensor) -> Tensor:
        """Limits of a recomputed step that has the same numbers again: factors of the largest ones so far.

        Args:
            known: numbers that the step is compared with.
            limits_S: limits of a step that is not recomputed.
        """
        level_S = torch.where(known.enough_S, known.level_S, -math.inf)
        return self._raised(limits_S, self._memory.largest_S.maximum(level_S), self._proven_factors_S)

    def _raised(self, limits_S: Tensor, logs_S: Tensor, factor: float | Tensor) -> Tensor:
        """Limits, at least `factor` times the remembered numbers."""
        return torch.where(self._remembered_S, limits_S.maximum(factor * logs_S.exp()), limits_S)

    def _far_logit_limit(self) -> Tensor:
        """The largest logit by those of long ago: one that grows with each step takes its level along.

        While a model settles its logits may well grow fifteenfold in half a history, from next to nothing:
        the cube of what a step may rise by.
        """
        known = self._history.statistics()
        margin = torch.maximum(self._policy.deviations * known.scatter_S[2], 3 * self._rises_S[2])
        limit = (self._history.far_level(signal=2) + margin).exp()
        return torch.where(known.enough_S[2], limit, math.inf)

    def _scalar(self, key: str, value: Tensor) -> Tensor:
        require(value.numel() == 1, key, tuple(value.shape), "one element")
        return value.detach().reshape(()).to(self._device, torch.float32, non_blocking=True)
