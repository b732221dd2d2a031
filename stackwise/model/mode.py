"""Mode: a module in eval mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into eval mode, and afterwards each part that was training back into training mode."""
    training = [part for part in module.modules() if part.training]
    if training:  # eval() walks the tree and assigns everywhere, which would cost each decoded token
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
