"""Evaluation: the loss weights all targets equally, a perplexity is exp of it, and averages are evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.batch import joined, rows_of
from stackwise.checks.probe.call import refusals
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.recorded_calls import recorded_calls
from stackwise.checks.probe.update import distance, train, weights_of
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun, labels_in, with_labels
from stackwise.support.hooks import temporary_hooks
from stackwise.support.mode import evaluating
from stackwise.support.optimizer_state import optimizers_in

_ROWS = 4
_STEPS = 4
_CLOSE = 0.1  # largest distance from the weights of eval mode; the weights of train mode have the distance 1
_EXACT = 1e-5
_NARROW = 1e-2
_UNEQUAL = "batches of 1 and 3 rows"
_SAME_SIZE = "all batches have the same number of rows, such as batches that are drawn at random"
_AVERAGES = "all batches have the same number of targets: this trainer averages the losses of batches"
_AUXILIARY = "evaluate() adds the auxiliary loss of the routers on purpose, and gives no perplexity"


@trainer_check
def evaluation_exact(subject: TrainerSubject) -> CheckResult:
    """Is the evaluation loss the mean over all targets, for any division of the rows into batches?"""
    run: Any = subject.run()
    needed(subject.has(run, "evaluate"), "evaluate(batches)")
    run.model.train()
    rows = _ragged_rows(subject)
    divisions = {
        "two batches of two rows": [joined(rows[:2], 1), joined(rows[2:], 1)],
        "batches of one row": rows,
        "batches of one row, in reverse order": rows[::-1],
        _UNEQUAL: [rows[0], joined(rows[1:], 1)],
    }
    exact = exact_loss(run, rows, subject.spec.ignored_label)
    wanted = _repeated_loss(run, rows) if exact is None else exact
    found = {name: _evaluated(run, batches) for name, batches in divisions.items()}
    gaps = {name: relative_gap(each, wanted) for name, each in found.items()}
    where = max(gaps, key=lambda name: math.inf if math.isnan(gaps[name]) else gaps[name])
    limit = _limit(run, rows, run.evaluate)
    if gaps[where] <= limit:
        return subject.passed(gaps[where], limit)
    averages = subject.averages_batches(run, "evaluate")
    mistake, correct_if = "", None
    if exact is not None:
        mistake, correct_if = _explained(subject, run, divisions[where], found[where], exact, limit)
    else:
        others = [gap for name, gap in gaps.items() if name != _UNEQUAL]
        is_same_size = subject.spec.ignored_label is None and all(gap <= limit for gap in others)
        run.model.train()
        if relative_gap(_evaluated(run, divisions[where]), found[where]) <= limit:  # the loss is repeatable
            correct_if = _AVERAGES if averages else _SAME_SIZE if is_same_size else None
    declare = (
        " If all batches have the same number of targets, declare it with averages_batches = ("
        '"evaluate",) on the run. The check then warns only.'
    )
    return subject.failed_unless(
        correct_if,
        gaps[where],
        limit,
        where=f"the result of evaluate(batches), {where}",
        meaning=f"The evaluation loss is {found[where]:.6g}; the mean loss over all targets is {wanted:.6g}."
        + mistake,
        advice="Evaluate in eval mode. Sum the losses of all targets, and divide once by their number: T - 1 "
        "of T tokens, without ignored ones. If windows of the text overlap, count each token once."
        + declare
        * (not averages),
    )


def _repeated_loss(run: TrainingRun, rows: list[Any]) -> float:
    """Return the evaluation loss of one batch, if the evaluation masks no random tokens."""
    loss = _evaluated(run, [joined(rows, 1)])
    if isinstance(rows[0], Mapping) and "input_ids" in rows[0]:
        with WithoutDropout():  # dropout is a finding, random masks of tokens are not
            repeated = {_evaluated(run, [joined(rows, 1)]) for _ in range(2)}
        needed(len(repeated) == 1, "an evaluation that masks no random tokens")
    return loss


def _explained(
    subject: TrainerSubject, run: TrainingRun, batches: list[Any], found: float, exact: float, limit: float
) -> tuple[str, str | None]:
    """Return the mistake in an evaluation loss, or "", and the condition under which the loss is correct."""
    ignored = padding_label(subject.spec.ignored_label)
    averages = subject.averages_batches(run, "evaluate")
    losses = [exact_loss(run, [batch], ignored) or math.nan for batch in batches]
    targets = [int((batch["labels"][:, 1:] != ignored).sum()) for batch in batches]
    labels = [int((batch["labels"] != ignored).sum()) for batch in batches]
    by_labels = [loss * n / m for loss, n, m in zip(losses, targets, labels, strict=True)]
    # A mean over batches may weigh them by their rows.
    by_batch = [[1] * len(batches), [len(batch["labels"]) for batch in batches]]

    def is_mean(values: list[float], weights: list[int] = targets) -> bool:
        """Return True if the evaluation loss is a weighted mean of the values of the batches."""
        means = (np.average(values, weights=each) for each in (by_batch if averages else [weights]))
        return any(relative_gap(found, float(mean)) <= limit for mean in means)

    near = limit * max(1.0, exact)
    mistakes = {
        "exp of this mean. Report a perplexity through perplexity(batches)": math.exp(exact),
        "2 to the power of this mean": 2**exact,
    }
    mistake = next((name for name, loss in mistakes.items() if relative_gap(found, loss) <= near), "")
    if not mistake and is_mean(by_labels, labels):
        mistake = "the sum divided by the number of labels. The first label of a row is not a target"
    trained = _trained_losses(run, batches)
    correct_if = _AUXILIARY if trained is not None and is_mean(trained) else None
    if averages and is_mean(losses):
        correct_if = _AVERAGES
    return mistake and f" The evaluation loss is {mistake}.", correct_if


@trainer_check
def perplexity_exact(subject: TrainerSubject) -> CheckResult:
    """Is the reported perplexity exp of the mean negative log likelihood of all targets?"""
    run: Any = subject.run()
    needed(subject.has(run, "perplexity"), "perplexity(batches)")
    rows = _ragged_rows(subject)
    batches = [joined(rows[:2], 1), joined(rows[2:], 1)]
    exact = exact_loss(run, batches, subject.spec.ignored_label)
    if exact is None and subject.has(run, "evaluate"):
        exact = _evaluated(run, batches)
    need = "evaluate(batches), or batches with input_ids and labels and a model that gives logits"
    exact = needed(exact, need)
    found, wanted = float(run.perplexity(batches)), math.exp(exact)
    losses = [exact_loss(run, [batch], subject.spec.ignored_label) for batch in batches]
    means = [each for each in losses if each is not None] or [exact]
    names = {
        "the mean of the perplexities of batches": fmean(map(math.exp, means)),
        "exp of the mean of the losses of batches": math.exp(fmean(means)),
        "2 to the power of a loss in nats": 2**exact,
        "the loss itself": exact,
    }
    # exp multiplies the relative error of a loss by the loss.
    limit = _limit(run, batches, run.perplexity) * max(1.0, exact)
    closest = min(names, key=lambda name: relative_gap(found, names[name]))
    is_closest = relative_gap(found, names[closest]) <= limit
    return subject.at_most(
        relative_gap(found, wanted),
        limit,
        where="the result of perplexity(batches)",
        meaning=f"The perplexity is {found:.6g}; exp of the mean over all targets is {wanted:.6g}."
        + f" The perplexity is {closest}." * is_closest,
        advice="Sum the losses of all targets of all batches in nats, divide once by their number, and take "
        "exp last: a mean of exponentials is too high.",
    )


@trainer_check
def evaluation_weights(subject: TrainerSubject) -> CheckResult:
    """Does evaluate() use the weights of the optimizer's eval mode (schedule-free optimizers)?"""
    run: Any = subject.run()
    needed(subject.has(run, "evaluate"), "evaluate(batches)")
    modal = [each for each in optimizers_in(run.optimizer) if _has_modes(each)]
    needed(modal, "an optimizer with the methods train() and eval()")
    train(subject, run, _STEPS)
    for optimizer in modal:
        optimizer.train()
    trained = weights_of(run)
    for optimizer in modal:
        optimizer.eval()
    averaged = weights_of(run)
    for optimizer in modal:
        optimizer.train()
    between = distance(trained, averaged)
    needed(between > 0, "an optimizer whose eval mode changes the weights")
    seen: list[float] = []

    def record(*_: object) -> None:
        seen.append(distance(weights_of(run), averaged))

    with temporary_hooks([run.model.register_forward_pre_hook(record)]):
        run.evaluate([subject.batch(_STEPS), subject.batch(_STEPS + 1)])
    needed(seen, "an evaluate(batches) that calls the model of the run")
    nearest, farthest = min(seen) / between, max(seen) / between
    if farthest <= _CLOSE:
        return subject.passed(farthest, _CLOSE)
    return subject.failed_unless(
        "evaluate() also calls the model with other weights on purpose" if nearest <= _CLOSE else None,
        farthest,
        _CLOSE,
        where="the weights during evaluate(batches)",
        meaning="The weights during evaluate() are not those of the optimizer's eval mode. The value is "
        "their distance; the weights of train mode have the distance 1.",
        advice="Call optimizer.eval() before the evaluation, and optimizer.train() after it. If a "
        "wrapper has these methods, look for an inner optimizer that it does not reach.",
    )


def _has_modes(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def padding_label(ignored: int | None) -> int:
    """Return the ignored label. If there is none, return a label that no token has."""
    return -100 if ignored is None else ignored


def relative_gap(found: float, wanted: float) -> float:
    """Return the difference of two numbers, relative to the second."""
    return abs(found - wanted) / max(abs(wanted), 1e-12)


def _evaluated(run: Any, batches: list[Any]) -> float:
    return float(run.evaluate(batches))


def _ragged_rows(subject: TrainerSubject) -> list[Any]:
    """Return batches of one row. If they have labels, each row has fewer targets than the row before."""
    batch = subject.batch(batch_size=_ROWS)
    labels, ignored = labels_in(batch), subject.spec.ignored_label
    if labels is not None and ignored is not None:
        labels = labels.clone()
        for index, row in enumerate(labels):
            row[..., max(2, labels.shape[-1] >> index) :] = ignored
        batch = with_labels(batch, labels)
    return [rows_of(batch, _ROWS, slice(index, index + 1)) for index in range(_ROWS)]


@torch.no_grad()
def exact_loss(run: TrainingRun, batches: Iterable[Any], ignored: int | None) -> float | None:
    """Return the mean loss over targets in float64, from the logits.

    None: the model returns no logits, or it is no causal model, so that its labels may not be shifted.
    """
    ignored = padding_label(ignored)
    total, count = 0.0, 0
    with evaluating(run.model):
        for batch in batches:
            logits = _logits(run, batch)
            if logits is None or _sees_ahead(run, batch, logits):
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
    return total / count if count else math.nan


def _sees_ahead(run: TrainingRun, batch: Any, logits: Tensor) -> bool:
    """Return True if another last token changes the outputs before it."""
    ids = batch["input_ids"].clone()
    if ids.shape[1] < 2:
        return False
    ids[:, -1] = torch.where(ids[:, -1] == ids[:, 0], ids[:, 1], ids[:, 0])
    changed = _logits(run, {**batch, "input_ids": ids})
    return changed is not None and not torch.equal(changed[:, :-1], logits[:, :-1])


@torch.no_grad()
def _trained_losses(run: Any, batches: Iterable[Any]) -> list[float] | None:
    """Return the training loss of each batch in eval mode. None: no auxiliary terms."""
    if getattr(run, "loss", None) is None:
        return None
    losses = []
    with evaluating(run.model):
        for batch in batches:
            try:
                output = run.model(**batch)
                losses.append(float(run.loss(batch)))
            except refusals():
                return None
            is_mapping = isinstance(output, Mapping)
            auxiliary = output.get("aux_loss") if is_mapping else getattr(output, "aux_loss", None)
            if not (isinstance(auxiliary, Tensor) and auxiliary.numel() == 1 and auxiliary > 0):
                return None
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


def _limit(run: TrainingRun, batches: list[Any], evaluate: Callable[[list[Any]], Any]) -> float:
    """Return the largest rounding difference. It is larger if weights or outputs are in 16 bits."""
    calls = recorded_calls(run.model, lambda: evaluate(batches), lambda *_: True)
    return rounding_of(run, *(call.output for call in calls))


def rounding_of(run: TrainingRun, *outputs: Any) -> float:
    """Return the largest difference of losses by rounding. 16 bits of weights or outputs increase it."""
    dtypes = {x.dtype for x in (*run.model.parameters(), *outputs) if isinstance(x, Tensor)}
    return _NARROW if dtypes & {torch.bfloat16, torch.float16} else _EXACT
