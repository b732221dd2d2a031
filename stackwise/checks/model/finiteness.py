"""Finiteness: no NaN and no infinity, in outputs and in gradients."""

from __future__ import annotations

import torch

from stackwise.checks.check import check
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.stability.locate import first_nan_module, first_nonfinite_module


@check
def finite_logits(subject: Subject) -> CheckResult:
    """Is every output finite, and every intermediate result free of NaN, in eval and train mode?"""
    inputs = subject.inputs(2)
    for mode in ("eval", "train"):
        model = subject.model(train=mode == "train")
        output = subject.logits(model, inputs)
        bad = int((~output.isfinite()).sum())
        if bad:
            culprit = first_nonfinite_module(model, lambda: subject.logits(model, inputs))  # noqa: B023
            return subject.failed(
                bad / output.numel(),
                0.0,
                where=f"{mode} mode; first in {culprit}" if culprit else f"{mode} mode",
                meaning=f"{bad} of {output.numel()} outputs are NaN or infinite.",
                advice="Look for a fully masked softmax row, a log or division of 0, uninitialised weights.",
            )
        hidden = first_nan_module(model, lambda: subject.logits(model, inputs))  # noqa: B023
        if hidden:
            # A softmax over masked scores alone is NaN, and may be masked later; weights are never NaN.
            own = hidden in dict(model.named_modules()) and any(
                True for _ in model.get_submodule(hidden).parameters(recurse=False)
            )
            return subject.failed_unless(
                None if own else "every NaN is masked on purpose, as of a row whose scores are all masked",
                1.0,
                0.0,
                where=f"{mode} mode; first in {hidden}",
                meaning="A module computes NaN, which does not show in the output.",
                advice="Look for nan_to_num(), where() and masks after it, and for attention kernels that "
                "return 0 for a query of NaN.",
            )
    return subject.passed(0.0, 0.0)


@check
def finite_weights(subject: Subject) -> CheckResult:
    """Is every parameter finite, and every buffer free of NaN, in a model as it is built?"""
    model = subject.model()
    named = [*model.named_parameters(), *model.named_buffers()]
    floating = {name: t for name, t in named if t.is_floating_point() or t.is_complex()}
    if not floating:
        return subject.not_applicable("the model has no floating-point weights")
    saved = model.state_dict().keys()
    parameters = {name for name, _ in model.named_parameters()}
    bad = [
        name
        for name, t in floating.items()
        # Infinite buffers are masks; ones that are not saved may be room for a cache.
        if (name in parameters and not t.isfinite().all()) or (name in saved and t.isnan().any())
    ]
    if bad:
        count = sum(int((~floating[name].isfinite()).sum()) for name in bad)
        return subject.failed(
            len(bad) / len(floating),
            0.0,
            where=f"{', '.join(bad[:3])}{', ...' if len(bad) > 3 else ''}",
            meaning=f"{count} values of {len(bad)} tensors are NaN or infinite before the first call.",
            advice="Look for torch.empty() that nothing fills, and for an init that divides by 0.",
        )
    return subject.passed(0.0, 0.0, meaning=f"{len(floating)} tensors.")


@check
def finite_gradients(subject: Subject) -> CheckResult:
    """Are the loss and every gradient finite?"""
    model = subject.model(train=True)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        return subject.not_applicable("no parameter is trainable")
    if subject.seq_len < 2 and subject.spec.causal and subject.spec.loss is None:
        return subject.not_applicable("needs at least 2 positions, to predict one from the other")
    inputs = subject.inputs(2)
    with torch.enable_grad(), subject.fixed_randomness():
        loss = subject.spec.loss_of(model, inputs)
    if not loss.isfinite():
        return subject.failed(
            loss.item(), where="the loss", meaning="The loss is not finite.", advice="See finite_logits."
        )
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if not gradients:
        return subject.failed(
            0.0,
            meaning="No parameter has a gradient: the loss is cut off from the model.",
            advice="Look for detach(), .data, no_grad() or an argmax between the parameters and the output.",
        )
    bad = [name for name, g in gradients.items() if not g.isfinite().all()]
    if bad:
        return subject.failed(
            len(bad) / len(gradients),
            0.0,
            where=f"{', '.join(bad[:3])}{', ...' if len(bad) > 3 else ''}",
            meaning=f"{len(bad)} of {len(gradients)} gradients are NaN or infinite; the loss is finite.",
            advice="Look for sqrt or norm at 0, 0 * inf in a masked branch, and a softmax over an empty row.",
        )
    return subject.passed(0.0, 0.0, meaning=f"{len(gradients)} of {len(parameters)} parameters have one.")
