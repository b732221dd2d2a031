"""Distributed: two ranks together train like one process with their joint batch."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.ranks import (
    N_RANKS,
    Ranks,
    Record,
    assembled,
    dense,
    has_evaluation_set,
    run_ranks,
)
from stackwise.checks.probe.run_state import different
from stackwise.checks.probe.update import norm
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.trainer_subject import TrainerSubject

# Attribute of a record -> (time, advice if the ranks differ).
_PLACES = {
    "initial": (
        "before the first step",
        "Broadcast the weights of rank 0, or use one seed. If you do so, communication loses data.",
    ),
    "final": (
        "after two steps",
        "Look for calls without the wrapper, parameters replaced after wrapping, and clipping on one rank.",
    ),
    "accumulated": (
        "after an update from two micro-batches",
        "Reduce the gradients in the backward pass of the last micro-batch: use `no_sync()` for the others.",
    ),
}


@trainer_check(suite="full")
def collectives_agree(subject: TrainerSubject) -> CheckResult:
    """Do all ranks call the same collectives in the same order, and finish?"""
    ranks = run_ranks(subject)
    place = ranks.disagreement()
    if place is not None:
        return subject.failed(
            float(place),
            where=ranks.calls_at(place),
            meaning=f"Collective {place} of two steps is not the same on all ranks: the ranks wait for each "
            "other for ever, or exchange wrong data.",
            advice="Look for a collective under a condition that is not the same on all ranks: an empty "
            "batch, an unused expert, a log on rank 0, an early stop.",
        )
    if ranks.errors:
        rank, error = next(iter(ranks.errors.items()))
        counts = [len(calls) for calls in ranks.collectives]
        return subject.failed(
            float(max(counts) - min(counts)),
            0.0,
            where=f"rank {rank}, after {counts[rank]} collectives; numbers of all ranks: {counts}",
            meaning=f"A rank did not finish two steps: {error}",
            advice="Look for an exception on one rank, and for a rank that calls fewer collectives.",
        )
    return subject.passed(0.0, 0.0, meaning=f"{len(ranks.collectives[0]) - 1} collectives in two steps.")


@trainer_check(suite="full")
def replicas_agree(subject: TrainerSubject) -> CheckResult:
    """Are replicated weights bit-identical on all ranks?"""
    ranks = _finished(subject)
    for when, (place, advice) in _PLACES.items():
        copies = _replicas(subject, ranks, when)
        is_complete = bool(copies[0]) or when == "accumulated"
        needed(is_complete, "weights that are complete on all ranks; all are sharded")
        if apart := different(*copies):
            share = (copies[0][apart[0]] != copies[1][apart[0]]).double().mean().item()
            return subject.failed(
                float(len(apart)),
                0.0,
                where=f"{listed(apart, 1)} {place}",
                meaning=f"{share:.1%} of the elements of this weight differ between the ranks.",
                advice=advice,
            )
    return subject.passed(
        0.0, 0.0, meaning=f"Compared parameters: {len(_replicas(subject, ranks, 'final')[0])}."
    )


@trainer_check(suite="full")
def non_finite_rank(subject: TrainerSubject) -> CheckResult:
    """If the loss of one rank is not finite, do all ranks skip the update, or none?"""
    has_parts = all(record.n_parts > 1 for record in _finished(subject).records)
    needed(has_parts, "ranks with different batches")
    needed(replicas_agree(subject).status == "passed", "a run that passes replicas_agree")
    ranks = run_ranks(subject, spoiled=True)
    place = ranks.disagreement()
    if place is None and ranks.errors:
        return subject.passed(meaning=f"The run ends with an error: {ranks.errors[max(ranks.errors)]}")
    if place is None:
        needed(ranks.records[-1].is_spoiled, "a model whose first layer returns a tensor")
        apart = different(*_replicas(subject, ranks, "final"))
        if not apart:
            return subject.passed(0.0, 0.0, meaning="The weights are the same on all ranks.")
        where, effect = listed(apart), "the ranks have different weights afterwards"
    else:
        where, effect = ranks.calls_at(place), "the ranks call different collectives and hang"
    return subject.failed(
        1.0,
        0.0,
        where=where,
        meaning=f"The model of one rank returns NaN, and {effect}.",
        advice="Reduce the flag that skips an update over all ranks before any of them leaves the step.",
    )


@trainer_check(suite="full")
def gradients_equal_dense(subject: TrainerSubject) -> CheckResult:
    """Are the gradient of all ranks and its norm equal to those of one process on the joint batch?"""
    ranks, whole = _finished(subject), dense(subject)
    _require_comparable(subject, ranks, whole)
    limit = _limit(whole)
    gaps, pairs = _gaps(ranks, whole)
    worst = max(gaps, key=lambda name: gaps[name])
    if not gaps[worst] <= limit:
        ratio, is_aligned = 0.0, False
        if gaps[worst] < float("inf"):
            got, wanted = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs, strict=True))
            ratio = float(got.norm() / wanted.norm())
            is_aligned = torch.nn.functional.cosine_similarity(got, wanted, dim=0).item() > 1 - 1e-6
        return subject.failed(
            gaps[worst],
            limit,
            where=worst,
            meaning=f"The gradient has the right direction and {ratio:.3g} times the length."
            if is_aligned
            else "The gradient at the optimizer differs from that of one process on the joint batch.",
            advice="Look for gradients that are summed instead of averaged, and for a norm that counts "
            "replicated parameters several times or skips parameters."
            if is_aligned
            else "Look for parameters that are not reduced, for a model that is called without its wrapper, "
            "and for communication that loses data.",
        )
    norms = [record.norm for record in ranks.records if record.norm is not None]
    if whole.norm is None or len(norms) < N_RANKS:
        return subject.passed(gaps[worst], limit, where=worst)
    apart = [abs(each / whole.norm - 1) for each in norms]
    rank = apart.index(max(apart))
    return subject.at_most(
        apart[rank],
        limit,
        where=f"rank {rank}",
        meaning=f"The grad_norm of this rank is {norms[rank]:.4g}; the norm of the joint batch is "
        f"{whole.norm:.4g}.",
        advice="Compute the norm of all parameters after the reduction. Count replicated parameters once, "
        "and sum the squares of sharded ones over the ranks.",
    )


@trainer_check(suite="full")
def unequal_targets(subject: TrainerSubject) -> CheckResult:
    """Does each target have the same weight if one rank has many targets and the other one few?"""
    _finished(subject)
    needed(gradients_equal_dense(subject).status == "passed", "a run that passes gradients_equal_dense")
    ranks = run_ranks(subject, unequal=True)
    is_finished = len(ranks.records) == N_RANKS and all(record.gradients for record in ranks.records)
    needed(is_finished, "ranks that finish a step with few targets on one rank")
    whole = dense(subject, unequal=True)
    gaps, _ = _gaps(ranks, whole)
    worst, limit = max(gaps, key=lambda name: gaps[name]), _limit(whole)
    if gaps[worst] <= limit:
        return subject.passed(gaps[worst], limit, where=worst)
    return subject.warned(
        gaps[worst],
        limit,
        where=worst,
        meaning="If the ranks have different numbers of targets, the gradient is not that of the mean over "
        "all targets: targets on a rank with few of them weigh more.",
        correct_if="all ranks always have the same number of targets",
        advice="Divide the sum of each rank by the number of targets of all ranks, times the number of ranks "
        "if gradients are averaged.",
    )


@trainer_check(suite="full")
def evaluation_equals_dense(subject: TrainerSubject) -> CheckResult:
    """Is the evaluation loss of all ranks equal to that of one process on their joint batches?"""
    ranks, whole = _finished(subject), dense(subject)
    loss, wanted = _evaluations(subject, ranks, whole, "evaluation", "evaluate(batches)")
    ratio = loss / wanted if wanted else 1.0
    if abs(ratio - 1) <= _limit(whole):
        return subject.passed(abs(ratio - 1), _limit(whole))
    is_scaled = min(abs(ratio - N_RANKS), abs(ratio - 1 / N_RANKS)) < 1e-3
    return subject.failed_unless(
        None if is_scaled else "one rank evaluates for all, or ranks have different numbers of targets",
        abs(ratio - 1),
        _limit(whole),
        where="the result of evaluate(batches)",
        meaning=f"The loss is {loss:.6g} on two ranks, and {wanted:.6g} in one process.",
        advice="Sum the losses and the numbers of targets of all ranks, and divide once. Do not multiply by "
        "the number of ranks, as for averaged gradients.",
    )


@trainer_check(suite="full")
def evaluation_set_equals_dense(subject: TrainerSubject) -> CheckResult:
    """Do all ranks together give each example of the evaluation set the same weight as one process?"""
    _finished(subject)
    need = "evaluate() without batches, with the same result for each call"
    needed(has_evaluation_set(subject), need)
    ranks, whole = _finished(subject, has_set=True), dense(subject, has_set=True)
    loss, wanted = _evaluations(subject, ranks, whole, "evaluation_set", need)
    gap = abs(loss / wanted - 1) if wanted else abs(loss)
    if gap <= _limit(whole):
        return subject.passed(gap, _limit(whole))
    read = Counter(row for record in ranks.records for row in record.evaluated)
    rows = Counter(whole.evaluated)
    again = (read - rows).total() if set(read) == set(rows) else 0
    # If each rank reads the whole set, the difference has another cause.
    is_repeated = 0 < again < rows.total() and not subject.averages_batches(subject.run(), "evaluate")
    return subject.failed_unless(
        None
        if is_repeated
        else "the ranks evaluate other examples than one process, or each batch has the same weight",
        gap,
        _limit(whole),
        where="the result of evaluate()",
        meaning=f"The loss is {loss:.6g} on two ranks, and {wanted:.6g} in one process."
        + f" The ranks evaluate {again} of {rows.total()} examples again." * is_repeated,
        advice="A distributed sampler repeats examples so that all ranks have the same number. Leave the "
        "repeated examples out of the sums. Sum the losses and the numbers of targets of all ranks, and "
        "divide once.",
    )


@trainer_check(suite="full")
def ranks_share_data(subject: TrainerSubject) -> CheckResult:
    """Does each example of an epoch belong to one rank?"""
    rows = [record.rows or [] for record in _finished(subject).records]
    whole = dense(subject).rows or []
    is_divided = bool(whole) and all(rows) and rows[0] != rows[1]
    needed(is_divided, "an epoch of at most 200 batches that is divided among ranks")
    read = Counter(row for each in rows for row in each)
    has_same_rows = len(set(whole)) == len(whole) and set(read) <= set(whole)
    needed(has_same_rows, "the same examples in one process as on the ranks, each once")
    # A sampler repeats or drops examples so that all ranks have the same number of batches.
    allowed = float(N_RANKS * subject.spec.batch_size)
    twice, left_out = read.total() - len(read), len(whole) - len(read)
    return subject.at_most(
        float(max(twice, left_out)),
        allowed,
        where="epoch(0)",
        meaning=f"Of {len(whole)} examples, the ranks read {twice} twice and {left_out} not at all.",
        advice="Shuffle with the same seed on all ranks: each rank takes its part of the same permutation.",
    )


def _evaluations(
    subject: TrainerSubject, ranks: Ranks, whole: Record, attribute: str, need: str
) -> tuple[float, float]:
    """Return an evaluation loss of all ranks and that of one process, from an attribute of their records."""
    found = {getattr(record, attribute) for record in ranks.records}
    wanted: float = needed(getattr(whole, attribute), need)
    needed(None not in found, need)
    _require_comparable(subject, ranks, whole)
    needed(len(found) == 1, "an evaluation over all ranks; each rank has its own result")
    return found.pop(), wanted


def _gaps(ranks: Ranks, whole: Record) -> tuple[dict[str, float], list[tuple[Tensor, Tensor]]]:
    """Compare the gradients of the ranks with those of one process.

    Returns:
        The difference of each parameter, relative to the norm of all gradients, and both gradients of each
        parameter that all ranks have.
    """
    scale = norm(whole.gradients.values())
    gaps: dict[str, float] = {}
    pairs = []
    for name, wanted in whole.gradients.items():
        parts = [record.gradients[name] for record in ranks.records if name in record.gradients]
        got = assembled(parts, wanted.shape) if len(parts) == N_RANKS else None
        if got is None:
            gaps[name] = float("inf")
            continue
        # Each rank may have a full copy, and any of them may be wrong.
        copies = [part for part in parts if part.shape == wanted.shape] or [got]
        differences = [norm([copy.double() - wanted.double()]) for copy in copies]
        gaps[name] = max(differences) / scale
        pairs.append((copies[differences.index(max(differences))].double(), wanted.double()))
    return gaps, pairs


def _replicas(subject: TrainerSubject, ranks: Ranks, when: str) -> list[dict[str, Tensor]]:
    """Return the weights of each rank, "initial" or "final", of which each rank has all elements."""
    shapes = {name: p.shape for name, p in subject.run().model.named_parameters()}
    weights = [getattr(record, when) for record in ranks.records]
    names = [n for n, p in weights[0].items() if all(w[n].shape == shapes.get(n, p.shape) for w in weights)]
    return [{name: each[name] for name in names} for each in weights]


def _finished(subject: TrainerSubject, *, has_set: bool = False) -> Ranks:
    ranks = run_ranks(subject, has_set=has_set)
    needed(len(ranks.records) == N_RANKS, "a run that passes collectives_agree")
    return ranks


def _require_comparable(subject: TrainerSubject, ranks: Ranks, whole: Record) -> None:
    """Raise an UnmeasuredError if the weights differ at the start, or a step is not deterministic."""
    has_gradients = all(record.gradients for record in (whole, *ranks.records))
    needed(has_gradients, "gradients at the time of the optimizer step")
    for name, wanted in whole.initial.items():
        parts = [record.initial[name] for record in ranks.records if name in record.initial]
        has_all = len(parts) == N_RANKS
        needed(has_all, f"the same parameter names in one process as on the ranks, which lack {name}")
        got = assembled(parts, wanted.shape)
        got = needed(got, f"parameters that are divided along one dimension; {name} is not")
        # If the ranks received different weights, replicas_agree reports this.
        is_same = torch.equal(got, wanted)
        needed(is_same, f"the same weights in one process as on the ranks; {name} differs")
    again = dense(TrainerSubject(subject.spec, subject.device, subject.seed))
    is_repeated = all(torch.equal(again.gradients[name], g) for name, g in whole.gradients.items())
    needed(is_repeated, "a deterministic step without dropout")


def _limit(whole: Record) -> float:
    """Return the largest allowed difference, relative to the norm of all gradients.

    Ranks and one process add numbers in different orders, which causes rounding errors. If 1 % of the
    elements is missing, the difference is about 0.1.
    """
    eps = max(torch.finfo(g.dtype).eps for g in whole.gradients.values())
    return max(1e-4, 8 * eps)
