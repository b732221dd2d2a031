"""Depth: the size of activations and gradients is stable from layer to layer.

Shapes: B batch, T positions, C width, L layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.model.norm import is_named_norm
from stackwise.checks.probe.backward import gradients_at
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.call import reason_of, refusals
from stackwise.checks.probe.layers import Stream, pattern, residual_stream
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.support.hooks import temporary_hooks

# Growth in nats beyond ln L, the largest growth by L equal contributions to a residual stream.
UNUSUAL, EXPLOSIVE, VANISHED = 1.5, 3.0, 12.0
# In fewer layers, one unusual layer could decide.
_ENOUGH_LAYERS = 4
_BLOCK_MATRICES = 3  # a feed-forward network has two
_DOUBLED = 1.5  # smallest factor of a stream that is added twice
_ROUNDING = 1e-2
_NO_BLOCKS = "needs two layers of one type, one after the other, with at least three matrices each"
_TOO_FEW = "needs at least two layers of one type that run one after the other"


@check
def depth_activations(subject: Subject) -> CheckResult:
    """Is the size of the residual stream stable from layer to layer, in a new model?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    stream = _stream(subject, subject.model())
    if stream is None or len(stream.after) < 2:
        return subject.not_applicable(_TOO_FEW)
    sizes = [_size(x) for x in stream.after]
    return _judged(
        subject,
        sizes,
        stream,
        measured="The size of the residual stream",
        advice="Look for a residual that is added twice, large weights in layers without a norm, a missing "
        "norm after the residual branch, and branches that are divided by 1 / sqrt(2 L) instead of "
        "multiplied by it.",
    )


@check
def residual_path(subject: Subject) -> CheckResult:
    """If the weights of a layer are 0, does the layer pass the residual stream on, without a larger scale?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    model = subject.model()
    stream = _stream(subject, model)
    # The stream after the last layer may be the output of this layer, which its caller adds.
    layers = [] if stream is None else [name for name in stream.layers[:-1] if _is_block(model, name)]
    if not layers:
        return subject.not_applicable(_NO_BLOCKS)
    assert stream is not None
    for name, factor in _factors(subject, layers, width=stream.first.shape[-1]).items():
        if 0 < factor < _DOUBLED or _has_other_stream(subject, name):
            continue
        without = "the output of this layer is the same for all inputs: no path leads around the weights"
        times = f"this layer multiplies the residual stream by {factor:.4g}"
        return subject.warned(
            factor,
            1.0,
            where=name,
            meaning=f"If its weights are 0, {times if factor else without}.",
            correct_if="the published architecture has no residual connection here, projects the stream, or "
            "scales it",
            advice="Look for x = layer(x) in place of x = x + layer(x), and for x that is added twice.",
        )
    return subject.passed(meaning=f"Layers with a path around their weights: {len(layers)}.")


@check
def residual_norms(subject: Subject) -> CheckResult:
    """Do the skip connections of a layer pass through norms either all or not at all?"""
    model = subject.model()
    stream = _stream(subject, model)
    layers = [] if stream is None else [name for name in stream.layers if _is_block(model, name)]
    if len(layers) < 2:
        return subject.not_applicable(_NO_BLOCKS)
    assert stream is not None
    model = _without_matrices(subject, layers, least=2)
    norms = defaultdict[str, list[nn.Module]](list)
    for layer in layers:
        for name, module in model.get_submodule(layer).named_modules():
            # A class such as PreLayerNormAttention contains more than a norm.
            if is_named_norm(module) and all(p.ndim < 2 for p in module.parameters()):
                norms[name].append(module)
    in_all = {name: some for name, some in norms.items() if len(some) == len(layers)}
    stream, reads, ends = _norms_of_stream(subject, model, in_all)
    if stream is None or len(reads) < 2:
        return subject.not_applicable("needs two norms in each layer that read the residual stream")
    on_path = [name for name in reads if _is_on_path(subject, model, stream, norms[name])]
    if not on_path or len(on_path) == len(reads) or ends.issuperset(on_path):
        return subject.passed(meaning=f"Norms on the skip connections: {len(on_path)} of {len(reads)}.")
    return subject.warned(
        float(len(on_path)),
        0.0,
        where=f"{pattern(layers[0])}.{on_path[0]}",
        meaning="A skip connection starts after this norm. Other skip connections of the layer start before "
        "their norm.",
        correct_if="the published architecture normalises the residual stream within the layer",
        advice="Look for residual = x after x = norm(x): the residual must be stored before the norm.",
    )


def _norms_of_stream(
    subject: Subject, model: nn.Module, norms: dict[str, list[nn.Module]]
) -> tuple[Stream | None, list[str], set[str]]:
    """Return the residual stream, the norms that read it, and those whose output is the output of a layer.

    Args:
        subject: the model under test.
        model: the model without matrices, whose branches return constants.
        norms: norms of all layers, by their name in the layer.
    """
    calls = dict[str, list[tuple[Tensor, Tensor]]]()

    def note(name: str, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.setdefault(name, []).append((args[0], output))

    handles = [
        norm.register_forward_hook(lambda _, args, output, name=name: note(name, args, output))
        for name, some in norms.items()
        for norm in some
    ]
    with temporary_hooks(handles):
        stream = _stream(subject, model)
    if stream is None:
        return None, [], set()
    reads = {
        name: pairs
        for name, pairs in calls.items()
        if all(x.shape == stream.first.shape and x.std(dim=1).max() > _ROUNDING * x.std() for x, _ in pairs)
    }
    after = {id(x) for x in stream.after}
    ends = {name for name, pairs in reads.items() if any(id(y) in after for _, y in pairs)}
    return stream, list(reads), ends


def _is_on_path(subject: Subject, model: nn.Module, stream: Stream, norms: list[nn.Module]) -> bool:
    """Return True if noise in the outputs of norms changes the residual stream."""
    generator = torch.Generator().manual_seed(subject.seed)
    noise = torch.randn(stream.first.shape, generator=generator).to(stream.first)
    with temporary_hooks([norm.register_forward_hook(lambda _, __, y: y + noise) for norm in norms]):
        changed = _stream(subject, model)
    return changed is not None and any(
        (a - b).norm() > _ROUNDING * a.norm()
        for a, b in zip(stream.after[:-1], changed.after[:-1], strict=True)
    )


def _stream(subject: Subject, model: nn.Module) -> Stream | None:
    return residual_stream(model, lambda: subject.logits(model, subject.inputs(2)))


def _is_block(model: nn.Module, name: str) -> bool:
    """Return True if a layer has at least three matrices and is not recurrent."""
    layer = model.get_submodule(name)
    return (
        not isinstance(layer, nn.RNNBase) and sum(p.ndim > 1 for p in layer.parameters()) >= _BLOCK_MATRICES
    )


def _has_other_stream(subject: Subject, name: str) -> bool:
    """Return True if a layer gets or returns several activations. One of them may be the residual stream."""
    model, counts = subject.model(), list[int]()

    def count(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # (B, T, ..., C): the layer may keep several streams, or those of earlier layers.
        got, returned = (
            [(*x.shape[:2], x.shape[-1]) for x in tensors_in(each) if x.ndim > 2]
            for each in ((*args, *kwargs.values()), output)
        )
        counts.extend(shapes.count(returned[0]) for shapes in (got, returned) if returned)

    with temporary_hooks([model.get_submodule(name).register_forward_hook(count, with_kwargs=True)]):
        subject.logits(model, subject.inputs(2))
    return max(counts, default=0) > 1


@torch.no_grad()
def _factors(subject: Subject, layers: list[str], *, width: int) -> dict[str, float]:
    """Return the factor by which each layer scales the stream if all matrices are 0.

    Without a constant factor, as after a norm, the factor is 1.
    """
    stream = _stream(subject, _without_matrices(subject, layers, least=width // 4))
    if stream is None:
        return {}
    before = dict(zip(stream.layers, (stream.first, *stream.after), strict=False))
    after = dict(zip(stream.layers, stream.after, strict=False))
    return {name: _factor(before[name], after[name]) for name in layers if name in after}


@torch.no_grad()
def _without_matrices(subject: Subject, layers: list[str], *, least: int) -> nn.Module:
    """Return a new model in which the matrices of the layers are 0, if both sizes are at least `least`.

    Matrices that mix several streams are small. A gain may have dimensions of size 1.
    """
    model = subject.model()
    for name in layers:
        for p in model.get_submodule(name).parameters():
            if p.ndim > 1 and sorted(p.shape)[-2] >= least:
                p.zero_()
    return model


def _factor(before: Tensor, after: Tensor) -> float:
    start, end = (x.flatten(0, 1).double() for x in (before, after))
    start, end = start - start.mean(dim=0), end - end.mean(dim=0)  # without biases
    if not start.norm() > 0:
        return 1.0  # a stream that starts at 0, or follows a layer without a path
    if end.norm() <= _ROUNDING * start.norm():
        return 0.0
    factor = float((start * end).sum() / start.square().sum())
    return factor if (end - factor * start).norm() <= _ROUNDING * end.norm() else 1.0


@check
def depth_gradients(subject: Subject) -> CheckResult:
    """Is the product of gradient size and residual stream size stable from layer to layer, in a new model?"""
    if subject.spec.trained:
        return subject.not_applicable("the weights are trained")
    model, outputs = subject.model(), list[Tensor]()
    with torch.enable_grad(), subject.fixed_randomness():
        stream = residual_stream(model, lambda: outputs.append(subject.spec.logits(model, subject.inputs(2))))
    if stream is None or len(stream.after) < 2:
        return subject.not_applicable(_TOO_FEW)
    # The gradient of a random projection of the output, because a loss may be flat in a new model.
    generator = torch.Generator().manual_seed(subject.seed)
    direction = torch.randn(outputs[0].shape, generator=generator).to(outputs[0])
    direction = direction.masked_fill(~outputs[0].isfinite(), 0.0)
    try:
        gradients = gradients_at(outputs[0], stream.after, direction)
    except refusals() as error:  # such as a model that changes tensors in place that it needs
        return subject.not_applicable(f"needs a backward pass in eval mode: {reason_of(error)}")
    reached = [g for g in gradients if g is not None]
    if len(reached) < len(gradients):
        return subject.not_applicable("needs a stream that passes through every layer")
    # Times the size of the stream: before a norm, the gradient is in inverse proportion to the stream.
    # Only positions that the head reads, such as a class token, have a direct gradient.
    read = reached[-1].ne(0).any(dim=-1)
    read = read if read.any() else torch.ones_like(read)
    pairs = zip(stream.after, reached, strict=True)
    sizes = [_size(x[read]) * _size(g[read]) for x, g in pairs][::-1]
    backwards = replace(stream, layers=stream.layers[::-1], after=stream.after[::-1])
    return _judged(
        subject,
        sizes,
        backwards,
        measured="The gradient of the residual stream, times the stream,",
        advice="Look for layers without a residual connection or a norm, weights much larger or smaller than "
        "1 / sqrt(fan in), and a scale of the stream that every layer applies.",
    )


def _judged(
    subject: Subject, sizes: list[float], stream: Stream, *, measured: str, advice: str
) -> CheckResult:
    """Compare the growth from the first to the last size, in nats, with the limits."""
    L = len(sizes)
    if infinite := [
        layer for layer, size in zip(stream.layers, sizes, strict=True) if not math.isfinite(size)
    ]:
        return subject.failed(where=infinite[0], meaning=f"{measured} is not finite.", advice=advice)
    if max(sizes) == 0:
        return subject.not_applicable(f"{measured.lower()} is 0 in every layer")
    if min(sizes) == 0:
        return subject.warned(
            where=stream.layers[sizes.index(0)],
            meaning=f"{measured} is 0 at this layer only.",
            correct_if="this layer is off at the start, for example by a gate of 0",
            advice=advice,
        )
    logs = [math.log(size) for size in sizes]
    growth = logs[-1] - logs[0]
    steps = [b - a for a, b in pairwise(logs)]
    worst = max(range(L - 1), key=lambda i: abs(steps[i])) + 1
    meaning = (
        f"{measured} changes by {growth:+.2f} nats (x{math.exp(min(growth, 700)):.3g}) over {L} layers, "
        f"{growth / (L - 1):+.2f} a layer."
    )
    size, usual = abs(growth), math.log(L) + UNUSUAL
    if size <= usual:
        return subject.passed(size, usual, meaning=meaning)
    largest = math.log(L) + (EXPLOSIVE if growth > 0 else VANISHED)
    is_certain = size > largest and L >= _ENOUGH_LAYERS
    return subject.failed_unless(
        None
        if is_certain
        else "the published architecture has this initialisation and trains stably at full depth",
        size,
        largest if is_certain else usual,
        where=stream.layers[worst],
        meaning=meaning,
        advice=advice,
    )


def _size(x_C: Tensor) -> float:
    """Return the median over positions (...) of the nonzero root mean squares of x (..., C), or inf.

    It is inf if any is not finite. The mean is not robust: the gradient of a norm at a padding token with
    embedding 0 is 1 / sqrt(eps).
    """
    sizes = x_C.detach().double().square().mean(dim=-1).sqrt()
    if not sizes.isfinite().all():
        return math.inf
    return float(sizes[sizes > 0].median()) if sizes.any() else 0.0
