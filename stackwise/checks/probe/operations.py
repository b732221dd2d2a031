"""Operations of torch in a block, below autograd and the layers of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Operations"]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that calls a function after each operation.

    Args:
        record: function of the name of the operation, its positional arguments and its result.
    """

    def __init__(self, record: Callable[[str, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self._record(function.overloadpacket.__name__, args, output)
        return output
