"""Causality: no output depends on a later input.

Shapes: R rows, T positions, V outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stackwise.checks.check import CheckResult, Subject, check
from stackwise.checks.difference import Finding, absolute_difference, hear, relative_difference

_EXACT_LEAK = 1e-8  # equal inputs and shapes: a sound model repeats itself to the bit
_EXACT_PREFIX = 1e-6  # other shapes, other order of sums; parts of a float64 model may stay float32
_MAX_ELEMENTS = 2**24  # of one output (R, T, V)

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

    findings = []
    for mode in ("eval", "train"):
        leak = _find_leak(subject, train=mode == "train")
        if leak.real:
            token, position = _place(subject, train=mode == "train", dtype=leak.dtype)
            return subject.failed(
                leak.value,
                leak.limit,
                where=f"position {position} reads token {token} ({mode} mode)",
                meaning=f"Replacing token {token} changed the output at position {position}, before it.",
                advice=_ADVICE,
            )
        findings.append(leak)
    for length in sorted({max(1, subject.seq_len // 2), subject.seq_len - 1}):
        gap = _find_gap(subject, length)
        if gap.real:
            return subject.failed(
                gap.value,
                gap.limit,
                where=f"the first {length} of {subject.seq_len} positions (eval mode)",
                meaning="The outputs of a prefix change when tokens follow it.",
                advice=_ADVICE + " Positions counted from the end do this too.",
            )
    worst = max(findings, key=lambda finding: finding.value)
    return _unless_blind(subject, worst)


def _find_leak(subject: Subject, *, train: bool) -> Finding:
    return hear(
        subject, lambda model: _leaks(subject, model).max().item(), exact_limit=_EXACT_LEAK, train=train
    )


def _leaks(subject: Subject, model: nn.Module) -> Tensor:
    """[token, position]: influence on earlier positions over that on the token's own and later ones."""
    base, changed = _perturbed(subject)
    leak = _leak(_influence(subject, model, base, changed))
    # A suspect row is asked alone, so that rows that see each other are not taken for a leak in time.
    for token in leak.amax(dim=1).nonzero().flatten().tolist():
        row = slice(token, token + 1)
        leak[row] = _leak(_influence(subject, model, base[row], changed[row]), first_token=token)
    return leak


def _find_gap(subject: Subject, length: int) -> Finding:
    """f(x[:t]) == f(x)[:t]; catches positions and scales that depend on the length."""
    inputs = subject.inputs(1)

    def gap(model: nn.Module) -> float:
        whole = subject.logits(model, inputs)
        return relative_difference(whole[:, :length], subject.logits(model, inputs[:, :length])).max().item()

    return hear(subject, gap, exact_limit=_EXACT_PREFIX)


def _place(subject: Subject, *, train: bool, dtype: torch.dtype) -> tuple[int, int]:
    """The (token, position) of the largest leak."""
    leak = _leaks(subject, subject.model(train=train, dtype=dtype))
    token, position = divmod(int(leak.argmax()), subject.seq_len)
    return token, position


def _unless_blind(subject: Subject, worst: Finding) -> CheckResult:
    """The passing result, or a warning where nothing was there to leak."""
    influence = _influence(subject, subject.model(dtype=worst.dtype), *_perturbed(subject))
    blind = (influence.triu().amax(dim=1) == 0).nonzero().flatten()
    if len(blind):
        return subject.warned(
            worst.value,
            worst.limit,
            where=f"token {int(blind[0])}",
            meaning="Replacing this token changed nothing at or after it: the model seems not to read it.",
            advice="Look for a mask that hides the token itself, and for an embedding that is constant.",
        )
    if influence.triu(1).max() == 0:
        return _with_zeros_filled(subject, worst)
    return subject.passed(worst.value, worst.limit, meaning=worst.meaning)


def _with_zeros_filled(subject: Subject, worst: Finding) -> CheckResult:
    """No position reads another. Where zero-initialised weights are why, look behind them."""
    model = subject.model(dtype=torch.float64) if worst.dtype == torch.float64 else subject.model()
    zero = [p for p in model.parameters() if p.is_floating_point() and not p.any()]
    generator = torch.Generator().manual_seed(subject.seed)
    with torch.no_grad():
        for p in zero:
            p.copy_(0.02 * torch.randn(p.shape, generator=generator))
    influence = _influence(subject, model, *_perturbed(subject))
    leak = _leak(influence)
    if leak.max() > worst.limit:
        token, position = divmod(int(leak.argmax()), subject.seq_len)
        return subject.failed(
            leak.max().item(),
            worst.limit,
            where=f"position {position} reads token {token} (eval mode, zero weights made random)",
            meaning="No position reads another as initialised, but a later one will once zero weights train.",
            advice=_ADVICE,
        )
    if influence.triu(1).max() > 0:
        return subject.passed(leak.max().item(), worst.limit, meaning="asked with zero weights made random")
    return subject.warned(
        worst.value,
        worst.limit,
        meaning="No position reads another, so there was nothing to leak.",
        advice="Right for a model without memory; else look for attention that is cut off.",
    )


def _perturbed(subject: Subject) -> tuple[Tensor, Tensor]:
    """T equal rows, and the same with token t of row t replaced."""
    T = subject.seq_len
    base = subject.inputs(1).repeat_interleave(T, dim=0)
    changed, t = base.clone(), torch.arange(T, device=base.device)
    if subject.spec.inputs == "tokens":
        step = 1 + subject.seed % (subject.spec.width - 1)
        changed[t, t] = (base[t, t] + step) % subject.spec.width
    else:
        noise = torch.randn(T, subject.spec.width, generator=torch.Generator().manual_seed(subject.seed + 1))
        changed[t, t] += noise.to(base)
    return base, changed


def _influence(subject: Subject, model: nn.Module, base: Tensor, changed: Tensor) -> Tensor:
    """[row, position]: how far the output moved, in any channel. Float64, on the CPU."""
    rows = []
    size = max(1, _MAX_ELEMENTS // (subject.seq_len * max(subject.spec.width, 1)))
    for some_base, some_changed in zip(torch.split(base, size), torch.split(changed, size), strict=True):
        before, after = subject.logits(model, some_base), subject.logits(model, some_changed)
        rows.append(absolute_difference(before, after).amax(dim=-1).cpu())
    return torch.cat(rows)


def _leak(influence: Tensor, first_token: int = 0) -> Tensor:
    """The same for rows whose tokens count from `first_token`."""
    token = torch.arange(first_token, first_token + len(influence))[:, None]
    earlier = torch.arange(influence.shape[1])[None, :] < token
    forward = influence.masked_fill(earlier, 0.0).amax(dim=1, keepdim=True)
    backward = influence.masked_fill(~earlier, 0.0)
    return torch.where(backward > 0, backward / forward, 0.0).nan_to_num(nan=torch.inf)
