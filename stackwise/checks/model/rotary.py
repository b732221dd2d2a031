"""Rotary: queries and keys are rotated by the frequencies that the model claims.

Shapes: P rotated pairs of elements of a head.
"""

from __future__ import annotations

import math

from torch import Tensor

from stackwise.checks.check import check
from stackwise.checks.probe.rotation import Rotation, rotations_of
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.rotary import RotaryClaim

# Largest relative difference of a frequency. Rounding to bfloat16 is 4e-3, and to float32 6e-8.
_LIMIT = 1e-4
# Absolute error of an angle if the rotation is computed in float32.
_ROUNDING = 1e-7
# Angle per position above which values are treated as rotated. Rotary embeddings have angles up to 1.
_TURNED = 0.1


@check
def rotary_frequencies(subject: Subject) -> CheckResult:
    """Does each layer rotate queries and keys by the claimed frequencies?"""
    claims = subject.spec.rotary
    if not claims:
        return subject.not_applicable("needs ModelSpec.rotary, or a configuration that states it")
    seen = rotations_of(subject)
    rotated = [each for each in seen if all(one.is_pure and len(one.frequencies) for one in each[:2])]
    if not rotated:
        return subject.not_applicable("needs a layer that rotates queries and keys, and changes nothing else")
    worst = 0.0
    for number, operands in enumerate(rotated, start=1):
        if any(values.is_pure and bool((values.frequencies > _TURNED).any()) for values in operands[2:]):
            return subject.failed(
                float(operands[2].frequencies[0]),
                _TURNED,
                where=f"values of attention {number} of {len(rotated)}",
                meaning="Values depend on the position, although all tokens are equal.",
                advice="Rotate queries and keys only.",
            )
        for name, rotation in zip(("queries", "keys"), operands, strict=False):
            claim = min(claims, key=lambda each: _gap(rotation, each))
            gap = _gap(rotation, claim)
            if gap > _LIMIT:
                return subject.failed(
                    gap,
                    _LIMIT,
                    where=f"{name} of attention {number} of {len(rotated)}",
                    meaning=_text(rotation, claim),
                    advice="Look for another theta, for exponents 2i / dim with another dim than the part of "
                    "a head that is rotated, and for a scaling that is used twice or not at all.",
                )
            worst = max(worst, gap)
    return subject.passed(worst, _LIMIT, meaning=f"{len(rotated)} products; {' or '.join(map(str, claims))}.")


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
