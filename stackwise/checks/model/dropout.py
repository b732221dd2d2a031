"""Dropout: train mode keeps the mean of each output, and draws random numbers for each row.

Shapes: N draws, B rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS, refusals
from stackwise.checks.probe.dropout import DropoutCalls
from stackwise.checks.probe.recorded_calls import RecordedCall, recorded_calls
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject
from stackwise.support.random_state import seeded

_N_DRAWS, _N_ROWS = 1000, 16
# Number of calls of the model, and of draws of a module, for the comparison of rows.
_N_CALLS, _N_COMPARED = 8, 32
# A mean is wrong if its relative error is above the first number, and above so many standard errors.
_ERROR, _STANDARD_ERRORS = 0.02, 5.0


@dataclass(frozen=True)
class _Draws:
    """Module that is random in train mode, with a recorded input.

    Attributes:
        name: name of the module.
        rows: dimension of its output that grows with the batch. None: there is none.
        draw: returns its output in train mode, with other random numbers in each call.
        mean: its output in eval mode.
    """

    name: str
    rows: int | None
    draw: Callable[[], Tensor]
    mean: Tensor


@check
@torch.no_grad()
def dropout_mean(subject: Subject) -> CheckResult:
    """Does the mean output of each random module in train mode equal its output in eval mode?"""
    found = _random_modules(subject)
    if not found:
        return subject.not_applicable("needs a random module that is not of torch and has no submodules")
    errors = []
    for each in found:
        with seeded(subject.seed, subject.device):
            mean = each.mean.double()
            scales = torch.stack([(each.draw() * mean).sum() for _ in range(_N_DRAWS)]) / mean.square().sum()
        error = abs(float(scales.mean()) - 1)
        limit = max(_ERROR, _STANDARD_ERRORS * float(scales.std()) / math.sqrt(_N_DRAWS))
        errors.append((error / limit, error, limit, each.name))
    _, worst, largest, where = max(errors)
    if worst <= largest:
        return subject.passed(worst, largest, meaning=f"{len(found)} modules")
    return subject.warned(
        worst,
        largest,
        where=where,
        meaning=f"In train mode, the mean output of a module differs by {worst:.0%} from its output in eval "
        "mode.",
        correct_if="the module masks inputs on purpose, as an augmentation",
        advice="In train mode, divide the kept values by 1 - p. In eval mode, change nothing.",
    )


@check
@torch.no_grad()
def dropout_applied(subject: Subject) -> CheckResult:
    """Is each dropout module with a rate above 0 applied in train mode?"""
    model = subject.model(train=True)
    rates = {
        name: each.p for name, each in model.named_modules() if isinstance(each, _DropoutNd) and each.p > 0
    }
    if not rates:
        return subject.not_applicable("needs a dropout module with a rate above 0")
    with subject.fixed_randomness(), DropoutCalls(model) as calls:
        subject.spec.loss_of(model, subject.inputs(2))
    unused = [name for name, rate in rates.items() if not calls.applies(name, rate)]
    if not unused:
        return subject.passed(0.0, 0.0, meaning=f"{len(rates)} modules")
    return subject.failed(
        float(len(unused)),
        0.0,
        where=listed(unused),
        meaning=f"{len(unused)} of {len(rates)} dropout modules are never called, although the module that "
        "contains them is, and it applies no other dropout of this rate.",
        advice="Call the dropout module on its tensor, or pass its rate to the attention function. Delete it "
        "if no dropout is wanted.",
    )


@check
@torch.no_grad()
def dropout_rows(subject: Subject) -> CheckResult:
    """Does each row of a batch have random draws of its own in train mode?"""
    model = subject.model(train=True)
    inputs = subject.inputs(1).expand(_N_ROWS, *subject.inputs(1).shape[1:]).contiguous()
    outputs = list[Tensor]()
    try:
        with seeded(subject.seed, subject.device):
            for _ in range(_N_CALLS):
                outputs.append(output := subject.spec.logits(model, inputs.clone()))
                if not torch.allclose(output[:1].expand_as(output), output, rtol=1e-4):
                    return subject.passed()
    except refusals():
        return subject.not_applicable("needs a model that runs in train mode")
    if all(torch.allclose(outputs[0], each) for each in outputs):
        return subject.not_applicable("needs a model that is random in train mode")
    shared = [each.name for each in _random_modules(subject) if _is_drawn_for_positions(subject, each)]
    return subject.failed_unless(
        None if shared else "layers are dropped for the whole batch on purpose, as by LayerDrop",
        float(_N_ROWS),
        1.0,
        where=shared[0] if shared else "",
        meaning=f"{_N_ROWS} equal rows have equal outputs in each call in train mode"
        + (", and the draws differ between positions." if shared else "."),
        advice="Draw random numbers for each row: stochastic depth has a mask (B, 1, ..., 1). Look for "
        "inputs (T, B, C) where the code expects (B, T, C).",
    )


def _is_drawn_for_positions(subject: Subject, module: _Draws) -> bool:
    """Return True if draws differ along other dimensions than that of the rows, and never along this one.

    If the rows come first, a module shares its draws on purpose, as a DropBlock of the batch does.
    """
    if not module.rows:
        return False
    differs_by_row, differs_otherwise = False, False
    with seeded(subject.seed, subject.device):
        for _ in range(_N_COMPARED):
            # Where a row has the value 0, it is not known if it was dropped.
            kept = (module.draw() != 0) | (module.mean == 0).any(dim=module.rows, keepdim=True)
            one = kept.select(module.rows, 0).unsqueeze(module.rows)
            differs_by_row = differs_by_row or not torch.equal(one.expand_as(kept), kept)
            differs_otherwise = differs_otherwise or bool(one.any() and not one.all())
    return differs_otherwise and not differs_by_row


def _random_modules(subject: Subject) -> list[_Draws]:
    """Return the modules without children, and not of torch, that are random in train mode only."""
    model = subject.model(train=True)
    calls, more = (_leaf_calls(subject, model, n_rows) for n_rows in (2, 3))
    found = []
    for name, call in calls.items():
        module, args = call.module, call.args
        sizes = zip(call.output.shape, more[name].output.shape if name in more else (), strict=False)
        rows = next((dim for dim, (one, other) in enumerate(sizes) if one != other), None)

        def draw(module: nn.Module = module, args: tuple[Any, ...] = args) -> Tensor:
            output: Tensor = module(*(each.clone() if isinstance(each, Tensor) else each for each in args))
            return output

        buffers = [buffer.clone() for buffer in module.buffers()]
        try:
            with seeded(subject.seed, subject.device):
                first, *others = (draw() for _ in range(_N_CALLS))
        except refusals():
            continue  # such as a recurrent layer that keeps the state of other rows
        if not all(map(torch.equal, buffers, module.buffers())):
            continue  # a state, such as a running mean
        module.eval()
        mean = draw()
        is_random = any(not torch.equal(first, each) for each in others) and torch.equal(mean, draw())
        module.train()
        if is_random and mean.shape == first.shape and bool(mean.any()):
            found.append(_Draws(name, rows, draw, mean))
    return found


def _leaf_calls(subject: Subject, model: nn.Module, n_rows: int) -> dict[str, RecordedCall]:
    """Return the first call of each module without children, in a call of the model with `n_rows` rows."""
    inputs = subject.inputs(n_rows)
    try:
        with subject.fixed_randomness():
            calls = recorded_calls(model, lambda: subject.spec.logits(model, inputs), _is_own_leaf)
    except REFUSALS:
        return {}
    return {
        call.name: call
        for call in reversed(calls)
        if not call.named and isinstance(call.output, Tensor) and call.output.is_floating_point()
    }


def _is_own_leaf(name: str, module: nn.Module) -> bool:
    is_of_torch = type(module).__module__.partition(".")[0] == "torch"
    return bool(name) and not is_of_torch and not any(True for _ in module.children())
