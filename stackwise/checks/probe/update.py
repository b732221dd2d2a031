"""Record of each update of an optimizer: gradients, parameters and learning rates.

Gradients are divided by the optimizer's `grad_scale` if it has one, as fused optimizers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_adapter import JoinedOptimizers
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.hooks import temporary_hooks

__all__ = [
    "Observation",
    "Update",
    "distance",
    "each_update",
    "norm",
    "observed",
    "rates_of",
    "train",
    "weights_of",
]


@dataclass(frozen=True)
class Update:
    """One call of `optimizer.step`.

    Attributes:
        gradients: parameter name -> gradient, for parameters that have one. Parameters of an optimizer that
            did not step are missing: their gradients may be stale.
        before: parameter name -> value before the call.
        after: parameter name -> value after the call.
        learning_rates: learning rate of each group.
        frozen: names of the parameters that took no gradient in this call.
    """

    gradients: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    learning_rates: list[float]
    frozen: frozenset[str] = frozenset()

    @property
    def has_rate(self) -> bool:
        """True if the learning rate of some group is above 0."""
        return any(rate > 0 for rate in self.learning_rates)

    def moved(self, name: str) -> Tensor:
        """Return the change of each element of a parameter, in float64."""
        return self.after[name].double() - self.before[name].double()


@dataclass
class Observation:
    """Record of a run.

    Attributes:
        updates: updates in their order.
        raw: last gradient of each parameter directly after the backward pass, including the loss scale.
        reached: names of parameters with a gradient other than zero in any backward pass.
    """

    updates: list[Update] = field(default_factory=list)
    raw: dict[str, Tensor] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)


@contextmanager
def observed(run: TrainingRun, *, factor: float = 1.0) -> Iterator[Observation]:
    """Record every update of `run.optimizer`.

    Args:
        run: the training run.
        factor: factor for every gradient in the backward pass.
    """
    seen = Observation()
    parameters = dict(run.model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    in_optimizer = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    loose = {name: p for name, p in parameters.items() if id(p) not in in_optimizer}
    pending: list[tuple[dict[str, Tensor], dict[str, Tensor], list[float]]] = []
    by_closure = False

    def record_raw(p: Tensor) -> None:
        nonlocal by_closure
        by_closure = by_closure or bool(pending)
        if p.grad is not None and not p.grad.is_sparse:
            seen.raw[names[id(p)]] = p.grad.detach().clone()
            if bool(p.grad.any()):
                seen.reached.add(names[id(p)])

    def before(optimizer: Any) -> None:
        pending.append((_gradients(optimizer, loose), weights_of(run), rates_of(optimizer)))

    def each_member(member: torch.optim.Optimizer) -> None:
        """Record the gradients of one optimizer just before its step, because a scaler divides them there."""
        own = {id(p) for group in member.param_groups for p in group["params"]}
        own_gradients = _gradients(member, {name: p for name, p in parameters.items() if id(p) in own})
        pending[-1][0].update(own_gradients)

    def after(optimizer: Any) -> None:
        nonlocal by_closure
        gradients, values, rates = pending.pop()
        if by_closure:  # a closure computed them; the earlier gradients belong to the step before
            gradients, by_closure = _gradients(optimizer, parameters), False
        frozen = frozenset(name for name, p in parameters.items() if not p.requires_grad)
        seen.updates.append(Update(gradients, values, weights_of(run), rates, frozen))

    trained = [p for p in parameters.values() if p.requires_grad]
    handles = [p.register_hook(lambda g: g * factor) for p in trained if factor != 1.0]  # type: ignore[no-untyped-call]
    handles += [p.register_post_accumulate_grad_hook(record_raw) for p in trained]  # type: ignore[no-untyped-call]
    with temporary_hooks(handles), each_update(run.optimizer, before, after, each_member):
        yield seen


def train(subject: TrainerSubject, run: TrainingRun, n_steps: int, *, factor: float = 1.0) -> Observation:
    """Make the first steps of a run, and return the record of its updates. See `observed`."""
    with subject.fixed_randomness(), observed(run, factor=factor) as seen:
        for number in range(n_steps):
            run.step(subject.batch(number))
    return seen


@contextmanager
def each_update(
    optimizer: Any,
    before: Callable[[Any], None],
    after: Callable[[Any], None] = lambda _: None,
    each_member: Callable[[torch.optim.Optimizer], None] = lambda _: None,
) -> Iterator[None]:
    """Call `before` and `after` around each update of the optimizer.

    The steps of joined optimizers form one update. If an optimizer steps twice, a new update starts. If
    step() of a subclass calls step() of its parent, torch runs the hooks twice for one update.

    Args:
        optimizer: an optimizer or `JoinedOptimizers`. `before` and `after` receive it.
        before: called before an update.
        after: called after an update.
        each_member: called before the step of each optimizer of the update.
    """
    members = optimizer.members if isinstance(optimizer, JoinedOptimizers) else [optimizer]
    depth = 0
    stepped: list[torch.optim.Optimizer] = []

    def enter(member: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth > 1:
            return
        if any(member is each for each in stepped):
            finish()
        if not stepped:
            before(optimizer)
        each_member(member)

    def leave(member: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            stepped.append(member)
            if len(stepped) == len(members):
                finish()

    def finish() -> None:
        stepped.clear()
        after(optimizer)

    handles = [member.register_step_pre_hook(enter) for member in members]
    handles += [member.register_step_post_hook(leave) for member in members]
    with temporary_hooks(handles):
        yield
        if stepped:
            finish()


def weights_of(run: TrainingRun) -> dict[str, Tensor]:
    """Return a copy of each parameter, by name."""
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def _gradients(optimizer: Any, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    scale = getattr(optimizer, "grad_scale", None)
    gradients = {}
    for name, p in parameters.items():
        if p.grad is not None:
            g = p.grad.detach().to_dense() if p.grad.is_sparse else p.grad.detach().clone()
            gradients[name] = g if scale is None else g / scale
    return gradients


def rates_of(optimizer: Any) -> list[float]:
    """Return the learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm of all tensors together, in float64."""
    return float(nn.utils.get_total_norm([_wide(t) for t in tensors]))


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the L2 norm of a - b over that of b, or inf if it is not finite. A missing tensor is zero."""
    zero = torch.zeros(())
    gap = norm(_wide(a.get(name, zero)) - _wide(b.get(name, zero)) for name in a.keys() | b.keys())
    size = norm(b.values())
    if not math.isfinite(gap):
        return math.inf
    return gap / size if size > 0 else (math.inf if gap > 0 else 0.0)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 or complex128."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))
