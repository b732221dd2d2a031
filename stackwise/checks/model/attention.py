"""Attention: axis, scale and entropy of the softmax over keys.

A dispatch mode records the matrix product of queries and keys and the softmax of the scores (T, S). All
implementations execute them: softmax, scaled_dot_product_attention, nn.MultiheadAttention.

Shapes: N batch times heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.check import check
from stackwise.checks.engine.call import changed_calls
from stackwise.checks.engine.examination import HALF_PRECISION
from stackwise.checks.engine.variation import Refused
from stackwise.checks.probe.call import reason_of, refusals
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.support.hooks import temporary_hooks

_LENGTH = 13  # unlikely to be a head size or a number of heads
_BATCH_SIZE = 8
_MASKED = -1e3
# Std of the scores. It is at most 1 in a healthy new model.
SOFT, SATURATED = 2.0, 10.0
# Relative error of a measured scale.
_SAME_WIDTH = 0.2
_NOT_SEEN = "no softmax over (positions, positions) was seen"


@check
def attention_axis(subject: Subject) -> CheckResult:
    """Does each softmax of attention run over the keys?"""
    seen = _watch(subject)
    if not seen:
        return subject.not_applicable(_NOT_SEEN)
    for number, each in enumerate(seen, start=1):
        if each.axis != -1:
            sums = each.scores.softmax(each.axis).sum(dim=-1)
            return subject.failed(
                (sums - 1).abs().max().item(),
                1e-5,
                where=f"softmax {number} of {len(seen)}, over dimension {each.axis}",
                meaning="The softmax runs over another dimension than the keys, so the weights of a query do "
                "not add up to 1.",
                advice="Look for dim=1, dim=-2 or dim=0 instead of dim=-1, and for scores as k @ q^T.",
            )
    return subject.passed(0.0, 1e-5, meaning=f"{len(seen)} softmaxes over keys.")


@check
def returned_attention(subject: Subject) -> CheckResult:
    """Are returned attention weights at least 0, with a sum of at most 1, and causal if the model is?"""
    returned = _returned(subject)
    if isinstance(returned, str):
        return subject.not_applicable(f"needs a model that returns attention weights: {returned}")
    found, states = returned
    if places := [i for i, each in enumerate(found) if any(torch.equal(each, state) for state in states)]:
        return subject.failed(
            float(len(places)),
            0.0,
            where=f"attentions[{places[0]}]",
            meaning="The model returns a hidden state in place of attention weights.",
            advice="Look for an index that selects another output of the layer.",
        )
    size = (subject.seq_len, subject.seq_len)
    if not found or not all(each.shape[-2:] == size and each.isfinite().all() for each in found):
        return subject.not_applicable("needs finite attention weights (B, H, T, T) in the output")
    is_causal = bool(subject.spec.causal) and subject.spec.visible is None
    errors = [_error_of(each, is_causal=is_causal) for each in found]
    value, sees_later = max(errors)
    limit = 1e-2 if found[0].dtype in HALF_PRECISION else 1e-4
    if value <= limit:
        return subject.passed(value, limit)
    return subject.failed_unless(
        None if sees_later else "heads are mixed or subtracted after the softmax, or there is no softmax",
        value,
        limit,
        where=f"attentions[{errors.index((value, sees_later))}]",
        meaning="The model returns attention weights above 0 for later positions."
        if sees_later
        else "Some returned attention weights are below 0, or their sum for one query is above 1.",
        advice="Return the weights after the mask and the softmax over keys, and before dropout.",
    )


def _error_of(weights: Tensor, *, is_causal: bool) -> tuple[float, bool]:
    """Return the largest error of attention weights, and True if it is a weight of a later position."""
    # With attention sinks, the sum is below 1.
    error = float(torch.maximum(weights.sum(dim=-1).max() - 1, -weights.min()))
    later = float(weights.triu(1).abs().max()) if is_causal else 0.0
    return max(error, later), later > error


def _returned(subject: Subject) -> tuple[list[Tensor], Sequence[Tensor]] | str:
    """Return attention weights and hidden states that a call returns, or the reason why there are none."""
    for names in (("output_attentions", "output_hidden_states"), ("output_attentions",)):
        model, outputs = subject.model(), list[Any]()
        handle = model.register_forward_hook(lambda _module, _args, output: outputs.append(output))  # noqa: B023
        try:
            if use_eager := getattr(model, "set_attn_implementation", None):
                use_eager("eager")  # other kernels return no weights
            with torch.no_grad(), temporary_hooks([handle]), changed_calls(model, dict.fromkeys(names, True)):
                subject.spec.forward(model, subject.inputs(2))
            weights = getattr(outputs[-1], "attentions", None) or ()
            states = getattr(outputs[-1], "hidden_states", None) or ()
            return [each for each in weights if isinstance(each, Tensor)], states
        except Refused as error:
            reason = str(error)
        except refusals() as error:
            reason = reason_of(error)
    return reason


@check
def attention_scale(subject: Subject) -> CheckResult:
    """Are scores divided by the root of the head size, or queries and keys normalised?"""
    seen = [s for s in _watch(subject, unit=1.0) if s.axis == -1 and s.head_dim >= 4 and s.spread() > 0]
    if not seen:
        return subject.not_applicable(_NOT_SEEN)
    scores = min(seen, key=_Scores.spread)
    value, D = scores.spread(), scores.head_dim
    width = D * scores.scores[..., 0, 0].numel() // _BATCH_SIZE
    limit = D**0.35
    meaning = (
        f"For queries and keys of unit variance and head size {D}, the std of scores is {value:.2f}. That is "
        f"a factor of about 1 / sqrt({D / value**2:.2g})"
    )
    if width > D and scores.scale > 0 and math.isclose(scores.scale**-2, width, rel_tol=_SAME_WIDTH):
        return subject.warned(
            scores.scale * math.sqrt(D),
            1.0,
            meaning=f"Scores are divided by the root of the width ({width}), not of the head size ({D}).",
            correct_if="scores of this architecture are small on purpose",
            advice="Divide by the root of the head size. More heads make attention uniform here.",
        )
    if value <= limit:
        return subject.passed(value, limit, meaning=f"{meaning}; 1 is usual.")
    if not _follows(subject):
        return subject.passed(value, limit, meaning=f"{meaning}; scores do not grow with queries and keys.")
    new = _watch(subject)
    # T5 (arXiv:1910.10683) starts with queries that are smaller by the root of the head size.
    if new and all(math.isclose(s.ratio * math.sqrt(D), 1.0, rel_tol=_SAME_WIDTH) for s in new):
        return subject.passed(value, limit, meaning=f"{meaning}; the initial weights of queries contain it.")
    own = max(map(_Scores.spread, new), default=0.0)
    correct_if = (
        f"the weights or a norm contain the scale: with the model's own weights, the std is {own:.2f}"
    )
    return subject.failed_unless(
        correct_if if subject.spec.trained or own <= 1.5 else None,
        value,
        limit,
        meaning=f"Scores are not divided by the root of the head size. {meaning}; 1 is usual, and the std "
        f"without a scale is sqrt({D}) = {math.sqrt(D):.2f}. With the model's own weights it is {own:.2f}.",
        advice="Look for a missing 1 / sqrt(head size), a scale= that overrides it, and one that multiplies.",
    )


@check
def attention_entropy(subject: Subject) -> CheckResult:
    """Is attention soft in a new model: scores of moderate spread, rows of high entropy?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    seen = [s for s in _watch(subject) if s.axis == -1]
    if not seen:
        return subject.not_applicable(_NOT_SEEN)
    worst = max(seen, key=_Scores.spread)
    value, where = worst.spread(), f"softmax {seen.index(worst) + 1} of {len(seen)}"
    meaning = f"Std of scores {value:.2f}, mean entropy {worst.entropy():.0%} of the uniform."
    advice = (
        "Look for large initial weights of queries and keys, a large embedding without a norm, and a missing "
        "1 / sqrt(head size)."
    )
    if value <= SOFT:
        return subject.passed(value, SOFT, meaning=meaning)
    meaning = f"Attention is sharp in a new model. {meaning}"
    if value > SATURATED and _follows(subject):
        return subject.failed(value, SATURATED, where=where, meaning=meaning, advice=advice)
    correct_if = "attention of this architecture starts sharp on purpose"
    return subject.warned(value, SOFT, where=where, meaning=meaning, correct_if=correct_if, advice=advice)


def _follows(subject: Subject) -> bool:
    """Return True if scores grow with queries and keys. They do not if these are normalised."""
    one, two = (
        min((s.spread() for s in _watch(subject, unit=unit) if s.spread() > 0), default=0.0)
        for unit in (1.0, 2.0)
    )
    return two > 2 * one > 0


@dataclass(frozen=True, eq=False)
class _Scores:
    """Input of one softmax of attention.

    Attributes:
        scores: (..., T, S), with -inf or a large negative constant at masked positions.
        axis: dimension of the softmax, counted from the end.
        head_dim: D of the product of queries and keys; 0: unknown.
        scale: factor of the product, for queries and keys of RMS 1; 0: unknown.
        ratio: RMS of queries, divided by that of keys; 0: unknown.
    """

    scores: Tensor
    axis: int
    head_dim: int
    scale: float = 0.0
    ratio: float = 0.0

    def spread(self) -> float:
        """Return the std over rows of the batch, for each head, query and visible key, so without biases."""
        by_row = self.scores.double().reshape(_BATCH_SIZE, -1, *self.scores.shape[-2:])
        visible = (by_row > _MASKED).all(dim=0) & by_row.isfinite().all(dim=0)
        if not visible.any():
            return 0.0
        return by_row.var(dim=0)[visible].mean().sqrt().item()

    def entropy(self) -> float:
        """Return the mean entropy of rows with two or more visible keys, relative to uniform attention."""
        visible = (self.scores > _MASKED).sum(dim=-1)
        weights = self.scores.double().softmax(dim=-1)
        entropy = -(weights * weights.clamp(min=1e-300).log()).sum(dim=-1)
        several = visible > 1
        return (entropy[several] / visible[several].double().log()).mean().item() if several.any() else 1.0


def _watch(subject: Subject, unit: float | None = None) -> list[_Scores]:
    """Return every softmax of attention in one call, in order.

    The result of each product with a weight, and so queries and keys, are scaled to the RMS `unit`.
    """
    T = min(_LENGTH, subject.spec.max_length or _LENGTH)
    is_sequence = subject.spec.make_batch is None
    for length in dict.fromkeys((T, subject.seq_len)):
        model = subject.model(fill_zeros=True)
        mode = _Watch(length if is_sequence else None, unit)
        try:
            # Without gradients, torch's layers take a fused path without a visible softmax.
            with torch.enable_grad(), subject.fixed_randomness(), sdpa_kernel([SDPBackend.MATH]), mode:
                subject.spec.logits(model, subject.inputs(_BATCH_SIZE, length))
        except refusals():
            continue
        return [s for s in mode.seen if s.scores[..., 0, 0].numel() % _BATCH_SIZE == 0]
    return []


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record each softmax over scores (T, S). If the length T is None, as for images, T = S >= 4."""

    def __init__(self, length: int | None, unit: float | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length, self.unit = length, unit
        self.head_dim = 0
        self.operands = self.ratio = 0.0  # RMS of queries times that of keys, and divided by it
        self.product: Tensor | None = None
        self.seen: list[_Scores] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm") and self.unit is not None and output.is_floating_point():
            if name == "addmm":
                output.sub_(args[0])  # without the bias
            size = output.double().square().mean().sqrt().item()
            if math.isfinite(size) and size > 0:
                output.mul_(self.unit / size)
        elif name in ("bmm", "baddbmm") and self._is_over_positions(output, square=True):
            queries, keys = args[-2:]
            self.head_dim = queries.shape[-1]
            sizes = [x.double().square().mean().sqrt().item() for x in (queries, keys)]
            self.operands, self.ratio = sizes[0] * sizes[1], sizes[0] / sizes[1] if sizes[1] else 0.0
            self.product = output.detach().clone()
        elif name in ("_softmax", "_safe_softmax"):
            scores, axis = args[0], args[1]
            if self._is_over_positions(scores):
                axis = axis - scores.ndim if axis >= 0 else axis
                scale = self.operands * _ratio(self.product, scores.detach())
                self.seen.append(_Scores(scores.detach().clone(), axis, self.head_dim, scale, self.ratio))
        return output

    def _is_over_positions(self, scores: Tensor, *, square: bool = False) -> bool:
        if scores.ndim < 3:
            return False
        T, S = scores.shape[-2:]
        if self.length is None:
            return T == S >= 4
        return self.length == T and (S == T if square else S >= T)


def _ratio(product: Tensor | None, scores: Tensor) -> float:
    """Return the factor between a product and its scores, or 0 if unknown."""
    if product is None or product.numel() != scores.numel():
        return 0.0
    product, scores = product.flatten().double(), scores.flatten().double()
    visible = (scores > _MASKED) & scores.isfinite() & (product.abs() > product.abs().median())
    return (scores[visible] / product[visible]).median().item() if visible.any() else 0.0
