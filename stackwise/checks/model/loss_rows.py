"""Loss rows: all parts of a loss scale in the same way with the number of rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stackwise.checks.check import check
from stackwise.checks.engine.examination import Examination
from stackwise.checks.probe.call import dtype_of, reason_of, refusals
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

# Relative size of a part, and of a deviation. Rounding in float64 is below 1e-9.
_PART, _SAME = 1e-4, 1e-6
_RANDOM = {
    *("randn", "randn_like", "rand", "rand_like", "normal", "normal_", "uniform_", "randint", "randint_like"),
    *("bernoulli", "exponential_", "random_"),
}


@check
def loss_rows(subject: Subject) -> CheckResult:
    """Do all parts of the loss scale in the same way with the number of rows?"""
    spec = subject.spec
    if spec.loss is None and (spec.labelled_loss is None or spec.inputs != "tokens"):
        return subject.not_applicable("needs loss, or labelled_loss of tokens")
    one, other = (subject.inputs(2)[row : row + 1] for row in (0, 1))
    try:
        mean, total = _parts(subject, one)
        other_mean, other_total = _parts(subject, other)
        joint = _loss(subject, torch.cat((one, other)))
    except refusals() as error:
        return subject.not_applicable(f"needs a loss of equal rows: {reason_of(error)}")
    size = abs(mean) + abs(total)
    if not (math.isfinite(size) and size):
        return subject.not_applicable("needs a loss that is finite and not 0")
    expected = (mean + other_mean) / 2 + total + other_total
    if abs(joint - expected) > _SAME * size:
        return subject.not_applicable("needs a loss that compares no rows, as a contrastive loss does")
    # A penalty of the weights does not depend on the rows.
    is_mean = abs(mean - other_mean) > max(_PART * abs(mean), _SAME * size)
    is_sum = abs(total) > _PART * abs(mean)
    share = abs(total) / size
    if not (is_mean and is_sum):
        return subject.passed(share, meaning="sum over the rows" if is_sum else "mean over the rows")
    return subject.failed(
        share,
        0.0,
        where="n copies of a row",
        meaning="A part of the loss is a mean over the rows, and a part grows with their number: for n "
        f"copies of a row, the loss is {mean:.4g} + {total:.4g} n.",
        advice="Look for a sum over the batch that is added to a mean, such as the divergence of an "
        "autoencoder or an auxiliary loss. The weight of this part depends on the batch size.",
    )


def _parts(subject: Subject, row: Tensor) -> tuple[float, float]:
    """Return a and b of the loss a + b n, where n is the number of copies of a row.

    Raises:
        ValueError: the loss has another form.
    """
    one, two, four = (_loss(subject, row.repeat(n, *(1 for _ in row.shape[1:]))) for n in (1, 2, 4))
    total = two - one
    if abs(four - two - 2 * total) > _SAME * (abs(one) + abs(total)):
        raise ValueError("it is not a mean or a sum over rows")
    return one - total, total


@torch.no_grad()
def _loss(subject: Subject, inputs: Tensor) -> float:
    """Return the loss in eval mode, with a constant in place of random numbers."""
    spec, model = subject.spec, Examination.of(subject).model()
    inputs = inputs.to(dtype_of(model)) if inputs.is_floating_point() else inputs.clone()
    with _Constant():
        if spec.loss is not None:
            return float(spec.loss(model, inputs))
        assert spec.labelled_loss is not None
        return float(spec.labelled_loss(model, inputs, inputs.clone()))


class _Constant(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Replaces random numbers by a constant, so that all rows get the same ones."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in _RANDOM and isinstance(result, Tensor):
            result.fill_(0.37 if result.is_floating_point() else 0)
        return result
