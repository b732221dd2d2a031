"""Causality: no output depends on a later input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stackwise.checks.check import CheckResult, Subject, check
from stackwise.checks.difference import persists_in_float64, relative_difference

_ADVICE = (
    "Look for a missing or shifted causal mask (tril(diagonal=1)), a mask that padding or eval mode "
    "replaces, view() where transpose() is meant, and any mean, norm or convolution over positions."
)


@check
def causality(subject: Subject) -> CheckResult:
    """Does changing one token leave every earlier output as it was, in eval and in train mode?"""
    spec = subject.spec
    if spec.causal is None:
        return subject.not_applicable("needs the claim: causal=True")
    if not spec.causal:
        return subject.not_applicable("the model claims no causality")
    if subject.seq_len < 2:
        return subject.not_applicable("needs at least 2 positions")
    if spec.inputs == "tokens" and spec.width < 2:
        return subject.not_applicable("needs a vocabulary of at least 2")

    worst, blind = 0.0, torch.zeros(0)
    for mode in ("eval", "train"):
        train = mode == "train"
        model = subject.model(train=train)
        base, changed = _perturbed(subject)
        influence = _influence(subject, model, base, changed)
        earlier = influence.tril(-1)
        value = earlier.max().item()
        if value > spec.tolerance:
            token, position = divmod(int(earlier.argmax()), subject.seq_len)

            def leak(twin: nn.Module, token: int = token) -> float:
                # The row alone, so that rows that see each other are not taken for a leak in time.
                alone = _influence(subject, twin, base[token : token + 1], changed[token : token + 1])  # noqa: B023
                return alone[0, :token].max().item()

            alone = leak(subject.model(train=train))
            if alone > spec.tolerance and persists_in_float64(subject, leak, train=train):
                return subject.failed(
                    alone,
                    spec.tolerance,
                    where=f"position {position} reads token {token} ({mode} mode)",
                    meaning=f"Replacing token {token} changed the output at position {position}, before it.",
                    advice=_ADVICE,
                )
        else:
            worst = max(worst, value)
        if not train:
            blind = (influence.triu().amax(dim=1) == 0).nonzero().flatten()

    truncated = _truncation(subject)
    if truncated is not None:
        return truncated
    if len(blind):
        return subject.warned(
            worst,
            spec.tolerance,
            where=f"token {int(blind[0])}",
            meaning="Replacing this token changed nothing at or after it: the model seems not to read it.",
            advice="Look for a mask that hides the token itself, and for an embedding that is constant.",
        )
    return subject.passed(worst, spec.tolerance)


def _perturbed(subject: Subject) -> tuple[Tensor, Tensor]:
    """T equal rows, and the same with token t of row t replaced."""
    T = subject.seq_len
    base = subject.inputs(1).repeat_interleave(T, dim=0)
    changed, t = base.clone(), torch.arange(T, device=base.device)
    if subject.spec.inputs == "tokens":
        changed[t, t] = (base[t, t] + 1 + subject.seed % max(1, subject.spec.width - 1)) % subject.spec.width
    else:
        changed[t, t] += torch.randn(
            base[t, t].shape, generator=torch.Generator().manual_seed(subject.seed)
        ).to(base)
    return base, changed


def _influence(subject: Subject, model: nn.Module, base: Tensor, changed: Tensor) -> Tensor:
    """[row, position]: how far the output moved, relative to the largest output."""
    return relative_difference(subject.logits(model, base), subject.logits(model, changed)).amax(dim=-1).cpu()


def _truncation(subject: Subject) -> CheckResult | None:
    """f(x[:t]) == f(x)[:t] in eval mode; catches positions and scales that depend on the length."""
    inputs, limit = subject.inputs(1), subject.spec.tolerance
    for length in sorted({max(1, subject.seq_len // 2), subject.seq_len - 1}):

        def gap(model: nn.Module, length: int = length) -> Tensor:
            whole = subject.logits(model, inputs)
            return relative_difference(whole[:, :length], subject.logits(model, inputs[:, :length])).amax(-1)[
                0
            ]

        gaps = gap(subject.model())
        value = gaps.max().item()
        if value > limit and persists_in_float64(subject, lambda twin: gap(twin).max().item()):
            return subject.failed(
                value,
                limit,
                where=f"position {int(gaps.argmax())} of a prefix of {length} tokens (eval mode)",
                meaning="The outputs of a prefix change when tokens follow it.",
                advice=_ADVICE + " Positions counted from the end do this too.",
            )
    return None
