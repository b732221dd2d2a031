"""Loss: the model's own loss is the mean cross-entropy of the next token.

Each check reports one aspect of the formula that `read_loss_formula` finds.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from stackwise.checks.check import check
from stackwise.checks.engine.call import changed_calls
from stackwise.checks.engine.variation import Refused
from stackwise.checks.probe.backward import gradients_at
from stackwise.checks.probe.call import REFUSALS, reason_of, refusals
from stackwise.checks.probe.difference import relative_difference
from stackwise.checks.probe.loss_formula import (
    IGNORED,
    LossFormula,
    RefusedLabelsError,
    UnreadableLossError,
    expected_shift,
    labelled_loss,
    part_that_learns,
    part_without_labels,
    read_loss_formula,
)
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.call_form import forward_parameters

# Share of the gradient of other outputs. A z-loss over all positions with a weight of 1e-4 stays below it.
_FAINT = 0.01
_ITEMS = 1000
_UNKNOWN = "the loss fits no known formula: see loss_formula"
_REFUSED = "the loss refuses ignored labels: see ignored_labels"


def _read(subject: Subject) -> LossFormula | CheckResult:
    """Return the formula, or a result with the reason why the check does not apply."""
    try:
        return read_loss_formula(subject)
    except UnreadableLossError as reason:
        return subject.not_applicable(str(reason))
    except RefusedLabelsError:
        return subject.not_applicable(_REFUSED)


@check
def label_shift(subject: Subject) -> CheckResult:
    """Is each label scored by the output of the position before it (its own, if the model is not causal)?"""
    found = _read(subject)
    if isinstance(found, CheckResult):
        return found
    if not found.known:
        return subject.not_applicable(_UNKNOWN)
    wanted = expected_shift(subject)
    distance = abs(found.shift - wanted)
    if distance == 0:
        return subject.passed(0.0, 0.0)
    where = f"label t is scored by the output at t{-found.shift:+d}"
    if found.shift == 0 and _decodes_for_an_encoder(subject):
        return subject.passed(
            distance,
            meaning="Labels are not shifted: the caller passes decoder inputs that are shifted to the right, "
            "as an encoder-decoder does with its decoder.",
            where=where,
        )
    if found.shift == 0 and _sees_ahead(subject):
        return subject.not_applicable(
            "needs a causal model, or causal=False; causality reports the later tokens"
        )
    if found.shift == 1:
        return subject.warned(
            distance,
            0.0,
            where=where,
            meaning="A model that is not causal predicts the next token: it can read its own label.",
            correct_if="labels are only given for tokens that are not in the input, as after a prefix",
            advice="Make the model causal.",
        )
    meaning = {
        0: "Each position predicts the token that it has just read: the loss falls to 0 by copying.",
        2: "Labels are shifted twice: each position predicts the token after the next.",
        -1: "The logits are shifted in place of the labels: each position predicts the token before it.",
    }[found.shift]
    return subject.failed(
        distance,
        0.0,
        where=where,
        meaning=meaning,
        advice="Compare logits[:, :-1] with labels[:, 1:]. Shift in the data or in the loss, not in both.",
    )


def _decodes_for_an_encoder(subject: Subject) -> bool:
    """Return True if some weights only get a gradient with an encoder's output."""
    model = subject.model()
    if not {"encoder_hidden_states", "encoder_outputs"} & forward_parameters(model).keys():
        return False
    with torch.enable_grad(), subject.fixed_randomness():
        output = subject.spec.logits(model, subject.inputs(1))
    reached = gradients_at(output.sum(), [p for p in model.parameters() if p.requires_grad])
    return any(g is None for g in reached)


def _sees_ahead(subject: Subject) -> bool:
    """Return True if the last token changes an earlier output."""
    model, inputs = subject.model(), subject.inputs(1)
    changed = inputs.clone()
    changed[:, -1] = (inputs[:, -1] + 1) % subject.spec.width
    before, after = subject.logits(model, inputs)[:, :-1], subject.logits(model, changed)[:, :-1]
    return bool(relative_difference(before, after).max() > 1e-3)


@check
def loss_reduction(subject: Subject) -> CheckResult:
    """Is the loss the mean over the labels that are not ignored?"""
    found = _read(subject)
    if isinstance(found, CheckResult):
        return found
    if not found.known:
        return subject.not_applicable(_UNKNOWN)
    if found.reduction in ("mean", "targets"):
        return subject.passed(0.0, 0.0)
    if found.reduction == "row means":
        return subject.warned(
            meaning="The loss is the mean of the rows' means, so that targets of short rows weigh more.",
            correct_if="each row has the same weight on purpose",
            advice="Divide the sum over the batch by the number of its targets.",
        )
    if found.reduction == "scaled":
        return subject.warned(
            found.scale,
            1.0,
            meaning=f"The loss is not a mean: a target weighs {found.scale:.4g} times as much as in a mean.",
            correct_if="the factor is intended, as with label smoothing",
            advice="Look at the divisor of the sum.",
        )
    meaning = {
        "sum": "1. It grows with the batch, and gradients with it.",
        "rows": "the number of rows. It grows with the length.",
        "all": "rows * positions, including ignored ones. It shrinks with padding.",
        "all shifted": "rows * (positions - 1), including ignored ones. It shrinks with padding.",
        "unshifted": "the number of labels before the shift. The first label is no target.",
    }[found.reduction]
    return subject.failed(
        found.value / found.expected if found.exact and found.expected else found.scale,
        1.0,
        meaning=f"The loss is a sum over targets divided by {meaning}",
        advice="Divide by (labels[:, 1:] != -100).sum(), or use cross_entropy(reduction='mean').",
    )


@check
def ignored_labels(subject: Subject) -> CheckResult:
    """Do labels of -100 have no influence, and all other labels an influence?"""
    try:
        found = read_loss_formula(subject)
    except UnreadableLossError as reason:
        return subject.not_applicable(str(reason))
    except RefusedLabelsError as refusal:
        return subject.failed(
            where=f"labels of {IGNORED}",
            meaning=f"Labels of {IGNORED} raise: {refusal}",
            advice=f"Pass ignore_index={IGNORED} to cross_entropy, or mask the loss.",
        )
    if not found.known:
        return subject.not_applicable(_UNKNOWN)
    if found.ignored == "skipped":
        part = part_without_labels(subject)
        if not part > _FAINT:
            return subject.passed(0.0, 0.0)
        return subject.warned(
            part,
            _FAINT,
            where="outputs far from any label",
            meaning=f"Outputs without a label get a gradient: {part:.2g} of that of outputs with a label.",
            correct_if="a further term of the loss, such as a z-loss, includes all positions on purpose",
            advice="Mask each term of the loss by the labels, such as the distance to a teacher's output.",
        )
    meaning = {
        "as token 0": "Ignored labels are scored as token 0: the model learns to predict it on padding.",
        "token 0 too": "Token 0 is ignored as if it were padding: the model never learns it.",
        "smoothed": "Label smoothing includes the positions of ignored labels.",
    }[found.ignored]
    return subject.failed(
        found.value,
        found.expected,
        where=f"labels of {IGNORED}" if found.ignored != "token 0 too" else "labels of 0",
        meaning=meaning,
        advice=f"Mask by labels == {IGNORED} (not by clamp, 0 or the padding id) before the sum. A mask (N,) "
        "and a loss (N, 1) have a product (N, N).",
    )


@check
def loss_formula(subject: Subject) -> CheckResult:
    """Is the loss the cross-entropy of the model's own logits, computed in float32 or better?"""
    found = _read(subject)
    if isinstance(found, CheckResult):
        return (_mixed_up(subject) if found.meaning == _REFUSED else None) or found
    gap = abs(found.value - found.expected)
    limit = 1e-4 * max(1.0, abs(found.expected))
    numbers = f"The loss is {found.value:.6g}; the mean cross-entropy of the logits is {found.expected:.6g}."
    if not math.isfinite(found.value) and math.isfinite(found.expected):
        return subject.failed(
            found.value,
            meaning=numbers,
            advice="Look for log of a probability that is 0, and for 0 * inf at masked labels.",
        )
    if found.narrow:
        return subject.failed(
            gap,
            limit,
            where=found.narrow,
            meaning=f"Every value of the loss is rounded to {found.narrow}, in a model of any dtype.",
            advice="Convert the logits to float32 before cross_entropy. Small improvements are rounded away.",
        )
    if found.kind != "cross-entropy":
        meaning, advice = {
            "softmax twice": (
                "The softmax is taken twice: the loss cannot fall near 0, and gradients nearly vanish.",
                "Pass logits to cross_entropy, which takes the softmax.",
            ),
            "probabilities": (
                "The loss is minus the probability: there is no log.",
                "Take log_softmax before nll_loss, not softmax.",
            ),
            "raw logits": (
                "The loss is minus the logit: without a normalisation, it falls without a lower bound.",
                "Take log_softmax before nll_loss, or use cross_entropy.",
            ),
        }[found.kind]
        return subject.failed(gap, limit, meaning=f"{meaning} {numbers}", advice=advice)
    if found.known and found.exact:
        return _in_its_own_dtype(subject)
    if not found.known and (mixed := _mixed_up(subject, numbers)):
        return mixed
    correct_if = "it has a z-loss, a router's loss or label smoothing on purpose"
    if not found.known:
        term, correct_if = "The difference is no known mistake.", "the model has another objective"
    elif abs(found.scale - 1) < 2e-3 or found.reduction != "scaled":
        term = f"The loss adds {found.addition:.4g} to the cross-entropy, which depends on no label."
    else:
        term = f"A label weighs {found.scale:.4g} times as much as in a cross-entropy."
    return subject.warned(
        gap,
        limit,
        meaning=f"{numbers} {term}",
        correct_if=correct_if,
        advice="Compare it with cross_entropy term by term.",
    )


def _mixed_up(subject: Subject, numbers: str = "") -> CheckResult | None:
    """Return a failure if the loss does not increase the logits of the labels."""
    part = part_that_learns(subject)
    if part is None or part >= 0.5:
        return None
    return subject.failed(
        part,
        0.5,
        meaning=f"{numbers} For {1 - part:.0%} of the labels the loss does not decrease if their own logit "
        "grows, for any shift of the labels: the loss trains the model to predict something else.".strip(),
        advice="Flatten logits (B, T, V) and labels (B, T) in the same order. Look for a transpose() or "
        "view() that mixes positions and vocabulary, and for labels in another order.",
    )


def _in_its_own_dtype(subject: Subject) -> CheckResult:
    """Return the result for a correct formula: a warning if the dtype of the loss has too few digits."""
    inputs, own_loss = subject.inputs(2), subject.spec.labelled_loss
    assert own_loss is not None
    with torch.no_grad(), subject.fixed_randomness():
        dtype = own_loss(subject.model(), inputs, inputs).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return subject.passed(0.0, 1e-4)
    return subject.warned(
        torch.finfo(dtype).eps,
        torch.finfo(torch.float32).eps,
        meaning=f"The loss has only 2 to 3 digits: its dtype is {str(dtype).removeprefix('torch.')}.",
        correct_if="the model is never trained",
        advice="Convert the logits to float32 before cross_entropy.",
    )


@check
def empty_loss(subject: Subject) -> CheckResult:
    """Are the loss and its gradients finite if every label of a batch, or of one row, is ignored?"""
    spec = subject.spec
    if spec.labelled_loss is None:
        return subject.not_applicable("needs labelled_loss")
    if spec.inputs != "tokens":
        return subject.not_applicable("needs token ids and logits over a vocabulary")
    model = subject.model(train=True)
    inputs = subject.inputs(2)
    full, _ = labelled_loss(subject, model, inputs, inputs)
    if not math.isfinite(full):
        return subject.not_applicable("the loss is not finite with every label either: see loss_formula")
    nothing = torch.full_like(inputs, IGNORED)
    one_row = nothing.clone()
    one_row[0] = inputs[0]
    for labels, where in ((one_row, "one row without targets"), (nothing, "a batch without targets")):
        model.zero_grad()
        try:
            with torch.enable_grad(), subject.fixed_randomness():
                loss = spec.labelled_loss(model, inputs, labels)
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
        except refusals() as error:
            return subject.warned(
                where=where,
                meaning=f"The loss raises {reason_of(error)}",
                correct_if="the data contain no such batch",
                advice="Return 0 if there is no target, so that training continues.",
            )
        bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        if bad or (labels is one_row and not loss.isfinite()):
            return subject.failed(
                loss.item(),
                where=f"{where}; {len(bad)} gradients, first {bad[0]}" if bad else where,
                meaning="The loss divides 0 by 0. One such batch makes "
                + ("the weights NaN." if bad else "the loss NaN."),
                advice="Divide the sum over the batch by the number of its targets, clamped to 1.",
            )
    if not loss.isfinite():
        # As in torch: the weights stay finite, a mean over losses does not.
        return subject.passed(
            where=where,
            meaning="Every gradient is finite. The loss is 0 / 0, as in torch: exclude such batches from "
            "means over losses.",
        )
    return subject.passed(loss.item())


@check(suite="full")
def loss_items(subject: Subject) -> CheckResult:
    """Does the loss depend on num_items_in_batch, if the Trainer of transformers passes it?"""
    spec, model = subject.spec, subject.model()
    if spec.labelled_loss is None or not _gets_number_of_items(model):
        return subject.not_applicable(
            "needs labelled_loss, and a transformers model whose forward takes **kwargs"
        )
    inputs = subject.inputs(2)
    plain, _ = labelled_loss(subject, model, inputs, inputs)
    try:
        losses = []
        for number in (_ITEMS, 2 * _ITEMS):
            with changed_calls(model, {"num_items_in_batch": number}):
                losses.append(labelled_loss(subject, model, inputs, inputs)[0])
    except (Refused, *REFUSALS) as error:
        return subject.not_applicable(f"needs a model that takes num_items_in_batch: {reason_of(error)}")
    if losses[0] != losses[1]:  # it may have a further term that is not divided
        return subject.passed(meaning=f"The loss is {losses[0]:.4g} for {_ITEMS} items.")
    return subject.warned(
        where=f"loss {losses[0]:.4g} with num_items_in_batch={_ITEMS}, {plain:.4g} without it",
        meaning="The loss ignores num_items_in_batch. Because forward accepts **kwargs, the Trainer of "
        "transformers does not divide the loss by the number of accumulated batches.",
        correct_if="the model is never trained by this Trainer with gradient_accumulation_steps above 1",
        advice="Pass **kwargs to self.loss_function, or set accepts_loss_kwargs = False in the class.",
    )


def _gets_number_of_items(model: nn.Module) -> bool:
    """Return True if the Trainer of transformers passes num_items_in_batch to the model."""
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        return False
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is None:
        accepts = any(each.kind is each.VAR_KEYWORD for each in forward_parameters(model).values())
    return bool(accepts)
