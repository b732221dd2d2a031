"""Compilation: torch.compile does not change the loss and the gradients, and creates one graph."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS, reason_of
from stackwise.checks.probe.compiler import BACKEND, counting_backend, fresh_compiler
from stackwise.checks.probe.parameter_gradient import compare_gradients, gradients_of, limit_of
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.support.system_errors import reraise_if_out_of_memory

# Weights and buffers shrink between the passes, so that constants stored by the first trace show.
_N_PASSES, _SHRINK = 2, 0.95


@check(suite="full")
def compiled_gradients(subject: Subject) -> CheckResult:
    """Are the loss and every gradient the same under torch.compile?"""
    model = _model(subject)
    eager = gradients_of(subject, model, _N_PASSES, shrink=_SHRINK)
    if not any(gradient.any() for gradient in eager[0].by_name.values()):
        return subject.not_applicable("needs a parameter with a gradient")
    model = _model(subject)
    graphs: list[int] = []
    try:
        with fresh_compiler():
            call: Any = torch.compile(model, backend=counting_backend(BACKEND, graphs), dynamic=False)
            compiled = gradients_of(subject, model, _N_PASSES, call=call, shrink=_SHRINK)
    except Exception as error:
        return _not_compiled(subject, error)
    if not graphs:
        return subject.not_applicable("needs a part that torch.compile compiles")
    worst = compare_gradients(eager, compiled)
    return subject.at_most(
        worst.value,
        limit_of(subject, model),
        where=worst.where,
        meaning=f"torch.compile changes this gradient; the losses differ by {worst.loss:.2g}.",
        advice="Look for branches on torch.compiler.is_compiling(), values that the trace stores as "
        "constants (assume_constant_result), and custom operators with their own gradient.",
    )


@check(suite="full")
def graph_breaks(subject: Subject) -> CheckResult:
    """Does torch.compile create one graph for the forward pass?"""
    from torch._dynamo.utils import counters

    model = _model(subject)
    graphs: list[int] = []
    try:
        with fresh_compiler(), torch.no_grad():
            before = Counter(counters["graph_break"])
            compiled: Any = torch.compile(model, backend=counting_backend("eager", graphs), dynamic=False)
            subject.spec.logits(compiled, subject.inputs(2))
    except Exception as error:
        return _not_compiled(subject, error)
    reasons = [" ".join(reason.split())[:200] for reason in Counter(counters["graph_break"]) - before]
    n_breaks = float(max(len(graphs) - 1, len(reasons)))
    if graphs and not n_breaks:
        return subject.passed(n_breaks, 0.0)
    return subject.warned(
        n_breaks,
        0.0,
        where="; ".join(reasons[:3]),
        meaning=f"The compiler returns to Python {n_breaks:.0f} times in one forward pass."
        if graphs
        else "torch.compile compiles no part of the model: the whole forward pass runs in Python.",
        correct_if="the model is never compiled, or the breaks are intended",
        advice="Look for values read by the host, printing, torch.compiler.disable, and calls that the "
        "compiler cannot follow.",
    )


def _model(subject: Subject) -> nn.Module:
    """Return the model in float64 if it runs in it, and in train mode if it is deterministic in it."""
    for dtype in (torch.float64, None):
        model = subject.model(train=True, dtype=dtype)
        try:
            with warnings.catch_warnings(action="ignore"), torch.no_grad(), subject.fixed_randomness():
                state = torch.get_rng_state()
                subject.spec.logits(model, subject.inputs(2))
                is_random = not torch.equal(state, torch.get_rng_state())
        except REFUSALS:
            if dtype is None:
                raise
            continue
        return subject.model(train=not is_random, dtype=dtype)
    raise AssertionError


def _not_compiled(subject: Subject, error: Exception) -> CheckResult:
    reraise_if_out_of_memory(error)
    return subject.warned(
        meaning=f"The model cannot be compiled: {reason_of(error)}",
        correct_if="the model is never compiled",
        advice="Change the operation that the error names, or exclude it from the compiled part.",
    )
