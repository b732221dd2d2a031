"""Template: a model from which many copies are made."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.support.system_errors import false_if_raised

__all__ = ["Template"]


class Template:
    """Model from which many copies are made.

    If the model can be pickled, copies come from a pickle without tensors, which is four times as fast as
    `copy.deepcopy`. Models with closures as hooks, or with a `__deepcopy__` of their own, are copied by
    `copy.deepcopy`.

    Attributes:
        model: the model. It must not change.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._tensors: list[Tensor] = []
        self._pickle = self._pickled()

    @property
    def is_pickled(self) -> bool:
        """True if copies come from a pickle. Otherwise they share functions and closures with the model."""
        return self._pickle is not None

    @false_if_raised
    def has_own_tensors(self, call: Callable[[nn.Module], Tensor]) -> bool:
        """Return True if a copy of the model does not use the parameters of the original.

        Patched functions may use them. `call` returns an output of a model. If it raises an exception,
        return False.
        """
        with torch.enable_grad():
            output = call(self.copy())
            if output.requires_grad:
                output.sum().backward()  # type: ignore[no-untyped-call]
        uses_original = any(p.grad is not None for p in self.model.parameters())
        self.model.zero_grad(set_to_none=True)
        return not uses_original

    def copy(self) -> nn.Module:
        """Return a new copy."""
        if self._pickle is None:
            return copy.deepcopy(self.model)
        model: nn.Module = _Unpickler(self._pickle, self._tensors).load()
        return model

    def _pickled(self) -> bytes | None:
        if any(hasattr(module, "__deepcopy__") for module in self.model.modules()):
            return None
        file = io.BytesIO()
        try:
            _Pickler(file, self._tensors).dump(self.model)
        except Exception:  # pickle and __reduce__ methods raise many types
            return None
        return file.getvalue()


class _Pickler(pickle.Pickler):
    """Puts tensors into a list, and their index into the pickle."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._indices: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._indices:
            self._indices[id(obj)] = len(self._tensors)
            self._tensors.append(obj)
        return self._indices[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Copies each tensor once. Parameters that are views of one storage do not share memory in the copy."""

    def __init__(self, content: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors = tensors
        self._memo: dict[int, Any] = {}

    def persistent_load(self, pid: int) -> Tensor:
        return copy.deepcopy(self._tensors[pid], self._memo)
