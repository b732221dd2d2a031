"""Auxiliary loss: it trains the routers, and ignores padding."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stackwise.checks.check import check
from stackwise.checks.engine.call import accepts, changed_calls
from stackwise.checks.probe.backward import gradients_at
from stackwise.checks.probe.call import REFUSALS
from stackwise.checks.probe.loss_formula import expected_shift, labelled_loss, mean_cross_entropy
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject

_NEEDED = "needs auxiliary_loss"
# Many models compute it in float32, also if their weights are float64.
_ROUNDING = 1e-5


@check
def auxiliary_value(subject: Subject) -> CheckResult:
    """Is the auxiliary loss finite and not negative, in eval and in train mode?"""
    if subject.spec.auxiliary_loss is None:
        return subject.not_applicable(_NEEDED)
    inputs, values = subject.inputs(2), []
    for mode in ("eval", "train"):
        value = _auxiliary(subject, subject.model(train=mode == "train"), inputs, None).item()
        if not math.isfinite(value):
            return subject.failed(
                value,
                where=f"{mode} mode",
                meaning="The auxiliary loss is not finite.",
                advice="Look for a log of 0, an expert without tokens, and a softmax in half precision.",
            )
        values.append(value)
    if min(values) < 0:
        return subject.warned(
            min(values),
            0.0,
            meaning="The auxiliary loss is negative.",
            correct_if="it is a term to be maximised, such as an entropy",
            advice="Look for a wrong sign: a load-balancing loss and a z-loss are never negative.",
        )
    return subject.passed(max(values))


@check
def auxiliary_gradient(subject: Subject) -> CheckResult:
    """Does at least one weight get a gradient from the auxiliary loss?"""
    if subject.spec.auxiliary_loss is None:
        return subject.not_applicable(_NEEDED)
    model = subject.model(train=True, fill_zeros=True)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        return subject.not_applicable("no parameter is trainable")
    with torch.enable_grad():
        loss = _auxiliary(subject, model, subject.inputs(2), None)
    gradients: dict[str, Tensor] = {}
    if loss.requires_grad:
        found = gradients_at(loss, list(named.values()))
        gradients = {name: g for name, g in zip(named, found, strict=True) if g is not None}
    if not gradients:
        return subject.failed(
            0.0,
            meaning="No weight gets a gradient from the auxiliary loss, so it has no effect.",
            advice="Look for detach(), no_grad() or counts of chosen experts (topk, argmax) instead of the "
            "router's probabilities.",
        )
    bad = [name for name, g in gradients.items() if not g.isfinite().all()]
    if bad:
        return subject.failed(
            where=listed(bad),
            meaning=f"{len(bad)} gradients of the auxiliary loss are not finite.",
            advice="Look for a log or division at 0 in the router's probabilities.",
        )
    largest = max(g.abs().max().item() for g in gradients.values())
    if largest > 1e-7 * max(1.0, abs(loss.item())):
        return subject.passed(largest, meaning=f"{len(gradients)} of {len(named)} parameters get a gradient.")
    return subject.failed_unless(
        None if loss.item() and _selects(subject, model) else "every token goes to every expert",
        largest,
        meaning="The gradients of the auxiliary loss are 0, so it has no effect.",
        advice="Use the router's probabilities, not counts of chosen experts. Average them over tokens, not "
        "over experts: their sum over experts is always 1.",
    )


@check
def auxiliary_padding(subject: Subject) -> CheckResult:
    """Is the auxiliary loss independent of the content and the amount of padding?"""
    spec = subject.spec
    if spec.auxiliary_loss is None:
        return subject.not_applicable(_NEEDED)
    if spec.inputs != "tokens" or subject.seq_len < 6:
        return subject.not_applicable("needs token ids and at least 6 positions")
    length = max(4, subject.seq_len // 2)
    inputs, others = subject.inputs(2), subject.inputs(2, shift=1)
    keep = torch.zeros_like(inputs, dtype=torch.bool)
    keep[0, :length] = True
    keep[1, : length - 2] = True
    other_padding = torch.where(keep, inputs, others)

    def gap(model: nn.Module) -> tuple[float, str]:
        short = slice(None), slice(length)
        batches = (inputs[short], keep[short]), (other_padding[short], keep[short]), (inputs, keep)
        plain, other, more = (_auxiliary(subject, model, *batch).double() for batch in batches)
        gaps = [float((each - plain).abs() / plain.abs().clamp(min=1e-6)) for each in (other, more)]
        return max(zip(gaps, ("other padding", "more padding"), strict=True))

    with torch.no_grad():
        try:
            value, where = gap(subject.model(fill_zeros=True))
        except TypeError as error:
            return subject.not_applicable(f"takes no mask: {error}")
        with suppress(*REFUSALS):
            value, where = gap(subject.model(dtype=torch.float64, fill_zeros=True))
    if value <= _ROUNDING:
        return subject.passed(value, _ROUNDING)
    if spec.masked is None and _ignores_keep(subject, inputs, keep):
        return subject.not_applicable(
            "needs a model that takes a mask (masked=), or an auxiliary_loss that does"
        )
    return subject.failed(
        value,
        _ROUNDING,
        where=where,
        meaning="The auxiliary loss changes with the padding of a batch.",
        advice="Pass the mask to the router, and ignore masked positions in the counts and in the mean "
        "probabilities.",
    )


@check
def auxiliary_in_loss(subject: Subject) -> CheckResult:
    """Does the model's own loss contain the auxiliary loss?"""
    terms = loss_terms(subject)
    if isinstance(terms, str):
        return subject.not_applicable(terms)
    value, added, auxiliary, model = terms
    noise = _ROUNDING * max(1.0, abs(value))
    if abs(added) > noise or abs(auxiliary) <= noise:
        return subject.passed(
            added, meaning=f"The loss adds {added:.3g}; the auxiliary loss is {auxiliary:.3g}."
        )
    request = " The configuration requests it (output_router_logits=True)." if _is_requested(model) else ""
    return subject.failed_unless(
        None if request else "the training step adds it, or the model is not to be trained",
        added,
        noise,
        meaning=f"The model's own loss does not contain the auxiliary loss of {auxiliary:.3g}.{request}",
        advice="Add it in every training step, not only if the caller requests router logits. The "
        "configuration of transformers has output_router_logits=True for this.",
    )


def loss_terms(subject: Subject) -> tuple[float, float, float, nn.Module] | str:
    """Return the model's own loss, its part that is not cross-entropy, the auxiliary loss, and the model.

    If they are unknown, return the reason.
    """
    spec = subject.spec
    if spec.auxiliary_loss is None:
        return _NEEDED
    if spec.labelled_loss is None:
        return "needs labelled_loss"
    if spec.inputs != "tokens" or subject.seq_len < 2:
        return "needs token ids and at least 2 positions"
    inputs = subject.inputs(2)
    model = subject.model(train=True, fill_zeros=True)
    # Models of transformers add the auxiliary loss only if the configuration or an argument requests it.
    takes_switch = accepts(model, "output_router_logits") and not _is_requested(model)
    switch = {"output_router_logits": True} if takes_switch else {}
    with changed_calls(model, switch):
        value, logits = labelled_loss(subject, model, inputs, inputs)
    if logits is None or logits.shape[:2] != inputs.shape:
        return "needs logits of a call with labels"
    with torch.no_grad():
        auxiliary = _auxiliary(subject, model, inputs, None).item()
    return value, value - mean_cross_entropy(logits, inputs, expected_shift(subject)), auxiliary, model


def _is_requested(model: nn.Module) -> bool:
    """Return True if the model's configuration includes the auxiliary loss in training."""
    config = getattr(model, "config", None)
    coefficient = getattr(config, "router_aux_loss_coef", 1.0)
    return getattr(config, "output_router_logits", False) is True and bool(coefficient)


@torch.no_grad()
def _ignores_keep(subject: Subject, inputs: Tensor, keep: Tensor) -> bool:
    model = subject.model(fill_zeros=True)
    one, two = (_auxiliary(subject, model, inputs, mask) for mask in (torch.ones_like(keep), keep))
    return torch.equal(one, two)


def _selects(subject: Subject, model: nn.Module) -> bool:
    """Return True if the model selects some of several entries, such as the experts of a token."""
    selections = _Selections()
    with selections, torch.no_grad():
        subject.logits(model, subject.inputs(2))
    return selections.found


class _Selections(TorchFunctionMode):
    """Mode that detects a topk or an argmax that selects only some entries."""

    found: bool = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and compare its result with its input."""
        output = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("topk", "argmax"):
            chosen = output if isinstance(output, Tensor) else output[0]
            self.found |= chosen.numel() < args[0].numel()
        return output


def _auxiliary(subject: Subject, model: nn.Module, inputs: Tensor, keep: Tensor | None) -> Tensor:
    assert subject.spec.auxiliary_loss is not None
    with subject.fixed_randomness():
        return subject.spec.auxiliary_loss(model, inputs.clone(), keep)
