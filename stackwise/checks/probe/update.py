"""Update: what one call of an optimizer saw and did, observed from outside.

Gradients are what the optimizer works with: divided by its `grad_scale` where it has one, as fused ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.trainer_adapter import JoinedOptimizers
from stackwise.subject.trainer_spec import TrainingRun

__all__ = ["Observation", "Update", "distance", "each_update", "norm", "observed", "rates_of"]


@dataclass(frozen=True)
class Update:
    """One call of `optimizer.step`.

    Attributes:
        gradients: by name of the parameter, those that had one.
        before: every parameter of the model.
        after: the same after the call.
        learning_rates: of each group.
    """

    gradients: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    learning_rates: list[float]

    def moved(self, name: str) -> Tensor:
        """How far each element of a parameter moved, in float64."""
        return self.after[name].double() - self.before[name].double()


@dataclass
class Observation:
    """What was seen of a run.

    Attributes:
        updates: in their order.
        raw: the last gradient that the backward pass left in each parameter, before anything was done
            to it; as it was then, loss scale included.
        reached: names of parameters whose gradient was somewhere not zero.
    """

    updates: list[Update] = field(default_factory=list)
    raw: dict[str, Tensor] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)


@contextmanager
def observed(run: TrainingRun, *, factor: float = 1.0) -> Iterator[Observation]:
    """Inside, every update of `run.optimizer` is noted.

    Args:
        run: any.
        factor: what every gradient is multiplied by as it leaves the backward pass.
    """
    seen = Observation()
    names = {id(p): name for name, p in run.model.named_parameters()}
    parameters = dict(run.model.named_parameters())
    noted: list[tuple[dict[str, Tensor], dict[str, Tensor], list[float]]] = []

    inside = False

    def note_raw(p: Tensor) -> None:
        nonlocal inside
        inside = inside or bool(noted)
        if p.grad is not None and not p.grad.is_sparse:
            seen.raw[names[id(p)]] = p.grad.detach().clone()
            if bool(p.grad.any()):
                seen.reached.add(names[id(p)])

    def before(optimizer: Any) -> None:
        noted.append((_gradients(optimizer, parameters), _values(parameters), rates_of(optimizer)))

    def next_member(member: torch.optim.Optimizer) -> None:
        """Note the gradients of one optimizer again: a scaler divides them just before its step."""
        own = {id(p) for group in member.param_groups for p in group["params"]}
        fresh = _gradients(member, {name: p for name, p in parameters.items() if id(p) in own})
        noted[-1][0].update(fresh)

    def after(optimizer: Any) -> None:
        nonlocal inside
        gradients, values, rates = noted.pop()
        if inside:  # by a closure; what was there before is of an earlier step
            gradients, inside = _gradients(optimizer, parameters), False
        seen.updates.append(Update(gradients, values, _values(parameters), rates))

    with ExitStack() as stack:
        for p in parameters.values():
            if p.requires_grad:
                if factor != 1.0:
                    stack.callback(p.register_hook(lambda g: g * factor).remove)  # type: ignore[no-untyped-call]
                handle = p.register_post_accumulate_grad_hook(note_raw)  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
        stack.enter_context(each_update(run.optimizer, before, after, next_member))
        yield seen


@contextmanager
def each_update(
    optimizer: Any,
    before: Callable[[Any], None],
    after: Callable[[Any], None] = lambda _: None,
    next_member: Callable[[torch.optim.Optimizer], None] = lambda _: None,
) -> Iterator[None]:
    """Call `before` and `after` around each update of the optimizer.

    Several optimizers make one update together: from the first of their steps to the last. An optimizer that
    steps twice begins a new update. Hooks of torch run twice if the step of a subclass calls that of its
    parent, which is one update.

    Args:
        optimizer: an optimizer or `JoinedOptimizers`. It is passed to `before` and `after`.
        before: called before an update.
        after: called after it.
        next_member: called before the step of each further optimizer of the same update.
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
        if stepped:
            next_member(member)
        else:
            before(optimizer)

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

    handles = [
        handle
        for member in members
        for handle in (member.register_step_pre_hook(enter), member.register_step_post_hook(leave))
    ]
    try:
        yield
        if stepped:
            finish()
    finally:
        for handle in handles:
            handle.remove()


def _values(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


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
    """The L2 norm of all together, in float64."""
    squares = [t.double().square().sum() for t in tensors]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The L2 norm of a - b over that of b; a missing tensor is zero; inf where one is not finite."""
    difference = {}
    for name in a.keys() | b.keys():
        some = a[name] if name in a else b[name]
        zero = torch.zeros_like(some)
        difference[name] = a.get(name, zero).double() - b.get(name, zero).double()
    apart, size = norm(difference.values()), norm(b.values())
    if not torch.isfinite(torch.tensor(apart)):
        return float("inf")
    return apart / size if size > 0 else (float("inf") if apart > 0 else 0.0)
