"""Rotary: queries and keys are rotated by the frequencies that the model claims.

Shapes: P rotated pairs of elements of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from stackwise.checks.check import check
from stackwise.checks.probe.rotation import LENGTH, Rotation, rotations_of
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.rotary import RotaryClaim, rotary_by_layer, rotary_in

# Largest relative difference of a frequency. Rounding to bfloat16 is 4e-3, and to float32 6e-8.
_LIMIT = 1e-4
# Absolute error of an angle if the rotation is computed in float32.
_ROUNDING = 1e-7
# Angle per position above which values are treated as rotated. Rotary embeddings have angles up to 1.
_TURNED = 0.1
_FREQUENCIES = """Look for another theta, for exponents 2i / dim with another dim than the part of a head \
that is rotated, and for a scaling that is used twice or not at all."""
_BOTH = """Rotate the queries and keys of each layer by the same angles. If some layers have no rotary \
embedding on purpose, declare it: ModelSpec.of(model, rotary=(claim, None))."""
# Products of each layer: the rotations of queries, of keys and, if they are seen, of values.
_Product = tuple[Rotation, ...]
_Layers = list[list[_Product]]


@check
def rotary_frequencies(subject: Subject) -> CheckResult:
    """Does each layer rotate queries and keys by the claimed frequencies?"""
    claims = [claim for claim in subject.spec.rotary if claim is not None]
    if not claims:
        return subject.not_applicable("needs ModelSpec.rotary, or a configuration that states it")
    if any(claim.kind == "longrope" and claim.original_length < LENGTH for claim in claims):
        return subject.not_applicable(f"needs factors of longrope that are used for {LENGTH} positions")
    layers = _layers(rotations_of(subject))
    if not_rotated := _not_rotated(subject, layers):
        return not_rotated
    results = list(_compared(subject, layers, claims))
    if failures := [result for result in results if not result.ok]:
        return failures[0]
    if not results:
        return subject.not_applicable("needs a layer that rotates queries and keys, and changes nothing else")
    meaning = f"{len(results)} of {len(layers)} layers; {' or '.join(map(str, claims))}."
    has_factor = any(claim.attention_factor not in (None, 1.0) for claim in claims)
    if has_factor and subject.spec.facts.attention_scale is None:
        meaning += " The attention factor is not measured: declare Facts.attention_scale."
    return subject.passed(max(result.value or 0.0 for result in results), _LIMIT, meaning=meaning)


def _is_rotated(rotation: Rotation) -> bool:
    return rotation.is_pure and bool(rotation.turns)


def _operands(layers: _Layers) -> list[Rotation]:
    """Return the rotations of all queries and keys."""
    return [rotation for layer in layers for product in layer for rotation in product[:2]]


def _not_rotated(subject: Subject, layers: _Layers) -> CheckResult | None:
    """Return a result if no layer rotates anything."""
    operands = _operands(layers)
    if not operands or any(not rotation.is_pure or rotation.turns for rotation in operands):
        return None
    is_declared = subject.spec.rotary != rotary_in(getattr(subject.model(), "config", None))
    return subject.failed_unless(
        None if is_declared else "the model has other positions in its place",
        0.0,
        where=f"all {len(layers)} layers",
        meaning="No layer rotates queries and keys by their positions.",
        advice="Look for a rotation whose result is not used, and for a table of angles that is 0.",
    )


def _compared(subject: Subject, layers: _Layers, claims: Sequence[RotaryClaim]) -> Iterator[CheckResult]:
    """Yield the result of each product of rotated queries and keys."""
    config = getattr(subject.model(), "config", None)
    by_layer = rotary_by_layer(config) if subject.spec.rotary == rotary_in(config) else ()
    is_rotary = any(map(_is_rotated, _operands(layers)))
    for number, layer in enumerate(layers):
        own = by_layer[number : number + 1] if len(by_layer) == len(layers) else claims
        place = f"attention {number + 1} of {len(layers)}"
        for product in layer:
            if all(map(_is_rotated, product[:2])):
                yield _reversed(subject, product, config, place) or _of_product(subject, product, own, place)
        # A sum of two products, such as that of latent attention, may have one that is not rotated.
        is_plain = len(layer) == 1 and len(layer[0]) > 2 and len(subject.spec.rotary) == 1
        if is_rotary and is_plain and any(x.is_pure and not x.turns for x in layer[0][:2]):
            text = "Queries or keys do not depend on the position, and the claim holds for each layer."
            yield subject.failed(1.0, 0.0, where=place, meaning=text, advice=_BOTH)


def _reversed(subject: Subject, product: _Product, config: Any, place: str) -> CheckResult | None:
    """Return a failure if a model with a configuration of a library rotates in the other direction.

    All models of transformers and litgpt but one rotate the first element of a pair towards the second.
    """
    turns = product[0].turns.values()
    is_stated = subject.spec.rotary == rotary_in(config)
    if not is_stated or not turns or max(turns) > 0 or getattr(config, "model_type", "") == "nanochat":
        return None
    return subject.failed(
        max(turns),
        0.0,
        where=f"queries of {place}",
        meaning="Queries and keys are rotated in the opposite direction of the models with this "
        "configuration, so that their weights give other outputs.",
        advice="Look for cos and sin in the wrong order, and for the sign in rotate_half.",
    )


def _of_product(
    subject: Subject, product: _Product, claims: Sequence[RotaryClaim], place: str
) -> CheckResult:
    """Compare queries, keys and, if they are known, values of one product with the claims."""
    queries, keys, *values = product
    if any(x.is_pure and bool((x.frequencies > _TURNED).any()) for x in values):
        text = "Values depend on the position, although all tokens are equal."
        found, advice = float(values[0].frequencies[0]), "Rotate queries and keys only."
        return subject.failed(found, _TURNED, where=f"values of {place}", meaning=text, advice=advice)
    if any(angle * keys.turns.get(pair, 0) < 0 for pair, angle in queries.turns.items()):
        text = "Keys are rotated in the opposite direction of queries."
        return subject.failed(1.0, 0.0, where=f"keys of {place}", meaning=text, advice=_BOTH)
    worst = 0.0
    for name, rotation in (("queries", queries), ("keys", keys)):
        gap, claim = min(((_gap(rotation, each), each) for each in claims), key=lambda pair: pair[0])
        if gap > _LIMIT:
            text, site = _text(rotation, claim), f"{name} of {place}"
            return subject.failed(gap, _LIMIT, where=site, meaning=text, advice=_FREQUENCIES)
        worst = max(worst, gap)
    return subject.passed(worst, _LIMIT)


def _layers(seen: list[_Product]) -> _Layers:
    """Return the products of each layer: all before its values are used, or one if no values are seen."""
    layers: _Layers = [[]]
    has_values = any(len(operands) > 2 for operands in seen)
    for operands in seen:
        layers[-1].append(operands)
        if len(operands) > 2 or not has_values:
            layers.append([])
    return [layer for layer in layers if layer]


def _wanted(rotation: Rotation, claim: RotaryClaim) -> Tensor:
    """Return the claimed frequencies (P,) in descending order."""
    return claim.frequencies(rotation.head_dim).sort(descending=True).values.to(rotation.frequencies)


def _gap(rotation: Rotation, claim: RotaryClaim) -> float:
    """Return the largest relative difference of a frequency, above rounding.

    Return inf if the number of pairs or the layout differs.
    """
    if claim.layout and rotation.layout and claim.layout != rotation.layout:
        return math.inf
    wanted = _wanted(rotation, claim)
    n = int((wanted > rotation.least).sum())
    if not n <= len(rotation.frequencies) <= len(wanted):
        return math.inf
    difference = (rotation.frequencies[:n] - wanted[:n]).abs()
    return float(((difference - _ROUNDING).clamp(min=0) / wanted[:n]).max())


def _text(rotation: Rotation, claim: RotaryClaim) -> str:
    found, wanted = rotation.frequencies, _wanted(rotation, claim)
    if claim.layout and rotation.layout and claim.layout != rotation.layout:
        return f"The pairs are {rotation.layout}, and {claim.layout} pairs are claimed ({claim})."
    if _gap(rotation, claim) == math.inf:
        return (
            f"{2 * len(found)} of the {rotation.head_dim} elements of a head are rotated, and "
            f"{2 * len(wanted)} are claimed ({claim})."
        )
    wanted = wanted[: len(found)]
    place = int(((found - wanted).abs() / wanted * (wanted > rotation.least)).argmax())
    return (
        f"The angle per position of pair {place} of {len(found)} is {found[place]:.6g}, and "
        f"{wanted[place]:.6g} is claimed ({claim})."
    )
