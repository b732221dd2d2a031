"""Top k: selection among equal values, and selection of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.probe.operations import Operations
from stackwise.checks.subject import Subject
from stackwise.support.system_errors import false_if_raised

__all__ = ["chooses_among_equals", "selects_positions"]

_LENGTH = 13  # unlikely to be a number of experts


@false_if_raised
def selects_positions(subject: Subject) -> bool:
    """Return True if the model selects positions by a top k, as sparse attention does.

    False if the model takes only inputs of another length.
    """
    length = min(_LENGTH, subject.spec.max_length or _LENGTH)
    selections = _selections(lambda: subject.logits(subject.model(), subject.inputs(1, length)))
    return any(size == length for size, _ in selections)


def chooses_among_equals(call: Callable[[], object]) -> bool:
    """Return True if `call` takes the top k of values, and the k-th is equal to the next one.

    Which of them is taken depends on the algorithm, and so on the shape: neither order is wrong. Values at
    the bottom of their dtype are masked out, and their order is of no account.
    """
    return any(is_tied for _, is_tied in _selections(call))


def _selections(call: Callable[[], object]) -> list[tuple[int, bool]]:
    """Return, for each top k, the number of its values, and True if it selects only some of equal values."""
    selections = []

    def record(name: str, args: Any, _: Any) -> None:
        if name == "topk" and args[0].ndim:
            values, k, dim = (*args, -1)[:3]
            selections.append((values.shape[dim], _is_tied(values, k, dim)))

    with Operations(record):
        call()
    return selections


def _is_tied(values: Tensor, k: int, dim: int) -> bool:
    if not 0 < k < values.shape[dim]:
        return False
    ordered = values.detach().sort(dim=dim, descending=True).values
    last, first = ordered.select(dim, k - 1), ordered.select(dim, k)
    counts = last > torch.finfo(values.dtype).min if values.is_floating_point() else torch.ones_like(last) > 0
    return bool(((last == first) & counts).any())
