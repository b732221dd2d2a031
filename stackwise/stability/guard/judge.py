"""Judge: the verdict over a training step, on the device, before its update is made.

Shapes: P parameters with a gradient; S signals: norm, loss, attention logit; L limits: of the three, and of
the norm where a step was computed again, and where it is to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from stackwise.argument import require
from stackwise.stability.guard.alarm import AlarmKind
from stackwise.stability.guard.log_history import LogHistory, Statistics
from stackwise.stability.guard.policy import GuardPolicy
from stackwise.stability.telemetry.gradient_norm import clip_divisor, global_norm

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
_SIGNALS_OF_LIMITS = (0, 1, 2, 0, 0)


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
        proven_limit: the largest that is sound if the step has it again when it is computed again.
        loss_limit: the same of the loss.
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
        no_limit = (policy.loss_factor or math.inf, policy.logit_factor or math.inf)
        suspect = policy.suspect_factor or policy.factor
        factors = (policy.factor, *no_limit, policy.proven_factor, suspect)
        wide = self._history.logs_SH.dtype
        self._rises_L = torch.tensor(factors, dtype=wide, device=device).log()
        # Nothing of the scatter in the last: to compute a step again costs little, and tells for sure.
        self._deviations_L = torch.tensor([policy.deviations] * 4 + [0.0], dtype=wide, device=device)
        self._signals_L = torch.tensor(_SIGNALS_OF_LIMITS, device=device)
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
            suspect: a rise of the norm by `suspect_factor` is a spike, which the host then looks into.
            before_S: norm, loss and logit that this very step had when it was made before, and was sound.
                Where the history is too short they are its level, without any scatter; NaN: not known.
            broken_buffers: boolean scalar, True if a buffer is not finite any more. None: none was examined.

        Raises:
            ValueError: a loss or logit of several elements.
        """
        loss, norm = self._scalar("loss", loss), global_norm(norms_P)
        logit = self._no_logit if logit is None else self._scalar("logit", logit)
        values_S = torch.stack([norm, loss, logit])
        known = self._known(before_S)
        limits_L = self._limits(known)
        norm_limit, loss_limit, logit_limit, proven_limit, doubted_limit = limits_L.unbind()
        if suspect:
            norm_limit = proven_limit if self._trusted else doubted_limit
        else:
            proven_limit = norm_limit
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
        if self._policy.spikes_clipped:
            clips = (code == _SPIKE) & (self._clipped < self._policy.spikes_clipped)
            counted = torch.where(code > 0, self._clipped + clips, 0.0)
            # A step that is left out for one before it is judged again.
            latched = self._latched if self._latched is not None else torch.zeros_like(clips)
            self._clipped = torch.where(latched, self._clipped, counted)
            left_out = left_out & ~clips
            to_level = torch.where(clips, (norm / known.level_S[0].exp()).float(), 1.0)
            divisor = to_level if divisor is None else torch.maximum(divisor, to_level)
        if self._latched is not None:
            left_out = left_out | self._latched
        if latch:
            self._latched = left_out
        sound = (code == 0) & ~left_out
        self._history.accept(values_S, sound)
        return Decision(
            left_out.float(),
            divisor,
            code,
            loss,
            norm,
            logit,
            norm_limit,
            proven_limit,
            loss_limit,
            logit_limit,
            norms_P,
        )

    def trust(self) -> None:
        """The next step was computed again, and its norm is its own."""
        self._trusted = True

    def unlatch(self) -> None:
        """Judge the next step by itself again."""
        self._latched = None

    def state_dict(self) -> dict[str, Any]:
        """The histories. Tensors of their own."""
        logs_SH = self._history.logs_SH.clone()
        return {"logs": logs_SH, "clipped": self._clipped.clone(), "trusted": self._trusted}

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

    def _limits(self, known: Statistics) -> Tensor:
        """The largest of each that passes; infinite: there is none, or too short a history to say."""
        level_S, scatter_S, enough_S = known
        of_L = self._signals_L
        margin_L = torch.maximum(self._deviations_L * scatter_S[of_L], self._rises_L)
        return torch.where(enough_S[of_L], (level_S[of_L] + margin_L).exp(), math.inf)

    def _far_logit_limit(self) -> Tensor:
        """The largest logit by those of long ago: one that grows with each step takes its level along.

        While a model settles its logits may well grow fifteenfold in half a history, from next to nothing:
        the cube of what a step may rise by.
        """
        known = self._history.statistics()
        margin = torch.maximum(self._deviations_L[2] * known.scatter_S[2], 3 * self._rises_L[2])
        limit = (self._history.far_level(signal=2) + margin).exp()
        return torch.where(known.enough_S[2], limit, math.inf)

    def _scalar(self, key: str, value: Tensor) -> Tensor:
        require(value.numel() == 1, key, tuple(value.shape), "one element")
        return value.detach().reshape(()).to(self._device, torch.float32, non_blocking=True)
