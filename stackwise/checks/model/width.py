"""Width: a width-independent (muP) parametrisation keeps activations and their changes at one size.

The coordinate check of Yang et al., "Tensor Programs V" (arXiv 2203.03466): the mean absolute value of each
activation, and its change after a few steps, against the width. Their slope in log-log scale is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from stackwise.checks.check import check
from stackwise.checks.probe.coordinate import LIMIT, UNUSUAL, Training, coordinates_of, slopes_of, worst_of
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

__all__ = ["training_at_width", "width_independence"]

_FACTORS = (1, 2, 4)
_SEEDS = 3
_STEPS = 3
_ROWS = 4


@check(suite="full")
def width_independence(subject: Subject) -> CheckResult:
    """Do activations, and their changes in training, have the same size at every width?"""
    spec = subject.spec
    if spec.at_width is None or spec.trained:
        return subject.not_applicable("needs new weights, and the claim at_width=: a wider model")
    seeds = range(subject.seed, subject.seed + _SEEDS)
    found = [
        [coordinates_of(training_at_width(subject, factor, seed), _STEPS) for seed in seeds]
        for factor in _FACTORS
    ]
    worst = worst_of(slopes_of(_FACTORS, found))
    if worst is None:
        return subject.not_applicable("needs modules whose outputs are not 0 at every width")
    value, where = worst.distance, worst.where
    meaning = f"The {worst.what} of {where} goes with width to the power {worst.value:+.2f}."
    advice = (
        "Look for an init std divided by the width instead of its root, a width multiplier that never "
        "reaches a layer or the optimizer's learning rate, and attention scaled by 1 / sqrt(head size)."
    )
    if value <= UNUSUAL:
        return subject.passed(value, UNUSUAL, meaning=meaning)
    if not value <= LIMIT:
        return subject.failed(value, LIMIT, where=where, meaning=meaning, advice=advice)
    exempt = "this module is meant to scale with the width, or the widths are too small to tell"
    return subject.warned(value, UNUSUAL, where=where, meaning=meaning, correct_if=exempt, advice=advice)


def training_at_width(
    subject: Subject,
    factor: int,
    seed: int,
    *,
    rows: int = _ROWS,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Training:
    """The model that a spec claims to be `factor` times as wide, trained on one batch.

    Args:
        subject: its device, and the batch.
        factor: what `at_width` takes.
        seed: of the weights.
        rows: of the batch.
        optimizer: of a model; None: the spec's.
    """
    spec = subject.spec
    assert spec.at_width is not None
    widen: Callable[[int], nn.Module] = spec.at_width
    model = replace(spec, build=lambda: widen(factor)).create(subject.device, seed).eval()
    inputs = subject.inputs(rows)
    updates = spec.optimizer(list(model.parameters())) if optimizer is None else optimizer(model)

    def update() -> None:
        updates.zero_grad()
        with torch.enable_grad(), subject.fixed_randomness():
            spec.loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]
        updates.step()

    return Training(model, lambda: subject.logits(model, inputs), update)
