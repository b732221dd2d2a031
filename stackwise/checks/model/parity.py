"""Parity: the model computes the same outputs, loss and gradients as a trusted reference.

A reference is another implementation or revision. A conversion computes its weights from those of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.engine.examination import Examination, gradients_in, randomize_constants
from stackwise.checks.probe.call import dtype_of
from stackwise.checks.probe.conversion import convert, load, match_names, parameter_names
from stackwise.checks.probe.difference import (
    Finding,
    measure_difference,
    relative_difference,
    uses_less_than_float64,
)
from stackwise.checks.probe.divergence import first_divergence
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject
from stackwise.subject.encoder_decoder import Decoder
from stackwise.subject.spec import ModelSpec

_NEEDED = "needs reference="
_LOSS = "the loss"
# Healthy pairs, one with a softmax in float32 and one without, differ by up to 1.5e-6 with random weights.
_FLOAT32 = 5e-6
# A gradient below this share of the largest one is treated as rounding.
_FLOOR = 1e-2
# Size of the change of weights that tests if a conversion is linear, relative to each weight.
_CHANGE = 0.3


@check
def reference_weights(subject: Subject) -> CheckResult:
    """Does the conversion set every weight of the reference from the weights of the model?"""
    if subject.spec.reference is None:
        return subject.not_applicable(_NEEDED)
    comparison = _Comparison(subject)
    pair = next(comparison.pairs(subject.model()))
    model, reference = pair.modules
    weights, changed = pair.weights, comparison.convert(model, _changes(_state(model).values(), 1.0))
    unset, split, fixed = [], [], []
    for name, p in _inner(reference).named_parameters():
        names = (each for each, tensor in _state(reference).items() if tensor is p)
        given = [each for each in names if each in weights]
        if not given:
            unset.append(f"{name} is not set")
        elif other := next((n for n in given if not torch.equal(weights[n], weights[given[0]])), None):
            split.append(f"{given[0]} and {other} are one tied weight, and get different values")
        elif torch.equal(weights[given[0]], changed[given[0]]) and bool((p != p.flatten()[0]).any()):
            fixed.append(f"{name} does not depend on the model")
    if not (wrong := unset + split or fixed):
        return subject.passed(0, 0)
    return subject.failed_unless(
        None if unset + split else "the model computes this weight, such as a table of positions",
        len(wrong),
        0,
        where=listed(wrong),
        meaning=f"{len(wrong)} weights of the reference are not determined by those of the model.",
        advice="Add these weights to to_reference. If the model has no such weight, return the constant that "
        "has no effect, such as zeros for a bias.",
    )


@check
def reference_output(subject: Subject) -> CheckResult:
    """Do model and reference give equal outputs, with the model's own weights and with random ones?"""
    if subject.spec.reference is None:
        return subject.not_applicable(_NEEDED)
    comparison = _Comparison(subject)

    def gap(model: nn.Module) -> float:
        return max(comparison.output_gap(pair) for pair in comparison.pairs(model))

    found = _measured(subject, gap)
    if not found.real:
        return comparison.passed(found)
    where = ""
    for pair in comparison.pairs(subject.model(dtype=found.dtype)):
        if comparison.output_gap(pair) > found.limit:
            place = first_divergence(*pair.modules, comparison.inputs, run=pair.logits, limit=found.limit)
            where = f"{place or 'in no module that both models have'} ({pair.name})"
            break
    return subject.failed(
        found.value,
        found.limit,
        where=where,
        meaning="With the same weights and inputs, the outputs of model and reference differ.",
        advice="Compare the code at this place with the reference, and the weights that to_reference gives: "
        "order of heads and of rotary halves, transposed matrices, type of GELU, dtype of a norm, scale, and "
        "tables computed in half precision.",
    )


@check
def reference_gradient(subject: Subject) -> CheckResult:
    """Do model and reference give the same loss and the same gradients?"""
    if subject.spec.reference is None:
        return subject.not_applicable(_NEEDED)
    comparison = _Comparison(subject)

    def gaps(model: nn.Module, *, each: bool = False) -> dict[str, float]:
        found: dict[str, float] = {}
        for pair in comparison.pairs(model):
            for name, gap in comparison.gradient_gaps(pair, each=each).items():
                found[name] = max(found.get(name, 0.0), gap)
        return found

    found = _measured(subject, lambda model: max(gaps(model).values()))
    if not found.real:
        return comparison.passed(found)
    every = gaps(subject.model(dtype=found.dtype), each=True)
    wrong = sorted((n for n in every if not every[n] <= found.limit), key=lambda n: (n != _LOSS, -every[n]))
    return subject.failed(
        found.value,
        found.limit,
        where=listed(wrong),
        meaning=f"{len(wrong)} values differ. Compared: the loss and {len(every) - 1} gradients.",
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


@dataclass(frozen=True)
class _Pair:
    """Model and reference with the same weights, in the same mode and dtype.

    Attributes:
        name: weights and mode in words.
        subjects: the model and the reference under examination.
        modules: the model and the reference.
        weights: state dict of the reference.
    """

    name: str
    subjects: tuple[Subject, Subject]
    modules: tuple[nn.Module, nn.Module]
    weights: Mapping[str, Tensor]

    def logits(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the logits of one of the modules."""
        with _without_dropout(module):
            return self.subjects[module is self.modules[1]].logits(module, inputs)

    def gradients(self, module: nn.Module, inputs: Tensor) -> tuple[float, Mapping[str, Tensor]]:
        """Return the loss and the gradients of one of the modules, by parameter name."""
        subject = self.subjects[module is self.modules[1]]
        module.zero_grad(set_to_none=True)
        with torch.enable_grad(), subject.fixed_randomness(), _without_dropout(module):
            if subject.spec.labelled_loss is not None and subject.spec.inputs == "tokens":
                loss = subject.spec.labelled_loss(module, inputs.clone(), inputs.clone())
            else:
                loss = subject.spec.loss_of(module, inputs.clone())
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), gradients_in(_inner(module))


class _Comparison:
    """Comparison of a model with its reference.

    Attributes:
        subjects: the model and the reference under examination. If their parameter names differ, the
            reference is called in its own way.
        inputs: inputs of both.
        to_reference: the declared conversion, or a mapping of names.
        problem: reason why only outputs in eval mode are compared, or "".
    """

    def __init__(self, subject: Subject) -> None:
        self._subject, spec, self.inputs = subject, subject.spec, subject.inputs(2)
        model, found = subject.model(), spec.reference
        assert found is not None
        if not isinstance(found, ModelSpec):
            same = replace(spec, build=found)
            is_same = spec.to_reference is None and parameter_names(same.create()) == parameter_names(model)
            found = same if is_same else ModelSpec.of(found)
        # If only one side has a loss of its own, both get the same cross-entropy.
        names = ("labelled_loss", "loss")
        losses: dict[str, Any] = {n: None for n in names if None in (getattr(spec, n), getattr(found, n))}
        calls = {n: getattr(found, n) for n in ("build", "forward", *names)}
        specs = replace(spec, **losses), replace(spec, **{**calls, **losses})
        self.subjects = replace(subject, spec=specs[0]), replace(subject, spec=specs[1])
        reference = found.create(subject.device, subject.seed)
        self.to_reference = spec.to_reference or match_names(_inner(model), _inner(reference))
        changes = _changes(_state(model).values(), _CHANGE)
        low, middle, high = (self.convert(model, changes, sign) for sign in (-1, 0, 1))
        is_linear = all(_is_midpoint(middle[n], low[n], high[n]) for n in middle)
        is_frozen = not reference.training and not any(p.requires_grad for p in reference.parameters())
        self.problem = "the reference is frozen and in eval mode" if is_frozen else ""
        if not is_linear:
            self.problem = "to_reference is not linear"

    @cached_property
    def has_train_mode(self) -> bool:
        """Return True if train mode can be compared: it is repeatable and updates no statistics."""
        exams = Examination.of(self._subject), Examination(self.subjects[1])
        return not self.problem and all(exam.has_train_mode for exam in exams)

    def passed(self, found: Finding) -> CheckResult:
        """Return a result that passes, and names the modes that are not compared."""
        texts = [found.meaning]
        if self.problem:
            texts.append(f"in eval mode and without gradients, because {self.problem}")
        elif not self.has_train_mode:
            texts.append("in eval mode, because train mode draws random numbers or updates statistics")
        return self._subject.passed(found.value, found.limit, meaning="; ".join(filter(None, texts)))

    def convert(self, model: nn.Module, changes: Mapping[int, Tensor], sign: int = 1) -> dict[str, Tensor]:
        """Return the weights of the reference for those of the model plus changes, by id of the tensor."""
        state = {name: t.detach() for name, t in _state(model).items()}
        for name, t in _state(model).items():
            if id(t) in changes:
                state[name] = state[name] + sign * changes[id(t)]
        return convert(self.to_reference, state)

    def pairs(self, model: nn.Module) -> Iterator[_Pair]:
        """Yield model and reference with the model's own weights, then with random weights, in each mode.

        In a new model, attention has little effect on the output, so a bug in attention has little effect
        too. Larger weights increase it, and equal implementations agree for all weights. Constant weights
        get random values, because a factor of 0 or 1 hides differences.
        """
        reference = self.subjects[1].model(dtype=dtype_of(model))
        for p in reference.parameters():
            p.requires_grad_(p.is_floating_point() or p.is_complex())
        for weights in ("own weights", "random weights")[: 1 if self.subjects[0].spec.trained else 2]:
            if weights == "random weights":
                _randomize(model)
            elif not self.subjects[0].spec.trained:
                buffers = self._converted_buffers(model, reference)
                randomize_constants([*model.parameters(), *buffers], self.subjects[0].seed)
            converted = self.convert(model, {})
            load(_inner(reference), converted)
            for mode in ("eval", "train") if self.has_train_mode else ("eval",):
                for each in (model, reference):
                    each.train(mode == "train")
                pair = _Pair(f"{weights}, {mode} mode", self.subjects, (model, reference), converted)
                if weights == "random weights" and not pair.logits(model, self.inputs).isfinite().all():
                    return
                yield pair

    def _converted_buffers(self, model: nn.Module, reference: nn.Module) -> list[Tensor]:
        """Return the stored buffers that have a counterpart in the reference, even if it is not set.

        These are statistics of a norm, buffers that the conversion reads, and buffers whose shape is that
        of a reference buffer that is not set. Other buffers are constants by design.
        """
        weights, found = self.convert(model, {}), []
        unset = {b.shape for name, b in _state(reference).items() if name not in weights and b.ndim}
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        statistics = {id(buffer) for norm in norms for buffer in norm.buffers()}
        for buffer in _state(model).values():
            if not isinstance(buffer, nn.Parameter) and buffer.is_floating_point() and buffer.numel() > 1:
                changed = self.convert(model, {id(buffer): torch.ones_like(buffer)})
                is_read = any(not torch.equal(weights[n], changed[n]) for n in weights)
                if is_read or buffer.shape in unset or id(buffer) in statistics:
                    found.append(buffer)
        return found

    def output_gap(self, pair: _Pair) -> float:
        """Return the largest difference of the outputs."""
        output, expected = (pair.logits(each, self.inputs) for each in pair.modules)
        if output.shape != expected.shape:
            raise ValueError(f"reference: outputs {tuple(expected.shape)}; the model's {tuple(output.shape)}")
        return float(relative_difference(expected, output).max())

    def gradient_gaps(self, pair: _Pair, *, each: bool) -> dict[str, float]:
        """Return the difference of the losses, and of the derivatives along random changes of the weights.

        The conversion turns a change of the model's weights into one of the reference's weights. It needs no
        derivative, because differences of its results are used, so it may use NumPy or no_grad.

        Args:
            pair: the two models.
            each: change one parameter at a time, to name those that differ.
        """
        loss, found = pair.gradients(pair.modules[0], self.inputs)
        expected_loss, _ = pair.gradients(pair.modules[1], self.inputs)
        gaps = {_LOSS: _gap(loss, expected_loss, abs(expected_loss))}
        if self.problem:
            return gaps
        model, reference = map(_inner, pair.modules)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        converted = {id(t): name for name, t in _state(reference).items() if name in pair.weights}
        targets = [(converted[id(p)], p.grad) for p in reference.parameters() if id(p) in converted]
        changes = _changes(named.values(), 1.0)
        rows = {}
        for place, part in ({n: [n] for n in named} if each else {"the gradients": [*named]}).items():
            moved = self.convert(pair.modules[0], {id(named[n]): changes[id(named[n])] for n in part})
            own = [n for n in part if n in found]
            a = sum(_product(found[n], changes[id(named[n])]) for n in own)
            b = sum(_product(g, moved[n] - pair.weights[n]) for n, g in targets if g is not None)
            size = sum(float((found[n] * named[n].detach()).abs().double().norm()) ** 2 for n in own) ** 0.5
            rows[place] = a, b, max(size, abs(b))
        floor = _FLOOR * max((size for _, _, size in rows.values()), default=0.0)
        return gaps | {name: _gap(a, b, max(size, floor)) for name, (a, b, size) in rows.items()}


def _gap(a: float, b: float, size: float) -> float:
    """Return a relative difference. Two non-finite values are equal."""
    if not (math.isfinite(a) or math.isfinite(b)):
        return 0.0
    gap = abs(a - b) / (size or 1.0)
    return gap if gap == gap else math.inf


def _product(a: Tensor, b: Tensor) -> float:
    return float((a.conj() * b).real.double().sum())


def _is_midpoint(middle: Tensor, low: Tensor, high: Tensor) -> bool:
    """Return True if a value is the mean of two others, except for rounding."""
    if not middle.is_floating_point():
        return True
    limit = 16 * torch.finfo(middle.dtype).eps * middle.abs().max() + 1e-3 * (high - low).abs().max()
    return bool((low + high - 2 * middle).abs().max() <= limit) if middle.numel() else True


def _inner(model: nn.Module) -> nn.Module:
    """Return the user's model."""
    return model.model if isinstance(model, Decoder) else model


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict. They are the parameters and buffers themselves."""
    state = _inner(model).state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _changes(tensors: Iterable[Tensor], size: float) -> dict[int, Tensor]:
    """Return random changes of floating-point tensors, relative to each element, by id of the tensor."""
    generator = torch.Generator().manual_seed(0)
    return {
        id(t): size * t.detach() * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
        for t in tensors
        if t.is_floating_point() or t.is_complex()
    }


def _without_dropout(module: nn.Module) -> AbstractContextManager[object]:
    return WithoutDropout() if module.training else nullcontext()


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Replace matrices by random ones that preserve the size of their input."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.ndim >= 2 and p.is_floating_point():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * (p.numel() / p.shape[0]) ** -0.5)
