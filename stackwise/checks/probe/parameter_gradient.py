"""Gradients of every parameter, of the same steps computed in two ways, and how far apart they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stackwise.checks.probe.call import dtype_of
from stackwise.checks.subject import Subject

__all__ = ["Apart", "Gradients", "apart", "gradients_of", "limit_of"]

# Of all gradients: where one is 0 but for rounding, as of a key's bias, only rounding would be compared.
_FLOOR, _NARROW_FLOOR = 1e-7, 1e-4
_EXACT = 1e-4  # of sound models in float64, measured: at most 7e-6


@dataclass(frozen=True)
class Gradients:
    """What one forward and backward pass leaves.

    Attributes:
        loss: the scalar that was minimised.
        of: parameter name -> its gradient; all zero where there is none.
        buffers: buffer name -> its value afterwards.
    """

    loss: float
    of: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Apart:
    """The parameter whose two gradients differ most.

    Attributes:
        value: norm of the difference over the larger norm.
        parameter: its name.
        loss: the relative difference of the losses.
    """

    value: float
    parameter: str
    loss: float


def gradients_of(
    subject: Subject,
    model: nn.Module,
    n_passes: int = 1,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    call: nn.Module | None = None,
    shrink: float = 1.0,
) -> list[Gradients]:
    """Passes over the same batches each time, under the subject's seed.

    Args:
        subject: gives the batches and the loss.
        model: whose parameters are meant.
        n_passes: each with a batch of its own.
        around: makes a context in which to run each pass.
        call: what is called in place of `model`.
        shrink: by which parameters and buffers are multiplied after each pass, as steps change them.
    """
    found = []
    with subject.fixed_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(n_passes):
            inputs = subject.inputs(2, shift=number)
            model.zero_grad(set_to_none=True)
            with around(), torch.enable_grad():
                loss = subject.spec.loss_of(model if call is None else call, inputs)
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
            gradients = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
            buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
            found.append(Gradients(loss.item(), gradients, buffers))
            if shrink != 1.0:
                with torch.no_grad():
                    for tensor in (*model.parameters(), *model.buffers()):
                        if tensor.is_floating_point() or tensor.is_complex():
                            tensor.mul_(shrink)
    return found


def apart(a: Gradients, b: Gradients) -> Apart:
    """Compare, parameter by parameter, names of `a`."""
    total = torch.stack([g.double().norm() for g in a.of.values()]).norm().item() if a.of else 0.0
    worst, where = 0.0, ""
    for name, one in a.of.items():
        other = b.of[name].double()
        floor = _FLOOR if one.dtype == torch.float64 else _NARROW_FLOOR
        size = max(one.double().norm().item(), other.norm().item(), floor * total)
        value = (one.double() - other).norm().item() / size if size else 0.0
        if not value <= worst:
            worst, where = value, name
            if value != value:
                worst = torch.inf
                break
    loss = abs(a.loss - b.loss) / max(abs(a.loss), torch.finfo(torch.float64).tiny)
    return Apart(worst, where, loss)


def limit_of(subject: Subject, model: nn.Module) -> float:
    """What is rounding between two ways to compute the same: 1e-4 in float64.

    In float32, sums of gradients that cancel (of a router's weights) were seen to be 3e-4 apart.
    """
    dtype = dtype_of(model)
    return (
        _EXACT if dtype == torch.float64 else max(300 * subject.spec.tolerance, 64 * torch.finfo(dtype).eps)
    )
