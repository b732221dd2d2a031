"""Width: a width-independent (muP) parametrisation keeps activations and their changes at one size.

The coordinate check of Yang et al., "Tensor Programs V" (arXiv 2203.03466): the mean absolute value of each
activation, and its change after a few steps, against the width. Their slope in log-log scale is 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

_FACTORS = (1, 2, 4)
_SEEDS = 3
_STEPS = 3
UNUSUAL, LIMIT = 0.25, 0.35


@check(suite="full")
def width_independence(subject: Subject) -> CheckResult:
    """Do activations and what training changes in them have the same size at every width?"""
    spec = subject.spec
    if spec.at_width is None:
        return subject.not_applicable("needs the claim: at_width=, a model so many times as wide")
    if spec.trained:
        return subject.not_applicable("the weights are trained")
    at_start: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(_FACTORS))
    changes: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(_FACTORS))
    for column, factor in enumerate(_FACTORS):
        for seed in range(_SEEDS):
            before, after = _trained(subject, factor, subject.seed + seed)
            for name in before.keys() & after.keys():
                at_start[name][column] += before[name].abs().mean().item() / _SEEDS
                changes[name][column] += (after[name] - before[name]).abs().mean().item() / _SEEDS
    found = []
    for what, sizes in (("size at the start", at_start), (f"change after {_STEPS} steps", changes)):
        for name, row in sizes.items():
            slope = _slope(row)
            # Outputs may be the smaller, the wider: a random readout scaled by 1 / width is.
            if slope is not None and not (name == "" and slope < 0):
                found.append((abs(slope), slope, name or "the output", what))
    if not found:
        return subject.not_applicable("needs modules whose outputs are not 0 at every width")
    value, slope, name, what = max(found)
    meaning = f"The {what} of {name} goes with width to the power {slope:+.2f}."
    advice = (
        "Look for an init std divided by the width instead of its root, a width multiplier that never "
        "reaches a layer or the optimizer's learning rate, and attention scaled by 1 / sqrt(head size)."
    )
    if not value <= LIMIT:
        return subject.failed(value, LIMIT, where=name, meaning=meaning, advice=advice)
    if value > UNUSUAL:
        return subject.warned(value, UNUSUAL, where=name, meaning=meaning, advice=advice)
    return subject.passed(value, UNUSUAL, meaning=meaning)


def _trained(subject: Subject, factor: int, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Activations by module of a model `factor` times as wide, before and after a few steps on one batch."""
    assert subject.spec.at_width is not None
    widen: Callable[[int], nn.Module] = subject.spec.at_width
    model = replace(subject.spec, build=lambda: widen(factor)).create(subject.device, seed)
    model.eval()
    inputs = subject.inputs(4)
    before = _activations(subject, model, inputs)
    optimizer = subject.spec.optimizer(model.parameters())
    for _ in range(_STEPS):
        optimizer.zero_grad()
        with torch.enable_grad(), subject.fixed_randomness():
            subject.spec.loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return before, _activations(subject, model, inputs)


def _activations(subject: Subject, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """The output of each module that gives one tensor, of its last call; "" is the model's own."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                found[name] = output.detach().double()

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if name]
    try:
        found[""] = subject.logits(model, inputs).double()
    finally:
        for handle in handles:
            handle.remove()
    same = {n: t for n, t in found.items() if n and torch.equal(t.flatten(), found[""].flatten())}
    return {n: t for n, t in found.items() if n not in same}


def _slope(sizes: list[float] | Mapping[int, float]) -> float | None:
    """Least-squares slope of log size against log width; None where a size is 0."""
    values = list(sizes)
    if not all(math.isfinite(v) for v in values):
        return math.inf
    if min(values) <= 0:
        return None
    x = torch.tensor([math.log(f) for f in _FACTORS], dtype=torch.float64)
    y = torch.tensor([math.log(v) for v in values], dtype=torch.float64)
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())
