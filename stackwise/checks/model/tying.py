"""Tying: the head reads the embedding's weight if declared so, also after copy, cast and load.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import refusals
from stackwise.checks.probe.difference import absolute_difference, variation
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.support.hooks import temporary_hooks


@check
def tying(subject: Subject) -> CheckResult:
    """Does the head read the embedding's weight as declared, also after copy, cast and load?"""
    spec = subject.spec
    if spec.inputs != "tokens" or not spec.per_position:
        return subject.not_applicable("needs token ids and an output per position")
    model = subject.model()
    logits = subject.logits(model, subject.inputs(1))
    if logits.shape[-1] < spec.width:
        return subject.not_applicable(f"{logits.shape[-1]} outputs are no logits over {spec.width} tokens")
    now = _is_tied(subject, model)
    if now is None:
        return subject.not_applicable(
            "needs an embedding of the token ids, and a token that is not in the input"
        )
    if spec.tied is not None and now != spec.tied:
        if spec.tied:
            meaning = "The head is declared tied, but does not read the embedding's weight."
            advice = (
                "Look for a tie by copy (clone(), copy_(), .data =), for an initialisation, wrapper or "
                "load_state_dict(assign=True) after the tie, and for a replaced head."
            )
        else:
            meaning = "The head is declared untied, but reads the embedding's weight."
            advice = "Look for a tie_weights() that ignores the configuration, and for a shared Parameter."
        return subject.failed(float(now), float(spec.tied), meaning=meaning, advice=advice)
    if spec.tied is False and (table := _other_tied_table(subject, model)):
        return subject.failed(
            1.0,
            0.0,
            where=table,
            meaning="The head is declared untied, but reads the weight of this embedding.",
            advice="Look for the order in which tied weights are assigned after a checkpoint is loaded.",
        )
    for how, other in _copies(subject, model):
        if _is_tied(subject, other) == (not now):
            return subject.failed(
                float(not now),
                float(now),
                where=how,
                meaning=f"The head is {'' if now else 'not '}tied to the embedding, and "
                f"{'no longer' if now else 'is'} after {how}.",
                advice="Tie by one nn.Parameter under two names; a closure, a property of a stored tensor, "
                "or a tie that only __init__ creates is lost.",
            )
    if not now and (twin := _equal_weight(subject, model)):
        return subject.warned(
            0.0,
            where=twin,
            meaning="This weight equals the embedding but is another tensor, so training will separate them.",
            correct_if="the two are meant to be equal only at the start",
            advice="Share one nn.Parameter: a copy is not tied.",
        )
    return subject.passed(float(now), float(now), meaning="tied" if now else "not tied")


def _other_tied_table(subject: Subject, model: nn.Module) -> str | None:
    """Return the name of a further embedding of tokens, as of an encoder, whose weight the head reads."""
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and module.num_embeddings == subject.spec.width
        if is_table and _reads(subject, model, module.weight):
            return f"{name}.weight"
    return None


def _copies(subject: Subject, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the model after each kind of copy that it supports, with a name."""
    copies: list[tuple[str, nn.Module]] = []
    loaded = subject.spec.create(subject.device, subject.seed + 1).eval()
    with suppress(RuntimeError):  # load_round_trip reports it
        loaded.load_state_dict(model.state_dict())
        copies.append(("load_state_dict()", loaded))
    with suppress(RuntimeError, TypeError):  # some models cannot be copied
        copies.append(("deepcopy()", copy.deepcopy(model)))
    with warnings.catch_warnings(action="ignore"):  # the cast discards imaginary parts of buffers
        copies.append(("to(float64)", subject.model().to(torch.float64)))
    return copies


def _is_tied(subject: Subject, model: nn.Module) -> bool | None:
    """Return True if the head reads the weight of the embedding of the inputs. None: unknown."""
    try:
        weight = _embedding_weight(subject, model, subject.inputs(1))
    except refusals():
        return None
    return None if weight is None else _reads(subject, model, weight)


@torch.no_grad()
def _reads(subject: Subject, model: nn.Module, weight: Tensor) -> bool | None:
    """Return True if the row of a token that is no input changes the logit of this token. None: unknown."""
    inputs = subject.inputs(1)
    absent = set(range(subject.spec.width)) - {*inputs.flatten().tolist()}
    if not absent:
        return None
    token = max(absent)  # because the first one is often the padding token
    try:
        before = subject.logits(model, inputs)
        row = weight[token].clone()
        generator = torch.Generator().manual_seed(subject.seed)
        noise = torch.randn(row.shape, generator=generator).to(row)
        weight[token] += noise * weight.std()
        moved = absolute_difference(before, subject.logits(model, inputs)).amax(dim=(0, 1))
        weight[token] = row
    except refusals():
        return None
    if moved.median() > 0 or not before.isfinite().all(dim=0).any():
        return None  # all logits change
    return bool(moved[token] > 1e-6 * variation(before))


def _embedding_weight(subject: Subject, model: nn.Module, inputs: Tensor) -> Tensor | None:
    """Return the weight of the first module whose input is the ids.

    A weight with one row for each token is preferred: a table of positions may also be called with ids.
    """
    found: list[Tensor] = []

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        ids = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if ids is not None and ids.dtype == inputs.dtype and torch.equal(ids.flatten(), inputs.flatten()):
            own = module.parameters(recurse=False)
            found.extend(p for p in own if p.ndim == 2 and len(p) >= subject.spec.width)

    handles = (m.register_forward_pre_hook(record, with_kwargs=True) for m in model.modules())
    with temporary_hooks(handles):
        subject.logits(model, inputs)
    return min(found, key=lambda p: len(p) != subject.spec.width, default=None)


def _equal_weight(subject: Subject, model: nn.Module) -> str | None:
    """Return the name of another parameter with the values of the embedding, if these are not constant."""
    weight = _embedding_weight(subject, model, subject.inputs(1))
    if weight is None or weight.std() == 0:
        return None
    others = [(n, p) for n, p in model.named_parameters() if p is not weight and p.shape == weight.shape]
    return next((n for n, p in others if p.data_ptr() != weight.data_ptr() and torch.equal(p, weight)), None)
