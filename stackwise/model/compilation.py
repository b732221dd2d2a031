"""Compilation: torch.compile for one caller alone, and what is known while it traces."""

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
    """`function` compiled for fixed shapes, apart from whatever else compiled it.

    The compiler keeps few graphs for each code object and runs what is beyond them as it is; so each
    Rack and each optimizer gets a code object of its own.
    """
    return torch.compile(_with_own_code(function), dynamic=False)


class Replayable:
    """A function to one tensor, compiled as by `compiled`, whose graph can be run again on the same tensors.

    Before each call the compiler looks through all that the function reads, every module of a model
    included, for what might have changed. A stance that leaves this out holds for the whole process, where
    another thread may have something to compile at that time; the graph alone concerns nobody else.

    Args:
        function: takes a tensor first, then anything.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = torch.compile(_with_own_code(function), backend=self._compile, dynamic=False)
        self._thread = threading.local()

    def __call__(self, x: Tensor, *arguments: object) -> tuple[Tensor, Callable[[], Tensor | None] | None]:
        """`function(x, *arguments)`, and what computes that from whatever its tensors then contain.

        It computes nothing, and returns None, where one of them has become another dtype or moved: the
        kernels were made for what they were. None in its place where that is not one graph alone: where the
        function is several, or keeps tensors besides its result. Nothing else that it does to objects is
        done again.
        """
        runs: list[_Run] = []
        self._thread.runs = runs
        try:
            y = self._function(x, *arguments)
        finally:
            del self._thread.runs
        match runs:
            # What follows another graph, or what is in none, takes what comes from there and not `x`.
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
    with torch._C.DisableTorchFunctionSubclass():  # else a quantised tensor is asked in Python
        return [(each.dtype, each.device) for each in tensors]


def is_constant(size: int) -> bool:
    """Whether the compiler that traces this knows `size`, and not only that it is some number."""
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
