"""Location: the first module whose output differs between a composition and the plain answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from stackwise.checks.engine.composition import Composition
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.execution import Execution
from stackwise.checks.probe.batch import tensors_in
from stackwise.support.hooks import temporary_hooks

__all__ = ["first_difference"]

Record = dict[str, list[Tensor]]


def first_difference(composition: Composition, exam: Examination) -> str:
    """Return the name of the first module whose output differs, or "" if none can be compared.

    Only modules are compared that give one tensor (B, T, ...) or (B, C, T) for each call of the model.
    """
    if not exam.spec.per_position:
        return ""
    execution = Execution(replace(composition, after=False), exam)
    with _recorded(execution.model) as composed:
        list(execution.compare())
    plain = []
    for place in execution.call.places:
        model = execution.exam.model()
        with _recorded(model) as record, torch.no_grad():
            execution.exam.plain(model, execution.exam.sequence(*place.sequence))
        plain.append(record)
    names = (name for name in composed if all(len(record.get(name, ())) == 1 for record in plain))
    return next((n for n in names if _differs(execution, composed[n], [r[n][0] for r in plain])), "")


def _differs(execution: Execution, parts: list[Tensor], plain: list[Tensor]) -> bool:
    """Return True if a module has other outputs than in the plain calls.

    Args:
        execution: the composition under test.
        parts: outputs of its calls, one for each part of the sequence.
        plain: outputs (1, T, ...) of the plain calls.
    """
    # Positions may be the last dimension (B, C, T), as after a convolution.
    if parts[0].ndim == 3 and parts[0].shape[1] != execution.question.width == parts[0].shape[2]:
        parts, plain = ([each.transpose(1, 2) for each in outputs] for outputs in (parts, plain))
    found = torch.cat(parts, dim=1)
    if found.shape[:2] != execution.call.inputs.shape[:2]:
        return False
    found = execution.call.restored(found)
    for place, expected in zip(execution.call.places, plain, strict=True):
        row = found[place.row : place.row + 1, place.start : place.end]
        if row.shape != expected.shape:
            return False
        if not float(execution.gaps(place, expected[0], row[0]).max()) <= execution.exam.limit:
            return True
    return False


@contextmanager
def _recorded(model: nn.Module) -> Iterator[Record]:
    """Inside, record the first floating-point tensor (B, T, ...) that each submodule returns."""
    record: Record = defaultdict(list)

    def keep(name: str, output: object) -> None:
        first = next(tensors_in(output), None)
        if first is not None and first.is_floating_point() and first.ndim >= 3:
            record[name].append(first.detach())

    handles = (
        module.register_forward_hook(lambda *call, name=name: keep(name, call[-1]))
        for name, module in model.named_modules()
        if name
    )
    with temporary_hooks(handles):
        yield record
