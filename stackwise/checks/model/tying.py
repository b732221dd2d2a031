"""Tying: whether the head reads the embedding's own weight, by what it does, and whether that lasts.

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


@check
def tying(subject: Subject) -> CheckResult:
    """Do head and embedding share one weight if the model claims it, also after copy, cast and load?"""
    spec = subject.spec
    if spec.inputs != "tokens":
        return subject.not_applicable("needs token ids")
    if not spec.per_position:
        return subject.not_applicable("needs an output per position")
    model = subject.model()
    logits = subject.logits(model, subject.inputs(1))
    if logits.shape[-1] < spec.width:
        return subject.not_applicable(f"{logits.shape[-1]} outputs are no logits over {spec.width} tokens")
    now = _is_tied(subject, model)
    if now is None:
        return subject.not_applicable("needs an embedding that the token ids enter, and a token to spare")
    if spec.tied is not None and now != spec.tied:
        if spec.tied:
            meaning = "The head claims to be the embedding's weight, and does not read it."
            advice = (
                "Look for a tie by copy (clone(), copy_(), .data =), for an initialisation, wrapper or "
                "load_state_dict(assign=True) after the tie, and for a head that was replaced."
            )
        else:
            meaning = "The head claims weights of its own, and reads the embedding's."
            advice = "Look for a tie_weights() that ignores the configuration, and for a shared Parameter."
        return subject.failed(float(now), float(spec.tied), meaning=meaning, advice=advice)
    for how, other in _copies(subject, model):
        if _is_tied(subject, other) == (not now):
            return subject.failed(
                float(not now),
                float(now),
                where=how,
                meaning=f"The head is {'' if now else 'not '}tied to the embedding, and "
                f"{'no longer' if now else 'is'} after {how}.",
                advice="Tie by one nn.Parameter under two names; a closure, a property over a saved tensor "
                "or a tie that only __init__ makes is lost.",
            )
    if not now and (twin := _equal_weight(subject, model)):
        return subject.warned(
            0.0,
            where=twin,
            meaning="This weight equals the embedding but is another tensor, so training will separate them.",
            correct_if="the two are only meant to start equal",
            advice="Share one nn.Parameter: a copy is not tied.",
        )
    return subject.passed(float(now), float(now), meaning="tied" if now else "not tied")


def _copies(subject: Subject, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model after each way of handing it on that it allows."""
    copies: list[tuple[str, nn.Module]] = []
    loaded = subject.spec.create(subject.device, subject.seed + 1).eval()
    with suppress(RuntimeError):  # load_round_trip says so
        loaded.load_state_dict(model.state_dict())
        copies.append(("load_state_dict()", loaded))
    with suppress(RuntimeError, TypeError):  # where it cannot be copied, no copy loses its tie
        copies.append(("deepcopy()", copy.deepcopy(model)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of complex buffers, whose imaginary part is lost
        copies.append(("to(float64)", subject.model().to(torch.float64)))
    return copies


@torch.no_grad()
def _is_tied(subject: Subject, model: nn.Module) -> bool | None:
    """Whether the logit of a token moves with its embedding though it is not in the input; None: unknown."""
    inputs = subject.inputs(1)
    absent = torch.ones(subject.spec.width, dtype=torch.bool, device=inputs.device)
    absent[inputs.flatten()] = False
    weight = _embedding_weight(subject, model, inputs)
    if weight is None or not absent.any():
        return None
    # Not the first: that is often the padding token, which some embeddings treat apart.
    token = int(absent.nonzero().flatten()[-1])
    try:
        before = subject.logits(model, inputs)
        row = weight[token].clone()
        generator = torch.Generator().manual_seed(subject.seed)
        noise = torch.randn(row.shape, generator=generator).to(row)
        weight[token] += noise * weight.std()
        moved = absolute_difference(before, subject.logits(model, inputs)).amax(dim=(0, 1))
        weight[token] = row
    except refusals():
        return None  # not in this dtype
    if moved.median() > 0 or not before.isfinite().all(dim=0).any():
        return None  # all outputs move: it is not the token's own logit that tells
    return bool(moved[token] > 1e-6 * variation(before))


def _embedding_weight(subject: Subject, model: nn.Module, inputs: Tensor) -> Tensor | None:
    """The table of the first module that the ids enter as they are."""
    found: list[Tensor] = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        ids = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if ids is None or ids.is_floating_point() or ids.numel() != inputs.numel():
            return
        if torch.equal(ids.flatten(), inputs.flatten()):
            own = module.parameters(recurse=False)
            found.extend(p for p in own if p.ndim == 2 and len(p) >= subject.spec.width)

    handles = [m.register_forward_pre_hook(look, with_kwargs=True) for m in model.modules()]
    try:
        subject.logits(model, inputs)
    except refusals():
        return None
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _equal_weight(subject: Subject, model: nn.Module) -> str | None:
    """The name of another parameter with the embedding's values, which are not constant."""
    weight = _embedding_weight(subject, model, subject.inputs(1))
    if weight is None or weight.std() == 0:
        return None
    others = [(n, p) for n, p in model.named_parameters() if p is not weight and p.shape == weight.shape]
    return next((n for n, p in others if p.data_ptr() != weight.data_ptr() and torch.equal(p, weight)), None)
