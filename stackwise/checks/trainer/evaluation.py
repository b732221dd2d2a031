"""Evaluation: the evaluation loss gives each target the same weight, and a perplexity is exp of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.batch import joined, rows_of
from stackwise.checks.probe.call import refusals
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun, labels_in, with_labels
from stackwise.support.hooks import temporary_hooks

_ROWS = 4
_EXACT = 1e-5
_NARROW = 1e-2
# Label for padding if no label is ignored. No token has it.
_NO_LABEL = -100
_UNEQUAL = "batches of 1 and 3 rows"
_SAME_SIZE = "all batches have the same number of rows, such as batches that are drawn at random"
_AVERAGES = "all batches have the same number of targets: this trainer averages the losses of batches"
_AUXILIARY = "evaluate() adds the auxiliary loss of the routers on purpose, and gives no perplexity"


@trainer_check
def evaluation_exact(subject: TrainerSubject) -> CheckResult:
    """Is the evaluation loss the mean over all targets, for any division of the rows into batches?"""
    run = subject.run()
    if not subject.has(run, "evaluate"):
        return subject.not_applicable("needs evaluate(batches)")
    run.model.train()
    rows = _ragged_rows(subject)
    divisions = {
        "two batches of two rows": [joined(rows[:2], 1), joined(rows[2:], 1)],
        "batches of one row": rows,
        "batches of one row, in reverse order": rows[::-1],
        _UNEQUAL: [rows[0], joined(rows[1:], 1)],
    }
    exact = exact_loss(run, rows, subject.spec.ignored_label)
    wanted = evaluated(run, [joined(rows, 1)]) if exact is None else exact
    if exact is None and isinstance(rows[0], Mapping) and "input_ids" in rows[0]:
        with WithoutDropout():  # dropout is a finding, random masks of tokens are not
            if len({evaluated(run, [joined(rows, 1)]) for _ in range(2)}) > 1:
                return subject.not_applicable("needs an evaluation that masks no random tokens")
    found = {name: evaluated(run, batches) for name, batches in divisions.items()}
    gaps = {name: _apart(each, wanted) for name, each in found.items()}
    where = max(gaps, key=lambda name: math.inf if math.isnan(gaps[name]) else gaps[name])
    limit = _limit(run, rows, run.evaluate)  # type: ignore[attr-defined]
    averages = subject.averages_batches(run, "evaluate")
    if gaps[where] <= limit:
        return subject.passed(gaps[where], limit)
    mistake, correct_if = "", None
    if exact is None:
        is_same_size = subject.spec.ignored_label is None and all(
            gap <= limit for name, gap in gaps.items() if name != _UNEQUAL
        )
        run.model.train()
        if _apart(evaluated(run, divisions[where]), found[where]) <= limit:  # the loss is repeatable
            correct_if = _AVERAGES if averages else _SAME_SIZE if is_same_size else None
    else:
        mistake, correct_if = _explained(subject, run, divisions[where], found[where], exact, limit)
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


def _explained(
    subject: TrainerSubject, run: TrainingRun, batches: list[Any], found: float, exact: float, limit: float
) -> tuple[str, str | None]:
    """Return the mistake in an evaluation loss, or "", and the condition under which the loss is correct."""
    ignored = _NO_LABEL if subject.spec.ignored_label is None else subject.spec.ignored_label
    averages = subject.averages_batches(run, "evaluate")
    losses = [exact_loss(run, [batch], ignored) or math.nan for batch in batches]
    targets = [int((batch["labels"][:, 1:] != ignored).sum()) for batch in batches]
    labels = [int((batch["labels"] != ignored).sum()) for batch in batches]
    by_labels = [loss * n / m for loss, n, m in zip(losses, targets, labels, strict=True)]
    # A mean over batches may weigh them by their rows.
    weights = [[1] * len(batches), [len(batch["labels"]) for batch in batches]] if averages else [targets]

    def is_mean(values: list[float], weights: list[list[int]] = weights) -> bool:
        """Return True if the evaluation loss is a weighted mean of the values of the batches."""
        return any(
            _apart(found, sum(map(operator.mul, each, values)) / sum(each)) <= limit for each in weights
        )

    near = limit * max(1.0, exact)
    mistakes = {
        "exp of this mean. Report a perplexity through perplexity(batches)": _apart(found, math.exp(exact))
        <= near,
        "2 to the power of this mean": _apart(found, 2**exact) <= near,
        "the sum divided by the number of labels. The first label of a row is not a target": is_mean(
            by_labels, weights if averages else [labels]
        ),
    }
    mistake = next((f" The evaluation loss is {name}." for name, is_made in mistakes.items() if is_made), "")
    correct_if = None
    trained = _trained_losses(run, batches)
    if averages and is_mean(losses):
        correct_if = _AVERAGES
    elif trained is not None and is_mean(trained):
        correct_if = _AUXILIARY
    return mistake, correct_if


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
    limit = _limit(run, batches, run.perplexity) * max(1.0, exact)  # type: ignore[attr-defined]
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
    """Return the mean loss over targets in float64, from the logits.

    None: the model returns no logits, or it is no causal model, so that its labels may not be shifted.
    """
    ignored = _NO_LABEL if ignored is None else ignored
    total, count = 0.0, 0
    with _eval_mode(run.model):
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
def _trained_losses(run: TrainingRun, batches: Iterable[Any]) -> list[float] | None:
    """Return the training loss of each batch in eval mode. None: no auxiliary terms."""
    if getattr(run, "loss", None) is None:
        return None
    losses = []
    with _eval_mode(run.model):
        for batch in batches:
            try:
                output = run.model(**batch)
                losses.append(float(run.loss(batch)))  # type: ignore[attr-defined]
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
    dtypes = {p.dtype for p in run.model.parameters()}

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            dtypes.add(output.dtype)

    with temporary_hooks(module.register_forward_hook(note) for module in run.model.modules()):
        evaluate(batches)
    return _NARROW if dtypes & {torch.bfloat16, torch.float16} else _EXACT


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
