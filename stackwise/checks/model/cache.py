"""Cache: how it is used, and how far it reaches. Its outputs are compared by `checks/variations/cache.py`.

Shapes: B batch, T positions, V outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import decoded, real_inputs, reason_of, refusals
from stackwise.checks.probe.difference import NOT_REPEATED, measure_difference, relative_difference, repeats
from stackwise.checks.probe.ties import chooses_among_equals
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.cached_call import ONLY_ONE_ROW

_LONGEST = 512


def _unasked(subject: Subject) -> str | None:
    """Return why a cache cannot be checked; None if it can."""
    if subject.spec.decode is None:
        return "needs decode: (model, inputs, cache) -> (output, cache)"
    if not subject.spec.causal:
        return "needs causal=True. Otherwise later tokens change the cached values"
    if subject.seq_len < 3:
        return "needs at least 3 positions"
    return None


@check
def cache_call(subject: Subject) -> CheckResult:
    """Can the checks decode with the model's cache?"""
    spec = subject.spec
    if spec.decode is None and spec.cache_problem.startswith(ONLY_ONE_ROW) and spec.causal:
        return subject.failed(
            1.0,
            where="a batch of several rows",
            meaning=f"{spec.cache_problem}.",
            advice="Look for squeeze(), view() or indexing that assumes one row, and for a state "
            "(B, C) that is added to activations (B, 1, C): it needs its own axis for the token.",
        )
    if spec.decode is None and spec.cache_problem and spec.causal:
        return subject.warned(
            meaning=f"The model may have a cache, but the checks cannot use it: {spec.cache_problem}.",
            correct_if="the model has no cache (declare decode=None)",
            advice="If it has one, the cache may be wrong. Declare how the model uses it, so that it can be "
            "checked: ModelSpec.of(factory, decode=lambda model, inputs, cache: (output, cache)). cache is "
            "None at first.",
        )
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    return subject.passed()


@check
def cache_limit(subject: Subject) -> CheckResult:
    """Does decoding with the cache work up to max_length, and beyond it like a call without a cache?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    limit = subject.spec.max_length
    if limit is None or not 4 <= limit <= _LONGEST:
        return subject.not_applicable(f"needs max_length from 4 to {_LONGEST}; this one is {limit}")
    if subject.device.type == "cuda":
        return subject.not_applicable("needs the CPU: an index out of range ends a CUDA process")
    # spec.batch refuses what is beyond the limit.
    inputs = torch.cat([real_inputs(subject, 1, limit), real_inputs(subject, 1, 2, shift=1)], dim=1)
    sizes = (limit - 2, 1, 1)
    try:
        decoded(subject, subject.model(), inputs[:, :limit], sizes)
    except refusals() as error:
        if isinstance(error, ValueError | NotImplementedError):  # a limit that the model states
            return subject.passed(meaning=f"within max_length={limit}: {reason_of(error)}")
        return subject.warned(
            where=f"within max_length={limit}",
            meaning=f"Decoding stops before the longest sequence: {reason_of(error)}",
            correct_if="the cache is meant to be shorter than max_length",
            advice="Give the cache as much room as the model has positions.",
        )
    found = measure_difference(subject, lambda model: _gaps(subject, model, inputs[:, :limit], sizes))
    if not found.real:
        try:
            decoded(subject, subject.model(), inputs, (*sizes, 1, 1))
        except refusals() as error:
            return subject.passed(found.value, found.limit, meaning=f"beyond it: {reason_of(error)}")
        try:
            subject.logits(subject.model(), inputs)
        except refusals() as error:
            return subject.failed(
                where=f"beyond max_length={limit}",
                meaning=f"The cache goes on where the model itself refuses ({reason_of(error)}).",
                advice="Look for positions that are clamped or wrapped; raise an error instead.",
            )
        found = measure_difference(subject, lambda model: _gaps(subject, model, inputs, (*sizes, 1, 1)))
        if not found.real:
            return subject.passed(found.value, found.limit, meaning="beyond it, as the whole sequence does")
    if not repeats(subject):
        return subject.not_applicable(NOT_REPEATED)
    if chooses_among_equals(lambda: subject.logits(subject.model(), inputs[:, :limit])):
        return subject.not_applicable("needs a choice (topk) that is not among equal scores")
    return subject.failed(
        found.value,
        found.limit,
        where=f"around max_length={limit}",
        meaning="At the longest sequence, outputs through the cache differ from those of the whole.",
        advice="Look for positions that are clamped, and for a cache that overwrites its oldest or last "
        "entries; raise an error instead.",
    )


def _gaps(subject: Subject, model: nn.Module, inputs: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the largest difference at each position (T,) between the cache and the whole."""
    by_cache = decoded(subject, model, inputs, sizes)
    return relative_difference(subject.logits(model, inputs), by_cache).amax(dim=(0, -1))
