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

from stackwise.checks.probe.operations import Operations
from stackwise.checks.probe.shadow import place_in_code

__all__ = ["Places", "host_waits_in", "listed_places"]

# Number of waits of each operation and place.
Places = Counter[tuple[str, str]]

_VALUE = "_local_scalar_dense"
# Operations that return a number to the host, or a shape that depends on values.
_WAITING = {
    _VALUE: "a value read by the host (.item(), int(), bool(), if, while)",
    "equal": "torch.equal",
    "is_nonzero": "a tensor as a condition",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "unique_consecutive": "unique_consecutive",
    "unique_dim": "unique",
    "_unique": "unique",
    "_unique2": "unique",
}
_OPTIM = str(Path(torch.optim.__file__).parent)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
# Functions that create a tensor on the host, unless they get a device.
_CREATING = (torch.rand, torch.randn, torch.randint, torch.tensor, torch.arange, torch.zeros, torch.ones)
# Functions that read a value. A tensor that was created on the host can be read without a wait.
_READING = (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__)
# Copies to the host. If the model runs on the host, they execute no operation.
_COPYING = {Tensor.cpu: ".cpu()", Tensor.numpy: ".numpy()", Tensor.tolist: ".tolist()"}


@contextmanager
def host_waits_in(model: nn.Module) -> Iterator[Places]:
    """Count the waits inside the context. Places are named by the modules of `model`."""
    waits = _Waits(model)
    with Operations(waits.record), _Copies(waits):
        yield waits.places


def listed_places(places: Places, most: int = 3) -> str:
    """Return the places with most waits, and the number of the others."""
    shown = [f"{n} x {operation} in {place}" for (operation, place), n in places.most_common(most)]
    more = len(places) - len(shown)
    return "; ".join(shown) + (f"; {more} more places" if more else "")


class _Waits:
    """Count of operations that a device must finish before the host can go on."""

    def __init__(self, model: nn.Module) -> None:
        self.places: Places = Counter()
        self.paused = False
        self._names = {id(module): name for name, module in model.named_modules()}

    def note(self, operation: str) -> None:
        """Count an operation at the current place in the code."""
        if not self.paused:
            self.places[operation, place_in_code(self._names)] += 1

    def record(self, name: str, args: Any, _: Any) -> None:
        """Count an operation that waits."""
        if name in _WAITING and (name != _VALUE or not _is_setting()):
            self.note(_WAITING[name])
        elif name in _INDEXING and any(t is not None and t.dtype == torch.bool for t in args[1]):
            self.note("a boolean mask as an index")


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

    def __init__(self, waits: _Waits) -> None:
        super().__init__()
        self._waits = waits
        # Tensors that are on the host whatever the device of the model, by id. Kept, so that ids stay unique.
        self._host: dict[int, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        on_host = all(id(each) in self._host for each in tensors)
        if _is_free(function, *args, **kwargs) or (function in _READING and on_host):
            self._waits.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self._waits.paused = False
        if not on_host:
            self._note_copy(function, *args, **kwargs)
        result = function(*args, **kwargs)
        created = tensors or (function in _CREATING and kwargs.get("device") is None)
        if on_host and created and isinstance(result, Tensor):
            self._host[id(result)] = result
        return result

    def _note_copy(self, function: Any, *args: Any, **kwargs: Any) -> None:
        if function in _COPYING:
            self._waits.note(_COPYING[function])
        elif function is Tensor.to and _goes_to_host(*args, **kwargs):
            self._waits.note('.to("cpu")')


def _is_free(function: Any, *args: Any, num_classes: int | None = None, **_: Any) -> bool:
    """Return True for one_hot with a number of classes, which reads its labels on the CPU only."""
    return function is F.one_hot and (*args[1:], num_classes)[0] not in (None, -1)


def _goes_to_host(tensor: Tensor, *args: Any, device: Any = None, **_: Any) -> bool:
    """Return True for `.to("cpu")`. A device object may be that of another tensor on the same device."""
    targets = [each for each in (*args[:1], device) if isinstance(each, str | torch.device)]
    return any(str(each) == "cpu" and (isinstance(each, str) or tensor.device != each) for each in targets)
