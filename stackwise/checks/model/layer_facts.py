"""Layer facts: factors, dropout, norms, experts and shared weights of layers, compared with the claims.

Shapes: B batch, T positions, C width.
"""

from __future__ import annotations

import math
import re
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from stackwise.checks.model.auxiliary import loss_terms
from stackwise.checks.model.norm import is_named_norm
from stackwise.checks.probe.call import dtype_of, refusals
from stackwise.checks.probe.claimed import Pair, UnmeasuredError, claimed, each
from stackwise.checks.probe.dropout import dropout_rate
from stackwise.checks.probe.planted import N_ROWS, SMALL, Planted, fitted, planted
from stackwise.checks.subject import Subject

_TINY, _LARGE = 1e-3, 1e5  # sizes of logits far below a cap, and far above it
_N_VECTORS = 64
# Largest relative difference of eps between two sizes of inputs, and of a sum between channels of a token.
_SAME_EPS, _UNEVEN = 0.05, 1e-2
_LEAST_LOSS = 1e-3  # the loss is computed in float32
_ADDS = "a layer that adds products with a weight to the residual stream, without a norm"
_DROPOUT = (
    "Look for the rate of another layer, for dropout that is applied twice or in one branch only, and for "
    "results that are not divided by 1 - p."
)
_FORM = "that divides by the root of the mean square or variance, plus eps"
_MEANS = r"aten\.(mean|var|var_mean|native_layer_norm|_fused_rms_norm)\."
_OTHER = r"aten\.(sum|norm|linalg_vector_norm|clamp|clamp_min|maximum)\."
_NORMS = "Look for the default eps of a norm, and for eps that is added after the square root."


@claimed(
    "factor of the embedding",
    place="embedding",
    advice="Look for sqrt(width) that is applied twice or not at all, and for the root of another width.",
    reason="one token embedding that is added to the residual stream without a norm",
)
def claimed_embedding_scale(subject: Subject, claim: float) -> list[Pair]:
    """Is the embedding of tokens multiplied by the claimed factor, before the first layer?"""
    call = planted(subject)
    first = call.streams[0]
    tables = [x for ids, x in call.lookups if torch.equal(ids, call.inputs) and x.shape == first.shape]
    found = fitted(first, tables) if len(tables) == 1 else None
    return [(found and found[0], float(claim))]


@claimed(
    "factor of each branch",
    place="layer",
    advice="Look for a factor that is applied twice, to one branch only, or to the residual stream.",
    reason=_ADDS,
)
def claimed_residual_scale(subject: Subject, claim: float | tuple[float, ...]) -> list[Pair]:
    """Is each branch multiplied by the claimed factor when it is added to the residual stream?"""
    found = planted(subject).branches()
    pairs = zip(found, each(claim, len(found)), strict=True)
    return [(tuple(x.values()) or None, (float(wanted),) * len(x)) for x, wanted in pairs]


@claimed(
    "factor of the logits",
    place="head",
    advice="Look for a product in place of a quotient, and for a factor both before and after the head.",
    reason="a head that is one matrix product of the output of a norm",
)
def claimed_logit_scale(subject: Subject, claim: float) -> list[Pair]:
    """Are the logits equal to the output of the last norm, times the head, times the claimed factor?"""
    call = planted(subject, _TINY)
    after = _head(call)
    inputs = call.products[-1].inputs if after else torch.empty(0)
    norms = [x.output for x in call.leaves if is_named_norm(x.module) and isinstance(x.output, Tensor)]
    is_input = bool(norms) and norms[-1].numel() == inputs.numel() and norms[-1].shape[-1] == inputs.shape[-1]
    before = fitted(inputs, [norms[-1].reshape(inputs.shape)]) if is_input else None
    return [(before and after and before[0] * after, float(claim))]


@claimed(
    "largest logit for a large output of the head, and for one of the size of the cap,",
    place="head",
    advice="Look for a cap that is not applied, applied twice or in one path only, and for a clamp.",
    reason="a head that is one matrix product",
)
def claimed_logit_cap(subject: Subject, claim: float) -> list[Pair]:
    """Do logits saturate at the claimed cap?"""
    factor = abs(_head(planted(subject, _TINY)) or 0.0)
    if not factor:
        return [(None, claim)]
    calls = [planted(subject, size) for size in (_LARGE, claim / factor / 2)]
    sizes = [float(factor * call.products[-1].planted.abs().max()) for call in calls]
    wanted = tuple(claim * math.tanh(size / claim) for size in sizes)
    return [(tuple(float(call.logits.abs().max()) for call in calls), wanted)]


@claimed(
    "row of the first position",
    place="table",
    advice="Look for an offset that is added twice or not at all, and for positions that start at 1.",
    reason="a table of positions that is read by an embedding",
)
def claimed_position_offset(subject: Subject, claim: int) -> list[Pair]:
    """Does the first position read the claimed row of the table of positions?"""
    call = planted(subject)
    T = call.length
    # The rows of a matrix of relative positions differ.
    rows = [ids.reshape(-1, T) for ids, _ in call.lookups if ids.ndim < 3 and ids.shape[-1] == T > 1]
    tables = [x for x in rows if (x == x[0]).all() and (x.diff(dim=-1) == 1).all()]
    return [(int(x[0, 0]), claim) for x in tables[:1]]


@claimed("dropout rate", place="embedding", advice=_DROPOUT, reason="a stream whose elements are dropped")
def claimed_embedding_dropout(subject: Subject, claim: float) -> list[Pair]:
    """Is the claimed share of the embedding dropped in train mode?"""
    call = planted(subject)
    before, after = call.streams[0], planted(subject, train=True).streams[0]
    rate = dropout_rate(before, after, claim)
    is_projected = not any(x.shape == before.shape for ids, x in call.lookups if ids.equal(call.inputs))
    # The planted result of a projection hides a dropout before it.
    return [(None if is_projected and rate == 0 else rate, claim)]


@claimed("dropout rate of each branch", place="layer", advice=_DROPOUT, reason=_ADDS)
def claimed_residual_dropout(subject: Subject, claim: float) -> list[Pair]:
    """Is the claimed share of each branch dropped in train mode?"""
    found = [list(x.items()) for x in planted(subject).branches()]
    rates: list[tuple[float, ...]] = [()] * len(found)
    for place in range(max(map(len, found), default=0)):
        chosen = {layer: pairs[place] for layer, pairs in enumerate(found) if len(pairs) > place}
        call = planted(subject, train=True, only={number for number, _ in chosen.values()})
        added = [after - before for before, after in pairwise(call.streams)]
        for layer, (number, factor) in chosen.items():
            branch = call.products[number].planted
            rate = dropout_rate(factor * branch, added[layer].reshape(branch.shape), claim)
            rates[layer] += () if rate is None else (rate,)
    return [(x or None, (claim,) * len(x)) for x in rates]


@claimed("eps", place="norm", advice=_NORMS, reason=f"a norm over the residual stream {_FORM}", limit=1e-2)
def claimed_norm_eps(subject: Subject, claim: float) -> list[Pair]:
    """Does each norm over the width of the residual stream have the claimed eps?"""
    return _eps(subject, claim, of_stream=True)


@claimed("eps", place="norm", advice=_NORMS, reason=f"a norm over another width {_FORM}", limit=1e-2)
def claimed_qk_norm_eps(subject: Subject, claim: float) -> list[Pair]:
    """Does each norm over another width, such as a norm of queries or keys, have the claimed eps?"""
    return _eps(subject, claim, of_stream=False)


@claimed(
    "index of the weight set of each layer",
    place="model",
    advice="Look for copies of a module that should be shared, and for a wrong order of layers.",
    reason="attention in layers with the same number of products of activations and weights",
)
def claimed_block_weights(subject: Subject, claim: tuple[int, ...]) -> list[Pair]:
    """Do exactly the claimed layers share their weights?"""
    call = planted(subject, noise=_TINY)  # noise separates equal copies
    starts = [site.start for site in call.sites]
    steps = {two - one for one, two in pairwise(starts)}
    if len(steps) != 1 or not starts[0]:
        return [(None, claim)]
    step = steps.pop()
    # Products that are in no layer may precede the first layer, or follow the last one.
    others = len(call.products) - len(starts) * step - (_head(call) is not None)
    first = min(max(starts[0] - others, 1), starts[0])
    sets = [[x.weight for x in call.products[i - first : i + max(step - starts[0], 0)]] for i in starts]
    found = tuple(next(i for i, one in enumerate(sets) if all(map(torch.equal, one, two))) for two in sets)
    return [(found, tuple(map(claim.index, claim)))]


@claimed(
    "number of experts per token",
    place="mixture of experts",
    advice="Look for a k that is not passed on, and for experts that are masked or added twice.",
    reason="experts that each process a part of the tokens",
)
def claimed_experts_per_token(subject: Subject, claim: int) -> list[Pair]:
    """Does the claimed number of experts process each token?"""
    counts: list[int | None] = []
    call = planted(subject, part=SMALL)
    n_tokens = N_ROWS * call.length
    for _, group in groupby(call.parts, key=lambda part: part[0]):
        sizes = [(rows, width) for _, rows, width in group]
        # Rows of the first and last products of experts
        first, n = (sum(rows for rows, width in sizes if width == sizes[i][1]) for i in (0, -1))
        is_known = n > 0 == n % n_tokens == first % n and sizes[0][1] != sizes[-1][1]
        counts.append(n // n_tokens if is_known else None)
    return [(n, claim) for n in counts]


@claimed(
    "sum of the weights of experts",
    place="layer",
    advice="Look for weights that are not normalised after the selection, and for a factor applied twice.",
    reason="a mixture of experts whose result is added to the residual stream without a norm",
    limit=1e-2,
)
def claimed_routing_sum(subject: Subject, claim: float) -> list[Pair]:
    """Do the weights of the experts of each token have the claimed sum?"""
    scale = subject.spec.facts.residual_scale
    wanted = float(claim) * (scale if isinstance(scale, float) else 1.0)
    one, two = (planted(subject, part=part).streams for part in (0.0, SMALL))
    pairs: list[Pair] = []
    for before, after in pairwise((b - a).double() / SMALL for a, b in zip(one, two, strict=True)):
        added = after - before
        is_even = (added.amax(dim=-1) - added.amin(dim=-1)).max() <= _UNEVEN * added.abs().max()
        farthest = max(added.mean(dim=-1).flatten().tolist(), key=lambda x: abs(x - wanted))
        pairs.append((farthest if is_even and added.any() else None, wanted))
    return pairs


@claimed(
    "coefficient of the auxiliary loss",
    place="loss",
    advice="Look for a coefficient that is applied both in the router and in the loss.",
    reason=f"an auxiliary loss above {_LEAST_LOSS} / coefficient",
    limit=1e-2,
)
def claimed_router_loss(subject: Subject, claim: float) -> list[Pair]:
    """Does the model's own loss contain the auxiliary loss times the claimed coefficient?"""
    terms = loss_terms(subject)
    if isinstance(terms, str):
        raise UnmeasuredError(terms)
    _, added, auxiliary, _ = terms
    return [(added / auxiliary if abs(claim * auxiliary) > _LEAST_LOSS else None, claim)]


def _head(call: Planted) -> float | None:
    """Return the factor between the last product and the logits (B, T, V)."""
    if not call.products or call.logits.numel() != call.products[-1].planted.numel():
        return None
    last = call.products[-1].planted
    found = fitted(call.logits.reshape(last.shape), [last])
    return None if found is None else found[0]


def _eps(subject: Subject, claim: float, *, of_stream: bool) -> list[Pair]:
    call = planted(subject)
    C = call.streams[0].shape[-1]
    leaves = [x for x in call.leaves if is_named_norm(x.module) and isinstance(x.output, Tensor)]
    norms = {x.module: x.output.shape[-1] for x in leaves if (x.output.shape[-1] == C) == of_stream}
    return [(_measured_eps(module, width, claim), claim) for module, width in norms.items()]


@torch.no_grad()
def _measured_eps(norm: nn.Module, C: int, claim: float) -> float | None:
    """Return eps of x / sqrt(mean square + eps), measured by the outputs for vectors of four sizes."""
    # Each group of channels has the same mean square, and mean 0.
    signs = torch.randint(2, (1, _N_VECTORS, C // 2, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    x = nn.functional.pad(torch.cat((signs, -signs), dim=-1).flatten(2), (0, C % 2))
    x = (x / x.square().mean(dim=-1, keepdim=True).sqrt()).to(dtype_of(norm))
    root = math.sqrt(claim or 1e-5)
    sizes = (root, 3 * root, 1e-3 * root**2, 1e3)
    try:
        found = [float((norm(x * s) - norm(-x * s)).double().square().mean().sqrt()) for s in sizes]
        operations = str(make_fx(norm)(x).graph)
    except refusals():
        return None
    if not min(found) > 0 or not re.search(_MEANS, operations) or re.search(_OTHER, operations):
        return None
    if abs(found[2] / found[3] - 1) < 1e-3:
        return 0.0
    one, two = (size**2 * ((found[3] / y) ** 2 - 1) for size, y in zip(sizes[:2], found[:2], strict=True))
    return one if abs(one - two) <= _SAME_EPS * max(one, two) else None
