"""Derivative: compare gradients along a random direction with finite differences in float64."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.probe.backward import gradients_at
from stackwise.checks.probe.widened import Widened
from stackwise.checks.subject import Subject, kept_buffers
from stackwise.checks.trainer_subject import TrainerSubject

__all__ = ["Comparison", "compared", "direction_of", "trainable_parameters"]

# Finite differences of a smooth function in float64 agree with its gradient to 1e-7. A detached branch
# changes the slope by 4 % and more.
_EXACT = 1e-5
_VAGUE = 0.05
_SIZES = (1e-6, 1e-5, 1e-3, 1e-2)
# The function is not smooth if the slopes at this step and at a longer step differ. Example: batch norm over
# two rows with one value each.
_CLOSER = 1e-9
# Operations with a derivative of 0 almost everywhere. The author chooses their gradient.
_STEP_FUNCTIONS = ("round", "sign", "heaviside", "bernoulli", "argmax", "argmin")
_COMPARISONS = ("gt", "ge", "lt", "le")

_Function = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        value: relative difference of the slopes along a direction over all parameters.
        limit: largest value that is rounding. Above 0.05, the function is not smooth.
        wrong: name, slope by gradient and slope by finite differences of each parameter that differs: slopes
            of 0 first, then the largest differences.
        uses_steps: the function uses step functions. The author chooses their gradient.
        truncates: matrices are multiplied while gradients are off, as in truncated backpropagation.
        is_surrogate: the value hides the gradient on purpose, as in exp(logp - logp.detach()): the value is
            constant, or contains a factor that is always 1.
        has_gradient: the result depends on a parameter.
    """

    value: float
    limit: float = _EXACT
    wrong: tuple[tuple[str, float, float], ...] = ()
    uses_steps: bool = False
    truncates: bool = False
    is_surrogate: bool = False
    has_gradient: bool = True

    @property
    def is_smooth(self) -> bool:
        """Return False if finite differences do not converge."""
        return self.limit <= _VAGUE


def trainable_parameters(subject: Subject | TrainerSubject, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, without those that are declared unused."""
    unused = getattr(subject.spec, "unused", None) or "\0"
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p.is_floating_point() and p.numel() and not name.startswith(unused)
    }


def direction_of(subject: Subject | TrainerSubject, p: Tensor) -> Tensor:
    """Return random numbers as large as the parameter."""
    generator = torch.Generator().manual_seed(subject.seed + p.numel())
    size = p.detach().double().square().mean().sqrt().item() or 0.02
    return (size * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p)


def compared(subject: Subject | TrainerSubject, model: nn.Module, function: _Function) -> Comparison:
    """Compare the gradient of a function of a float64 model with finite differences.

    Random choices in `function` are the same at each call, and buffers are restored after it.

    Args:
        subject: the model, or the training run that contains it.
        model: a new model of it, with trainable parameters.
        function: model -> tensor of any shape.

    Raises:
        Exception: the function raises.
    """
    probe = _Probe(subject, model, function)
    if not probe.has_gradient:
        return Comparison(1.0, has_gradient=False)
    total, scale = sum(probe.slopes.values()), max(math.hypot(*probe.slopes.values()), 1e-300)
    noise, measured, size = math.inf, 0.0, _SIZES[0]
    for step in _SIZES:
        (whole, _), (half, bend) = (probe.difference(probe.parameters, s) for s in (step, step / 2))
        # At a kink, such as relu at 0, the slopes on both sides differ.
        noise, measured, size = min(
            (noise, measured, size), (max(abs(whole - half), bend) / max(abs(half), scale), half, step / 2)
        )
        if noise < _EXACT / 10:
            break
    scale = max(abs(measured), scale)
    value, limit = abs(measured - total) / scale, max(_EXACT, 10 * noise)
    if not limit <= _VAGUE or value <= limit:
        return Comparison(value, limit)
    if abs(probe.difference(probe.parameters, _CLOSER)[0] - measured) > _VAGUE * scale:
        return Comparison(value, limit=torch.inf)
    watch, wrong = probe.watch, probe.wrong(size, limit * scale)
    slopes = (probe.difference(probe.parameters, s)[0] for s in _SIZES[2:])
    surrogate = watch.has_unit_factor or all(abs(slope) <= 1e-9 * scale for slope in slopes)
    return Comparison(value, limit, wrong, watch.uses_steps, watch.truncates, surrogate)


class _Probe:
    """Projection of a function, its slope along a direction for each parameter, and finite differences.

    Attributes:
        parameters: trainable parameters by name.
        slopes: gradient times direction, by name of the parameter.
        watch: operations of the function.
        has_gradient: the result depends on a parameter.
    """

    def __init__(self, subject: Subject | TrainerSubject, model: nn.Module, function: _Function) -> None:
        self._subject, self._model, self._function = subject, model, function
        self.parameters = trainable_parameters(subject, model)
        self._directions = directions = _directions(subject, model, self.parameters)
        self.watch = _Watch()
        self.slopes: dict[str, float] = {}
        with torch.enable_grad(), self._comparable():
            with self.watch:
                output = function(model)
            self._base = output.detach().double()
            generator = torch.Generator().manual_seed(subject.seed + 1)
            weights = torch.randn(self._base.shape, generator=generator, dtype=torch.float64)
            self._weights = weights.to(self._base.device).masked_fill(~self._base.isfinite(), 0.0)
            self.has_gradient = output.requires_grad
            if self.has_gradient:
                finite = output.masked_fill(~self._base.isfinite(), 0.0)
                gradients = gradients_at(finite, [*self.parameters.values()], self._weights.to(finite))
                for name, g in zip(self.parameters, gradients, strict=True):
                    self.slopes[name] = 0.0 if g is None else float((g.double() * directions[name]).sum())

    @contextmanager
    def _comparable(self) -> Iterator[None]:
        """Inside, all is computed in float64 with the same random choices. Buffers are restored after it."""
        with kept_buffers(self._model), self._subject.fixed_randomness(), Widened():
            yield

    @torch.no_grad()
    def difference(self, names: Iterable[str], size: float) -> tuple[float, float]:
        """Return the central difference along the directions of parameters, and the gap of both sides."""
        start = {name: self.parameters[name].clone() for name in names}
        values = []
        for sign in (1.0, -1.0):
            for name, old in start.items():
                self.parameters[name].copy_(old + sign * size * self._directions[name])
            with self._comparable():
                moved = self._function(self._model).double() - self._base
            values.append((moved.nan_to_num(0.0, 0.0, 0.0) * self._weights).sum().item())
        for name, old in start.items():
            self.parameters[name].copy_(old)
        return (values[0] - values[1]) / (2 * size), abs(values[0] + values[1]) / (2 * size)

    def wrong(self, size: float, tolerance: float) -> tuple[tuple[str, float, float], ...]:
        """Return name, slope and difference of each parameter with a wrong slope."""
        found = [(name, slope, self.difference([name], size)[0]) for name, slope in self.slopes.items()]
        wrong = [each for each in found if abs(each[2] - each[1]) > tolerance / len(self.slopes)]
        return tuple(sorted(wrong, key=lambda item: (item[1] != 0, -abs(item[1] - item[2]))))


def _directions(
    subject: Subject | TrainerSubject, model: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return a direction for each parameter, 0 for the row of a padding token, which gets no gradient."""
    directions = {name: direction_of(subject, p) for name, p in parameters.items()}
    names = {id(p): name for name, p in parameters.items()}
    for module in model.modules():
        row, name = getattr(module, "padding_idx", None), names.get(id(getattr(module, "weight", None)))
        if isinstance(row, int) and name is not None and directions[name].ndim == 2:
            directions[name][row] = 0.0
    return directions


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record step functions, products of matrices without gradients, and factors of 1 with a gradient."""

    uses_steps: bool = False
    truncates: bool = False
    has_unit_factor: bool = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compared: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = function.overloadpacket.__name__
        name = called.rstrip("_")
        if name in ("mm", "addmm") and not torch.is_grad_enabled():
            self.truncates |= not _is_in_custom_function()
        # Dropout draws its mask in place, and no gradient passes through it.
        if name in _STEP_FUNCTIONS and called != "bernoulli_" and isinstance(args[0], Tensor):
            self.uses_steps |= args[0].is_floating_point()
        if name in ("exp", "div"):
            self.has_unit_factor |= _is_unit_factor(name, args)
        output = function(*args, **(kwargs or {}))
        if name in _COMPARISONS and isinstance(args[0], Tensor) and args[0].requires_grad:
            self._compared.append(output)
        if name == "_to_copy" and output.is_floating_point():  # a comparison is cast to numbers
            self.uses_steps |= any(args[0] is each for each in self._compared)
        return output


def _is_unit_factor(name: str, args: Any) -> bool:
    """Return True if exp or a division by a constant has the result 1, and passes a gradient."""
    if not isinstance(args[0], Tensor) or not args[0].requires_grad or args[0].is_leaf:
        return False
    one = args[1] if name == "div" else torch.zeros_like(args[0])
    is_constant = isinstance(one, Tensor) and not one.requires_grad and one.numel() > 1
    return is_constant and torch.equal(args[0], one)


def _is_in_custom_function() -> bool:
    """Return True inside the forward of a torch.autograd.Function, which runs without gradients."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if any(isinstance(value, FunctionCtx) for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False
