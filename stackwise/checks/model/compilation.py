"""Compilation: what torch.compile makes of a model computes the same, in one piece."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS
from stackwise.checks.probe.parameter_gradient import Apart, Gradients, apart, gradients_of, limit_of
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.support.system_errors import is_out_of_memory

# Traces forward and backward and takes operations apart as the default compiler does, without its code.
_BACKEND = "aot_eager_decomp_partition"
_RECOMPILE_LIMIT = 64
_N_PASSES = 2  # the second one sees what the first one's trace has kept
_SHRINK = 0.95  # all weights and buffers in between, so that what was kept is no longer so


@check(suite="full")
def compiled_gradients(subject: Subject) -> CheckResult:
    """Are loss and every parameter's gradient the same under torch.compile?"""
    model = _model(subject)
    if not any(p.requires_grad for p in model.parameters()):
        return subject.not_applicable("no parameter is trainable")
    eager = gradients_of(subject, model, _N_PASSES, shrink=_SHRINK)
    if not any(gradient.any() for gradient in eager[0].of.values()):
        return subject.not_applicable("needs a parameter with a gradient")
    model = _model(subject)  # a fresh one, so that what calls leave behind does not count
    graphs: list[int] = []
    try:
        with _compiler():
            call = _compiled(model, _BACKEND, graphs)
            again = gradients_of(subject, model, _N_PASSES, call=call, shrink=_SHRINK)
    except Exception as error:  # whatever else the compiler raises is its answer
        if is_out_of_memory(error):
            raise
        return _refused(subject, error)
    if not graphs:
        return subject.not_applicable("needs a part that torch.compile compiles")
    return _judged(subject, eager, again, limit_of(subject, model))


@check(suite="full")
def graph_breaks(subject: Subject) -> CheckResult:
    """Does torch.compile capture the forward pass as one graph?"""
    from torch._dynamo.utils import counters

    model = _model(subject)
    graphs: list[int] = []
    before = Counter(counters["graph_break"])
    try:
        with _compiler(), torch.no_grad():
            subject.spec.logits(_compiled(model, "eager", graphs), subject.inputs(2))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return _refused(subject, error)
    reasons = [_one_line(reason) for reason in Counter(counters["graph_break"]) - before]
    n_breaks = float(max(len(graphs) - 1, len(reasons)))
    if not graphs:
        return subject.warned(
            meaning="torch.compile compiles nothing: the whole forward pass runs in Python.",
            where="; ".join(reasons[:3]),
            correct_if="the model is never compiled",
            advice="Look for torch.compiler.disable and for code that the compiler does not enter.",
        )
    if n_breaks:
        return subject.warned(
            n_breaks,
            0.0,
            where="; ".join(reasons[:3]),
            meaning=f"The compiler returns to Python {n_breaks:.0f} times in one forward pass.",
            correct_if="the model is never compiled, or the breaks are meant",
            advice="Look for values read by the host, printing, and calls that the compiler cannot follow.",
        )
    return subject.passed(n_breaks, 0.0)


def _judged(
    subject: Subject, eager: Sequence[Gradients], again: Sequence[Gradients], limit: float
) -> CheckResult:
    found = [apart(a, b) for a, b in zip(eager, again, strict=True)]
    worst: Apart = max(found, key=lambda each: max(each.value, each.loss))
    value = max(worst.value, worst.loss)
    if not value <= limit:
        return subject.failed(
            value,
            limit,
            where=f"{worst.parameter or 'the loss'}, pass {found.index(worst) + 1}",
            meaning="Under torch.compile this gradient is another one; the losses differ by "
            f"{worst.loss:.2g}.",
            advice="Look for branches on torch.compiler.is_compiling(), values read once as it traces "
            "(assume_constant_result), and custom operators whose gradient is registered apart.",
        )
    return subject.passed(value, limit)


def _model(subject: Subject) -> nn.Module:
    """In float64 where it runs so, and in train mode where it then draws nothing at random."""
    for dtype in (torch.float64, None):
        model = subject.model(train=True, dtype=dtype)
        try:
            with _quiet(), torch.no_grad(), subject.fixed_randomness():
                state = torch.get_rng_state()
                subject.spec.logits(model, subject.inputs(2))
                draws = not torch.equal(state, torch.get_rng_state())
        except REFUSALS:
            if dtype is None:
                raise
            continue
        return subject.model(train=not draws, dtype=dtype)
    raise AssertionError


def _compiled(model: nn.Module, backend: str, graphs: list[int]) -> nn.Module:
    """The model compiled; the size of each graph that it is cut into goes to `graphs`."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    # What the compiler knows, it keeps by code; with code of its own a model meets nothing that others left.
    forward = type(model).forward
    if isinstance(forward, FunctionType):
        own = FunctionType(
            forward.__code__.replace(),
            forward.__globals__,
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        own.__kwdefaults__ = forward.__kwdefaults__
        model.forward = MethodType(own, model)
    compiled: Any = torch.compile(model, backend=compile_graph, dynamic=False)
    return cast("nn.Module", compiled)


@contextmanager
def _compiler() -> Iterator[None]:
    """Leave no graph uncompiled because other models of this class have been."""
    import torch._dynamo

    with _quiet(), torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _refused(subject: Subject, error: Exception) -> CheckResult:
    return subject.warned(
        meaning=f"The model cannot be compiled: {type(error).__name__}: {_one_line(str(error))}",
        correct_if="the model is never compiled",
        advice="Change the operation that the error names, or keep it out of the compiled part.",
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
