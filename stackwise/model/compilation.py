"""Compilation: torch.compile with a separate cache of graphs per caller, and queries during tracing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["Replayable", "compiled", "is_constant"]

BACKEND = "inductor"
_Graph = Callable[..., Sequence[Tensor]]
_Run = tuple[_Graph, tuple[Tensor, ...], Sequence[Tensor]]
_Kind = tuple[torch.dtype, torch.device]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled for fixed shapes, independent of other compiled copies of it.

    The compiler limits the number of graphs per code object and runs further ones uncompiled. So each Rack
    and each optimizer gets its own code object.
    """
    return torch.compile(_with_own_code(function), dynamic=False)


class Replayable:
    """Compiled function that returns one tensor, with a replay of its graph on the same input tensors.

    Before each call, the compiler checks everything that the function reads, including every module of a
    model, for changes. A compiler stance without these checks affects the entire process, in which another
    thread may compile at that time. A replay of the graph has no such effect.

    Args:
        function: function of a tensor and any further arguments.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = torch.compile(_with_own_code(function), backend=self._compile, dynamic=False)
        self._thread = threading.local()

    def __call__(self, x: Tensor, *arguments: object) -> tuple[Tensor, Callable[[], Tensor | None] | None]:
        """Return `function(x, *arguments)`, and a function that recomputes it from current tensor contents.

        The second function returns None without computing if the dtype or device of an input has changed,
        because the kernels do not fit any more. It is None if the call is not a single graph: the function
        is several graphs, or returns further tensors. Other side effects are not repeated.
        """
        runs: list[_Run] = []
        self._thread.runs = runs
        try:
            y = self._function(x, *arguments)
        finally:
            del self._thread.runs
        match runs:
            # A later graph, or code between graphs, uses results of the earlier one instead of `x`.
            case [(graph, inputs, [only])] if only is y and any(each is x for each in inputs):
                return y, functools.partial(_again, graph, inputs, _kinds(inputs))
        return y, None

    def _compile(self, traced: GraphModule, examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        graph = torch._dynamo.lookup_backend(BACKEND)(traced, examples)

        def noted(*inputs: Tensor) -> Sequence[Tensor]:
            outputs: Sequence[Tensor] = graph(*inputs)
            self._thread.runs.append((graph, inputs, outputs))
            return outputs

        return noted


def _again(graph: _Graph, inputs: tuple[Tensor, ...], kinds: list[_Kind]) -> Tensor | None:
    return graph(*inputs)[0] if _kinds(inputs) == kinds else None


def _kinds(tensors: Sequence[Tensor]) -> list[_Kind]:
    with torch._C.DisableTorchFunctionSubclass():  # otherwise a quantised tensor answers in Python
        return [(each.dtype, each.device) for each in tensors]


def is_constant(size: int) -> bool:
    """Return True if `size` is a constant, and not symbolic, for the compiler that traces this call."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports the compiler

    return has_static_value(size)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own
