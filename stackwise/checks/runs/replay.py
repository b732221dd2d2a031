"""Replay: the updates of one parameter, repeated by a new optimizer that holds only this parameter.

The new optimizer has the class, the options and the gradients of the recorded optimizer, but a new state. If
parameters share a state or a counter by mistake, the new optimizer makes a different update.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.hooks import temporary_hooks
from stackwise.support.optimizer_state import optimizers_in
from stackwise.support.random_state import seeded
from stackwise.support.system_errors import reraise_if_out_of_memory

__all__ = ["Recording", "Replayed", "coupled_decay", "options_without_effect", "recorded", "replayed"]

# Options of a parameter group that select an implementation.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
# Options that change every update of a parameter with gradients, if they are above 0.
_OPTIONS = ("momentum", "betas", "beta", "beta1", "beta2", "weight_decay")
# Smallest number of updates after which an option must have an effect.
_LEAST_CHANGES = 3
# Largest number of parameters whose options are compared.
_MOST_COMPARED = 6
# Largest rounding error of a parameter in one update, in multiples of the eps of its dtype.
_ROUNDINGS = 4.0
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


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
        optimizer: the optimizer.
        attributes: its attributes before the first step, without parameters, state and hooks.
        changes: changes of each parameter, by name.
    """

    optimizer: torch.optim.Optimizer
    attributes: dict[str, Any]
    changes: dict[str, list[_Change]] = field(default_factory=lambda: defaultdict(list))

    @property
    def kind(self) -> str:
        """Return the name of the class."""
        return type(self.optimizer).__name__

    @property
    def has_pauses(self) -> bool:
        """Return True if a parameter had a gradient in some updates and none in others."""
        return any(len({each.gradient is None for each in changes}) > 1 for changes in self.changes.values())

    def isolated(self, start: Tensor) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        """Return a new optimizer of this class, and its only parameter.

        Raises:
            ValueError: the optimizer keeps tensors in attributes, which belong to all parameters.
        """
        for name, value in vars(self.optimizer).items():
            if name not in ("param_groups", "state", *_HOOKS) and _has_tensors(value):
                raise ValueError(f"the optimizer keeps tensors in the attribute {name}")
        optimizer = type(self.optimizer).__new__(type(self.optimizer))
        parameter = nn.Parameter(start.clone())
        vars(optimizer).update({name: _copy_of(value) for name, value in self.attributes.items()})
        vars(optimizer).update({name: OrderedDict() for name in _HOOKS})
        optimizer.state, optimizer.param_groups = defaultdict(dict), [{"params": [parameter]}]
        return optimizer, parameter


@dataclass(frozen=True)
class Replayed:
    """Largest difference between the updates of a parameter and those of the isolated optimizer.

    Attributes:
        name: name of the parameter.
        gap: L2 norm of the difference, divided by the norm of the update of the isolated optimizer. inf: an
            update is not finite, although its gradient is finite.
        update: number of the update, from 0.
        length: norm of the update, divided by the norm of the update of the isolated optimizer.
    """

    name: str
    gap: float
    update: int
    length: float


@contextmanager
def recorded(run: TrainingRun) -> Iterator[list[Recording]]:
    """Record the changes of each optimizer of a run that has not made a step."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    recordings = [
        Recording(optimizer, _plain_attributes(optimizer))
        for optimizer in optimizers_in(run.optimizer)
        # A wrapper calls the step of the optimizer inside it, which is recorded itself.
        if isinstance(optimizer, torch.optim.Optimizer)
        and not any(each is not optimizer for each in optimizers_in(optimizer))
    ]
    with temporary_hooks(handle for recording in recordings for handle in _record(recording, names)):
        yield recordings


def replayed(recording: Recording) -> list[Replayed]:
    """Return the largest difference of each parameter.

    Raises:
        Exception: the optimizer does not run with one parameter.
    """
    return [_replayed(recording, name, changes) for name, changes in recording.changes.items()]


def options_without_effect(recording: Recording) -> list[str]:
    """Return options of momentum and weight decay that change no update of a weight with gradients.

    Raises:
        Exception: the optimizer does not run with one parameter in float64.
    """

    def is_moved(change: _Change) -> bool:
        return change.gradient is not None and bool(change.gradient.any()) and bool(change.before.any())

    long = [each for each in recording.changes.values() if len(each) >= _LEAST_CHANGES]
    moved = [each for each in long if all(map(is_moved, each))]
    # Norms and biases, which have few dimensions, may have no weight decay.
    chosen = sorted(moved, key=lambda changes: -changes[0].before.ndim)[:_MOST_COMPARED]
    effects = {name: [_has_effect(recording, changes, name) for changes in chosen] for name in _OPTIONS}
    return [name for name, each in effects.items() if False in each and True not in each]


def coupled_decay(recording: Recording) -> dict[str, float]:
    """Return the share of the effect of weight decay on one update that is not a multiple of the weight.

    With decoupled weight decay (arXiv:1711.05101) it is only rounding. Elements without an effect do not
    count, because cautious decay omits some. Matrices without decay or gradient are left out.

    Raises:
        Exception: the optimizer does not run with one parameter in float64.
    """
    shares = {}
    for name, changes in recording.changes.items():
        change = changes[0]
        start, is_trained = change.before.double(), change.gradient is not None and change.gradient.any()
        if start.ndim < 2 or not is_trained or not start.any() or not change.options.get("weight_decay"):
            continue
        with seeded(0):  # some optimizers round at random
            end = _end_of(recording, [change])
        with seeded(0):
            plain = _end_of(recording, [change], {"weight_decay": 0.0})
        effect = end - plain
        # The learning rate may be 0. If only the effect is 0, option_effects reports it.
        if torch.equal(end, start) or not effect.any():
            continue
        # Some optimizers compute in float32.
        rounding = _ROUNDINGS * torch.finfo(torch.float32).eps * float(start.norm())
        is_changed = effect != 0
        effect = effect[is_changed]
        # The decay may be before or after the update.
        parts = [x[is_changed] for x in (start, plain)]
        gaps = [float((effect - x * (effect @ x / x.square().sum())).norm()) for x in parts]
        shares[name] = max(min(gaps) - rounding, 0.0) / float(effect.norm())
    return shares


def _has_effect(recording: Recording, changes: list[_Change], name: str) -> bool | None:
    """Return True if half of an option gives different updates. None: it is 0, or there is no update."""
    value: Any = changes[0].options.get(name)
    parts = value if isinstance(value, tuple | list) else [value]
    if not all(isinstance(each, float) and each > 0 for each in parts):
        return None
    wanted = _end_of(recording, changes)
    if torch.equal(wanted, changes[0].before.double()):
        return None
    half = type(value)(each / 2 for each in parts) if isinstance(value, tuple | list) else parts[0] / 2
    return not torch.equal(_end_of(recording, changes, {name: half}), wanted)


def _end_of(recording: Recording, changes: list[_Change], options: dict[str, Any] | None = None) -> Tensor:
    """Return a parameter after updates with the recorded gradients, with some options replaced."""
    # In float64, the effect of a small weight decay is larger than rounding errors.
    optimizer, parameter = recording.isolated(changes[0].before.double())
    for change in changes:
        _step(optimizer, parameter, change, options or {})
    return parameter.detach()


def _step(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, change: _Change, options: dict[str, Any]
) -> None:
    """Make one update with the recorded gradient and options, with some options replaced."""
    plain = {each: False for each in _IMPLEMENTATIONS if each in change.options}
    optimizer.param_groups[0] |= change.options | plain | options
    parameter.grad = None if change.gradient is None else change.gradient.to(parameter)
    type(optimizer).step(optimizer)


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of attributes that an isolated optimizer needs."""
    # A scheduler replaces `step` by a function that counts its calls.
    skipped = ("param_groups", "state", "step", *_HOOKS)
    named = vars(optimizer).items()
    return {name: _copy_of(x) for name, x in named if name not in skipped and not _has_tensors(x)}


def _copy_of(value: Any) -> Any:
    """Return a deep copy of a collection or a tensor, which a step may change. Others stay unchanged."""
    try:
        return copy.deepcopy(value) if isinstance(value, dict | list | set | tuple | Tensor) else value
    except Exception as error:  # it contains a lock or a file
        reraise_if_out_of_memory(error)
        return value


def _has_tensors(value: Any) -> bool:
    """Return True for a tensor with several elements, and for a collection that contains one."""
    if isinstance(value, dict):
        return any(map(_has_tensors, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor) and value.numel() > 1


def _record(recording: Recording, names: dict[int, str]) -> list[RemovableHandle]:
    """Start to record an optimizer."""
    optimizer = recording.optimizer
    depth, pending, has_closure = 0, list[_Change](), False

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal depth, has_closure
        depth += 1  # the step of a subclass may call that of its parent
        if depth > 1:
            return
        has_closure = any(callable(each) for each in (*args, *kwargs.values()))
        for group in optimizer.param_groups:
            # A learning rate may be a tensor that the schedule changes in place.
            options = {name: _copy_of(value) for name, value in group.items() if name != "params"}
            for p in group["params"]:
                change = _Change(p.detach().clone(), _gradient_of(p, optimizer), options)
                pending.append(change)
                name = names.get(id(p), f"parameter {len(pending)} outside the model")
                recording.changes[name].append(change)

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

    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


def _gradient_of(p: Tensor, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return the gradient that the optimizer uses. A fused one divides by a scale, or skips the update."""
    scale, is_skipped = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if p.grad is None or (is_skipped is not None and bool(is_skipped)):
        return None
    gradient = p.grad.detach().clone()
    return gradient if scale is None else gradient / scale


def _replayed(recording: Recording, name: str, changes: list[_Change]) -> Replayed:
    optimizer, parameter = recording.isolated(changes[0].before)
    worst = Replayed(name, 0.0, 0, 1.0)
    for number, change in enumerate(changes):
        assert change.after is not None
        with torch.no_grad():
            parameter.copy_(change.before)
        _step(optimizer, parameter, change, {})
        start = change.before.double()
        wanted = (parameter.detach().double() - start).flatten()
        found = (change.after.double() - start).flatten()
        rounding = _ROUNDINGS * torch.finfo(change.before.dtype).eps * float(start.norm())
        gap, size = float((found - wanted).norm()), float(wanted.norm())
        if not math.isfinite(gap):
            is_known = change.gradient is not None and bool(change.gradient.isfinite().all())
            gap = math.inf if is_known and bool(start.isfinite().all()) else 0.0
        elif gap <= rounding:
            gap = 0.0
        else:
            gap = (gap - rounding) / size if size > rounding else math.inf
        if gap > worst.gap:
            length = float(found.norm()) / size if size else math.inf
            worst = Replayed(name, gap, number, length)
    return worst
