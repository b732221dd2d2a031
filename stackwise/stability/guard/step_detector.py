"""StepDetector: decides about a training step on the device, before its update.

A number of a step is unusual if it is above its ordinary limit, that is, much larger than in the last healthy
steps. An unusual number is a spike unless the run had numbers of its size before (`SpikeMemory`). If the
guard can recompute steps, it recomputes every unusual step. If the recomputed numbers are the same, the step
is a spike only if its norm or loss is much larger than all earlier ones of the run.

Shapes: P parameters with a gradient; S signals: norm, loss, attention logit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from stackwise.config import GuardPolicy
from stackwise.stability.guard.alarm import AlarmKind
from stackwise.stability.guard.history import LogHistory, SpikeMemory, Statistics
from stackwise.stability.telemetry.gradient_norm import clip_divisor, global_norm
from stackwise.support.arguments import require

__all__ = ["KINDS", "Decision", "GuardRecord", "StepDetector"]

# Kinds by code. 0: the step is healthy. With several processes, the largest code applies.
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
    """Decision about a step. All fields are tensors on the device, scalars except for the last.

    Attributes:
        found_inf: float32, 1 if the update is to be skipped, otherwise 0, as fused optimizers read it.
        divisor: float32 divisor of the gradients; None: nothing is clipped.
        code: index into `KINDS`.
        loss: loss that was passed to the guard.
        norm: global L2 norm of the gradient.
        logit: largest attention logit; NaN: none was passed.
        norm_limit: largest norm that passed; infinite: any finite norm.
        proven_limit: largest value of the spiking signal that passes if a recomputation reproduces it.
        loss_limit: largest loss that passed; infinite: any finite loss.
        logit_limit: largest attention logit that passed; infinite: any.
        norms_P: norms of the gradients.
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


@dataclass(frozen=True)
class GuardRecord:
    """Measurements, limits and decision of one step, on the host.

    Attributes:
        step: number of the step, from 0.
        loss: loss that was passed to the guard.
        total_norm: global L2 norm of the gradient, before clipping.
        parameter_norms: gradient norm of each parameter, by name.
        limit: largest norm that passed; infinite: any finite norm.
        divisor: divisor of the gradients.
        kind: type of the problem; None: the step was healthy.
        skipped: True if the update was skipped.
        logit: largest attention logit; NaN: none was passed to the guard.
        loss_limit: largest loss that passed; infinite: any finite loss.
        logit_limit: largest attention logit that passed; infinite: any.
    """

    step: int
    loss: float
    total_norm: float
    parameter_norms: dict[str, float]
    limit: float
    divisor: float
    kind: str | None
    skipped: bool
    logit: float = math.nan
    loss_limit: float = math.inf
    logit_limit: float = math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


class StepDetector:
    """Comparison of each step with earlier healthy steps. The host never waits for it.

    Args:
        policy: limits.
        device: device of the gradients.
        group: processes that train together. A step that is bad in one is bad in all. For a healthy step, all
            remember the largest signals of any process. None: this process only.
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
        self._clipped = torch.zeros((), device=device)  # number of consecutive clipped spikes
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
        """Judge a step, and record it if it is healthy.

        Args:
            loss: loss of the step, one element.
            norms_P: L2 norm of each gradient, before clipping.
            logit: largest attention logit of the step, one element.
            latch: skip every step from the first bad one until `unlatch`.
            suspect: the host recomputes unusual steps: a rise of the norm by `suspect_factor` is a spike, and
                the memory does not raise any limit.
            before_S: norm, loss and logit of the first, healthy execution of a replayed step; NaN: unknown.
                If the history is too short, they replace the level, with a scatter of 0.
            broken_buffers: boolean scalar, True if a buffer became non-finite. None: no buffer was examined.

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
            # A logit of NaN means no signal. Other non-finite numbers are in the code.
            numbers_S = values_S.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
            largest = torch.cat([code[None].to(numbers_S), numbers_S])
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, self._group)
            code, values_S = largest[0].to(code.dtype), largest[1:]
        divisor = None if self._policy.clip is None else clip_divisor(norm, self._policy.clip)
        skipped = code > 0
        latched = self._latched if self._latched is not None else torch.zeros_like(skipped)
        if self._policy.spikes_clipped:
            clips = (code == _SPIKE) & (self._clipped < self._policy.spikes_clipped)
            counted = torch.where(code > 0, self._clipped + clips, 0.0)
            # A step that an earlier alarm skips will be judged in its replay.
            self._clipped = torch.where(latched, self._clipped, counted)
            skipped = skipped & ~clips
            to_level = torch.where(clips, (norm / known.level_S[0].exp()).float(), 1.0)
            divisor = to_level if divisor is None else torch.maximum(divisor, to_level)
        spike = skipped & ~latched & ((code == _SPIKE) | (code == _LOSS))
        skipped = skipped | latched
        if latch:
            self._latched = skipped
        sound = (code == 0) & ~skipped
        # By the history only, which is equal in all processes.
        unusual_S = self._remembered_S & self._history.statistics().enough_S & (values_S > ordinary_S)
        self._history.accept(values_S, sound)
        self._memory.note(values_S, unusual_S, spike)
        if not suspect:  # no recomputation follows
            self._memory.learn(at_once=True)
        self._memory.accept(values_S, unusual_S, sound)
        proven_limit = torch.where(code == _LOSS, proven_S[1], proven_S[0])
        limits = norm_limit, proven_limit, loss_limit, logit_limit
        return Decision(skipped.float(), divisor, code, loss, norm, logit, *limits, norms_P)

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
        """Judge the next step independently, without the latch."""
        self._latched = None

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the histories."""
        logs_SH = self._history.logs_SH.clone()
        return {
            "logs": logs_SH,
            "memory": self._memory.state(),
            "clipped": self._clipped.clone(),
            "trusted": self._trusted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            ValueError: not a state with histories.
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
        """Return the statistics that a step is compared with.

        They describe the healthy steps before it. If the history is too short, a replayed step is compared
        with its first execution.
        """
        history = self._history.statistics()
        if before_S is None:
            return history
        # A sufficient history is that of the first execution, which is better evidence than one number.
        known_S = (before_S > 0) & before_S.isfinite() & ~history.enough_S
        return Statistics(
            torch.where(known_S, before_S.log(), history.level_S),
            torch.where(known_S, 0.0, history.scatter_S),
            known_S | history.enough_S,
        )

    def _ordinary_limits(self, known: Statistics) -> Tensor:
        """Return limits by the recent history only; infinite without a history or a factor."""
        margin_S = torch.maximum(self._policy.deviations * known.scatter_S, self._rises_S)
        return torch.where(known.enough_S, (known.level_S + margin_S).exp(), math.inf)

    def _suspect_limits(self, known: Statistics, ordinary_S: Tensor) -> Tensor:
        """Return limits above which a step is recomputed.

        A recomputation costs little, so the norm's limit ignores scatter.
        """
        norm_limit = known.level_S[0].exp() * (self._policy.suspect_factor or self._policy.factor)
        norm_limit = torch.where(known.enough_S[0], norm_limit, math.inf)
        return torch.cat([norm_limit[None], ordinary_S[1:]])

    def _proven_limits(self, known: Statistics, limits_S: Tensor) -> Tensor:
        """Return limits of a reproduced step: multiples of the largest numbers of the run.

        Args:
            known: statistics that the step is compared with.
            limits_S: limits of a step that is not recomputed.
        """
        level_S = torch.where(known.enough_S, known.level_S, -math.inf)
        return self._raised(limits_S, self._memory.largest_S.maximum(level_S), self._proven_factors_S)

    def _raised(self, limits_S: Tensor, logs_S: Tensor, factor: float | Tensor) -> Tensor:
        """Return limits, at least `factor` times the remembered numbers."""
        return torch.where(self._remembered_S, limits_S.maximum(factor * logs_S.exp()), limits_S)

    def _far_logit_limit(self) -> Tensor:
        """Return the largest logit that passes by the full history.

        Steady growth raises the level of the recent steps too, but not that of the full history. While a
        healthy model settles, its logits may grow fifteenfold within half a history, from almost 0. So the
        allowed rise is the cube of that of one step.
        """
        known = self._history.statistics()
        margin = torch.maximum(self._policy.deviations * known.scatter_S[2], 3 * self._rises_S[2])
        limit = (self._history.far_level(signal=2) + margin).exp()
        return torch.where(known.enough_S[2], limit, math.inf)

    def _scalar(self, key: str, value: Tensor) -> Tensor:
        require(value.numel() == 1, key, tuple(value.shape), "one element")
        return value.detach().reshape(()).to(self._device, torch.float32, non_blocking=True)
