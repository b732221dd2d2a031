"""The compiler: torch.compile without the graphs of earlier models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["fresh_compiler"]

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
