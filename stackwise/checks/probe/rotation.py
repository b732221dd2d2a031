"""Rotation: the angle by which each layer rotates queries and keys from one position to the next.

If all tokens of a sequence are equal, queries and keys of a layer differ between positions only by their
rotation. A dispatch mode records them where their product is taken.

Shapes: N batch times heads, T positions, D head size, P rotated pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stackwise.checks.probe.call import refusals
from stackwise.checks.probe.operations import Operations
from stackwise.checks.subject import Subject

__all__ = ["LENGTH", "Rotation", "rotations_of"]

LENGTH = 13  # of the measured sequence; unlikely to be a head size or a number of heads
# dtype -> (change of an element between positions, relative to the norm, above which it is rotated; smallest
# frequency that can be measured; rounding error of an angle, which may be computed in float32).
_RESOLUTION = {torch.float64: (1e-9, 1e-8, 1e-6), torch.float32: (1e-5, 1e-3, 1e-5)}
# Largest change of the length of a rotated pair, relative to the change of its elements, and largest
# difference of its angles, relative to their mean.
_IMPURE = 1e-2


@dataclass(frozen=True)
class Rotation:
    """Rotation of the queries, or of the keys, of one layer.

    Attributes:
        frequencies: angles per position of the rotated pairs (P,), in float64 and descending order. Empty:
            nothing depends on the position.
        head_dim: D.
        is_pure: True if each pair of elements is only rotated.
        least: smallest frequency that can be measured in the dtype of the model.
        layout: "halves" or "interleaved" pairs. "": unknown.
        turns: numbers of the two elements of a pair -> signed angle per position, if it is measurable.
    """

    frequencies: Tensor
    head_dim: int
    is_pure: bool
    least: float
    layout: str = ""
    turns: dict[tuple[int, int], float] = field(default_factory=dict)


def rotations_of(subject: Subject) -> list[tuple[Rotation, ...]]:
    """Return the rotations of queries, keys and, if a softmax multiplies them, values, in order of calls.

    []: the model does not run with a sequence of equal tokens.
    """
    length = min(LENGTH, subject.spec.max_length or LENGTH)
    token = subject.inputs(1, 1)
    inputs = token.expand(1, length, *token.shape[2:]).contiguous()
    for dtype in _RESOLUTION:  # some kernels for mixtures of experts have no float64
        model = subject.model(dtype=dtype, fill_zeros=True)
        try:
            products = _products(subject, model, inputs)
        except refusals():
            continue
        return [tuple(map(rotation_of, each)) for each in products]
    return []


def rotation_of(x: Tensor) -> Rotation:
    """Return the rotation between the positions of vectors (N, T, D) that are equal without it."""
    least_change, least, rounding = _RESOLUTION.get(x.dtype, _RESOLUTION[torch.float32])
    vectors = x[x.double().norm(dim=(1, 2)).argmax()].double()  # of one head
    D = vectors.shape[-1]
    change = (vectors - vectors[:1]).abs().amax(dim=0) / vectors.norm(dim=1).max()
    free = [i for i in range(D) if change[i] > least_change]
    frequencies, is_pure, distances, turns = [], True, set[int](), dict[tuple[int, int], float]()
    while len(free) > 1:
        first = max(free, key=lambda i: float(change[i]))
        free.remove(first)
        errors = {second: _impurity(vectors[:, first], vectors[:, second]) for second in free}
        second = min(errors, key=lambda each: errors[each])
        free.remove(second)
        steps = _angles(vectors[:, first], vectors[:, second])
        frequencies.append(abs(float(steps.mean())))
        is_even = bool(((steps - steps.mean()).abs() < _IMPURE * frequencies[-1] + rounding).all())
        distances.add(abs(first - second))
        if frequencies[-1] > max(least, rounding):
            sign = 1 if first < second else -1
            turns[min(first, second), max(first, second)] = sign * float(steps.mean())
        is_pure = is_pure and is_even and (errors[second] < _IMPURE or frequencies[-1] < least)
    is_pure = is_pure and all(change[i] < least for i in free)
    ordered = torch.tensor(frequencies, dtype=torch.float64).sort(descending=True).values
    is_known = len(distances) == 1 and len(ordered) > 1
    layout = ("interleaved" if distances == {1} else "halves") if is_known else ""
    return Rotation(ordered, D, is_pure, least, layout, turns)


def _impurity(x: Tensor, y: Tensor) -> float:
    """Return the change of the length of (x, y) between positions, relative to the change of x and y."""
    length = (x.square() + y.square()).sqrt()
    moved = ((x - x[0]).square() + (y - y[0]).square()).sqrt()
    return float((length - length[0]).abs().max() / moved.max())


def _angles(x: Tensor, y: Tensor) -> Tensor:
    """Return the angles (T - 1,) from one position to the next."""
    vectors = torch.complex(x, y)
    return (vectors[1:] * vectors[:-1].conj()).angle()


def _products(subject: Subject, model: nn.Module, inputs: Tensor) -> list[list[Tensor]]:
    """Return queries and keys (N, T, D) of each product of scores (N, T, T), and the values."""
    square = (inputs.shape[1],) * 2
    seen: list[list[Tensor]] = []
    is_normalized = False  # linear attention has no softmax, and often no rotary embedding

    def record(name: str, args: Any, output: Any) -> None:
        nonlocal is_normalized
        if name in ("bmm", "baddbmm") and output.shape[-2:] == square:
            queries, keys = args[-2:]
            seen.append([queries.detach().clone(), keys.detach().mT.clone()])
            is_normalized = False
        elif "softmax" in name and output.shape[-2:] == square:
            is_normalized = True
        elif name == "bmm" and is_normalized and args[0].shape[1:] == square:
            seen[-1][2:] = [args[1].detach().clone()]

    kernel, operations = sdpa_kernel([SDPBackend.MATH]), Operations(record)
    with torch.enable_grad(), subject.fixed_randomness(), kernel, operations:
        subject.spec.logits(model, inputs)
    return seen
