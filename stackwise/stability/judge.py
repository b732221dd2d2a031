"""Judge: the verdict over a training step, on the device, before its update is made.

Shapes: P parameters with a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from stackwise.argument import require
from stackwise.stability.alarm import AlarmKind
from stackwise.stability.detector import DeviceDetector
from stackwise.stability.gradient_norm import global_norm
from stackwise.stability.policy import GuardPolicy

__all__ = ["KINDS", "Decision", "Judge"]

# By code; the worst of several processes is the largest. 0: the step is sound.
KINDS: tuple[AlarmKind | None, ...] = (
    None,
    "logit growth",
    "loss spike",
    "gradient spike",
    "non-finite gradient",
    "non-finite loss",
)
_LOGIT, _LOSS, _SPIKE, _GRADIENT, _NO_LOSS = range(1, 6)


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
        group: of processes that train together: what is broken in one is broken in all. None: this one alone.
    """

    def __init__(
        self,
        policy: GuardPolicy,
        device: torch.device,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        self._policy, self._device, self._group = policy, device, group
        self._norms = self._detector(policy.factor)
        self._losses = None if policy.loss_factor is None else self._detector(policy.loss_factor)
        self._logits = None if policy.logit_factor is None else self._detector(policy.logit_factor)
        self._any = torch.full((), math.inf, device=device)
        self._no_logit = torch.full((), math.nan, device=device)
        self._clipped = torch.zeros((), device=device)  # spikes in a row
        self._latched: Tensor | None = None
        self._trusted = False

    def _detector(self, factor: float) -> DeviceDetector:
        policy = self._policy
        return DeviceDetector(
            self._device,
            deviations=policy.deviations,
            factor=factor,
            recent=policy.recent,
            history=policy.history,
            minimum=policy.minimum,
        )

    @torch.no_grad()
    def decide(
        self,
        loss: Tensor,
        norms_P: Tensor,
        logit: Tensor | None = None,
        *,
        latch: bool = False,
        suspect: bool = False,
    ) -> Decision:
        """Judge a step, and remember it where it is sound.

        Args:
            loss: one element.
            norms_P: L2 norm of each gradient, before clipping.
            logit: the largest attention logit of the step, one element.
            latch: leave out every step from the first broken one until `unlatch`.
            suspect: a rise of the norm by `suspect_factor` is a spike, which the host then looks into.

        Raises:
            ValueError: a loss or logit of several elements.
        """
        loss, norm = self._scalar("loss", loss), global_norm(norms_P)
        logit = self._no_logit if logit is None else self._scalar("logit", logit)
        norm_limit = proven_limit = self._norms.limit()
        if suspect:
            proven_limit = self._norms.limit(self._policy.proven_factor)
            # No scatter in it: to compute a step again costs little, and tells for sure.
            doubted_limit = self._norms.limit(self._policy.suspect_factor, 0.0)
            norm_limit = proven_limit if self._trusted else doubted_limit
        self._trusted = False
        loss_limit = self._any if self._losses is None else self._losses.limit()
        logit_limit = self._any if self._logits is None else self._logits.limit()
        if self._policy.logit_limit is not None:
            logit_limit = logit_limit.clamp(max=self._policy.logit_limit)
        broken = (
            (logit > logit_limit) * _LOGIT,
            (loss > loss_limit) * _LOSS,
            (norm > norm_limit) * _SPIKE,
            ~norm.isfinite() * _GRADIENT,
            ~loss.isfinite() * _NO_LOSS,
        )
        code = torch.stack(broken).amax()
        if self._group is not None:
            distributed.all_reduce(code, distributed.ReduceOp.MAX, self._group)
        divisor = None
        if self._policy.clip is not None:
            divisor = ((norm + 1e-6) / self._policy.clip).clamp(min=1.0)
        left_out = code > 0
        if self._policy.spikes_clipped:
            clips = (code == _SPIKE) & (self._clipped < self._policy.spikes_clipped)
            counted = torch.where(code > 0, self._clipped + clips, 0.0)
            # A step that is left out for one before it is judged again.
            latched = self._latched if self._latched is not None else torch.zeros_like(clips)
            self._clipped = torch.where(latched, self._clipped, counted)
            left_out = left_out & ~clips
            to_level = torch.where(clips, (norm / self._norms.level()).float(), 1.0)
            divisor = to_level if divisor is None else torch.maximum(divisor, to_level)
        if self._latched is not None:
            left_out = left_out | self._latched
        if latch:
            self._latched = left_out
        sound = (code == 0) & ~left_out
        self._norms.accept(norm, sound)
        if self._losses is not None:
            self._losses.accept(loss, sound)
        if self._logits is not None:
            self._logits.accept(logit, sound)
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
        """The histories."""
        detectors = {"norms": self._norms, "losses": self._losses, "logits": self._logits}
        states = {name: None if d is None else d.state_dict() for name, d in detectors.items()}
        return {**states, "clipped": self._clipped.clone(), "trusted": self._trusted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. A signal that only one of the two has starts anew.

        Raises:
            ValueError: no history of norms.
        """
        for name, detector in (("norms", self._norms), ("losses", self._losses), ("logits", self._logits)):
            kept = state.get(name)
            require(kept is not None or name != "norms", name, kept, "a history, as state_dict() gave it")
            if detector is not None and kept is not None:
                detector.load_state_dict(kept)
        self._clipped = state["clipped"].to(self._clipped, copy=True)
        self._trusted = bool(state["trusted"])
        self._latched = None

    def _scalar(self, key: str, value: Tensor) -> Tensor:
        require(value.numel() == 1, key, tuple(value.shape), "one element")
        return value.detach().reshape(()).to(self._device, torch.float32, non_blocking=True)
