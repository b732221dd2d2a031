"""Synchronization: places where the host waits for a value from the device, seen on any device."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.check import check
from stackwise.checks.probe.shadow import place_in_code
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

# Their result is a number for the host, or has a shape that only the values tell.
_WAITING = {
    "aten::_local_scalar_dense": "a value read by the host (.item(), int(), bool(), if, while)",
    "aten::equal": "torch.equal",
    "aten::is_nonzero": "a tensor as a condition",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::unique_consecutive": "unique_consecutive",
    "aten::unique_dim": "unique",
    "aten::_unique": "unique",
    "aten::_unique2": "unique",
}
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# Copies to the host; where the device is the host already, no operation shows them.
_COPYING = {Tensor.cpu: ".cpu()", Tensor.numpy: ".numpy()", Tensor.tolist: ".tolist()"}


@check
def host_waits(subject: Subject) -> CheckResult:
    """Does a forward and backward pass, after a first one, never make the host wait for the device?"""
    watch = _Waits(subject.model(train=True))
    model = watch.model
    with subject.fixed_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(2):  # the first one may fill caches
            inputs = subject.inputs(2)
            if number:
                with watch, _Copies(watch):
                    _backward(subject.spec.loss_of(model, inputs))
            else:
                _backward(subject.spec.loss_of(model, inputs))
    count = float(watch.places.total())
    if not count:
        return subject.passed(count, 0.0)
    places = [f"{n} x {what} in {where}" for (what, where), n in watch.places.most_common(3)]
    more = len(watch.places) - len(places)
    answer = subject.failed if subject.spec.never_waits else subject.warned
    return answer(
        count,
        0.0,
        where="; ".join(places) + (f"; {more} more places" if more else ""),
        meaning=f"The host waits {int(count)} times in one forward and backward pass, or its code depends on "
        "values.",
        advice="On a GPU each wait empties its queue, and such code can neither be captured in a CUDA graph "
        "nor compiled as a whole. Keep the value on the device (torch.where, masked_fill).",
    )


def _backward(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that a device must finish before the host can go on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.places: Counter[tuple[str, str]] = Counter()
        self._names = {id(module): name for name, module in model.named_modules()}

    def note(self, what: str) -> None:
        """Count one, where the stack says."""
        self.places[what, place_in_code(self._names)] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name in _WAITING:
            self.note(_WAITING[name])
        elif name in _INDEXING and any(t is not None and t.dtype == torch.bool for t in args[1]):
            self.note("a boolean mask as an index")
        return function(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    """Counts copies to the host that no operation shows."""

    def __init__(self, watch: _Waits) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _COPYING:
            self._watch.note(_COPYING[function])
        elif function is Tensor.to and self._goes_to_host(*args, **(kwargs or {})):
            self._watch.note('.to("cpu")')
        return function(*args, **(kwargs or {}))

    def _goes_to_host(self, tensor: Tensor, *args: Any, device: Any = None, **_: Any) -> bool:
        """Where all is on the host, a device may be that of another tensor; only its name is a wish."""
        wishes = [each for each in (*args[:1], device) if isinstance(each, str | torch.device)]
        return any(str(each) == "cpu" and (isinstance(each, str) or tensor.device != each) for each in wishes)
