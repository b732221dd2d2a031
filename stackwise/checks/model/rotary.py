"""Rotary: queries and keys are rotated by the frequencies that the model claims.

Shapes: P rotated pairs of elements of a head.
"""

from __future__ import annotations

import math

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


@check
def rotary_frequencies(subject: Subject) -> CheckResult:
    """Does each layer rotate queries and keys by the claimed frequencies?"""
    claims = [claim for claim in subject.spec.rotary if claim is not None]
    if not claims:
        return subject.not_applicable("needs ModelSpec.rotary, or a configuration that states it")
    if any(claim.kind == "longrope" and claim.original_length < LENGTH for claim in claims):
        return subject.not_applicable(f"needs factors of longrope that are used for {LENGTH} positions")
    layers = _layers(rotations_of(subject))
    rotated = [[x for x in layer if all(y.is_pure and y.turns for y in x[:2])] for layer in layers]
    is_rotary = any(y.is_pure and y.turns for layer in layers for x in layer for y in x[:2])
    config = getattr(subject.model(), "config", None)
    by_layer = rotary_by_layer(config) if subject.spec.rotary == rotary_in(config) else ()
    worst = 0.0
    for number, layer in enumerate(layers):
        own = by_layer[number : number + 1] if len(by_layer) == len(layers) else claims
        place = f"attention {number + 1} of {len(layers)}"
        for operands in rotated[number]:
            if any(values.is_pure and bool((values.frequencies > _TURNED).any()) for values in operands[2:]):
                text = "Values depend on the position, although all tokens are equal."
                found, advice = float(operands[2].frequencies[0]), "Rotate queries and keys only."
                return subject.failed(found, _TURNED, where=f"values of {place}", meaning=text, advice=advice)
            if any(angle * operands[1].turns.get(pair, 0) < 0 for pair, angle in operands[0].turns.items()):
                text = "Keys are rotated in the opposite direction of queries."
                return subject.failed(1.0, 0.0, where=f"keys of {place}", meaning=text, advice=_BOTH)
            for name, rotation in zip(("queries", "keys"), operands, strict=False):
                claim = min(own, key=lambda each: _gap(rotation, each))
                if (gap := _gap(rotation, claim)) > _LIMIT:
                    text, site = _text(rotation, claim), f"{name} of {place}"
                    return subject.failed(gap, _LIMIT, where=site, meaning=text, advice=_FREQUENCIES)
                worst = max(worst, gap)
        is_still = is_rotary and any(x.is_pure and not x.turns for x in layer[-1][:2])
        # A sum of two products, such as that of latent attention, may have one that is not rotated.
        if is_still and len(layer) == 1 and len(layer[-1]) > 2 and len(subject.spec.rotary) == 1:
            text = "Queries or keys do not depend on the position, and the claim holds for each layer."
            return subject.failed(1.0, 0.0, where=place, meaning=text, advice=_BOTH)
    if layers and not is_rotary and all(y.is_pure for layer in layers for x in layer for y in x[:2]):
        return subject.failed_unless(
            None
            if subject.spec.rotary != rotary_in(config)
            else "the model has other positions in its place",
            0.0,
            where=f"all {len(layers)} layers",
            meaning="No layer rotates queries and keys by their positions.",
            advice="Look for a rotation whose result is not used, and for a table of angles that is 0.",
        )
    if not any(rotated):
        return subject.not_applicable("needs a layer that rotates queries and keys, and changes nothing else")
    meaning = f"{sum(map(bool, rotated))} of {len(layers)} layers; {' or '.join(map(str, claims))}."
    has_factor = any(claim.attention_factor not in (None, 1.0) for claim in claims)
    if has_factor and subject.spec.facts.attention_scale is None:
        meaning += " The attention factor is not measured: declare Facts.attention_scale."
    return subject.passed(worst, _LIMIT, meaning=meaning)


def _layers(seen: list[tuple[Rotation, ...]]) -> list[list[tuple[Rotation, ...]]]:
    """Return the products of each layer: all before its values are used, or one if no values are seen."""
    layers: list[list[tuple[Rotation, ...]]] = [[]]
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
