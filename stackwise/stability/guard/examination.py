"""Examination: recomputes a bad step to find out if its batches are the cause, and which module."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from stackwise.stability.buffers import Buffers
from stackwise.stability.guard.alarm import Alarm
from stackwise.stability.guard.attribution import attributed_module
from stackwise.stability.guard.replay_loader import DrawnBatch, ReplayLoader
from stackwise.stability.locate import ModuleScales, locate
from stackwise.stability.recomputation import recomputation
from stackwise.stability.telemetry.gradient_norm import global_norm, gradient_norms
from stackwise.support.random_state import keep_random_states, set_random_states

__all__ = ["REFERENCES", "Examination", "Replay", "rerun"]

REFERENCES = 2  # healthy batches that a spike is compared with
_EQUAL = 0.05  # relative difference of two recomputations: kernels that sum in any order differ by far less
_VOTES = (None, False, True)  # values of `reproduced`, by increasing weight


class Replay(NamedTuple):
    """Result of recomputing a bad step.

    Attributes:
        loss: sum over the batches of the step.
        grad_norm: global L2 norm of the sum of their gradients.
        parameter_norms: gradient norm of each parameter, by name.
        where: first bad place; "": none.
        spike: True if the alarm's number is finite and the recomputed number is above the alarm's limit too.
            None: unknown, because it is an attention logit or the limit is not known.
    """

    loss: float
    grad_norm: float
    parameter_norms: dict[str, float]
    where: str
    spike: bool | None = False

    @property
    def broken(self) -> bool:
        """True if loss or gradient is not finite, a bad place was found, or the spike was reproduced."""
        finite = math.isfinite(self.loss) and math.isfinite(self.grad_norm)
        return bool(self.where) or not finite or bool(self.spike)


class Examination:
    """Recomputation of the bad steps of one training. All processes of `group` must call it at the same step.

    Args:
        model: trained model.
        named: optimized parameters with their names, which the guard updates.
        loss_of: loss of (model, batch); None: no step can be recomputed.
        loader: function that returns the source of the healthy batches before a bad one.
        buffers: copies of the model's buffers and of weights that its forward passes write, restored after
            each recomputation.
        group: processes that train together; None: this process only.
        loss_scale: function that returns the factor of the loss in the backward pass.

    Attributes:
        failed: True if the last step could not be recomputed.
        is_random: True if two recomputations of a step gave different numbers, because `loss_of` draws from
            its own random generator. Finite spikes are then not recomputed any more.
    """

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        loss_of: Callable[[nn.Module, Any], Tensor] | None,
        loader: Callable[[], ReplayLoader],
        buffers: Buffers,
        group: distributed.ProcessGroup | None,
        loss_scale: Callable[[], float],
    ) -> None:
        self._model, self._named, self._loss_of = model, named, loss_of
        self._loader, self._buffers, self._group = loader, buffers, group
        self._loss_scale = loss_scale
        self.failed = self.is_random = False

    def located(
        self, batches: Sequence[DrawnBatch], alarm: Alarm, norms: Mapping[str, float], proven_limit: float
    ) -> Alarm:
        """Return the alarm with the bad place of the recomputed step.

        Args:
            batches: batches of the step.
            alarm: alarm, with the place that was derived from the norms.
            norms: gradient norm of each parameter in the bad step, by name.
            proven_limit: largest value of the alarm's signal that passes if the recomputed step reproduces
                it.

        Raises:
            Exception: any error of `loss_of`, if several processes train together.

        Warns:
            RuntimeWarning: the loss cannot be recomputed, or is random; `reproduced` is then None.
        """
        where, reproduced, placed = alarm.where, None, False
        found = self._recomputed(batches, alarm)
        if found is not None:
            finite = _is_finite(alarm)
            overflowed = self._overflowed(found, alarm)
            reproduced = self._reproduced(found, alarm)
            if reproduced is False and finite:
                # The recomputed norms of this step are a better reference than earlier steps.
                where = attributed_module(norms, found.parameter_norms)
            sound = reproduced and alarm.is_finite_spike and alarm.value <= proven_limit
            # In all processes or in none, because all of them gather sharded weights.
            if any(self._of_all(finite and not overflowed and reproduced is not False and not sound)):
                found = self._again(batches, lambda: self._scales(batches)) or found
            if not overflowed:
                where, placed = found.where or where, bool(found.where)
        # Prefer a process that saw the bad number, then one that reproduced it, then one that found the
        # place. The other processes got bad gradients from it, or did not see the fault.
        everyone = self._of_all((where, reproduced, placed, alarm.value, alarm.limit))
        where, reproduced, _, value, limit = max(
            everyone,
            key=lambda each: (_is_broken(*each[3:]), _VOTES.index(each[1]), each[2], bool(each[0])),
        )
        return replace(alarm, where=where, reproduced=reproduced, value=value, limit=limit)

    def _recomputed(self, batches: Sequence[DrawnBatch], alarm: Alarm) -> Replay | None:
        """Recompute the step. Return None if this is not possible or shows nothing."""
        self.failed = False
        if self._loss_of is None or not batches or (self.is_random and alarm.is_finite_spike):
            return None
        found = self._again(batches)
        if found is not None and self._finds_random_loss(found, batches, alarm):
            found = None
        self.failed = found is None
        return found

    def _again(
        self, batches: Sequence[DrawnBatch], scales: Callable[[], ModuleScales | None] | None = None
    ) -> Replay | None:
        """Recompute the step. Return None if this fails."""
        assert self._loss_of is not None
        try:
            return rerun(
                self._model,
                batches,
                self._loss_of,
                scales,
                self._group,
                named=self._named,
                buffers=self._buffers,
                loss_scale=self._loss_scale(),
            )
        except Exception as error:  # user-defined loss; hooks also need more memory
            if self._group is not None and distributed.get_world_size(self._group) > 1:
                raise  # other processes may wait for this one in a collective of the model
            # Training can continue without the result.
            advice = "it is unknown if its batches are the cause"
            said = f"step {batches[0].step} cannot be recomputed: {error!r}; {advice}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
            return None

    def _overflowed(self, found: Replay, alarm: Alarm) -> bool:
        """Return True if only the recomputation overflowed. It is then no evidence about the alarm."""
        return _is_finite(alarm) and self._loss_scale() != 1.0 and not math.isfinite(found.grad_norm)

    def _reproduced(self, found: Replay, alarm: Alarm) -> bool | None:
        """Return True if the recomputed step is bad as well; None if the recomputation cannot show it."""
        if self._overflowed(found, alarm):
            return None
        if found.broken or not _is_finite(alarm):
            return found.broken
        # A recomputation has no attention logit.
        norm = self._norm_of(found.parameter_norms) or found.grad_norm
        again = {"gradient spike": norm, "loss spike": found.loss}.get(alarm.kind)
        mine = alarm.limit is None or alarm.value > alarm.limit
        return None if again is None or not mine else 2 * again > alarm.value

    def _finds_random_loss(self, found: Replay, batches: Sequence[DrawnBatch], alarm: Alarm) -> bool:
        """Return True if two recomputations of a finite spike differ.

        A second recomputation runs if the first one did not reproduce the spike. If they differ, `loss_of`
        draws from a generator that the guard cannot restore. The step is then no evidence of a fault.
        """
        doubtful = alarm.is_finite_spike and self._reproduced(found, alarm) is False
        if not any(self._of_all(doubtful)):
            return False
        second = self._again(batches)
        differs = second is not None and not (
            math.isclose(found.loss, second.loss, rel_tol=_EQUAL)
            and math.isclose(found.grad_norm, second.grad_norm, rel_tol=_EQUAL)
        )
        self.is_random = any(self._of_all(differs))
        if self.is_random:
            warnings.warn(
                f"step {batches[0].step}: two recomputations differ, so loss_of draws random numbers that "
                "the guard cannot restore. Finite spikes are judged as without loss_of. Draw from the global "
                "generator of torch, NumPy or Python, or in the data loader.",
                RuntimeWarning,
                stacklevel=2,
            )
        return self.is_random

    def _of_all(self, mine: Any) -> list[Any]:
        """Return the values of all processes, in rank order."""
        if self._group is None:
            return [mine]
        everyone: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(everyone, mine, self._group)
        return everyone

    def _norm_of(self, norms: Mapping[str, float]) -> float:
        """Return the norm over the optimized parameters."""
        return math.hypot(*(norms[name] for name, _ in self._named if name in norms))

    def _scales(self, batches: Sequence[DrawnBatch]) -> ModuleScales | None:
        """Return the scales of the last healthy batches that are stored; None: no such batch."""
        assert self._loss_of is not None
        model, loss_of, loss_scale = self._model, self._loss_of, self._loss_scale()
        sound = self._loader().healthy_before(batches, REFERENCES)
        if not sound:
            return None

        def run(given: DrawnBatch) -> None:
            set_random_states(given.random)
            _scaled(loss_of(model, given.batch), loss_scale).backward()  # type: ignore[no-untyped-call]

        with recomputation("sound"), keep_random_states(), torch.enable_grad():
            scales = ModuleScales.observe(model, *(lambda given=given: run(given) for given in sound))
        _forget_gradients(model, self._named)
        self._buffers.restore()
        return scales


def _is_finite(alarm: Alarm) -> bool:
    return alarm.kind not in ("non-finite loss", "non-finite gradient", "non-finite buffer")


def _is_broken(value: float, limit: float | None) -> bool:
    """Return True if this number made the step bad."""
    return not math.isfinite(value) or (limit is not None and value > limit)


def rerun(
    model: nn.Module,
    batches: Sequence[DrawnBatch],
    loss_of: Callable[[nn.Module, Any], Tensor],
    scales: Callable[[], ModuleScales | None] | None = None,
    group: distributed.ProcessGroup | None = None,
    *,
    named: Sequence[tuple[str, nn.Parameter]] = (),
    buffers: Buffers | None = None,
    loss_scale: float = 1.0,
) -> Replay:
    """Run forward and backward over `batches` under hooks. The gradients of `named` are deleted.

    Random states, buffers and all other gradients are restored, also after an error. The other processes of
    `group` do not learn of the error. They may be in a collective of the model, and wait until this process
    exits.

    Args:
        model: model with the weights of the step.
        batches: batches of the step.
        loss_of: function that returns the part of a batch, as it is passed to `backward`.
        scales: function that returns the scales of healthy steps. It is called first. None: only non-finite
            values are found.
        group: processes that all recompute the step and average their gradients.
        named: trained parameters with their names. They need not belong to the model.
        buffers: copies of the model's buffers and of weights that its forward passes write. The copies are
            renewed. None: copies of the buffers only.
        loss_scale: factor of the losses in the backward pass. Norms are divided by it.

    Raises:
        Exception: any error of `loss_of`.
    """
    losses: list[float] = []
    where = ""
    buffers = buffers or Buffers(model)
    # Not by zero_grad: a hook on it would treat the step as finished.
    with buffers.looking(), _forgotten_gradients(model, named):
        known_scales = None if scales is None else scales()
        with recomputation(), keep_random_states(), torch.enable_grad():
            for given in batches:

                def run(given: DrawnBatch = given) -> None:
                    set_random_states(given.random)
                    loss = loss_of(model, given.batch)
                    losses.append(float(loss.detach()))
                    _scaled(loss, loss_scale).backward()  # type: ignore[no-untyped-call]

                location = locate(model, run, scales=known_scales)
                if location is not None and not where:
                    of_loss = location.direction == "loss"
                    where = location.module if of_loss else f"{location.module} ({location.direction})"
            if not where and (broken := buffers.broken()) is not None:
                where = next(iter(broken.names()), "")
        everything = _with_others(model, named)
        if group is not None:
            _average_gradients(everything.values(), group)
        known = {name: p for name, p in everything.items() if p.grad is not None}
        norms_P = gradient_norms(known.values()) / loss_scale
        total = float(global_norm(norms_P))
        norms = dict(zip(known, norms_P.tolist(), strict=True))
    return Replay(sum(losses), total, norms, where)


def _scaled(loss: Tensor, loss_scale: float) -> Tensor:
    """Return the scaled loss, from which the backward pass starts.

    The scale is a float32 tensor, as in `torch.amp.GradScaler`. Multiplied by a Python number, a loss would
    stay float16 and could overflow although it does not in training.
    """
    if loss_scale == 1.0:
        return loss
    return loss * torch.tensor(loss_scale, dtype=torch.float32, device=loss.device)


def _with_others(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return the parameters of the model and of `named`, each once, by name."""
    found = dict(model.named_parameters())
    mine = {id(p) for p in found.values()}
    return found | {name: p for name, p in named if id(p) not in mine}


def _average_gradients(parameters: Iterable[nn.Parameter], group: distributed.ProcessGroup) -> None:
    """Average gradients over the processes. Values that DDP has averaged stay the same."""
    processes = distributed.get_world_size(group)
    for p in parameters:
        if p.requires_grad and not hasattr(p, "full_tensor"):
            # All processes must reduce the same parameters, even if one has no gradient.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            distributed.all_reduce(p.grad, group=group)
            p.grad /= processes


@contextmanager
def _forgotten_gradients(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
    """Run the block without gradients, and delete the gradients that it computes.

    After it, the gradients of parameters outside `named` are restored.
    """
    # Of another optimizer, which has not updated yet.
    own = {id(p) for _, p in named}
    of_others = [(p, p.grad) for p in model.parameters() if id(p) not in own]
    # Views of DDP's buckets, which it will overwrite.
    viewed = [(g, g.clone()) for _, g in of_others if g is not None and g._is_view()]
    _forget_gradients(model, named)
    try:
        yield
    finally:
        _forget_gradients(model, named)
        for p, gradient in of_others:
            p.grad = gradient
        for gradient, values in viewed:
            gradient.copy_(values)


def _forget_gradients(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]] = ()) -> None:
    """Delete the gradients of the model and of the parameters in `named`."""
    for p in (*model.parameters(), *(p for _, p in named)):
        p.grad = None
