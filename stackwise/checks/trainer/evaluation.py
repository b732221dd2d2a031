"""Evaluation: evaluate() has no side effects, is repeatable, and gives each target the same weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.batch import joined, rows_of
from stackwise.checks.probe.call import refusals
from stackwise.checks.probe.run_state import different, state_of
from stackwise.checks.probe.update import distance, observed
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun, labels_in, with_labels

_ROWS = 4
_EXACT = 1e-5
_NARROW = 1e-2
_SAME = 1e-6
_OTHER_STEP = 1e-3
# Label for padding if no label is ignored. No token has it.
_NO_LABEL = -100
_UNEQUAL = "batches of 1 and 3 rows"
_SAME_SIZE = "all batches have the same number of rows, such as batches that are drawn at random"
_REASON = "needs evaluate(batches)"
_AVERAGES = "all batches have the same number of targets: this trainer averages the losses of batches"


@trainer_check
def evaluation_restores(subject: TrainerSubject) -> CheckResult:
    """Does evaluation leave weights, modes and the next training step unchanged?"""
    if not subject.has(subject.run(), "evaluate"):
        return subject.not_applicable(_REASON)
    steps: dict[bool, dict[str, Tensor]] = {}
    modes: dict[bool, dict[str, bool]] = {}
    for evaluating in (False, True):
        run = subject.run()
        with subject.fixed_randomness():
            run.step(subject.batch(0))
        if evaluating:
            grad_mode = torch.is_grad_enabled()
            before = state_of(run)
            with subject.fixed_randomness():
                evaluated(run, [subject.batch(2)])
            changed = different(before, state_of(run))
            if torch.is_grad_enabled() != grad_mode:
                torch.set_grad_enabled(grad_mode)
                changed.append("torch.is_grad_enabled()")
            if changed:
                return subject.failed(
                    len(changed),
                    0.0,
                    where=listed(changed),
                    meaning=f"An evaluation changed {len(changed)} of {len(before)} tensors and settings.",
                    advice="Evaluate in eval mode under torch.no_grad(), and restore the state afterwards.",
                )
        with subject.fixed_randomness(), observed(run) as seen:
            run.step(subject.batch(1))
        modes[evaluating] = _modes(run)
        steps[evaluating] = seen.updates[-1].gradients if seen.updates else {}
    wrong = [name for name, mode in modes[True].items() if mode != modes[False].get(name, mode)]
    if wrong:
        mode = "train" if modes[True][wrong[0]] else "eval"
        return subject.failed(
            len(wrong),
            0.0,
            where=listed([name or "the model" for name in wrong]),
            meaning=f"Modules that stay in {mode} mode after an evaluation: {len(wrong)}.",
            advice="Restore the mode of each module after evaluation. Otherwise training continues without "
            "dropout, or frozen parts leave eval mode.",
        )
    value = distance(steps[True], steps[False])
    return subject.at_most(
        value,
        _OTHER_STEP,
        where="gradient of the next step",
        meaning="After an evaluation, the gradient differs from that of the same step without it.",
        advice="Look for gradients or other state that the evaluation does not restore.",
    )


@trainer_check
def evaluation_repeats(subject: TrainerSubject) -> CheckResult:
    """Is the evaluation loss of a model in train mode independent of the random state?"""
    run = subject.run()
    if not subject.has(run, "evaluate"):
        return subject.not_applicable(_REASON)
    values = []
    for seed in range(2):
        run.model.train()
        with subject.under_seed(seed):
            values.append(evaluated(run, [subject.batch(0), subject.batch(1)]))
    one, other = values
    return subject.at_most(
        _apart(other, one),
        _SAME,
        where="the result of evaluate(batches)",
        meaning=f"With two seeds, the same batches give {one:.6g} and {other:.6g} nats per target.",
        advice="Call model.eval() before the evaluation and model.train() after it: dropout is active.",
    )


@trainer_check
def evaluation_batches(subject: TrainerSubject) -> CheckResult:
    """Is the evaluation loss independent of the batch size and the order of rows?"""
    run = subject.run()
    if not subject.has(run, "evaluate"):
        return subject.not_applicable(_REASON)
    rows = _ragged_rows(subject)
    whole = evaluated(run, [joined(rows, 1)])
    value, where, found = 0.0, "", whole
    for name, batches in (
        ("batches of one row", rows),
        ("batches of one row, in reverse order", rows[::-1]),
        (_UNEQUAL, [rows[0], joined(rows[1:], 1)]),
    ):
        other = evaluated(run, batches)
        apart = _apart(other, whole)
        if not apart <= value:
            value, where, found = apart, name, other
    averages = subject.averages_batches(run, "evaluate")
    declare = (
        " If all batches have the same number of targets, declare it with averages_batches = ("
        '"evaluate",) on the run. The check then warns only.'
    )
    result = subject.at_most(
        value,
        _limit(run, rows),
        where=where,
        meaning="The evaluation loss depends on the division of rows into batches: it is "
        f"{found:.6g} nats per target, and {whole:.6g} with all rows in one batch.",
        advice="Sum the losses of all targets and divide once by their number. A mean over batches gives "
        "more weight to the targets of short batches." + declare * (not averages),
    )
    if averages:
        return _warned(subject, result, _AVERAGES)
    has_ignored = subject.spec.ignored_label is not None
    return result if has_ignored or where != _UNEQUAL else _warned(subject, result, _SAME_SIZE)


@trainer_check
def evaluation_exact(subject: TrainerSubject) -> CheckResult:
    """Is the evaluation loss the mean negative log likelihood of all targets?"""
    run = subject.run()
    if not subject.has(run, "evaluate"):
        return subject.not_applicable(_REASON)
    rows = _ragged_rows(subject)
    batches = [joined(rows[:2], 1), joined(rows[2:], 1)]
    exact = exact_loss(run, batches, subject.spec.ignored_label)
    if exact is None:
        return subject.not_applicable(
            "needs batches with input_ids and labels, and a model that gives logits"
        )
    found, limit = evaluated(run, batches), _limit(run, batches)
    ignored = _NO_LABEL if subject.spec.ignored_label is None else subject.spec.ignored_label
    averages = subject.averages_batches(run, "evaluate")
    means = [exact_loss(run, [batch], ignored) or math.nan for batch in batches]
    counts = [int((batch["labels"][:, 1:] != ignored).sum()) for batch in batches]
    n_labels = [int((batch["labels"] != ignored).sum()) for batch in batches]
    sums = [mean * count for mean, count in zip(means, counts, strict=True)]
    by_labels = (
        sum(total / n for total, n in zip(sums, n_labels, strict=True)) / len(sums)
        if averages
        else sum(sums) / sum(n_labels)
    )
    mistakes = {
        "exp of this mean. Report a perplexity through perplexity(batches)": float(
            torch.tensor(exact, dtype=torch.float64).exp()
        ),
        "2 to the power of this mean": float(torch.tensor(exact, dtype=torch.float64).exp2()),
        "the sum divided by the number of labels. The first label of a row is not a target": by_labels,
    }
    mistake = next(
        (name for name, each in mistakes.items() if _apart(found, each) <= limit * max(1.0, exact)), ""
    )
    result = subject.at_most(
        _apart(found, exact),
        limit,
        where="the result of evaluate(batches)",
        meaning=f"The evaluation loss is {found:.6g}; the mean loss over all targets is {exact:.6g} nats."
        + (f" The evaluation loss is {mistake}." if mistake else ""),
        advice="Divide by the number of targets: T - 1 of T tokens, without ignored ones. If windows "
        "of the text overlap, count each token once.",
    )
    if result.ok:
        return result
    if averages and _apart(found, sum(means) / len(means)) <= limit:
        return _warned(subject, result, _AVERAGES)
    if (trained := _trained_losses(run, batches)) is not None:
        weights = [1] * len(batches) if averages else counts
        own = sum(w * loss for w, loss in zip(weights, trained, strict=True)) / sum(weights)
        if _apart(found, own) <= limit:
            return _warned(
                subject,
                result,
                "evaluate() adds the auxiliary loss of the routers on purpose, and gives no perplexity",
            )
    return result


@trainer_check
def perplexity_exact(subject: TrainerSubject) -> CheckResult:
    """Is the reported perplexity exp of the mean negative log likelihood of all targets?"""
    run = subject.run()
    if not subject.has(run, "perplexity"):
        return subject.not_applicable("needs perplexity(batches)")
    rows = _ragged_rows(subject)
    batches = [joined(rows[:2], 1), joined(rows[2:], 1)]
    exact = exact_loss(run, batches, subject.spec.ignored_label)
    if exact is None and subject.has(run, "evaluate"):
        exact = evaluated(run, batches)
    if exact is None:
        return subject.not_applicable(
            "needs evaluate(batches), or batches with input_ids and labels and a model that gives logits"
        )
    found = float(run.perplexity(batches))  # type: ignore[attr-defined]
    wanted = math.exp(exact)
    losses = [exact_loss(run, [batch], subject.spec.ignored_label) for batch in batches]
    means = [each for each in losses if each is not None] or [exact]
    names = {
        "the mean of the perplexities of batches": sum(map(math.exp, means)) / len(means),
        "exp of the mean of the losses of batches": math.exp(sum(means) / len(means)),
        "2 to the power of a loss in nats": 2**exact,
        "the loss itself": exact,
    }
    # exp multiplies the relative error of a loss by the loss.
    limit = _limit_of(run, batches, run.perplexity) * max(1.0, exact)  # type: ignore[attr-defined]
    closest = min(names, key=lambda name: _apart(found, names[name]))
    return subject.at_most(
        _apart(found, wanted),
        limit,
        where="the result of perplexity(batches)",
        meaning=f"The perplexity is {found:.6g}; exp of the mean over all targets is {wanted:.6g}."
        + (f" The perplexity is {closest}." if _apart(found, names[closest]) <= limit else ""),
        advice="Sum the losses of all targets of all batches in nats, divide once by their number, and take "
        "exp last: a mean of exponentials is too high.",
    )


def _warned(subject: TrainerSubject, result: CheckResult, correct_if: str) -> CheckResult:
    """Return a failure as a warning, because it may be intended, and other results unchanged."""
    if result.status != "failed":
        return result
    text = {"where": result.where, "meaning": result.meaning, "advice": result.advice}
    return subject.warned(result.value, result.limit, correct_if=correct_if, **text)


def _apart(found: float, wanted: float) -> float:
    return abs(found - wanted) / max(abs(wanted), 1e-12)


def evaluated(run: TrainingRun, batches: list[Any]) -> float:
    """Return the mean loss of batches, as the run computes it."""
    return float(run.evaluate(batches))  # type: ignore[attr-defined]


def _ragged_rows(subject: TrainerSubject) -> list[Any]:
    """Return batches of one row. If they have labels, each row has fewer targets than the row before."""
    batch = subject.batch(batch_size=_ROWS)
    rows = [rows_of(batch, _ROWS, slice(index, index + 1)) for index in range(_ROWS)]
    for index, row in enumerate(rows):
        labels, ignored = labels_in(row), subject.spec.ignored_label
        if labels is not None and ignored is not None:
            keep = max(2, labels.shape[-1] >> index)
            labels = labels.clone()
            labels[..., keep:] = ignored
            rows[index] = with_labels(row, labels)
    return rows


@torch.no_grad()
def exact_loss(run: TrainingRun, batches: Iterable[Any], ignored: int | None) -> float | None:
    """Return the mean loss over targets in float64, from the logits. None: the model returns none."""
    ignored = _NO_LABEL if ignored is None else ignored
    modes = _modes(run)
    total, count = 0.0, 0
    try:
        run.model.eval()
        for batch in batches:
            logits = _logits(run, batch)
            if logits is None:
                return None
            targets = batch["labels"][:, 1:].to(logits.device).long()
            if (mask := batch.get("attention_mask")) is not None:
                targets = targets.masked_fill(mask[:, 1:] == 0, ignored)
            losses = F.cross_entropy(
                logits[:, :-1].flatten(0, 1).double(),
                targets.flatten(),
                ignore_index=ignored,
                reduction="sum",
            )
            total, count = total + float(losses), count + int((targets != ignored).sum())
    finally:
        for name, module in run.model.named_modules():
            module.training = modes[name]
    return total / count if count else math.nan


@torch.no_grad()
def _trained_losses(run: TrainingRun, batches: Iterable[Any]) -> list[float] | None:
    """Return the training loss of each batch in eval mode. None: no auxiliary terms."""
    if getattr(run, "loss", None) is None:
        return None
    modes, losses = _modes(run), []
    try:
        run.model.eval()
        for batch in batches:
            output = run.model(**batch)
            auxiliary = (
                output.get("aux_loss") if isinstance(output, Mapping) else getattr(output, "aux_loss", None)
            )
            if not (isinstance(auxiliary, Tensor) and auxiliary.numel() == 1 and auxiliary > 0):
                return None
            losses.append(float(run.loss(batch)))  # type: ignore[attr-defined]
    except refusals():
        return None
    finally:
        for name, module in run.model.named_modules():
            module.training = modes[name]
    return losses


def _logits(run: TrainingRun, batch: Any) -> Tensor | None:
    """Return logits (B, T, V) of a batch whose ids and labels have the same shape, or None."""
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
        return None
    ids = batch["input_ids"]
    if batch["labels"].shape != ids.shape:
        return None
    named = {"input_ids": ids, "attention_mask": batch.get("attention_mask")}
    for arguments, keywords in (((), named), ((ids,), {})):
        try:
            output = run.model(*arguments, **keywords)
        except refusals():
            continue
        found = getattr(output, "logits", output)
        if isinstance(found, Tensor) and found.ndim == 3 and found.shape[:2] == ids.shape:
            return found
    return None


def _limit(run: TrainingRun, batches: list[Any]) -> float:
    """Return the largest difference by rounding. It is larger if weights or outputs are in half precision."""
    return _limit_of(run, batches, run.evaluate)  # type: ignore[attr-defined]


def _limit_of(run: TrainingRun, batches: list[Any], evaluate: Callable[[list[Any]], Any]) -> float:
    """Return the largest difference by rounding in the result of `evaluate(batches)`."""
    dtypes = {p.dtype for p in run.model.parameters()}

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            dtypes.add(output.dtype)

    with ExitStack() as stack:
        for module in run.model.modules():
            stack.callback(module.register_forward_hook(note).remove)
        evaluate(batches)
    return _NARROW if dtypes & {torch.bfloat16, torch.float16} else _EXACT


def _modes(run: TrainingRun) -> dict[str, bool]:
    return {name: module.training for name, module in run.model.named_modules()}
