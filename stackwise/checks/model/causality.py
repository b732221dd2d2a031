"""Causality: no output depends on a later input.

Shapes: R rows, T positions, V outputs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.difference import (
    NOT_REPEATED,
    Finding,
    absolute_difference,
    hear,
    relative_difference,
    repeats,
)
from stackwise.checks.probe.ties import chooses_among_equals
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.support.system_errors import is_out_of_memory

_MAX_ELEMENTS = 2**24  # of one output (R, T, V)
# Lengths beyond the chunks, blocks and windows that are common, and no multiple of them.
_FAR = (273, 137, 67, 33)

_ADVICE = (
    "Look for a missing or shifted causal mask (tril(diagonal=1)), a mask that padding or eval mode "
    "replaces, view() where transpose() is meant, and any mean, norm or convolution over positions."
)


@check
def causality(subject: Subject) -> CheckResult:
    """Does changing one token leave every earlier output as it was, in eval and in train mode?"""
    if (reason := _out_of_question(subject)) is not None:
        return subject.not_applicable(reason)
    worst = Finding(0.0, 0.0, False, torch.float64)
    starts_at_zero = subject.starts_at_zero
    leaks = partial(_leaks, subject, *_perturbed(subject))
    for fill_zeros in (False, True) if starts_at_zero else (False,):
        behind = ", zero weights made random" if fill_zeros else ""
        for mode in ("eval", "train"):
            leak = hear(subject, leaks, same_shapes=True, train=mode == "train", fill_zeros=fill_zeros)
            if leak.real:
                token, position = divmod(int(leak.gaps.argmax()), subject.seq_len)
                return subject.failed(
                    leak.value,
                    leak.limit,
                    where=f"position {position} reads token {token} ({mode} mode{behind})",
                    meaning=f"Replacing token {token} changed the output at position {position}, before it.",
                    advice=_advice(subject),
                )
            worst = max(worst, leak, key=lambda finding: (finding.value, finding.limit))
        for length in sorted({max(1, subject.seq_len // 2), subject.seq_len - 1}):
            gap = _find_gap(subject, length, fill_zeros)
            if gap.real and not repeats(subject):
                return subject.not_applicable(f"whether a prefix computes the same alone {NOT_REPEATED}")
            if gap.real:
                return _of_a_gap(subject, gap, length, subject.seq_len, behind)
    return _unless_blind(subject, worst, fill_zeros=starts_at_zero)


@check(suite="full")
def causality_far(subject: Subject) -> CheckResult:
    """Is it causal beyond the first chunk: do later tokens leave all before them as they were?"""
    if (reason := _out_of_question(subject)) is not None:
        return subject.not_applicable(reason)
    T = next((T for T in _FAR if _takes(subject, T)), None)
    if T is None:
        return subject.not_applicable(f"needs a model that takes {_FAR[-1]} positions")
    base, changed, starts = _with_other_ends(subject, T)
    leaks = partial(_leaks, subject, base, changed, starts)
    worst = Finding(0.0, 0.0, False, torch.float64)
    for train in (False, True):
        found = hear(subject, leaks, same_shapes=True, train=train, fill_zeros=True)
        if found.real:
            start = int(starts[int(found.gaps.argmax()) // T])
            return subject.failed(
                found.value,
                found.limit,
                where=f"tokens from {start} on, of {T} ({'train' if train else 'eval'} mode)",
                meaning=f"Replacing all tokens from {start} on changed an output before them.",
                advice=_advice(subject)
                + " Where the first positions are right, look at how chunks and blocks join.",
            )
        worst = max(worst, found, key=lambda finding: (finding.value, finding.limit))
    for length in (T // 2, T - 1):
        gap = _find_gap(subject, length, True, of=T)
        if gap.real and not repeats(subject):
            return subject.not_applicable(f"whether a prefix computes the same alone {NOT_REPEATED}")
        if gap.real:
            return _of_a_gap(subject, gap, length, T, "")
    return subject.passed(worst.value, worst.limit, meaning=worst.meaning)


def _advice(subject: Subject, more: str = "") -> str:
    assumed = " Causality was assumed: for an encoder, say causal=False (stackwise check --no-causal)."
    return _ADVICE + more + (assumed if "causal" in subject.spec.assumed else "")


def _out_of_question(subject: Subject) -> str | None:
    spec = subject.spec
    if spec.causal is None:
        return "needs the claim: causal=True"
    if not spec.causal:
        return "the model claims no causality"
    if subject.seq_len < 2:
        return "needs at least 2 positions"
    if spec.inputs == "tokens" and spec.width < 2:
        return "needs a vocabulary of at least 2"
    return None


def _takes(subject: Subject, T: int) -> bool:
    """Whether the model takes T positions; one that says nothing is tried."""
    if subject.seq_len >= T or (subject.spec.max_length or T) < T:
        return False
    try:
        subject.logits(subject.model(), subject.inputs(1, T))
    except Exception as error:  # any failure but this one is an answer: it does not take so many
        if is_out_of_memory(error):
            raise
        return False
    return True


def _with_other_ends(subject: Subject, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Equal rows, the same with all tokens from a start on replaced, and the starts (R,)."""
    powers = [2**k + d for k in range(4, 9) for d in (-1, 0, 1)]
    starts = sorted({s for s in [*powers, *range(8, T, 8), T - 1] if s < T})
    base = subject.inputs(1, T).repeat_interleave(len(starts), dim=0)
    changed = base.clone()
    for row, start in enumerate(starts):
        if subject.spec.inputs == "tokens":
            changed[row, start:] = (changed[row, start:] + 1) % subject.spec.width
        else:
            changed[row, start:] = -changed[row, start:]
    return base, changed, torch.tensor(starts)


def _leaks(subject: Subject, base: Tensor, changed: Tensor, starts: Tensor, model: nn.Module) -> Tensor:
    """[row, position]: influence on positions before the row's start over that on the others."""
    leak = _leak(_influence(subject, model, base, changed), starts)
    # A suspect row is asked alone, so that rows that see each other are not taken for a leak in time.
    for number in leak.amax(dim=1).nonzero().flatten().tolist():
        row = slice(number, number + 1)
        leak[row] = _leak(_influence(subject, model, base[row], changed[row]), starts[row])
    return leak


def _find_gap(subject: Subject, length: int, fill_zeros: bool, of: int | None = None) -> Finding:
    """f(x[:t]) == f(x)[:t]; catches positions and scales that depend on the length."""
    inputs = subject.inputs(1, of)

    def gaps(model: nn.Module) -> Tensor:
        whole = subject.logits(model, inputs)
        return relative_difference(whole[:, :length], subject.logits(model, inputs[:, :length]))

    return hear(subject, gaps, same_shapes=False, fill_zeros=fill_zeros)


def _of_a_gap(subject: Subject, gap: Finding, length: int, T: int, behind: str) -> CheckResult:
    """The answer where a prefix computes something else alone."""
    where = f"the first {length} of {T} positions (eval mode{behind})"
    model = subject.model(dtype=gap.dtype, fill_zeros=bool(behind))
    if chooses_among_equals(lambda: subject.logits(model, subject.inputs(1, T))):
        return subject.warned(
            gap.value,
            gap.limit,
            where=where,
            meaning="The outputs of a prefix change when tokens follow it.",
            correct_if="only the order of equal scores changes: a top-k of this model chooses among equal "
            "scores, as after a ReLU",
            advice="Look for a mask that depends on the length. To be sure, break ties by position.",
        )
    return subject.failed(
        gap.value,
        gap.limit,
        where=where,
        meaning="The outputs of a prefix change when tokens follow it.",
        advice=_advice(subject, " Positions counted from the end do this too."),
    )


def _unless_blind(subject: Subject, worst: Finding, *, fill_zeros: bool) -> CheckResult:
    """The passing result, or a warning where nothing was there to leak."""
    model = subject.model(dtype=worst.dtype, fill_zeros=fill_zeros)
    base, changed, _ = _perturbed(subject)
    influence = _influence(subject, model, base, changed)
    blind = (influence.triu().amax(dim=1) == 0).nonzero().flatten()
    if len(blind):
        return subject.warned(
            worst.value,
            worst.limit,
            where=f"token {int(blind[0])}",
            meaning="The model does not read this token: replacing it changes no output at or after it.",
            correct_if="the model ignores such tokens on purpose",
            advice="Look for a mask that hides the token itself, and for an embedding that is constant.",
        )
    if influence.triu(1).max() == 0:
        return subject.warned(
            worst.value,
            worst.limit,
            meaning="No position reads any other position, so there is nothing to leak.",
            correct_if="the model has no memory and computes each position alone",
            advice="Look for attention that is switched off.",
        )
    asked_twice = "asked again with zero weights made random" if fill_zeros else ""
    return subject.passed(worst.value, worst.limit, meaning=worst.meaning or asked_twice)


def _perturbed(subject: Subject) -> tuple[Tensor, Tensor, Tensor]:
    """T equal rows, the same with token t of row t replaced, and every t (T,)."""
    T = subject.seq_len
    base = subject.inputs(1).repeat_interleave(T, dim=0)
    changed, t = base.clone(), torch.arange(T, device=base.device)
    if subject.spec.inputs == "tokens":
        step = 1 + subject.seed % (subject.spec.width - 1)
        changed[t, t] = (base[t, t] + step) % subject.spec.width
    else:
        noise = torch.randn(T, subject.spec.width, generator=torch.Generator().manual_seed(subject.seed + 1))
        changed[t, t] += noise.to(base)
    return base, changed, t.cpu()


def _influence(subject: Subject, model: nn.Module, base: Tensor, changed: Tensor) -> Tensor:
    """[row, position]: how far the output moved, in any channel. Float64, on the CPU."""
    rows = []
    size = max(1, _MAX_ELEMENTS // (base.shape[1] * max(subject.spec.width, 4 * base.shape[1])))
    for some_base, some_changed in zip(torch.split(base, size), torch.split(changed, size), strict=True):
        before, after = subject.logits(model, some_base), subject.logits(model, some_changed)
        rows.append(absolute_difference(before, after).amax(dim=-1).cpu())
    return torch.cat(rows)


def _leak(influence: Tensor, starts: Tensor) -> Tensor:
    """[row, position]: that before the row's start over the largest of the others."""
    earlier = torch.arange(influence.shape[1]) < starts[:, None]
    forward = influence.masked_fill(earlier, 0.0).amax(dim=1, keepdim=True)
    backward = influence.masked_fill(~earlier, 0.0)
    return torch.where(backward > 0, backward / forward, 0.0).nan_to_num(nan=torch.inf)
