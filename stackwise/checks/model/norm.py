"""Norm: the output of a norm does not depend on the size of its input, and has RMS 1 at the start.

Shapes: N vectors, C channels.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS, dtype_of
from stackwise.checks.probe.recorded_calls import recorded_calls
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

_N_VECTORS = 64
# The output grows like the size of the input to a power. Rounding and eps alone give a smaller power.
_GROWTH = 0.1
# The RMS of the output of a new norm may be between 1 / 1.5 and 1.5. Healthy models have 1.
_FACTOR = 1.5


@check
def norm_gains(subject: Subject) -> CheckResult:
    """Does every new norm return vectors of RMS 1, without a bias and with the signs of its input?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    norms = [norm for norm in _norms(subject) if norm.is_invariant]
    if not norms:
        return subject.not_applicable("no norm with weights was found")
    for norm in norms:
        if norm.size > 0 and norm.flipped > 0.05:
            return subject.failed(
                norm.flipped,
                0.05,
                where=norm.name,
                meaning=f"A new norm changes the sign of {norm.flipped:.0%} of the channels.",
                advice="Gains start at 1 (or at 0 for 1 + gain): look for an initialisation of all weights "
                "from N(0, std) that includes norms.",
            )
    correct_if = "the published architecture initialises its norms in this way"
    biased = max(norms, key=lambda norm: norm.offset)
    if biased.offset > 0.1:
        return subject.warned(
            biased.offset,
            0.1,
            where=biased.name,
            meaning=f"A new norm adds a bias of RMS {biased.offset:.3g}; 0 is usual.",
            correct_if=correct_if,
            advice="Look for an initialisation of all biases that includes norms.",
        )
    worst = max(norms, key=lambda norm: norm.distance)
    if worst.distance > math.log(_FACTOR):
        return subject.failed_unless(
            None if worst.has_double_offset else correct_if,
            worst.distance,
            math.log(_FACTOR),
            where=worst.name,
            meaning=f"The output of a new norm has RMS {worst.size:.3g}; 1 is usual.",
            advice="Check the initial gain: 1 for gain * x, and 0 for (1 + gain) * x. Also check eps and any "
            "other factor.",
        )
    return subject.passed(
        worst.distance,
        math.log(_FACTOR),
        meaning=f"{len(norms)} norms; the output of {worst.name} has RMS {worst.size:.3g}.",
    )


@check
def norm_scale(subject: Subject) -> CheckResult:
    """Is the output of every module named norm independent of the size of its input?"""
    norms = [norm for norm in _norms(subject) if norm.is_named]
    if not norms:
        return subject.not_applicable("needs a module with norm in the name of its class")
    worst = max(norms, key=lambda norm: (norm.is_wrong, 0.0 if norm.is_invariant else abs(norm.growth)))
    if worst.is_invariant:
        return subject.passed(abs(worst.growth), _GROWTH, meaning=f"{len(norms)} norms")
    return subject.failed_unless(
        None if worst.is_wrong else "the module is no normalisation, although the name of its class says so",
        worst.growth,
        _GROWTH,
        where=worst.name,
        meaning=f"The output of a norm grows like the size of its input to the power {worst.growth:.2g}. The "
        "output of a correct norm does not depend on it.",
        advice="Look for a missing square root, and for x / rsqrt(...) where x * rsqrt(...) is correct.",
    )


@dataclass(frozen=True)
class _Norm:
    """Module with vectors as parameters, or with the name of a norm.

    Attributes:
        name: name of the module.
        size: RMS of the output without its mean over inputs.
        flipped: share of the channels with another sign than the input.
        offset: RMS of the mean output.
        growth: power of the size of the input with which the output grows.
        is_invariant: True if the outputs for x and 4 x are equal.
        has_double_offset: True if the output has RMS 2 and all gains are 1: the norm adds 1 to a gain of 1.
        is_named: True if the class has the name of a norm that uses no statistics of earlier batches.
    """

    name: str
    size: float
    flipped: float
    offset: float
    growth: float
    is_invariant: bool
    has_double_offset: bool
    is_named: bool

    @property
    def is_wrong(self) -> bool:
        """Return True if no function that scales or saturates grows like this."""
        return not self.is_invariant and not -_GROWTH < self.growth < 1 + _GROWTH

    @property
    def distance(self) -> float:
        """Distance of the size from 1, in nats."""
        return abs(math.log(max(self.size, 1e-9)))


def _norms(subject: Subject) -> list[_Norm]:
    """Return the modules that a call passes vectors (., C) to, and that return the same shape."""
    model = subject.model()
    widths: dict[str, int] = {}
    for call in recorded_calls(model, lambda: subject.logits(model, subject.inputs(2)), _may_be_norm):
        x = next((each for each in call.args if isinstance(each, Tensor)), None)
        is_same_shape = isinstance(call.output, Tensor) and x is not None and x.shape == call.output.shape
        if is_same_shape and x is not None and x.is_floating_point() and x.shape[-1] > 3:
            widths[call.name] = x.shape[-1]
    generator, found = torch.Generator().manual_seed(subject.seed), []
    for name, C in widths.items():
        half_NC = torch.randn(1, _N_VECTORS, C, generator=generator).to(subject.device, dtype_of(model))
        with suppress(*REFUSALS):
            found.append(_measured(name, model.get_submodule(name), torch.cat((half_NC, -half_NC), dim=1)))
    return found


def _may_be_norm(_: str, module: nn.Module) -> bool:
    """Return True for a module with the name of a norm, or whose parameters are vectors and scalars."""
    if any(True for child in module.children() for _ in child.parameters()):
        return False
    return is_named_norm(module) or {p.ndim for p in module.parameters(recurse=False)} in ({1}, {0, 1})


def is_named_norm(module: nn.Module) -> bool:
    """Return True if the class name is that of a norm without statistics of earlier batches."""
    name = type(module).__name__
    of_batches = isinstance(module, nn.modules.batchnorm._NormBase) or "BatchNorm" in name
    is_other = of_batches or re.search("NoNorm|LocalResponse", name)
    return bool(re.search("Norm(?![a-z])|_norm", name)) and not is_other


@torch.no_grad()
def _measured(name: str, module: nn.Module, x_NC: Tensor) -> _Norm:
    """Return the figures of a module."""
    y_NC, larger_NC = module(x_NC).double()[0], module(4 * x_NC).double()[0]
    mean_C, larger_mean_C = y_NC.mean(dim=0), larger_NC.mean(dim=0)
    variable_NC = y_NC - mean_C
    gap = (larger_NC - y_NC).abs().max().item()
    flipped = ((variable_NC * x_NC[0].double()).sum(dim=0) < 0).double().mean().item()
    size, larger, offset = (
        t.square().mean().sqrt().item() for t in (variable_NC, larger_NC - larger_mean_C, mean_C)
    )
    return _Norm(
        name,
        size,
        min(flipped, 1 - flipped),
        offset,
        growth=math.log(max(larger, 1e-12) / max(size, 1e-12), 4),
        is_invariant=gap <= 0.02 * max(variable_NC.abs().max().item(), 1e-12),
        has_double_offset=abs(size - 2) < 0.02 and any(bool((p == 1).all()) for p in module.parameters()),
        is_named=is_named_norm(module),
    )
