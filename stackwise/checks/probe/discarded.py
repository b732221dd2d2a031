"""Discarded results: tensors that are computed and never used, as in `x.masked_fill(mask, 0)`."""

from __future__ import annotations

import dis
import itertools
import sys
import weakref
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
from torch.utils._pytree import tree_leaves

from stackwise.checks.probe.shadow import place_in_code

__all__ = ["WITH_EFFECTS", "DiscardedResults", "fate_of_result"]

_TORCH, _PROBES = str(Path(torch.__file__).parent), str(Path(__file__).parent)
# Functions that write into buffers, also if nobody uses their result.
WITH_EFFECTS = ("batch_norm", "instance_norm", "embedding_bag", "fake_quantize")


class DiscardedResults(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Records the results of functions of torch and of custom autograd functions that have no effect.

    Attributes:
        found: place in the code -> function whose result is discarded. It is also discarded if a custom
            autograd function returns it, and it is deleted before another function gets it.
        unread: place in the code -> function whose result is only stored in a variable that is never read.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        # id of a result of a custom autograd function that no function got yet -> result, place, function.
        self._pending: dict[int, tuple[weakref.ref[Tensor], str, str]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the functions that run in this context."""
        apply = Function.apply.__func__  # type: ignore[attr-defined]

        def watched(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
            self._use((args, kwargs))
            result = apply(kind, *args, **kwargs)
            name = f"{kind.__name__}.apply"
            if self._note(name, result, args):
                self._pending[id(result)] = (weakref.ref(result), place_in_code(self._names), name)
            return result

        with self, patch.object(Function, "apply", classmethod(watched)):
            yield
        for result, place, name in self._pending.values():
            if result() is None:  # neither stored nor returned
                self.found.setdefault(place, name)
        self._pending.clear()

    def _use(self, values: Any) -> None:
        """Remove the pending results that are among the arguments of a function."""
        if self._pending:
            for value in tree_leaves(values):
                pending = self._pending.get(id(value))
                if pending is not None and pending[0]() is value:
                    del self._pending[id(value)]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._use((args, kwargs))
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        versions = [each._version for each in tensors if not each.is_inference()]
        result = function(*args, **kwargs)
        if versions == [each._version for each in tensors if not each.is_inference()]:
            self._note(getattr(function, "__name__", ""), result, tensors)
        return result

    def _note(self, name: str, result: Any, arguments: Any) -> bool:
        """Record a result if the statement discards it. Return True if it is a new tensor.

        A result is not new if it is an argument, or if the function has other effects.
        """
        is_new = isinstance(result, Tensor) and all(result is not each for each in arguments)
        if not is_new or any(part in name for part in WITH_EFFECTS):
            return False
        kind = fate_of_result()
        if kind in ("discarded", "unread"):
            (self.found if kind == "discarded" else self.unread)[place_in_code(self._names)] = name
        return True


def fate_of_result() -> str:
    """Return what the running statement outside torch does with its result.

    It is "discarded", "unread" (stored in a variable that is never read), "ignored" (the same, and the name
    of the variable begins with an underscore, on purpose) or "" (used).
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _PROBES)):
        frame = frame.f_back
    return "" if frame is None else _fates(frame.f_code).get(frame.f_lasti, "")


@cache
def _fates(code: CodeType) -> dict[int, str]:
    """Return the offsets of the instructions whose result is "discarded", "unread" or "ignored".

    In a call of Python code, the offset of a frame can be that of a cache entry of the instruction.
    """
    instructions = list(dis.get_instructions(code))
    read = {each.argval for each in instructions if each.opname != "STORE_FAST"}
    read |= {name for pair in read if isinstance(pair, tuple) for name in pair}  # LOAD_FAST_LOAD_FAST
    kinds: dict[int, str] = {}
    for one, following in itertools.pairwise(instructions):
        kind = ""
        if following.opname == "POP_TOP":
            kind = "discarded"
        elif following.opname == "STORE_FAST" and following.argval not in read:
            kind = "ignored" if following.argval.startswith("_") else "unread"
        if kind:
            kinds |= dict.fromkeys(range(one.offset, following.offset), kind)
    return kinds
