"""Depth: activations and gradients keep their size from layer to layer.

Shapes: B batch, T positions, C width, L layers.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from stackwise.checks.check import check
from stackwise.checks.probe.layers import Stream, residual_stream
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

# L equal contributions to a residual stream make it at most L times as large: ln L nats. What is
# beyond that by the first is unusual, by the second it multiplies from layer to layer.
UNUSUAL, EXPLOSIVE = 1.5, 3.0
VANISHED = 12.0
# Of fewer layers one alone may be unlike the others; that is no rule by which the size grows.
_ENOUGH_LAYERS = 4


@check
def depth_activations(subject: Subject) -> CheckResult:
    """Does the residual stream of a fresh model have a similar size after each layer?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    model = subject.model()
    stream = residual_stream(model, lambda: subject.logits(model, subject.inputs(2)))
    if stream is None or len(stream.after) < 2:
        return subject.not_applicable("needs at least two layers of one kind that run one after the other")
    sizes = [_size(x) for x in stream.after]
    return _judged(
        subject,
        sizes,
        stream,
        what="The size of the residual stream",
        advice="Look for a residual that is added twice, layers without a norm whose weights are too "
        "large, a norm behind the residual branch that is missing, and a scale of the branches such as "
        "1 / sqrt(2 L) that multiplies where it should divide.",
    )


@check
def depth_gradients(subject: Subject) -> CheckResult:
    """Does the gradient of the residual stream, times the stream, keep its size over the layers?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    model, outputs = subject.model(), list[Tensor]()
    with torch.enable_grad(), subject.fixed_randomness():
        stream = residual_stream(model, lambda: outputs.append(subject.spec.logits(model, subject.inputs(2))))
    if stream is None or len(stream.after) < 2:
        return subject.not_applicable("needs at least two layers of one kind that run one after the other")
    if not outputs[0].requires_grad or not all(x.requires_grad for x in stream.after):
        return subject.not_applicable("needs gradients that reach every layer")
    # Of a random direction of the output: a loss may be flat where a model starts.
    generator = torch.Generator().manual_seed(subject.seed)
    direction = torch.randn(outputs[0].shape, generator=generator).to(outputs[0])
    direction = direction.masked_fill(~outputs[0].isfinite(), 0.0)
    try:
        gradients = torch.autograd.grad(outputs[0], stream.after, direction, allow_unused=True)
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        return subject.not_applicable("changes in place, in eval mode, what its gradient needs")
    reached = [g for g in gradients if g is not None]
    if len(reached) < len(gradients):
        return subject.not_applicable("needs a stream that passes through every layer")
    # Times the stream's own size: what a change by a given part of it does to the output. A stream that
    # a norm reads has a gradient in inverse proportion to its size, which is no fault.
    # Only at positions that the output reads: a head that reads a class token, or the last token, has no
    # direct gradient elsewhere, and the attention to the rest is no part of the depth.
    read = reached[-1].ne(0).any(dim=-1)
    read = read if read.any() else torch.ones_like(read)
    pairs = zip(stream.after, reached, strict=True)
    sizes = [_size(x[read]) * _size(g[read]) for x, g in pairs][::-1]
    backwards = Stream(stream.layers[::-1], stream.after[::-1])
    return _judged(
        subject,
        sizes,
        backwards,
        what="The gradient of the residual stream, times the stream,",
        advice="Look for layers without a residual connection or a norm, weights far from 1 / sqrt(fan in), "
        "and a scale of the stream that each layer applies anew.",
    )


def _judged(subject: Subject, sizes: list[float], stream: Stream, *, what: str, advice: str) -> CheckResult:
    """By the growth from the first to the last of `sizes`, in nats."""
    L = len(sizes)
    if not all(math.isfinite(size) for size in sizes):
        place = next(i for i, size in enumerate(sizes) if not math.isfinite(size))
        meaning = f"{what} is not finite."
        return subject.failed(where=stream.layers[place], meaning=meaning, advice=advice)
    if min(sizes) == 0:
        if max(sizes) == 0:
            return subject.not_applicable(f"{what.lower()} is 0 everywhere")
        return subject.warned(
            where=stream.layers[sizes.index(0)],
            meaning=f"{what} is 0 at this layer and not at the others.",
            correct_if="this layer is switched off at the start, as by a gate of 0",
            advice=advice,
        )
    logs = [math.log(size) for size in sizes]
    growth, limit = logs[-1] - logs[0], math.log(L) + EXPLOSIVE
    steps = [b - a for a, b in pairwise(logs)]
    worst = max(range(L - 1), key=lambda i: abs(steps[i])) + 1
    meaning = (
        f"{what} changes by {growth:+.2f} nats (x{math.exp(min(growth, 700)):.3g}) over {L} layers, "
        f"{growth / (L - 1):+.2f} a layer."
    )
    if growth > limit and L >= _ENOUGH_LAYERS:
        return subject.failed(growth, limit, where=stream.layers[worst], meaning=meaning, advice=advice)
    if growth < -(math.log(L) + VANISHED) and L >= _ENOUGH_LAYERS:
        return subject.failed(-growth, math.log(L) + VANISHED, meaning=meaning, advice=advice)
    usual = math.log(L) + UNUSUAL
    if abs(growth) > usual:
        return subject.warned(
            abs(growth),
            usual,
            where=stream.layers[worst],
            meaning=meaning,
            correct_if="the architecture is published with such a start and trains stably at full depth",
            advice=advice,
        )
    return subject.passed(abs(growth), usual, meaning=meaning)


def _size(x_C: Tensor) -> float:
    """Return the median over positions (...) of the root mean square of x (..., C), without those that are 0.

    It is inf if any is not finite. The mean would not do: the gradient of a norm at a padding token, whose
    embedding is 0, is 1 / sqrt(eps).
    """
    sizes = x_C.detach().double().square().mean(dim=-1).sqrt()
    if not sizes.isfinite().all():
        return math.inf
    return float(sizes[sizes > 0].median()) if sizes.any() else 0.0
