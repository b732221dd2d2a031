"""Evaluation: it changes nothing, repeats itself, and weighs every target the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.update import distance, observed, rates_of
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.trainer_spec import TrainingRun

__all__ = ["evaluation_batches", "evaluation_exact", "evaluation_repeats", "evaluation_restores"]

_ROWS = 4
_EXACT = 1e-5
_NARROW = 1e-2
_SAME = 1e-6
_OTHER_STEP = 1e-3
_REASON = "needs evaluate(batches)"


@trainer_check
def evaluation_restores(subject: TrainerSubject) -> CheckResult:
    """Does evaluation change no weight and no mode, and leave the next step as it would have been?"""
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
            before = _state(run)
            with subject.fixed_randomness():
                evaluated(run, [subject.batch(2)])
            changed = [name for name, value in _state(run).items() if not _same(value, before.get(name))]
            if torch.is_grad_enabled() != grad_mode:
                torch.set_grad_enabled(grad_mode)
                changed.append("whether gradients are recorded")
            if changed:
                return subject.failed(
                    len(changed),
                    0.0,
                    where=_listed(changed),
                    meaning=f"{len(changed)} of {len(before)} tensors and settings changed in an evaluation",
                    advice="evaluate in eval mode under torch.no_grad(), and put back what is changed for it",
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
            where=_listed([name or "the model" for name in wrong]),
            meaning=f"after an evaluation {len(wrong)} modules train on in {mode} mode, unlike without it",
            advice="put each module's mode back after evaluation: else training goes on without dropout, or "
            "parts that were kept in eval mode are no longer",
        )
    value = distance(steps[True], steps[False])
    if value > _OTHER_STEP:
        return subject.failed(
            value,
            _OTHER_STEP,
            where="gradient of the next step",
            meaning="it differs from that of the same step without the evaluation before it",
            advice="gradients or other state of the evaluation are left behind",
        )
    return subject.passed(value, _OTHER_STEP)


@trainer_check
def evaluation_repeats(subject: TrainerSubject) -> CheckResult:
    """Does evaluation of a model in train mode give the same twice, whatever the random state?"""
    run = subject.run()
    if not subject.has(run, "evaluate"):
        return subject.not_applicable(_REASON)
    values = []
    for seed in range(2):
        run.model.train()
        with subject.under_seed(seed):
            values.append(evaluated(run, [subject.batch(0), subject.batch(1)]))
    value = abs(values[0] - values[1]) / max(abs(values[0]), 1e-12)
    if not value <= _SAME:
        return subject.failed(
            value,
            _SAME,
            where="what evaluate(batches) returns",
            meaning=f"{values[0]:.6g} and {values[1]:.6g} nats of the same batches under two seeds",
            advice="dropout is active: call model.eval() before, and train() again after",
        )
    return subject.passed(value, _SAME)


@trainer_check
def evaluation_batches(subject: TrainerSubject) -> CheckResult:
    """Does the evaluation loss not depend on how rows are put into batches, and on their order?"""
    run = subject.run()
    if not subject.has(run, "evaluate"):
        return subject.not_applicable(_REASON)
    rows = _ragged_rows(subject)
    whole = evaluated(run, [_joined(rows)])
    limit = _limit(run, rows)
    value, where, found = 0.0, "", whole
    for name, batches in (
        ("one row to a batch", rows),
        ("one row to a batch, in reverse order", rows[::-1]),
        ("1 and 3 rows to a batch", [rows[0], _joined(rows[1:])]),
    ):
        other = evaluated(run, batches)
        apart = abs(other - whole) / max(abs(whole), 1e-12)
        if not apart <= value:
            value, where, found = apart, name, other
    if not value <= limit:
        return subject.failed(
            value,
            limit,
            where=where,
            meaning=f"{found:.6g} nats per target, and {whole:.6g} with all rows in one batch",
            advice="sum the losses of all targets and divide once by their number: a mean of the means of "
            "batches weighs targets of short batches more",
        )
    return subject.passed(value, limit)


@trainer_check
def evaluation_exact(subject: TrainerSubject) -> CheckResult:
    """Is the evaluation loss the mean over all targets of their negative log likelihood?"""
    run = subject.run()
    if not subject.has(run, "evaluate"):
        return subject.not_applicable(_REASON)
    rows = _ragged_rows(subject)
    batches = [_joined(rows[:2]), _joined(rows[2:])]
    exact = _exact_loss(run, batches, subject.spec.ignored_label)
    if exact is None:
        return subject.not_applicable(
            "needs batches with input_ids and labels, and a model that gives logits"
        )
    found = evaluated(run, batches)
    value, limit = abs(found - exact) / max(abs(exact), 1e-12), _limit(run, batches)
    if not value <= limit:
        return subject.failed(
            value,
            limit,
            where="what evaluate(batches) returns",
            meaning=f"{found:.6g} nats per target; summed over the targets themselves it is {exact:.6g}",
            advice="divide by the number of targets, T - 1 of T tokens less the ignored ones; count each "
            "token of overlapping windows once",
        )
    return subject.passed(value, limit)


def evaluated(run: TrainingRun, batches: list[Any]) -> float:
    """The mean loss of batches, as the run computes it."""
    return float(run.evaluate(batches))  # type: ignore[attr-defined]


def _ragged_rows(subject: TrainerSubject) -> list[Any]:
    """Batches of one row, with fewer targets from row to row where they have labels."""
    batch = subject.batch(batch_size=_ROWS)
    rows = [_row(batch, index) for index in range(_ROWS)]
    for index, row in enumerate(rows):
        if isinstance(row, Mapping) and "labels" in row:
            keep = max(2, row["labels"].shape[-1] >> index)
            labels = row["labels"].clone()
            labels[..., keep:] = subject.spec.ignored_label
            rows[index] = {**row, "labels": labels}
    return rows


def _row(batch: Any, index: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[index : index + 1] if batch.ndim and len(batch) == _ROWS else batch
    if isinstance(batch, Mapping):
        return {key: _row(value, index) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_row(value, index) for value in batch)
    return batch


def _joined(rows: list[Any]) -> Any:
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.cat(rows) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: _joined([row[key] for row in rows]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(list(values)) for values in zip(*rows, strict=True))
    return first


@torch.no_grad()
def _exact_loss(run: TrainingRun, batches: Iterable[Any], ignored: int) -> float | None:
    """Summed over targets in float64, from the logits of the model alone; None: it gives none."""
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


def _logits(run: TrainingRun, batch: Any) -> Tensor | None:
    """(B, T, V) of a batch with ids and labels of one shape."""
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
        return None
    ids = batch["input_ids"]
    if batch["labels"].shape != ids.shape:
        return None
    named = {"input_ids": ids, "attention_mask": batch.get("attention_mask")}
    for arguments, keywords in (((), named), ((ids,), {})):
        try:
            output = run.model(*arguments, **keywords)
        except (TypeError, ValueError, RuntimeError):
            continue
        found = getattr(output, "logits", output)
        if isinstance(found, Tensor) and found.ndim == 3 and found.shape[:2] == ids.shape:
            return found
    return None


def _limit(run: TrainingRun, batches: list[Any]) -> float:
    """What rounding explains: more where weights or outputs of modules are narrow, as in autocast."""
    dtypes = {p.dtype for p in run.model.parameters()}

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            dtypes.add(output.dtype)

    with ExitStack() as stack:
        for module in run.model.modules():
            stack.callback(module.register_forward_hook(note).remove)
        evaluated(run, batches)
    return _NARROW if dtypes & {torch.bfloat16, torch.float16} else _EXACT


def _modes(run: TrainingRun) -> dict[str, bool]:
    return {name: module.training for name, module in run.model.named_modules()}


def _state(run: TrainingRun) -> dict[str, Any]:
    """All that a checkpoint has of the model, the optimizer's state and its learning rates."""
    state: dict[str, Any] = {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in run.model.state_dict().items()
    }
    for name, p in run.model.named_parameters():
        for key, value in run.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer {key} of {name}"] = value.detach().clone()
    for index, rate in enumerate(rates_of(run.optimizer)):
        state[f"learning rate of group {index}"] = rate
    return state


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
