"""Attention facts: scale, cap, biases, shared keys, windows and dropout, compared with the claims.

Shapes: H heads, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.checks.probe.claimed import Pair, UnmeasuredError, claimed, each
from stackwise.checks.probe.dropout import dropout_rate
from stackwise.checks.probe.planted import N_ROWS, SMALL, Site, by_row, planted
from stackwise.checks.subject import Subject
from stackwise.support.arguments import require

_LARGE, _SHORT, _LONGEST = 1e4, 13, 512
_PRODUCTS = "attention whose scores are products of planted queries and keys"


@claimed(
    "factor between q k^T and the scores",
    place="attention",
    advice="Look for a scale that does not use the head size, or that is applied twice or not at all.",
    reason=_PRODUCTS,
)
def claimed_attention_scale(subject: Subject, claim: float | tuple[float, ...]) -> list[Pair]:
    """Are attention scores equal to q k^T times the claimed factor?"""
    one, two = (planted(subject, size, even=True).sites for size in (SMALL, 2 * SMALL))
    # A rotary embedding multiplies queries and keys by its attention factor.
    factors = {
        x.attention_factor or (0.0 if x.kind == "yarn" else 1.0) for x in subject.spec.rotary if x
    } or {1.0}
    if len(factors) > 1 or 0.0 in factors:
        raise UnmeasuredError("needs one attention_factor in ModelSpec.rotary")
    claims = [float(x) * min(factors) ** 2 for x in each(claim, len(one))]
    is_trained = subject.spec.trained
    return [(_scale(*pair, is_trained=is_trained), pair[2]) for pair in zip(one, two, claims, strict=True)]


@claimed(
    "largest score for large queries and keys",
    place="attention",
    advice="Look for a cap that is not applied, applied twice, or applied before the scale.",
    reason=f"{_PRODUCTS}, without a norm",
)
def claimed_attention_cap(subject: Subject, claim: float) -> list[Pair]:
    """Do scores saturate at the claimed cap?"""
    one, two = (planted(subject, size, even=True).sites for size in (SMALL, _LARGE))
    pairs = zip(one, two, strict=True)
    return [
        (
            float(large.scores[large.visible].abs().max()) if _grows(small, large, _LARGE / SMALL) else None,
            claim,
        )
        for small, large in pairs
    ]


@claimed(
    "decrease of the scores per position, by head,",
    place="attention",
    advice="Look for a wrong sign, for slopes of another number of heads, and for biases that are scaled.",
    reason=f"{_PRODUCTS}, plus biases with equal steps",
    limit=1e-2,  # some models round biases to bfloat16
)
def claimed_alibi_slopes(subject: Subject, claim: tuple[float, ...]) -> list[Pair]:
    """Do scores decrease with the distance by the claimed slope of each head?"""
    found = [_slopes(site) for site in planted(subject).sites]
    for n in {len(x) for x in found if x is not None}:
        require(len(claim) == n, "alibi_slopes", claim, f"a tuple of {n} numbers, one for each head")
    return [(x, claim) for x in found]


@claimed(
    "key head of each query head",
    place="attention",
    advice="Look for repeat() in place of repeat_interleave(), and for a view with heads in another order.",
    reason="a product of queries and keys for each head",
)
def claimed_key_heads(subject: Subject, claim: int) -> list[Pair]:
    """Is the number of key heads as claimed, and do consecutive query heads share a key and value head?"""
    pairs = []
    for site in planted(subject).sites:
        keys, values = (() if x is None else _heads(x) for x in (site.keys, site.values))
        n = len(keys) or claim
        require(n % claim == 0, "key_heads", claim, f"a divisor of the number of heads, {n}")
        wanted = tuple(head // (n // claim) for head in range(n))
        pairs += [(heads or None, wanted) for heads in (keys, values)]
    return pairs


@claimed(
    "number of positions that the last query reads",
    place="attention",
    advice="Look for < in place of <=, and for windows that are assigned to the wrong layers.",
    reason="a softmax over all positions",
)
def claimed_windows(subject: Subject, claim: tuple[int | None, ...]) -> list[Pair]:
    """Does each layer read the claimed number of positions?"""
    length = max(_SHORT, *(0 if window is None else window + 3 for window in claim), 0)
    if length > min(subject.spec.max_length or _LONGEST, _LONGEST):
        raise UnmeasuredError(f"needs a sequence of {length} positions")
    found = [int(site.visible[0, -1].sum()) for site in planted(subject, length=length).sites]
    return list(zip(found, (window or length for window in each(claim, len(found))), strict=True))


@claimed(
    "dropout rate",
    place="attention",
    advice="Look for the rate of another layer, and for dropout that is applied twice or not rescaled.",
    reason="a product of attention weights and values",
)
def claimed_attention_dropout(subject: Subject, claim: float) -> list[Pair]:
    """Is the claimed share of attention weights dropped in train mode?"""
    sites = planted(subject, train=True).sites
    return [(None if x.used is None else dropout_rate(x.weights, x.used, claim), claim) for x in sites]


def _grows(one: Site, two: Site, ratio: float) -> bool:
    """Return True if queries and keys grow with the planted values. Then they are not normalised."""
    if one.size is None or two.size is None or one.factor is None:
        return False
    return abs(two.size / one.size / ratio**2 - 1) < 1e-3


def _scale(one: Site, two: Site, claim: float, *, is_trained: bool) -> float | None:
    """Return the factor of the scores. Normalised queries and keys may have RMS 1 or length 1."""
    if _grows(one, two, 2.0):
        return one.size * one.factor / SMALL**2  # type: ignore[operator]
    if one.size is None or two.size is None or one.factor is None:
        return None
    if abs(two.size / one.size - 1) > 1e-2 or is_trained:
        return None
    of_rms = one.size * one.factor
    return min((of_rms, of_rms * one.queries.shape[-1]), key=lambda scale: abs(scale - claim))


def _slopes(site: Site) -> tuple[float, ...] | None:
    if site.factor is None:
        return None
    bias = by_row(site.scores - site.factor * site.queries @ site.keys.mT).mean(dim=0)
    steps = bias[:, -1].diff(dim=-1)  # all keys are at or before the last query
    is_even = (steps - steps.mean(dim=-1, keepdim=True)).abs().max() <= 1e-2 * steps.abs().max() + 1e-6
    return tuple(steps.mean(dim=-1).tolist()) if is_even else None


def _heads(x: Tensor) -> tuple[int, ...]:
    """Return for each head (T, D) the index of its distinct value, or () if the number is unknown."""
    if len(x) % N_ROWS:
        return ()
    order: list[int] = []
    heads = by_row(x)[0]
    for n, head in enumerate(heads):
        same = [i for i in range(n) if torch.equal(heads[i], head)]
        order.append(order[same[0]] if same else max(order, default=-1) + 1)
    return tuple(order)
