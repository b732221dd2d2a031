"""Attention facts: scale, cap, biases, shared keys, windows and dropout, compared with the claims.

Shapes: H heads, T positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stackwise.checks.model.norm import is_named_norm
from stackwise.checks.probe.claimed import Pair, UnmeasuredError, claimed, each
from stackwise.checks.probe.dropout import dropout_rate
from stackwise.checks.probe.planted import N_ROWS, SMALL, Planted, Site, by_row, planted
from stackwise.checks.subject import Subject
from stackwise.support.arguments import require

_LARGE, _SHORT, _LONGEST = 1e4, 13, 512
_NOISE = 0.1  # separates equal biases
_SAME_BIAS = 1e-5  # some models compute scores in float32
_PRODUCTS = "attention whose scores are products of planted queries and keys"


@claimed(
    "factor between q k^T and the scores",
    place="attention",
    advice="Look for a scale that does not use the head size, or that is applied twice or not at all.",
    reason=_PRODUCTS,
)
def claimed_attention_scale(subject: Subject, claim: float | tuple[float, ...]) -> list[Pair]:
    """Are attention scores equal to q k^T times the claimed factor?"""
    calls = [planted(subject, size, even=True) for size in (SMALL, 2 * SMALL)]
    one, two = (call.sites for call in calls)
    # A rotary embedding multiplies queries and keys by its attention factor.
    sizes = {site.queries.shape[-1] for site in one}
    found = {x.score_factor(size) if x else 1.0 for size in sizes for x in subject.spec.rotary}
    factor, *others = found or {1.0}
    if factor is None or others:
        raise UnmeasuredError("needs one attention_factor in ModelSpec.rotary")
    claims = [factor * x for x in each(claim, len(one))]
    is_trained = subject.spec.trained
    places = zip(one, two, claims, strict=True)
    return [(_scale(calls[0], *place, is_trained=is_trained), place[2]) for place in places]


@claimed(
    "largest score for large queries and keys, and for scores of the size of the cap,",
    place="attention",
    advice="Look for a cap that is not applied, applied twice or before the scale, and for a clamp.",
    reason=f"{_PRODUCTS}, without a norm or biases",
)
def claimed_attention_cap(subject: Subject, claim: float) -> list[Pair]:
    """Do scores saturate at the claimed cap?"""
    one = planted(subject, even=True).sites
    largest = max((_largest(site.scores, site) for site in one), default=0.0)
    sizes = (_LARGE, SMALL * (claim / largest) ** 0.5 if largest else SMALL)
    pairs: list[Pair] = []
    for small, *larger in zip(one, *(planted(subject, x, even=True).sites for x in sizes), strict=True):
        factor = small.factor or 0.0
        bias = _largest(small.scores - factor * small.queries @ small.keys.mT, small)
        raw = [abs(factor) * _largest(x.queries @ x.keys.mT, x) for x in larger]
        is_known = _grows(small, larger[0], _LARGE / SMALL) and bias <= 1e-3 * _largest(small.scores, small)
        found = tuple(_largest(x.scores, x) for x in larger) if is_known else None
        pairs.append((found, tuple(claim * math.tanh(x / claim) for x in raw)))
    return pairs


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
    counts = {len(x) for x in found if x is not None}
    if counts == {1} != {len(claim)}:
        raise UnmeasuredError("needs all heads of a layer in one product")
    for n in counts:
        require(len(claim) == n, "alibi_slopes", claim, f"a tuple of {n} numbers, one for each head")
    farthest = lambda rows, wanted: max(rows, key=lambda x: abs(x - wanted))  # noqa: E731
    return [(x and tuple(map(farthest, x, claim)), claim) for x in found]


@claimed(
    "relative position, and the nearest one with the same bias,",
    place="attention",
    advice="Look for a wrong sign, another largest distance, and buckets of both directions in a decoder.",
    reason=f"{_PRODUCTS}, plus biases that depend on the distance",
)
def claimed_relative_buckets(subject: Subject, claim: tuple[int, int]) -> list[Pair]:
    """Do the relative positions of each claimed bucket, and no others, have the same bias?"""
    length = _measurable(subject, claim[1] + 3)
    return [_first_other(x, *claim) for x in planted(subject, length=length, noise=_NOISE).sites]


@claimed(
    "key head of each query head",
    place="attention",
    advice="Look for repeat() in place of repeat_interleave(), and for a view with heads in another order.",
    reason="a product of queries and keys for each head",
)
def claimed_key_heads(subject: Subject, claim: int) -> list[Pair]:
    """Is the number of key heads as claimed, and do consecutive query heads share a key and value head?"""
    pairs: list[Pair] = []
    call = planted(subject)
    for site in call.sites:
        order = call.order(site)
        if order is None and site.n_shared > 1:  # the order of the heads of the product is unknown
            pairs += [(None, ())] * 2
            continue
        keys, values = (() if x is None else _heads(x, order) for x in (site.keys, site.values))
        n = len(keys) or claim
        if n == 1 != claim:
            raise UnmeasuredError("needs all heads of a layer in one product")
        require(n % claim == 0, "key_heads", claim, f"a divisor of the number of heads, {n}")
        wanted = tuple(head // (n // claim) for head in range(n))
        pairs += [(heads or None, wanted) for heads in (keys, values)]
    return pairs


@claimed(
    "number of positions that a query reads",
    place="attention",
    advice="Look for < in place of <=, and for windows that are assigned to the wrong layers.",
    reason="a softmax over all positions",
)
def claimed_windows(subject: Subject, claim: tuple[int | None, ...]) -> list[Pair]:
    """Does each layer read the claimed number of positions?"""
    if not subject.spec.causal:
        raise UnmeasuredError("needs a causal model")
    length = _measurable(subject, max(_SHORT, *(0 if window is None else window + 3 for window in claim), 0))
    sites, pairs = planted(subject, length=length).sites, []
    for site, window in zip(sites, each(claim, len(sites)), strict=True):
        counts = site.visible.sum(dim=-1)  # (N, T)
        wanted = torch.arange(1, length + 1).clamp(max=window or length).expand_as(counts)
        worst = int((counts - wanted).abs().argmax())
        pairs.append((int(counts.flatten()[worst]), int(wanted.flatten()[worst])))
    return pairs


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


def _measurable(subject: Subject, length: int) -> int:
    """Return a length, or raise an UnmeasuredError if it is too long."""
    longest = min(subject.spec.max_length or _LONGEST, _LONGEST)
    if length > longest:
        raise UnmeasuredError(f"needs a sequence of {length} positions, and at most {longest} are measured")
    return length


def _grows(one: Site, two: Site, ratio: float) -> bool:
    """Return True if queries and keys grow with the planted values. Then they are not normalised."""
    if one.size is None or two.size is None or one.factor is None:
        return False
    return abs(two.size / one.size / ratio**2 - 1) < 1e-3


def _scale(call: Planted, one: Site, two: Site, claim: float, *, is_trained: bool) -> float | None:
    """Return the factor of the scores. Normalised queries and keys have RMS 1, length 1, or that of norms."""
    if _grows(one, two, 2.0):
        return one.size * one.factor / SMALL**2  # type: ignore[operator]
    if one.size is None or two.size is None or one.factor is None:
        return None
    if abs(two.size / one.size - 1) > 1e-2 or is_trained:
        return None
    of_rms, D = one.size * one.factor, one.queries.shape[-1]
    found = (of_rms, of_rms * D, of_rms / _rms_of_norms(call, D) ** 2)
    return min(found, key=lambda scale: abs(scale - claim))


def _rms_of_norms(call: Planted, width: int) -> float:
    """Return the RMS of the outputs of all norms of a width, or 1 if they differ."""
    norms = [x.output for x in call.leaves if is_named_norm(x.module) and isinstance(x.output, Tensor)]
    sizes = [
        x.detach().double().square().mean(dim=-1).sqrt().flatten() for x in norms if x.shape[-1] == width
    ]
    every = torch.cat(sizes) if sizes else torch.empty(0)
    is_even = every.numel() > 0 and 0 < every.max() <= 1.01 * every.min()
    return float(every.mean()) if is_even else 1.0


def _largest(x: Tensor, site: Site) -> float:
    return float(x[site.visible].abs().max())


def _slopes(site: Site) -> list[list[float]] | None:
    """Return for each head the mean decrease of the bias per position of distance.

    There is one for the keys before each query after the first, and one for the visible keys after it.
    """
    if site.factor is None:
        return None
    steps = by_row(site.scores - site.factor * site.queries @ site.keys.mT).mean(dim=0).diff(dim=-1)[:, 1:]
    visible = by_row(site.visible).all(dim=0)
    pairs = visible[..., 1:] & visible[..., :-1]
    slopes = []
    for sign, is_seen in ((1, pairs.tril(-1)[:, 1:]), (-1, pairs.triu()[:, 1:])):
        is_used = is_seen.any(dim=-1).all(dim=0)  # by query
        if sign == 1 and not is_used.all():
            return None
        chosen, seen = sign * steps[:, is_used], is_seen[:, is_used]
        means = chosen.where(seen, 0.0).sum(dim=-1) / seen.sum(dim=-1)
        gaps = (chosen - means[..., None]).abs().where(seen, 0.0)
        if gaps.numel() and gaps.max() > 1e-2 * steps.where(is_seen, 0.0).abs().max() + 1e-6:
            return None
        slopes.append(means)
    return torch.cat(slopes, dim=-1).tolist()


def _first_other(site: Site, n_buckets: int, farthest: int) -> Pair:
    """Return the first relative position in another bucket, with the nearest positions of both buckets."""
    if site.factor is None:
        return None, ()
    bias = by_row(site.scores - site.factor * site.queries @ site.keys.mT).mean(dim=0)
    visible = by_row(site.visible).all(dim=0).all(dim=0)
    biases: dict[int, Tensor] = {}  # of each relative position
    for step in range(1 - len(visible), len(visible)):
        values = bias.diagonal(step, 1, 2)[:, visible.diagonal(step)]
        if values.numel():
            biases[step] = values[:, 0]
            if (values - values[:, :1]).abs().max() > _SAME_BIAS:
                return None, ()
    nearest: dict[int, int] = {}  # bucket -> relative position
    for step in sorted(biases, key=abs):
        bucket = _bucket(step, n_buckets, farthest, is_causal=max(biases, default=0) <= 0)
        if bucket is None:
            continue
        wanted = nearest.setdefault(bucket, step)
        same = [x for x in nearest.values() if (biases[x] - biases[step]).abs().max() <= _SAME_BIAS]
        if same != [wanted]:
            return (step, same[0] if same else step), (step, wanted)
    return (0, 0), (0, 0)


def _bucket(step: int, number: int, farthest: int, *, is_causal: bool) -> int | None:
    """Return the bucket of a relative position, or None if rounding decides."""
    number = number if is_causal else number // 2
    start, distance, exact = number * (step > 0), abs(step), number // 2
    if distance < exact:
        return start + distance
    place = math.log(distance / exact) / math.log(farthest / exact) * (number - exact)
    if exact < distance < farthest and abs(place - round(place)) < _SAME_BIAS:
        return None
    return start + min(exact + int(place + _SAME_BIAS), number - 1)


def _heads(x: Tensor, places: list[int] | None) -> tuple[int, ...]:
    """Return for each head (T, D) the index of its distinct value, or () if the number is unknown.

    `places` are the places of the heads in their order. None: they are in order.
    """
    if len(x) % N_ROWS:
        return ()
    order: list[int] = []
    heads = by_row(x)[0]
    if places is not None:
        heads = heads[places]
    for n, head in enumerate(heads):
        same = [i for i in range(n) if torch.equal(heads[i], head)]
        order.append(order[same[0]] if same else max(order, default=-1) + 1)
    return tuple(order)
