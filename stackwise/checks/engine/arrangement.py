"""Arrangement: the tensors of a question.

Shapes: B rows, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call, Place, Question

__all__ = ["arranged"]


def arranged(question: Question, exam: Examination) -> tuple[Call, list[tuple[int, int]]]:
    """Return the tensors of a question, and the number and length of each sequence."""
    numbers: list[tuple[int, int]] = []
    places: list[Place] = []
    sequences: list[Tensor] = []
    rows: list[Tensor] = []
    keeps: list[Tensor] = []
    documents: list[Tensor] = []
    kinds = {segment.kind for row in question.rows for segment in row}
    shape = len(question.rows), question.width
    fillers = {
        kind: exam.padding(*shape) if kind == "padding" else exam.filler(*shape)
        for kind in kinds - {"sequence"}
    }
    for index, row in enumerate(question.rows):
        parts: list[Tensor] = []
        keep: list[bool] = []
        document: list[int] = []
        start = 0
        for segment in row:
            end = start + segment.length
            if segment.kind == "sequence":
                number = len(numbers) if segment.number is None else segment.number
                key = (number, segment.length)
                numbers.append(key)
                places.append(Place(index, start, end))
                sequences.append(exam.sequence(*key))
                parts.append(sequences[-1])
            else:
                parts.append(fillers[segment.kind][index, start:end])
            keep += [segment.kind != "padding"] * segment.length
            is_first = segment.kind == "sequence" and start > 0
            document += [(document[-1] if document else 0) + is_first] * segment.length
            start = end
        rows.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        keeps.append(torch.tensor(keep))
        documents.append(torch.tensor(document))
    device = exam.subject.device
    call = Call(torch.stack(rows).to(device), sequences, places)
    if question.mask:
        call.keep = torch.stack(keeps).to(device)
    if question.documents:
        call.documents = torch.stack(documents).to(device)
    if question.parts:
        call.parts = _filled(question.parts, question.width)
        call.first_cache = question.first_cache
        call.operation, call.turns_rows = question.operation, question.turns_rows
        call.in_turns = question.in_turns
        if question.in_turns or question.operation is not None:
            call.others = exam.filler(*shape)
    if question.ignored is not None:
        call.labels = _labels(call, question.ignored, exam)
    return call, numbers


def _filled(sizes: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Return sizes that add up to `width`. The last size repeats."""
    parts: list[int] = []
    left = width
    while left > 0:
        size = min(left, sizes[min(len(parts), len(sizes) - 1)])
        parts.append(size)
        left -= size
    return tuple(parts)


def _labels(call: Call, ignored: float, exam: Examination) -> Tensor:
    """Return the ids of the sequences as labels, a share of them ignored.

    The first label of a sequence is ignored: the output before it belongs to padding or another sequence.
    """
    labels = torch.full_like(call.inputs, -100)
    for number, place in enumerate(call.places):
        some = call.sequences[number].clone()
        rng = torch.Generator().manual_seed(exam.subject.seed + number)
        some[torch.rand(len(some), generator=rng) < ignored] = -100
        some[0] = -100
        labels[place.row, place.start : place.end] = some
    return labels
