"""Replay: the update of each parameter, made again by a fresh optimizer that holds this parameter alone.

A fresh optimizer of the same class gets the recorded gradients and options of one parameter. Its
state belongs to this parameter only. So a state that parameters share by mistake, a counter that follows
another parameter, and a part of a fused update that is left out show as another update.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.optimizer_state import optimizers_in

__all__ = ["Recording", "Replayed", "options_without_effect", "recorded", "replayed"]

# Options of a group that choose an implementation.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
# Options that change every update of a parameter with gradients, if they are above 0.
_OPTIONS = ("momentum", "betas", "beta", "beta1", "beta2", "weight_decay")
# Updates after which an option must have an effect.
_LEAST_CHANGES = 3
# Parameters whose options are compared.
_MOST_COMPARED = 6
# Roundings of a parameter in one update, in multiples of the eps of its dtype.
_ROUNDINGS = 4.0


@dataclass
class _Change:
    """Change of one parameter in one call of `optimizer.step`.

    Attributes:
        before, after: the parameter before and after the call.
        gradient: gradient that the optimizer got. None: it had none.
        options: options of the group of the parameter.
    """

    before: Tensor
    gradient: Tensor | None
    options: dict[str, Any]
    after: Tensor | None = None


@dataclass
class Recording:
    """Changes of the parameters of one optimizer.

    Attributes:
        fresh: copy of the optimizer before its first step, without parameters.
        changes: changes of each parameter, by name.
    """

    fresh: torch.optim.Optimizer
    changes: dict[str, list[_Change]] = field(default_factory=lambda: defaultdict(list))

    @property
    def has_pauses(self) -> bool:
        """Return True if a parameter had a gradient in some updates and none in others."""
        return any(len({each.gradient is None for each in changes}) > 1 for changes in self.changes.values())


@dataclass(frozen=True)
class Replayed:
    """Largest difference between the updates of a parameter and those of the fresh optimizer.

    Attributes:
        name: name of the parameter.
        gap: L2 norm of the difference over that of the update of the fresh optimizer.
        update: number of the update, from 0.
        length: norm of the update over that of the update of the fresh optimizer.
    """

    name: str
    gap: float
    update: int
    length: float


@contextmanager
def recorded(run: TrainingRun) -> Iterator[list[Recording]]:
    """Record the changes of each optimizer of a run that has not made a step."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    recordings: list[Recording] = []
    with ExitStack() as stack:
        for optimizer in optimizers_in(run.optimizer):
            # A wrapper calls the step of the optimizer inside it.
            is_wrapper = any(each is not optimizer for each in optimizers_in(optimizer))
            if isinstance(optimizer, torch.optim.Optimizer) and not is_wrapper:
                recordings.append(Recording(_without_parameters(optimizer)))
                stack.callback(_record(optimizer, recordings[-1], names))
        yield recordings


def replayed(recording: Recording) -> list[Replayed]:
    """Return the largest difference of each parameter.

    Raises:
        Exception: the optimizer does not run with one parameter.
    """
    return [_replayed(recording.fresh, name, changes) for name, changes in recording.changes.items()]


def options_without_effect(recording: Recording) -> list[str]:
    """Return options of momentum and weight decay that change no update of a weight with gradients.

    Raises:
        Exception: the optimizer does not run with one parameter in float64.
    """

    def is_moved(change: _Change) -> bool:
        return change.gradient is not None and bool(change.gradient.any()) and bool(change.before.any())

    moved = [
        each
        for each in recording.changes.values()
        if len(each) >= _LEAST_CHANGES and all(map(is_moved, each))
    ]
    # A weight decay may leave out norms and biases.
    chosen = sorted(moved, key=lambda changes: -changes[0].before.ndim)[:_MOST_COMPARED]
    ignored = []
    for name in _OPTIONS:
        effects = [_has_effect(recording.fresh, changes, name) for changes in chosen]
        if False in effects and True not in effects:
            ignored.append(name)
    return ignored


def _has_effect(fresh: torch.optim.Optimizer, changes: list[_Change], name: str) -> bool | None:
    """Return True if half of an option gives other updates. None: the option is 0, or there is no update."""
    value = changes[0].options.get(name)
    other: Any = None
    if isinstance(value, float) and value > 0:
        other = value / 2
    elif isinstance(value, tuple | list) and all(isinstance(each, float) and each > 0 for each in value):
        other = type(value)(each / 2 for each in value)
    wanted = _positions(fresh, changes, {})
    if other is None or torch.equal(wanted, changes[0].before.double()):
        return None
    return not torch.equal(_positions(fresh, changes, {name: other}), wanted)


def _positions(fresh: torch.optim.Optimizer, changes: list[_Change], options: dict[str, Any]) -> Tensor:
    """Return a parameter after the recorded gradients, with some other options."""
    # In float64, a small weight decay is more than rounding.
    alone, parameter = _alone(fresh, changes[0].before.double())
    for change in changes:
        alone.param_groups[0] |= _options_of(change) | options
        parameter.grad = None if change.gradient is None else change.gradient.to(parameter)
        type(alone).step(alone)
    return parameter.detach()


def _alone(fresh: torch.optim.Optimizer, start: Tensor) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    alone = copy.copy(fresh)
    alone.state = defaultdict(dict)
    parameter = nn.Parameter(start.clone())
    alone.param_groups = [{"params": [parameter]}]
    return alone, parameter


def _options_of(change: _Change) -> dict[str, Any]:
    return change.options | {each: False for each in _IMPLEMENTATIONS if each in change.options}


def _without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    fresh = copy.copy(optimizer)
    fresh.__dict__.pop("step", None)  # a scheduler replaces it by a function that counts
    fresh.state, fresh.param_groups = defaultdict(dict), []
    return fresh


def _record(
    optimizer: torch.optim.Optimizer, recording: Recording, names: dict[int, str]
) -> Callable[[], None]:
    """Start to record an optimizer, and return the function that ends it."""
    depth, pending, has_closure = 0, list[_Change](), False

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal depth, has_closure
        depth += 1  # the step of a subclass may call that of its parent
        if depth > 1:
            return
        has_closure = any(callable(each) for each in (*args, *kwargs.values()))
        scale, is_skipped = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for group in optimizer.param_groups:
            # A learning rate may be a tensor that the schedule changes in place.
            options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for p in group["params"]:
                gradient = None if p.grad is None else p.grad.detach().clone()
                if gradient is not None and scale is not None:
                    gradient = gradient / scale
                if is_skipped is not None and bool(is_skipped):
                    gradient = None
                change = _Change(p.detach().clone(), gradient, options)
                pending.append(change)
                recording.changes[names.get(id(p), f"parameter {len(pending)} outside the model")].append(
                    change
                )

    def after(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for change, p in zip(pending, parameters, strict=True):
            change.after = p.detach().clone()
            if has_closure and p.grad is not None:  # the closure has computed the gradients
                change.gradient = p.grad.detach().clone()
        pending.clear()

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _replayed(fresh: torch.optim.Optimizer, name: str, changes: list[_Change]) -> Replayed:
    alone, parameter = _alone(fresh, changes[0].before)
    worst = Replayed(name, 0.0, 0, 1.0)
    for number, change in enumerate(changes):
        assert change.after is not None
        alone.param_groups[0] |= _options_of(change)
        with torch.no_grad():
            parameter.copy_(change.before)
        parameter.grad = None if change.gradient is None else change.gradient.to(parameter)
        type(alone).step(alone)
        wanted = (parameter.detach().double() - change.before.double()).flatten()
        found = (change.after.double() - change.before.double()).flatten()
        rounding = _ROUNDINGS * torch.finfo(change.before.dtype).eps * float(change.before.double().norm())
        apart = max(0.0, float((found - wanted).norm()) - rounding)
        size = float(wanted.norm())
        gap = apart / size if size > rounding else (math.inf if apart > rounding else 0.0)
        if not gap <= worst.gap:
            length = float(found.norm()) / size if size else math.inf
            worst = Replayed(name, gap, number, length)
    return worst
