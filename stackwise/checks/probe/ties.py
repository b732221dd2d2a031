"""Top k: selection among equal values, and selection of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    watch = _Ties()
    with watch:
        subject.logits(subject.model(), subject.inputs(1, length))
    return length in watch.sizes


def chooses_among_equals(call: Callable[[], object]) -> bool:
    """Return True if `call` takes the top k of values, and the k-th is equal to the next one.

    Which of them is taken depends on the algorithm, and so on the shape: neither order is wrong. Values at
    the bottom of their dtype are masked out, and their order is of no account.
    """
    watch = _Ties()
    with watch:
        call()
    return watch.seen


class _Ties(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records if a top k selects only some of equal values, and the number of its values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.topk.default and args[0].ndim:
            values, k = args[0], args[1]
            dim = args[2] if len(args) > 2 else -1
            self.seen = self.seen or _is_tied(values, k, dim)
            self.sizes.add(values.shape[dim])
        return output


def _is_tied(values: Tensor, k: int, dim: int) -> bool:
    if not 0 < k < values.shape[dim]:
        return False
    ordered = values.detach().sort(dim=dim, descending=True).values
    last, first = ordered.select(dim, k - 1), ordered.select(dim, k)
    counts = last > torch.finfo(values.dtype).min if values.is_floating_point() else torch.ones_like(last) > 0
    return bool(((last == first) & counts).any())
