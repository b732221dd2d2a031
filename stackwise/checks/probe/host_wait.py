"""Host waits: operations that block the host until the device has a result, counted on any device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.probe.shadow import place_in_code

__all__ = ["Places", "host_waits_in", "listed_places"]

# Number of waits of each operation and place.
Places = Counter[tuple[str, str]]

_VALUE = "aten::_local_scalar_dense"
# Operations that return a number to the host, or a shape that depends on values.
_WAITING = {
    _VALUE: "a value read by the host (.item(), int(), bool(), if, while)",
    "aten::equal": "torch.equal",
    "aten::is_nonzero": "a tensor as a condition",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::unique_consecutive": "unique_consecutive",
    "aten::unique_dim": "unique",
    "aten::_unique": "unique",
    "aten::_unique2": "unique",
}
_OPTIM = str(Path(torch.optim.__file__).parent)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# Functions that create a tensor on the host, unless they get a device.
_CREATING = (torch.rand, torch.randn, torch.randint, torch.tensor, torch.arange, torch.zeros, torch.ones)
# Functions that read a value. A tensor that was created on the host can be read without a wait.
_READING = (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__)
# Copies to the host. If the model runs on the host, they execute no operation.
_COPYING = {Tensor.cpu: ".cpu()", Tensor.numpy: ".numpy()", Tensor.tolist: ".tolist()"}


@contextmanager
def host_waits_in(model: nn.Module) -> Iterator[Places]:
    """Count the waits inside the context. Places are named by the modules of `model`."""
    watch = _Waits(model)
    with watch, _Copies(watch):
        yield watch.places


def listed_places(places: Places, most: int = 3) -> str:
    """Return the places with most waits, and the number of the others."""
    shown = [f"{n} x {operation} in {place}" for (operation, place), n in places.most_common(most)]
    more = len(places) - len(shown)
    return "; ".join(shown) + (f"; {more} more places" if more else "")


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that a device must finish before the host can go on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: Places = Counter()
        self.paused = False
        self._names = {id(module): name for name, module in model.named_modules()}

    def note(self, operation: str) -> None:
        """Count an operation at the current place in the code."""
        if not self.paused:
            self.places[operation, place_in_code(self._names)] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name in _WAITING:
            if name != _VALUE or not _is_setting():
                self.note(_WAITING[name])
        elif name in _INDEXING and any(t is not None and t.dtype == torch.bool for t in args[1]):
            self.note("a boolean mask as an index")
        return function(*args, **(kwargs or {}))


def _is_setting() -> bool:
    """Return True if an optimizer of torch reads its step count or learning rate, which are on the host."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_get_value" and code.co_filename.startswith(_OPTIM):
            return True
        frame = frame.f_back
    return False


class _Copies(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Counts copies to the host that execute no operation, and leaves out tensors that are on the host."""

    def __init__(self, watch: _Waits) -> None:
        super().__init__()
        self._watch = watch
        # Tensors that are on the host whatever the device of the model, by id. Kept, so that ids stay unique.
        self._host: dict[int, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.one_hot:
            return self._one_hot(*args, **kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        on_host = all(id(each) in self._host for each in tensors)
        if function in _READING and on_host:
            return self._unwatched(function, *args)
        if not on_host:
            self._note_copy(function, args, kwargs)
        result = function(*args, **kwargs)
        created = tensors or (function in _CREATING and kwargs.get("device") is None)
        if on_host and created and isinstance(result, Tensor):
            self._host[id(result)] = result
        return result

    def _note_copy(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if function in _COPYING:
            self._watch.note(_COPYING[function])
        elif function is Tensor.to and self._goes_to_host(*args, **kwargs):
            self._watch.note('.to("cpu")')

    def _unwatched(self, function: Any, *args: Any) -> Any:
        self._watch.paused = True
        try:
            return function(*args)
        finally:
            self._watch.paused = False

    def _one_hot(self, labels: Tensor, num_classes: int = -1) -> Tensor:
        """Call one_hot. If the number of classes is given, it reads the labels on the CPU only."""
        self._watch.paused = num_classes > 0
        try:
            return F.one_hot(labels, num_classes)
        finally:
            self._watch.paused = False

    def _goes_to_host(self, tensor: Tensor, *args: Any, device: Any = None, **_: Any) -> bool:
        """Return True for `.to("cpu")`. A device object may be that of another tensor on the same device."""
        targets = [each for each in (*args[:1], device) if isinstance(each, str | torch.device)]
        return any(
            str(each) == "cpu" and (isinstance(each, str) or tensor.device != each) for each in targets
        )
