"""Parity: the model computes the same outputs, loss and gradients as a trusted reference.

A reference is another implementation or revision with the same parameter names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.backward import gradients_at
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.difference import (
    Finding,
    measure_difference,
    relative_difference,
    uses_less_than_float64,
)
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject
from stackwise.subject.inference import logits_of

__all__ = ["Divergence", "first_divergence"]

_NEEDED = "needs reference="
_ROOT = "(outside the submodules)"
_LOSS = "the loss"
_EXACT = 1e-8
# Healthy pairs, one with a softmax in float32 and one without, differ by up to 1.5e-6 with random weights.
_FLOAT32 = 5e-6


@dataclass(frozen=True)
class Divergence:
    """First difference between two models.

    Attributes:
        module: name of the first module, in order of execution, that differs; "(outside the submodules)" for
            the root.
        side: "output": its inputs agree and its outputs differ; "input": its inputs differ, because of code
            outside of any submodule.
        after: the last module with equal outputs, or "".
        value: difference, relative to the variation of the tensor.
        limit: largest difference that is rounding.
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
    """Return the first difference between two models with the same module names, for the same inputs.

    The inputs and the outputs of every module that both models have are compared at every call, in the
    order of the calls in `model`.

    Args:
        model: the model to examine, in the mode and dtype of the comparison.
        reference: the trusted model: an earlier revision, another implementation, another backend.
        inputs: (B, T) ids or (B, T, C) vectors.
        run: (model, inputs) -> anything; None: `model(inputs)`.
        limit: largest difference, relative to the variation of a tensor, that is rounding;
            None: 1e-8 in float64, otherwise 16 eps of the tensor's dtype.

    Returns:
        None if no module differs.
    """
    run = run or (lambda module, batch: module(batch))
    events = _recorded(model, lambda: run(model, inputs))
    expected = _recorded(reference, lambda: run(reference, inputs))
    after = ""
    for event, tensors in events.items():
        others = expected.get(event)
        if others is None or [t.shape for t in tensors] != [t.shape for t in others]:
            continue
        module, side, _ = event
        for tensor, other in zip(tensors, others, strict=True):
            eps = max(torch.finfo(tensor.dtype).eps, torch.finfo(other.dtype).eps)
            allowed = max(_EXACT, 16 * eps) if limit is None else limit
            value = _difference(other, tensor)
            if not value <= allowed:
                return Divergence(module, side, after, value, allowed)
        if side == "output" and tensors:
            after = module
    return None


_Event = tuple[str, Literal["input", "output"], int]


def _recorded(model: nn.Module, run: Callable[[], object]) -> dict[_Event, list[Tensor]]:
    """Return the inputs and outputs of each module, in order: (name, side, number of the call) -> tensors."""
    events: dict[_Event, list[Tensor]] = {}
    counts: Counter[tuple[str, str]] = Counter()

    def record(name: str, side: Literal["input", "output"], value: Any) -> None:
        if hasattr(value, "logits") and not isinstance(value, Mapping | tuple | list):
            value = logits_of(value)
        tensors = [t.detach().clone() for t in tensors_in(value) if t.is_floating_point()]
        events[name, side, counts[name, side]] = tensors
        counts[name, side] += 1

    def before(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _, args, kwargs: record(name, "input", (args, kwargs))

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _, __, output: record(name, "output", output)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name or _ROOT), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name or _ROOT)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return events


def _difference(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    rows = (1, -1) if a.ndim < 2 else a.shape
    return float(relative_difference(a.reshape(rows), b.reshape(rows)).max())


@check
def reference_output(subject: Subject) -> CheckResult:
    """Do model and reference give equal outputs, with the model's own weights and with random ones?"""
    if subject.spec.reference is None:
        return subject.not_applicable(_NEEDED)
    inputs = subject.inputs(2)

    def gap(model: nn.Module) -> float:
        return max(_output_gap(subject, model, pair.reference, inputs) for pair in _pairs(subject, model))

    found = _measured(subject, gap)
    if not found.real:
        return subject.passed(found.value, found.limit, meaning=found.meaning)
    model = subject.model(dtype=found.dtype)
    where = ""
    for pair in _pairs(subject, model):
        if _output_gap(subject, model, pair.reference, inputs) > found.limit:
            place = first_divergence(model, pair.reference, inputs, run=subject.logits, limit=found.limit)
            where = f"{place or 'in no module that both models have'} ({pair.weights})"
            break
    return subject.failed(
        found.value,
        found.limit,
        where=where,
        meaning="With the same weights and inputs, the outputs of model and reference differ.",
        advice="Compare the code at this place with the reference: order of heads and of rotary halves, type "
        "of GELU, dtype of a norm, scale, and tables computed in half precision.",
    )


@check
def reference_gradient(subject: Subject) -> CheckResult:
    """Do model and reference give the same loss and the same gradients?"""
    if subject.spec.reference is None:
        return subject.not_applicable(_NEEDED)
    inputs = subject.inputs(2)

    def gaps(model: nn.Module) -> dict[str, float]:
        found: dict[str, float] = {}
        for pair in _pairs(subject, model):
            for name, gap in _gradient_gaps(subject, model, pair, inputs).items():
                found[name] = max(found.get(name, 0.0), gap)
        return found

    found = _measured(subject, lambda model: max(gaps(model).values(), default=0.0))
    if not found.real:
        return subject.passed(found.value, found.limit, meaning=found.meaning)
    each = gaps(subject.model(dtype=found.dtype))
    wrong = sorted((n for n in each if not each[n] <= found.limit), key=lambda n: (n != _LOSS, -each[n]))
    return subject.failed(
        found.value,
        found.limit,
        where=listed(wrong),
        meaning=f"{len(wrong)} of the loss and {len(each) - 1} gradients differ from the reference.",
        advice="If the outputs agree, look for detach(), a custom backward, recomputation with other values, "
        "and a different loss. Otherwise see reference_output.",
    )


def _measured(subject: Subject, measure: Callable[[nn.Module], float]) -> Finding:
    """Measure a difference. If either model computes in float32 parts, allow their rounding."""
    found = measure_difference(subject, measure)
    is_small = found.dtype == torch.float64 and found.value <= _FLOAT32
    if found.real and is_small and uses_less_than_float64(subject.model(dtype=torch.float64), measure):
        return replace(found, limit=_FLOAT32, real=False)
    return found


def _output_gap(subject: Subject, model: nn.Module, reference: nn.Module, inputs: Tensor) -> float:
    output, expected = subject.logits(model, inputs), subject.logits(reference, inputs)
    if output.shape != expected.shape:
        raise ValueError(f"reference: outputs {tuple(expected.shape)}; the model's {tuple(output.shape)}")
    return float(relative_difference(expected, output).max())


@dataclass(frozen=True)
class _Pair:
    """A reference with the weights of a model.

    Attributes:
        weights: the weights in words.
        reference: the reference, in the mode and dtype of the model.
        orders: parameter name -> order of its elements in the model and in the reference, if they differ.
    """

    weights: str
    reference: nn.Module
    orders: Mapping[str, tuple[Tensor, Tensor]]


def _gradient_gaps(subject: Subject, model: nn.Module, pair: _Pair, inputs: Tensor) -> dict[str, float]:
    found, expected = (_gradients(subject, each, inputs) for each in (model, pair.reference))
    # A smaller gradient is rounding.
    floor = 1e-2 * max((float(g.abs().max()) for n, g in expected.items() if n != _LOSS), default=0.0)
    gaps = dict.fromkeys(found.keys() ^ expected.keys(), torch.inf)
    for name in found.keys() & expected.keys():
        a, b = found[name].double(), expected[name].double()
        if name in pair.orders:
            a, b = (g.flatten()[order] for g, order in zip((a, b), pair.orders[name], strict=True))
        gap = float((a - b).abs().max()) / (max(float(b.abs().max()), floor) or 1.0)
        gaps[name] = gap if gap == gap else torch.inf
    return gaps


def _gradients(subject: Subject, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return the loss and the gradients, by parameter name."""
    spec = subject.spec
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), subject.fixed_randomness():
        if spec.labelled_loss is not None and spec.inputs == "tokens":
            loss = spec.labelled_loss(model, inputs.clone(), inputs.clone())
        else:
            loss = spec.loss_of(model, inputs.clone())
        found: list[Tensor | None] = []
        if loss.requires_grad:
            found = gradients_at(loss, list(named.values()))
    gradients = {name: g for name, g in zip(named, found, strict=False) if g is not None}
    return {_LOSS: loss.detach(), **gradients}


def _pairs(subject: Subject, model: nn.Module) -> Iterator[_Pair]:
    """Yield the reference with the model's own weights, then with random weights in both.

    Attention has little effect on the output of a new model, so a defect in it has little effect too. Larger
    weights show it, and two equal implementations agree for all weights.

    If the reference has the same weights in another order, as after a conversion, only these are used.

    Raises:
        ValueError: the parameters' names or shapes differ.
    """
    assert subject.spec.reference is not None
    with subject.fixed_randomness():
        reference = subject.spec.reference().to(subject.device)
    weights = dict(model.named_parameters(remove_duplicate=False))
    others = dict(reference.named_parameters(remove_duplicate=False))
    if unlike := sorted(weights.keys() ^ others.keys()):
        raise ValueError(f"reference: got parameter {unlike[0]} in one model only; allowed: the same names")
    for name in weights:
        if weights[name].shape != others[name].shape:
            got, allowed = tuple(others[name].shape), tuple(weights[name].shape)
            raise ValueError(f"reference: {name}: got shape {got}; allowed: {allowed}")
    dtype = next((p.dtype for p in weights.values() if p.is_floating_point()), torch.float32)
    reference._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # type: ignore[no-untyped-call]
    reference.train(model.training)
    others = dict(reference.named_parameters(remove_duplicate=False))
    if orders := _orders(weights, others):
        yield _Pair("own weights", reference, orders)
        return
    _copy(weights, others)
    yield _Pair("own weights", reference, {})
    if not subject.spec.trained:
        _randomize(model)
        _copy(weights, others)
        if subject.logits(model, subject.inputs(2)).isfinite().all():
            yield _Pair("random weights", reference, {})


def _orders(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the orders of parameters with reordered values, or {} if a parameter has other values."""
    orders = {}
    for name, p in weights.items():
        if torch.equal(p, others[name]):
            continue
        a, b = p.detach().flatten().sort(), others[name].detach().flatten().sort()
        if not torch.equal(a.values, b.values):
            return {}
        orders[name] = a.indices, b.indices
    return orders


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, p in target.items():
        p.copy_(source[name])


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Replace matrices by random ones that preserve the size of their input."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.ndim >= 2 and p.is_floating_point():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * (p.numel() / p.shape[0]) ** -0.5)
