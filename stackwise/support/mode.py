"""Mode: context manager for eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch `module` to eval mode in this context. At the end the mode of each submodule is restored."""
    training = [part for part in module.modules() if part.training]
    if training:  # eval() visits every module, which would be slow for each decoded token
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
