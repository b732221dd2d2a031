"""Discarded results: tensors that a statement computes and does not store, as in `x.masked_fill(mask, 0)`."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from stackwise.checks.probe.shadow import place_in_code

__all__ = ["discarded_results_in"]

_TORCH = str(Path(torch.__file__).parent)
# Functions that write into buffers, also if nobody uses their result.
_WITH_EFFECTS = ("batch_norm", "instance_norm", "embedding_bag", "fake_quantize")


@contextmanager
def discarded_results_in(model: nn.Module) -> Iterator[dict[str, str]]:
    """Record each discarded result inside the context: its place -> the function that computed it.

    A function that changes one of its arguments is not recorded.
    """
    watch = _Watch(model)
    apply = Function.apply.__func__  # type: ignore[attr-defined]

    def watched(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
        result = apply(kind, *args, **kwargs)
        watch.note(f"{kind.__name__}.apply", result, args)
        return result

    with watch, patch.object(Function, "apply", classmethod(watched)):
        yield watch.found


class _Watch(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Records functions of torch whose result is a new tensor that the calling statement discards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._names = {id(module): name for name, module in model.named_modules()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        versions = [each._version for each in tensors if not each.is_inference()]
        result = function(*args, **kwargs)
        if versions == [each._version for each in tensors if not each.is_inference()]:
            self.note(getattr(function, "__name__", ""), result, tensors)
        return result

    def note(self, name: str, result: Any, arguments: Any) -> None:
        """Record a result, unless it is an argument or no tensor, or the function has other effects."""
        is_new = isinstance(result, Tensor) and all(result is not each for each in arguments)
        if is_new and not any(part in name for part in _WITH_EFFECTS) and _is_discarded():
            self.found[place_in_code(self._names)] = name


def _is_discarded() -> bool:
    """Return True if the innermost statement outside torch discards the value of its call."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return frame is not None and frame.f_lasti in _discarding(frame.f_code)


@cache
def _discarding(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions whose result the next instruction removes from the stack.

    In a call of Python code, the offset of a frame can be that of a cache entry of the instruction.
    """
    instructions = list(dis.get_instructions(code))
    return frozenset(
        offset
        for one, following in itertools.pairwise(instructions)
        if following.opname == "POP_TOP"
        for offset in range(one.offset, following.offset)
    )
