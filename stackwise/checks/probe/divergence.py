"""Divergence: the first module at which two models differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.probe.recorded_calls import watched_modules
from stackwise.subject.inference import logits_of

__all__ = ["Divergence", "first_divergence"]

_ROOT = "(outside the submodules)"
_EXACT = 1e-8


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
        reference: the module of the reference, if its names differ from those of the model; otherwise "".
    """

    module: str
    side: Literal["input", "output"]
    after: str
    value: float
    limit: float
    reference: str = ""

    def __str__(self) -> str:
        if self.reference:
            last = f"the last equal one is that of {self.after}" if self.after else "no earlier one is equal"
            return f"outputs of {self.module} and of {self.reference} in the reference; {last}"
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
    """Return the first difference between two models for the same inputs.

    The inputs and the outputs of every module that both models have are compared at every call, in the
    order of the calls in `model`. If both have modules that the other one lacks, modules are matched by
    the order of their calls and the shapes of their outputs.

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

    def compare(tensor: Tensor, other: Tensor) -> tuple[float, float]:
        """Return the difference and its limit."""
        eps = max(torch.finfo(tensor.dtype).eps, torch.finfo(other.dtype).eps)
        return _difference(other, tensor), max(_EXACT, 16 * eps) if limit is None else limit

    names, other_names = ({name for name, _, _ in each} for each in (events, expected))
    if not (names <= other_names or other_names <= names):
        return _by_order(events, expected, compare)
    after = ""
    for event, tensors in events.items():
        others = expected.get(event)
        if others is None or [t.shape for t in tensors] != [t.shape for t in others]:
            continue
        module, side, _ = event
        for tensor, other in zip(tensors, others, strict=True):
            value, allowed = compare(tensor, other)
            if not value <= allowed:
                return Divergence(module, side, after, value, allowed)
        if side == "output" and tensors:
            after = module
    return None


_Event = tuple[str, Literal["input", "output"], int]
_Events = dict[_Event, list[Tensor]]


def _by_order(
    events: _Events, expected: _Events, compare: Callable[[Tensor, Tensor], tuple[float, float]]
) -> Divergence | None:
    """Return the first two modules with the same output shape after the last pair with equal outputs."""
    ours, theirs = (
        [
            (name, tensors[0].flatten(0, -2))
            for (name, side, _), tensors in each.items()
            if side == "output" and tensors and tensors[0].ndim > 1
        ]
        for each in (events, expected)
    )

    def agree(tensor: Tensor, other: Tensor) -> bool:
        if tensor.shape != other.shape:
            return False
        value, allowed = compare(tensor, other)
        return value <= allowed

    after, here, there = "", 0, 0
    for i, (name, tensor) in enumerate(ours):
        equal = (j for j, (_, other) in enumerate(theirs) if j >= there and agree(tensor, other))
        if (j := next(equal, None)) is not None:
            after, here, there = name, i + 1, j + 1
    for name, tensor in ours[here:]:
        for other_name, other in theirs[there:]:
            # A module that returns its input, such as dropout, repeats an equal output.
            if tensor.shape == other.shape and not any(agree(each, other) for _, each in ours[:here]):
                return Divergence(name, "output", after, *compare(tensor, other), reference=other_name)
    return None


def _recorded(model: nn.Module, run: Callable[[], object]) -> _Events:
    """Return the inputs and outputs of each module, in order: (name, side, number of the call) -> tensors."""
    events: _Events = {}
    counts: Counter[tuple[str, str]] = Counter()

    def record(side: Literal["input", "output"], name: str, value: Any) -> None:
        if hasattr(value, "logits") and not isinstance(value, Mapping | tuple | list):
            value = logits_of(value)
        name = name or _ROOT
        tensors = [t.detach().clone() for t in tensors_in(value) if t.is_floating_point()]
        events[name, side, counts[name, side]] = tensors
        counts[name, side] += 1

    with watched_modules(model, partial(record, "input"), partial(record, "output")):
        run()
    return events


def _difference(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    rows = (1, -1) if a.ndim < 2 else a.shape
    return float(relative_difference(a.reshape(rows), b.reshape(rows)).max())
