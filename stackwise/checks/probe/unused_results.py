"""Unused results: values that are computed from parameters, and on which no output depends."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.call import REFUSALS
from stackwise.checks.probe.discarded import WITH_EFFECTS, fate_of_result
from stackwise.checks.probe.shadow import place_in_code
from stackwise.support.hooks import temporary_hooks

__all__ = ["UnusedResults"]

_TORCH = str(Path(torch.__file__).parent)
_CALLERS = tuple(str(Path(__file__).parents[2] / name) for name in ("checks", "subject"))
# Functions that move values and compute none.
_MOVES = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"),
    *("expand_as", "repeat", "transpose", "t", "permute", "movedim", "swapaxes", "contiguous", "clone"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "detach", "requires_grad_"),
    *("select", "narrow", "index_select", "gather", "__getitem__", "cat", "stack", "pad", "roll", "flip"),
    *("__get__", "__set__"),
}
# Functions that read no values.
_METADATA = {
    *("__get__", "size", "dim", "ndimension", "numel", "stride", "is_floating_point", "is_contiguous"),
    *("__len__", "register_hook", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like"),
    *("randn_like", "new_zeros", "new_ones", "new_empty", "new_full"),
}
# Function, and code and instruction of each frame on the stack.
_Key = tuple[Any, ...]


class UnusedResults(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Finds operations whose results never reach an output.

    A result is used if an output depends on it, if it still exists after the call, and if a function without
    a gradient reads it, such as topk. All tensors that a module returns are outputs, if there are several.
    The same operation in several layers is one operation: the last layer may compute more than it needs.

    Attributes:
        weights: place in the code of each unused result of a parameter -> function that computes it.
        numbers: the same, of results without dimensions, which may be terms of a loss.

    Args:
        model: the model that is called.
        has_loss: the calls compute the loss. Otherwise its terms are unused on purpose.
    """

    def __init__(self, model: nn.Module, *, has_loss: bool) -> None:
        super().__init__()
        self._model, self._has_loss = model, has_loss
        self._names = {id(module): name for name, module in model.named_modules()}
        self.weights: dict[str, str] = {}
        self.numbers: dict[str, str] = {}
        # Function and calls on the stack -> place in the code, in the order of the calls.
        self._places: dict[_Key, str] = {}
        self._with_weight: set[_Key] = set()
        self._numbers: set[_Key] = set()
        self._used: set[_Key] = set()
        self._results: list[tuple[weakref.ref[Tensor], _Key | None]] = []
        self._ends: list[Tensor] = []
        self._output: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations of a call, whose graph must still exist."""
        self._results, self._ends = [], []
        handles = (module.register_forward_hook(self._returned) for module in self._model.modules())
        with self, temporary_hooks(handles):
            yield
        self._ends.extend(tensor for result, _ in self._results if (tensor := result()) is not None)
        self._output = None
        ends = [each for each in self._ends if each.requires_grad]
        try:
            torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
        except REFUSALS:  # the model has no gradient
            self._used.update(self._places)
        unused = [key for key in self._places if key not in self._used]
        self.weights = {self._places[key]: key[0] for key in unused if key in self._with_weight}
        if self._has_loss:
            self.numbers = {self._places[key]: key[0] for key in unused if key in self._numbers}

    def _returned(self, module: nn.Module, _args: Any, output: Any) -> None:
        tensors = list(tensors_in(output))
        if len(tensors) > 1 or module is self._model:
            self._ends.extend(tensors)
        if module is self._model:
            self._output = output  # what it refers to still exists after the call

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name, given = getattr(function, "__name__", ""), _tensors((args, kwargs))
        results = tree_leaves(result)
        has_gradient = all(isinstance(each, Tensor) and each.requires_grad for each in results)
        if not has_gradient or not torch.is_grad_enabled():
            if name not in _METADATA or (name == "__get__" and isinstance(result, Tensor)):
                self._ends.extend(each for each in given if each.requires_grad)
        elif any(result is each for each in given):  # in place, which may replace the node of a hook
            self._used.update(key for earlier, key in self._results if key and earlier() is result)
        elif isinstance(result, Tensor):
            key = (name, *_calls()) if _computes(name) and fate_of_result() != "ignored" else None
            self._results.append((weakref.ref(result), key))
            if key is not None:
                self._note(key, result, given)
        return result

    def _note(self, key: _Key, result: Tensor, given: list[Tensor]) -> None:
        if key not in self._places:
            self._places[key] = place_in_code(self._names)
        if not result.ndim:
            self._numbers.add(key)
        elif any(isinstance(each, nn.Parameter) for each in given):
            self._with_weight.add(key)
        result.register_hook(lambda _: self._used.add(key))  # type: ignore[no-untyped-call]


def _computes(name: str) -> bool:
    return name not in _MOVES and not any(part in name for part in WITH_EFFECTS)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _calls() -> Iterator[tuple[int, int]]:
    """Yield code and instruction of each frame outside torch, from the innermost to that of the model."""
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_CALLERS):
        if not frame.f_code.co_filename.startswith(_TORCH):
            yield id(frame.f_code), frame.f_lasti
        frame = frame.f_back
