"""Caches: what is continued from a cache is what the whole would have been.

Shapes: B batch, T positions, V outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import (
    decoded,
    has_fixed_state,
    real_inputs,
    reason_of,
    refusals,
)
from stackwise.checks.probe.difference import NOT_REPEATED, hear, relative_difference, repeats
from stackwise.checks.probe.ties import chooses_among_equals
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.cached_call import cache_tensors
from stackwise.subject.inference import cast, logits_of

_LENGTH = 12
_LONGEST_WINDOW = 64
_LONGEST = 512

_ADVICE = (
    "Look at the positions of new tokens (they start at the length of the cache), at causality aligned "
    "with the last key instead of the first (is_causal with fewer queries than keys), at keys rotated twice "
    "or not at all, and at what a full or rolling cache overwrites."
)


def _unasked(subject: Subject) -> str | None:
    """Return why a cache cannot be checked; None if it can."""
    if subject.spec.decode is None:
        found = " (see cache_decoding)" if subject.spec.cache_problem else ""
        return f"needs decode: (model, inputs, cache) -> (output, cache){found}"
    if not subject.spec.causal:
        return "needs the claim causal=True: else later tokens change what is in the cache"
    if subject.seq_len < 3:
        return "needs at least 3 positions"
    return None


def _length(subject: Subject) -> int:
    """T, beyond a window that rolls."""
    window: Any = subject.spec.window
    wanted = min(subject.seq_len, _LENGTH)
    if isinstance(window, int) and window <= _LONGEST_WINDOW:
        wanted = max(wanted, 2 * window + 3)
    return min(wanted, subject.spec.max_length or wanted)


@check
def cache_decoding(subject: Subject) -> CheckResult:
    """Does token by token through the cache give what the whole sequence gives?"""
    if subject.spec.decode is None and subject.spec.cache_problem and subject.spec.causal:
        return subject.warned(
            meaning=f"The model may have a cache that no check could use: {subject.spec.cache_problem}.",
            correct_if="the model has no cache (declare decode=None)",
            advice="If it has one, the cache may be wrong. Declare how the model uses it, so that it can be "
            "checked: ModelSpec.of(factory, decode=lambda model, inputs, cache: (output, cache)). cache is "
            "None at first.",
        )
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    T = _length(subject)
    half = max(1, T // 2)
    return _compare(subject, [(half, *(1,) * (T - half)), (1,) * min(T, 4)], _ADVICE)


@check
def cache_chunks(subject: Subject) -> CheckResult:
    """Does a prompt in parts, several tokens at a time, give what the whole gives?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    T = _length(subject)
    ways = [(T // 2, T - T // 2), (1, *_parts(T - 1, 4))]
    return _compare(
        subject,
        ways,
        "A token must attend to the cache and to earlier tokens of its part. " + _ADVICE,
    )


def _parts(total: int, size: int) -> Iterable[int]:
    return (min(size, total - start) for start in range(0, total, size))


def _compare(subject: Subject, ways: Sequence[Sequence[int]], advice: str) -> CheckResult:
    """The cache against the whole, for each way of dividing it."""
    inputs = real_inputs(subject, 2, max(map(sum, ways)))
    refused: dict[Sequence[int], str] = {}
    for way in ways:
        try:
            decoded(subject, subject.model(), inputs[:, : sum(way)], way)
        except refusals() as error:
            refused[way] = reason_of(error)
    if len(refused) == len(ways):
        first = ways[0]
        return subject.not_applicable(f"needs a cache that takes parts of {_named(first)}: {refused[first]}")
    ways = [way for way in ways if way not in refused]

    found = hear(
        subject,
        lambda model: torch.cat([_gaps(subject, model, inputs[:, : sum(way)], way) for way in ways]),
        same_shapes=False,
        fill_zeros=True,
    )
    if not found.real:
        meaning = "; ".join(f"parts of {_named(way)} are refused: {why}" for way, why in refused.items())
        return subject.passed(found.value, found.limit, meaning=meaning or found.meaning)
    if not repeats(subject):
        return subject.not_applicable(NOT_REPEATED)
    model = subject.model(dtype=found.dtype, fill_zeros=True)
    each = zip(ways, torch.split(found.gaps, [sum(way) for way in ways]), strict=True)
    worst, gap = max(each, key=lambda pair: pair[1].max().item())
    if excuse := _excuse(subject, model, inputs[:, : sum(worst)], worst, found.limit):
        return subject.warned(found.value, found.limit, where=f"in parts of {_named(worst)}", **excuse)
    # Lengths that differ are no matter of the cache; the check of causality asks about them.
    start = inputs[:, : worst[0]]
    whole = subject.logits(model, inputs[:, : sum(worst)])[:, : worst[0]]
    if relative_difference(whole, subject.logits(model, start)).max().item() > found.limit:
        return subject.not_applicable(
            f"needs a model whose first {worst[0]} outputs do not depend on what follows; see causality"
        )
    first_wrong = int((~(gap <= found.limit)).nonzero()[0])
    return subject.failed(
        found.value,
        found.limit,
        where=f"from position {first_wrong} on, in parts of {_named(worst)}",
        meaning="Outputs through the cache differ from those of the whole sequence.",
        advice=advice,
    )


def _excuse(
    subject: Subject, model: nn.Module, inputs: Tensor, way: Sequence[int], limit: float
) -> dict[str, str] | None:
    """Return the text of a warning if the difference may have a harmless cause, otherwise None."""
    if chooses_among_equals(lambda: subject.logits(model, inputs)):
        return {
            "meaning": "Outputs through the cache differ from those of the whole sequence.",
            "correct_if": "only the order of equal scores changes: a top-k of this model chooses among equal "
            "scores",
            "advice": "Look for a cache that loses tokens. To be sure, break ties by position.",
        }
    # A recurrent state that several tokens cannot continue; seeing what is ahead of them has no excuse.
    if (
        max(way[1:]) > 1
        and has_fixed_state(subject, inputs)
        and not _looks_ahead(subject, model, inputs, limit)
    ):
        return {
            "meaning": "Several tokens after a cache give other outputs than the same tokens one by one.",
            "correct_if": "the model takes a prompt at once and then single tokens only, as recurrent layers "
            "often do",
            "advice": "Continue the state over several tokens, or raise an error.",
        }
    return None


def _looks_ahead(subject: Subject, model: nn.Module, inputs: Tensor, limit: float) -> bool:
    """Whether, of two tokens that follow a cache together, the first reads the second."""
    changed = inputs.clone()
    changed[:, -1] = inputs[:, 0] if not torch.equal(inputs[:, 0], inputs[:, -1]) else inputs[:, 1]
    way = (*(1,) * (inputs.shape[1] - 2), 2)  # a rolling cache need not take more at once
    one, other = (decoded(subject, model, x, way)[:, -2:-1] for x in (inputs, changed))
    return relative_difference(one, other).max().item() > limit


def _named(way: Sequence[int]) -> str:
    """Sizes in words: the first ones, and how many in all."""
    shown = ", ".join(map(str, way[:4]))
    return shown if len(way) <= 4 else f"{shown}, ... ({len(way)} parts)"


@check
def cache_independence(subject: Subject) -> CheckResult:
    """Do two sequences that are decoded in turns, each with a cache of its own, stay apart?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    decode, T = subject.spec.decode, min(subject.seq_len, _LENGTH)
    assert decode is not None
    inputs = real_inputs(subject, 2, T)
    half = max(1, T // 2)
    cuts = [0, half, *range(half + 1, T + 1)]
    try:
        with torch.no_grad():
            _, cache = decode(model := subject.model(), cast(inputs[:1, :half].clone(), model), None)
    except refusals() as error:
        return subject.not_applicable(f"needs a cache that begins with {half} tokens: {reason_of(error)}")
    if not any(True for _ in cache_tensors(cache)):
        return subject.not_applicable(
            "needs a cache that holds what was computed; the model keeps it in itself"
        )

    def in_turns(model: nn.Module) -> Tensor:
        def run() -> Tensor:
            caches: list[Any] = [None, None]
            outputs: list[list[Tensor]] = [[], []]
            for start, end in pairwise(cuts):
                for row in (0, 1):
                    part = cast(inputs[row : row + 1, start:end].clone(), model)
                    output, caches[row] = decode(model, part, caches[row])
                    outputs[row].append(logits_of(output))
            return torch.cat([torch.cat(parts, dim=1) for parts in outputs])

        return subject.call(model, run)

    def gaps(model: nn.Module) -> Tensor:
        sizes = [end - start for start, end in pairwise(cuts)]
        one_after_other = torch.cat([decoded(subject, model, row, sizes) for row in torch.split(inputs, 1)])
        return relative_difference(one_after_other, in_turns(model))

    found = hear(subject, gaps, same_shapes=True, fill_zeros=True)
    if found.real and not repeats(subject):
        return subject.not_applicable(NOT_REPEATED)
    if found.real:
        return subject.failed(
            found.value,
            found.limit,
            meaning="A sequence's output depends on another sequence that is decoded in between.",
            advice="Keep positions, masks and lengths in the cache, not in the model: a counter on the "
            "module counts the tokens of every sequence, and is wrong for a cache that was made elsewhere.",
        )
    return subject.passed(found.value, found.limit, meaning=found.meaning)


@check
def cache_padding(subject: Subject) -> CheckResult:
    """Do prompts that are padded on the left continue as each does alone?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    decode = subject.spec.decode
    assert decode is not None
    if "keep" not in inspect.signature(decode).parameters:
        return subject.not_applicable(
            "needs decode: (model, inputs, cache, keep), keep (B, S) of all tokens so far"
        )
    if "left" not in subject.spec.padding_sides:
        return subject.not_applicable("needs 'left' in padding_sides")
    T = min(subject.seq_len, _LENGTH)
    prompt, n_new = T - max(1, T // 4), max(1, T // 4)
    inputs, others = real_inputs(subject, 3, T), real_inputs(subject, 3, T, shift=1)
    padding = (0, prompt // 3, prompt - 1)
    keep = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    for row, n in enumerate(padding):
        keep[row, :n] = False
        inputs[row, :n] = others[row, :n]

    def gaps(model: nn.Module) -> Tensor:
        """(B, T): the difference at each position, 0 at padding."""
        together = decoded(subject, model, inputs, (prompt, *(1,) * n_new), keep)
        gap = torch.zeros(keep.shape, dtype=torch.float64, device=keep.device)
        for row, n in enumerate(padding):
            sizes = (prompt - n, *(1,) * n_new)
            alone = decoded(subject, model, inputs[row : row + 1, n:], sizes, keep[row : row + 1, n:])
            gap[row, n:] = relative_difference(alone, together[row : row + 1, n:]).amax(dim=-1)[0]
        return gap

    found = hear(subject, gaps, same_shapes=False, fill_zeros=True)
    if found.real and not repeats(subject):
        return subject.not_applicable(NOT_REPEATED)
    if found.real:
        row = int(found.gaps.amax(dim=1).argmax())
        first = int((~(found.gaps[row] <= found.limit)).nonzero()[0])
        kind = "in the prompt" if first < prompt else f"new token {first - prompt}"
        return subject.failed(
            found.value,
            found.limit,
            where=f"row {row} (padded by {padding[row]}), position {first}: {kind}",
            meaning="A prompt that is padded on the left continues otherwise than alone.",
            advice="Each row has its own position: the number of real tokens before, not the length of the "
            "cache; and the mask has to reach over the cached tokens too.",
        )
    return subject.passed(found.value, found.limit, meaning=found.meaning)


@check
def cache_limit(subject: Subject) -> CheckResult:
    """Does decoding reach the longest sequence, and go beyond it as the whole does, or not at all?"""
    if reason := _unasked(subject):
        return subject.not_applicable(reason)
    limit = subject.spec.max_length
    if limit is None:
        return subject.not_applicable("needs max_length")
    if limit > _LONGEST or limit < 4:
        return subject.not_applicable(f"needs a max_length from 4 to {_LONGEST}; this one is {limit}")
    if subject.device.type == "cuda":
        return subject.not_applicable("needs the CPU: an index out of range ends a CUDA process")
    # spec.batch refuses what is beyond the limit.
    inputs = torch.cat([real_inputs(subject, 1, limit), real_inputs(subject, 1, 2, shift=1)], dim=1)
    sizes = (limit - 2, 1, 1)
    try:
        decoded(subject, subject.model(), inputs[:, :limit], sizes)
    except refusals() as error:
        return subject.warned(
            where=f"within max_length={limit}",
            meaning=f"Decoding stops before the longest sequence: {reason_of(error)}",
            correct_if="the cache is meant to be shorter than max_length",
            advice="Give the cache as much room as the model has positions.",
        )
    found = hear(subject, lambda model: _gaps(subject, model, inputs[:, :limit], sizes), same_shapes=False)
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
        found = hear(subject, lambda model: _gaps(subject, model, inputs, (*sizes, 1, 1)), same_shapes=False)
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
    """(T,): the largest difference at each position between the cache and the whole."""
    by_cache = decoded(subject, model, inputs, sizes)
    return relative_difference(subject.logits(model, inputs), by_cache).amax(dim=(0, -1))
