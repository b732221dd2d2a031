"""The compiler: torch.compile with a count of the compiled graphs, and without those of earlier models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["BACKEND", "counting_backend", "fresh_compiler"]

# Trace forward and backward and decompose operations as the default compiler does, without code generation.
BACKEND = "aot_eager_decomp_partition"
_RECOMPILE_LIMIT = 64


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Clear the compiler's cache of earlier models, and allow one compilation for each layer."""
    import torch._dynamo

    torch.compiler.reset()
    with (
        warnings.catch_warnings(action="ignore"),
        torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT),
    ):
        yield


def counting_backend(backend: str, graphs: list[int]) -> Callable[..., Any]:
    """Return a backend that appends the number of nodes of each of its graphs to `graphs`."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return compile_graph
