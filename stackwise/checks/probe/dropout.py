"""Dropout, switched off in models that are in train mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutDropout"]

_DROPOUTS = {
    F.dropout,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
}
_P_OF_ATTENTION = 4


class WithoutDropout(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Inside, dropout of torch does nothing, also where a module keeps its probability for itself."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call, or its input as it came."""
        kwargs = kwargs or {}
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            args = tuple(0.0 if index == _P_OF_ATTENTION else value for index, value in enumerate(args))
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        return function(*args, **kwargs)
