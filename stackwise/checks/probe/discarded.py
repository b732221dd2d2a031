"""Discarded results: tensors that a statement computes and does not store, as in `x.masked_fill(mask, 0)`."""

from __future__ import annotations

import dis
import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
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

__all__ = ["DiscardedResults"]

_TORCH = str(Path(torch.__file__).parent)
# Functions that write into buffers, also if nobody uses their result.
_WITH_EFFECTS = ("batch_norm", "instance_norm", "embedding_bag", "fake_quantize")


class DiscardedResults(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Records the results of functions of torch and of custom autograd functions that have no effect.

    Attributes:
        found: place in the code -> function whose result is discarded.
        unread: place in the code -> function whose result is only stored in a variable that is never read.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        # Place and function -> the results with a gradient, and True if a backward pass reached one.
        self._results: dict[tuple[str, str], list[weakref.ref[Tensor]]] = {}
        self._reached: set[tuple[str, str]] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the functions that run in this context."""
        apply = Function.apply.__func__  # type: ignore[attr-defined]

        def watched(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
            result = apply(kind, *args, **kwargs)
            self._note(f"{kind.__name__}.apply", result, args)
            if isinstance(result, Tensor) and result.grad_fn is not None:
                key = (place_in_code(self._names), f"{kind.__name__}.apply")
                self._results.setdefault(key, []).append(weakref.ref(result))
                result.grad_fn.register_hook(lambda *_: self._reached.add(key))
            return result

        with self, patch.object(Function, "apply", classmethod(watched)):
            yield

    def follow_back(self, ends: Sequence[Tensor]) -> None:
        """Add the deleted results of custom functions that no gradient of these tensors reaches.

        Raises:
            RuntimeError: the backward pass fails.
        """
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        for key, results in self._results.items():
            if key not in self._reached and all(result() is None for result in results):
                self.found.setdefault(*key)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        versions = [each._version for each in tensors if not each.is_inference()]
        result = function(*args, **kwargs)
        if versions == [each._version for each in tensors if not each.is_inference()]:
            self._note(getattr(function, "__name__", ""), result, tensors)
        return result

    def _note(self, name: str, result: Any, arguments: Any) -> None:
        """Record a result, unless it is an argument or no tensor, or the function has other effects."""
        is_new = isinstance(result, Tensor) and all(result is not each for each in arguments)
        if not is_new or any(part in name for part in _WITH_EFFECTS):
            return
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
            frame = frame.f_back
        kind = "" if frame is None else _ends(frame.f_code).get(frame.f_lasti, "")
        if kind:
            (self.found if kind == "discarded" else self.unread)[place_in_code(self._names)] = name


@cache
def _ends(code: CodeType) -> dict[int, str]:
    """Return the offsets of the instructions whose result is "discarded", or "unread" in a variable.

    In a call of Python code, the offset of a frame can be that of a cache entry of the instruction.
    A variable with a leading underscore is unread on purpose.
    """
    instructions = list(dis.get_instructions(code))
    read = {each.argval for each in instructions if each.opname != "STORE_FAST"}
    read |= {name for pair in read if isinstance(pair, tuple) for name in pair}  # LOAD_FAST_LOAD_FAST
    kinds: dict[int, str] = {}
    for one, following in itertools.pairwise(instructions):
        is_unread = following.opname == "STORE_FAST" and following.argval not in read
        if following.opname == "POP_TOP":
            kinds |= dict.fromkeys(range(one.offset, following.offset), "discarded")
        elif is_unread and not following.argval.startswith("_"):
            kinds |= dict.fromkeys(range(one.offset, following.offset), "unread")
    return kinds
