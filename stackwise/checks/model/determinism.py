"""Determinism: the same input gives the same output. Asked before all other checks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

LIMIT = 1e-6


@check
def determinism(subject: Subject) -> CheckResult:
    """Do two calls in eval mode give the same output?"""
    model, inputs = subject.model(), subject.inputs(2)
    untouched = inputs.clone()

    def gap(first: Tensor, second: Tensor) -> float:
        return relative_difference(first, second).max().item()

    with torch.no_grad(), subject.fixed_randomness():
        first = subject.spec.logits(model, inputs)
        if not torch.equal(inputs, untouched):
            return subject.failed(
                meaning="The model writes into its own input.",
                advice="Look for an operation in place (add_, masked_fill_, +=) on the input or on a view.",
            )
        second = subject.spec.logits(model, inputs)
    value = gap(first, second)
    if value <= LIMIT:
        return subject.passed(value, LIMIT)
    with torch.no_grad():
        seeded = []
        for _ in range(2):
            with subject.fixed_randomness():
                seeded.append(subject.spec.logits(model, inputs))
        if names := _fix_seeds(model):
            with subject.fixed_randomness():
                set_on = [subject.spec.logits(model, inputs) for _ in range(2)]
            if gap(*set_on) <= LIMIT:
                return subject.warned(
                    value,
                    LIMIT,
                    where=", ".join(names),
                    meaning=f"Two calls in eval mode differ. They agree if {names[0]} is set.",
                    correct_if="outputs are meant to be random, as of random features",
                    advice=f"Set {names[0]} for evaluation. Other checks run under one seed.",
                )
    meaning = "Two calls in eval mode differ even under one seed: the model changes, or memory is unset."
    advice = "Look for buffers that forward() updates in eval mode, torch.empty, and atomic kernels."
    if gap(*seeded) <= LIMIT:
        meaning = "Two calls in eval mode differ, but agree under one seed: something is random."
        advice = "Look for dropout that ignores self.training: F.dropout(x, p) or dropout_p=p without it."
    return subject.failed(value, LIMIT, meaning=meaning, advice=advice)


def _fix_seeds(model: nn.Module) -> list[str]:
    """Set the seeds that a model's own modules leave open, and name them."""
    names = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if value is None and (name == "seed" or name.endswith("_seed")):
                setattr(module, name, 0)
                names.append(name)
    return list(dict.fromkeys(names))
