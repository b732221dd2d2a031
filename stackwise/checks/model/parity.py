"""Parity: a model computes what its reference computes, in its outputs, its loss and every gradient.

A reference is an implementation, or a revision, that is trusted, with the same parameter names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.difference import (
    Finding,
    hear,
    relative_difference,
    uses_less_than_float64,
)
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.inference import logits_of

__all__ = ["Divergence", "first_divergence"]

_NEEDED = "needs reference="
_ROOT = "(outside the submodules)"
_LOSS = "the loss"
_EXACT = 1e-8
# Sound pairs, one with a softmax in float32 and one without, get to 1.5e-6 with lively weights.
_FLOAT32 = 5e-6


@dataclass(frozen=True)
class Divergence:
    """Where two models part.

    Attributes:
        module: name of the first module, in order of execution, that differs; "(outside the submodules)" for
            the root.
        side: "output": its inputs agree, what it makes of them does not; "input": it is handed something
            else, by code that is outside of any module.
        after: the last module whose output agreed, or "".
        value: the difference, relative to how far the tensor varies.
        limit: beyond which it counts.
    """

    module: str
    side: Literal["input", "output"]
    after: str
    value: float
    limit: float

    def __str__(self) -> str:
        if self.side == "output":
            return f"{self.module}: its inputs agree, its output does not"
        return f"between {self.after or 'the start'} and the input of {self.module}"


@torch.no_grad()
def first_divergence(
    model: nn.Module,
    reference: nn.Module,
    inputs: Tensor,
    *,
    run: Callable[[nn.Module, Tensor], Any] | None = None,
    limit: float | None = None,
) -> Divergence | None:
    """The first place where two models with the same module names differ on the same inputs.

    Every module that both have by the same name is compared at every call, in the order in which
    `model` runs them: what goes in, then what comes out.

    Args:
        model: the one under suspicion; in the mode and dtype to be compared.
        reference: the other; an earlier revision, another implementation, the same on another backend.
        inputs: (B, T) ids or (B, T, C) vectors.
        run: (model, inputs) -> anything; None: `model(inputs)`.
        limit: largest difference, relative to how far a tensor varies, that counts as rounding;
            None: 1e-8 in float64, else 16 eps of the tensor's dtype.

    Returns:
        None where nothing that both show differs.
    """
    run = run or (lambda module, batch: module(batch))
    events = _events(model, lambda: run(model, inputs))
    others = dict(_events(reference, lambda: run(reference, inputs)))
    after = ""
    for event, tensors in events:
        theirs = others.get(event)
        if theirs is None or [t.shape for t in tensors] != [t.shape for t in theirs]:
            continue
        module, side, _ = event
        for mine, other in zip(tensors, theirs, strict=True):
            allowed = _allowed(mine, other) if limit is None else limit
            value = _difference(other, mine)
            if not value <= allowed:
                return Divergence(module, side, after, value, allowed)
        if side == "output" and tensors:
            after = module
    return None


_Event = tuple[str, Literal["input", "output"], int]


def _events(model: nn.Module, run: Callable[[], object]) -> list[tuple[_Event, list[Tensor]]]:
    """What enters and leaves each module, in order: (name, side, how often before) -> its tensors."""
    events: list[tuple[_Event, list[Tensor]]] = []
    seen: dict[tuple[str, str], int] = {}

    def note(name: str, side: Literal["input", "output"], value: Any) -> None:
        count = seen[name, side] = seen.get((name, side), -1) + 1
        events.append(((name, side, count), [t.detach().clone() for t in _tensors(value)]))

    def before(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _, args, kwargs: note(name, "input", (args, kwargs))

    def behind(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _, __, output: note(name, "output", output)

    handles = []
    for name, module in model.named_modules():
        name = name or _ROOT
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(behind(name)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return events


def _tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point ones, in order."""
    bare = hasattr(value, "logits") and not isinstance(value, Mapping | tuple | list)
    return (t for t in tensors_in(logits_of(value) if bare else value) if t.is_floating_point())


def _allowed(a: Tensor, b: Tensor) -> float:
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return max(_EXACT, 16 * eps)


def _difference(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    rows = (1, -1) if a.ndim < 2 else a.shape
    return float(relative_difference(a.reshape(rows), b.reshape(rows)).max())


@check
def reference_output(subject: Subject) -> CheckResult:
    """Are the outputs equal to those of the reference, with initial and with changed weights?"""
    if subject.spec.reference is None:
        return subject.not_applicable(_NEEDED)
    inputs = subject.inputs(2)

    def gap(model: nn.Module) -> float:
        return max(
            _output_gap(subject, model, reference, inputs) for _, reference, _ in _pairs(subject, model)
        )

    found = _heard(subject, gap)
    if not found.real:
        return subject.passed(found.value, found.limit, meaning=found.meaning)
    model = subject.model(dtype=found.dtype)
    where = ""
    for name, reference, _ in _pairs(subject, model):
        if _output_gap(subject, model, reference, inputs) > found.limit:
            place = first_divergence(model, reference, inputs, run=subject.logits, limit=found.limit)
            where = f"{place or 'in no module that both have by one name'} ({name})"
            break
    return subject.failed(
        found.value,
        found.limit,
        where=where,
        meaning="With the same weights and inputs, the outputs differ from the reference's.",
        advice="Compare the code there with the reference's: order of heads and of rotary halves, kind of "
        "GELU, where a norm is widened, scale, and tables computed in half precision.",
    )


@check
def reference_gradient(subject: Subject) -> CheckResult:
    """Are the loss and every gradient equal to those of the reference?"""
    if subject.spec.reference is None:
        return subject.not_applicable(_NEEDED)
    inputs = subject.inputs(2)

    def gaps(model: nn.Module) -> dict[str, float]:
        found: dict[str, float] = {}
        for _, reference, orders in _pairs(subject, model):
            mine, theirs = _gradients(subject, model, inputs), _gradients(subject, reference, inputs)
            # A gradient that is 0 but for rounding is measured by the others.
            largest = max((float(g.abs().max()) for n, g in theirs.items() if n != _LOSS), default=0.0)
            for name in sorted(mine.keys() | theirs.keys()):
                if name not in mine or name not in theirs:
                    found[name] = torch.inf
                    continue
                one, other = mine[name].double(), theirs[name].double()
                if name in orders:
                    one, other = (g.flatten()[o] for g, o in zip((one, other), orders[name], strict=True))
                scale = max(float(other.abs().max()), 1e-2 * largest) or 1.0
                gap = float((one - other).abs().max()) / scale
                found[name] = max(found.get(name, 0.0), torch.inf if gap != gap else gap)
        return found

    found = _heard(subject, lambda model: max(gaps(model).values(), default=0.0))
    if not found.real:
        return subject.passed(found.value, found.limit, meaning=found.meaning)
    moved = gaps(subject.model(dtype=found.dtype))
    worst = sorted((n for n in moved if not moved[n] <= found.limit), key=lambda n: (n != _LOSS, -moved[n]))
    return subject.failed(
        found.value,
        found.limit,
        where=f"{', '.join(worst[:3])}{', ...' if len(worst) > 3 else ''}",
        meaning=f"Of the loss and {len(moved) - 1} gradients, {len(worst)} differ from the reference's.",
        advice="Where the outputs agree, look for detach(), a custom backward, recomputation that sees other "
        "values, and a different loss; else see reference_output.",
    )


def _heard(subject: Subject, measure: Callable[[nn.Module], float]) -> Finding:
    """As `hear`; where either side computes in float32 even in a float64 model, its rounding is allowed."""
    found = hear(subject, measure, same_shapes=False)
    if found.real and found.dtype == torch.float64 and found.value <= _FLOAT32:
        twin = subject.model(dtype=torch.float64)
        if uses_less_than_float64(twin, measure):
            return replace(found, limit=_FLOAT32, real=False)
    return found


def _output_gap(subject: Subject, model: nn.Module, reference: nn.Module, inputs: Tensor) -> float:
    mine, theirs = subject.logits(model, inputs), subject.logits(reference, inputs)
    if mine.shape != theirs.shape:
        raise ValueError(f"reference: outputs {tuple(theirs.shape)}; the model's {tuple(mine.shape)}")
    return float(relative_difference(theirs, mine).max())


def _gradients(subject: Subject, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """By name, and the loss itself. Parameters that need none, or have none, are left out."""
    spec = subject.spec
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), subject.fixed_randomness():
        if spec.labelled_loss is not None and spec.inputs == "tokens":
            loss = spec.labelled_loss(model, inputs.clone(), inputs.clone())
        else:
            loss = spec.loss_of(model, inputs.clone())
        found: tuple[Tensor | None, ...] = ()
        if loss.requires_grad:
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(named, found, strict=False) if g is not None}
    return {_LOSS: loss.detach(), **gradients}


def _pairs(
    subject: Subject, model: nn.Module
) -> Iterator[tuple[str, nn.Module, dict[str, tuple[Tensor, Tensor]]]]:
    """The reference with `model`'s weights: as they are, then with both made lively.

    Attention hardly matters to the output of a model at its initialisation, and whatever is wrong in it
    hardly moves it. What computes the same does so for all weights, so that larger ones may be chosen.

    Each time: what the weights are, the reference, and, for a parameter whose values the reference holds
    in another order, the two orders that match them.

    Raises:
        ValueError: the parameters' names or shapes differ.
    """
    assert subject.spec.reference is not None
    with subject.fixed_randomness():
        reference = subject.spec.reference().to(subject.device)
    mine = dict(model.named_parameters(remove_duplicate=False))
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    if unlike := sorted(mine.keys() ^ theirs.keys()):
        raise ValueError(f"reference: got parameter {unlike[0]} on one side alone; wanted the same names")
    for name in mine:
        if mine[name].shape != theirs[name].shape:
            raise ValueError(
                f"reference: {name}: got {tuple(theirs[name].shape)}; wanted {tuple(mine[name].shape)}"
            )
    dtype = next((p.dtype for p in mine.values() if p.is_floating_point()), torch.float32)
    reference._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # type: ignore[no-untyped-call]
    reference.train(model.training)
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    orders = _orders(mine, theirs)
    if orders:
        # A conversion, whose order of weights is what is asked about: it keeps its own.
        yield "weights as they are", reference, orders
        return
    _copy(mine, theirs)
    yield "weights as they are", reference, {}
    if not subject.spec.trained:
        _enliven(model)
        _copy(mine, theirs)
        if subject.logits(model, subject.inputs(2)).isfinite().all():
            yield "weights made lively", reference, {}


def _orders(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of parameters with the same values in another order; none where any has other values."""
    orders = {}
    for name, p in mine.items():
        if torch.equal(p, theirs[name]):
            continue
        one, other = p.detach().flatten().sort(), theirs[name].detach().flatten().sort()
        if not torch.equal(one.values, other.values):
            return {}
        orders[name] = one.indices, other.indices
    return orders


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, p in target.items():
        p.copy_(source[name])


@torch.no_grad()
def _enliven(model: nn.Module) -> None:
    """Random matrices that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.ndim >= 2 and p.is_floating_point():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * (p.numel() / p.shape[0]) ** -0.5)
