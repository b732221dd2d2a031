"""Gradients of every parameter, for the same passes computed in two ways."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stackwise.checks.probe.call import dtype_of
from stackwise.checks.probe.update import norm
from stackwise.checks.subject import Subject

__all__ = ["GradientDifference", "Gradients", "compare_gradients", "gradients_of", "limit_of"]

# Share of the norm of all gradients. Smaller gradients, such as that of a key's bias, are rounding.
_FLOOR, _NARROW_FLOOR = 1e-7, 1e-4
_EXACT = 1e-4  # healthy models in float64: at most 7e-6


@dataclass(frozen=True)
class Gradients:
    """Result of one forward and backward pass.

    Attributes:
        loss: value of the loss.
        by_name: parameter name -> gradient, or zeros if there is none.
        buffers: buffer name -> value after the pass.
        moved_backward: names of the buffers that the backward pass changes.
    """

    loss: float
    by_name: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    moved_backward: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradientDifference:
    """Largest difference between passes that were computed in two ways.

    Attributes:
        value: norm of a gradient's difference over the larger norm, or the relative difference of a loss.
        loss: relative difference of the losses of this pass.
        where: the parameter, and the pass.
    """

    value: float
    loss: float
    where: str


def gradients_of(
    subject: Subject,
    model: nn.Module,
    n_passes: int = 1,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    call: nn.Module | None = None,
    shrink: float = 1.0,
) -> list[Gradients]:
    """Return the gradients of passes with the seed of the subject.

    Args:
        subject: provides the batches and the loss.
        model: owner of the parameters.
        n_passes: number of passes. Each has its own batch, the same in every call of this function.
        around: returns the context of a pass.
        call: module to call, such as a compiled one. None: the model.
        shrink: factor for parameters and buffers after each pass, as a stand-in for an optimizer step.
    """
    passes = []
    with subject.fixed_randomness(), warnings.catch_warnings(action="ignore"):
        for number in range(n_passes):
            inputs = subject.inputs(2, shift=number)
            model.zero_grad(set_to_none=True)
            with around(), torch.enable_grad():
                loss = subject.spec.loss_of(model if call is None else call, inputs)
                forward = _copies(model.named_buffers())
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
            trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            gradients = _copies((n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in trained)
            buffers = _copies(model.named_buffers())
            moved = tuple(
                name
                for name, buffer in buffers.items()
                if name in forward and not torch.equal(buffer.nan_to_num(), forward[name].nan_to_num())
            )
            passes.append(Gradients(loss.item(), gradients, buffers, moved))
            for tensor in (*model.parameters(), *model.buffers()) if shrink != 1.0 else ():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.data.mul_(shrink)
    return passes


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def compare_gradients(plain: Sequence[Gradients], other: Sequence[Gradients]) -> GradientDifference:
    """Return the largest difference between two lists of passes."""
    found = []
    for number, (a, b) in enumerate(zip(plain, other, strict=True), start=1):
        total = norm(a.by_name.values())
        gaps = {name: _gap(gradient, b.by_name[name], total) for name, gradient in a.by_name.items()}
        loss = abs(a.loss - b.loss) / max(abs(a.loss), torch.finfo(torch.float64).tiny)
        loss = math.inf if math.isnan(b.loss) and not math.isnan(a.loss) else loss
        worst = max(gaps, key=lambda name: gaps[name])
        name = worst if gaps[worst] > 0 else "the loss"
        found.append(GradientDifference(max(gaps[worst], loss), loss, f"{name}, pass {number}"))
    return max(found, key=lambda each: each.value)


def _gap(a: Tensor, b: Tensor, total: float) -> float:
    floor = total * (_FLOOR if a.dtype == torch.float64 else _NARROW_FLOOR)
    gap, size = norm([a.double() - b.double()]), max(norm([a]), norm([b]), floor)
    if math.isnan(gap):
        return math.inf
    return gap / size if size else 0.0


def limit_of(subject: Subject, model: nn.Module) -> float:
    """Return the largest difference that is rounding: 1e-4 in float64.

    In float32, sums that cancel (gradients of a router's weights) differ by up to 3e-4 in healthy models.
    """
    dtype = dtype_of(model)
    if dtype == torch.float64:
        return _EXACT
    return max(300 * subject.spec.tolerance, 64 * torch.finfo(dtype).eps)
