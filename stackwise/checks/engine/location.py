"""Location: the first module whose output differs between a composition and the plain answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from stackwise.checks.engine.composition import Composition, Variations
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.execution import Execution
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.difference import relative_difference

__all__ = ["first_difference"]

Record = dict[str, list[Tensor]]


def first_difference(composition: Composition, variations: Variations, exam: Examination) -> str:
    """Return the name of the first module whose output differs, or "" if none can be compared.

    Only modules are compared that give one tensor (B, T, ...) or (B, C, T) for each call of the model.
    """
    if not exam.spec.per_position:
        return ""
    execution = Execution(replace(composition, after=False), variations, exam)
    with _recorded(execution.model) as composed:
        list(execution.compare())
    plain = []
    for key in execution.numbers:
        model = execution.exam.model()
        with _recorded(model) as record, torch.no_grad():
            execution.exam.plain(model, execution.exam.sequence(*key))
        plain.append(record)
    for name, parts in composed.items():
        if any(len(record.get(name, ())) != 1 for record in plain):
            continue
        is_last = parts[0].ndim == 3 and _is_last(parts[0], execution.question.width)
        if is_last:
            parts = [part.transpose(1, 2) for part in parts]
        whole = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if whole.shape[:2] != execution.call.inputs.shape[:2]:
            continue
        whole = execution.call.restored(whole)
        for number, (place, record) in enumerate(zip(execution.call.places, plain, strict=True)):
            [expected] = record[name]
            expected = expected.transpose(1, 2) if is_last else expected
            found = whole[place.row : place.row + 1, place.start : place.end]
            if found.shape != expected.shape:
                break
            gaps = relative_difference(expected, found).flatten(2).amax(dim=-1)[0]
            if not execution.exam.compares_values:
                is_bad = expected.isfinite() & ~found.isfinite()
                gaps = torch.where(is_bad.flatten(2).any(dim=-1)[0], torch.inf, 0.0)
            if number in execution.call.compared:
                gaps = gaps.where(execution.call.compared[number], 0.0)
            if not float(gaps.max()) <= execution.exam.limit:
                return name
    return ""


def _is_last(output: Tensor, width: int) -> bool:
    """Return True if positions are the last dimension of (B, C, T), as after a convolution."""
    return output.shape[1] != width == output.shape[2]


@contextmanager
def _recorded(model: nn.Module) -> Iterator[Record]:
    """Inside, record the first floating-point tensor (B, T, ...) that each submodule returns."""
    record: Record = defaultdict(list)

    def keep(name: str, output: object) -> None:
        first = next(tensors_in(output), None)
        if first is not None and first.is_floating_point() and first.ndim >= 3:
            record[name].append(first.detach())

    handles = [
        module.register_forward_hook(lambda *call, name=name: keep(name, call[-1]))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
