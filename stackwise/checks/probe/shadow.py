"""Shadow: every operation of a call is also computed in float64.

The first operation that differs much from its shadow loses precision. The stack names its line in the
model's code. This is shadow execution for floating-point errors (Benz, Hildebrandt, Hack, "A dynamic
program analysis to find floating-point accuracy problems", PLDI 2012).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from stackwise.checks.probe.call import REFUSALS

__all__ = ["Loss", "Shadow", "TooMuchError", "place_in_code"]

Kind = Literal["table", "parameter", "activation"]
_KINDS: tuple[Kind, ...] = ("table", "parameter", "activation")
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[1])  # checks and probes
# Not measured: memory without values, and means, which may be near 0 with a large relative error. If such an
# error matters, later operations show it.
_NOT_MEASURED = ("empty", "new_empty", "mean", "sum", "var", "std")
# Operations that amplify rounding: an exponential of large scores, a product of matrices with terms that
# cancel.
_SHARP = ("softmax", "scaled_dot_product", "exp", "mm")
# Share of positions that may be much worse than the rest: a vector near 0, or of nearly equal numbers, has
# lost digits, and a norm scales it up.
_FEW, _ENOUGH_POSITIONS = 1 / 20, 8
# sin and cos near 0 have no correct digits, such as cos(pi / 2). Their error is divided by this or more.
_PERIODIC, _NEAR_ZERO = ("cos", "sin"), 0.1
_TINY = torch.finfo(torch.float64).tiny
_PRUNE_EVERY = 64
_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm")
# Constant cost of an operation, in elements.
_OVERHEAD = 25_000


@dataclass(frozen=True)
class Loss:
    """Operation with a result that differs from float64.

    Attributes:
        error: norm of the difference over the norm of the shadow, or over its standard deviation for "table"
            and "parameter". inf if only the shadow is finite.
        operation: name in PyTorch.
        where: module and line of code.
        kind: "activation" if the result depends on an input of the model, or on the product of a parameter
            and a matrix; otherwise "parameter" if it depends on a parameter; otherwise "table".
        is_sharp: the operation amplifies the rounding of large operands.
        is_difference: the operation is a sum or a difference, in which large operands may cancel.
        angle: largest angle whose sine or cosine is computed, or 0.
    """

    error: float
    operation: str
    where: str
    kind: Kind
    is_sharp: bool
    is_difference: bool
    angle: float = 0.0


class TooMuchError(RuntimeError):
    """The call computes more than its budget allows."""


class _CallsOfUser(TorchFunctionMode):
    """Record if autocast is on at the call of an operation. Inside the operation, it is always off."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.autocasts = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention by the plain formula widens its inputs on purpose.
        attends = function in (F.scaled_dot_product_attention, F.multi_head_attention_forward)
        self.autocasts = torch.is_autocast_enabled(self._device_type) and not attends
        return function(*args, **(kwargs or {}))


class Shadow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, each operation is also computed in float64, from float64 operands.

    Choices (comparisons, top-k, indices) are those of the call, so that both compute the same function. If an
    operation cannot be computed in float64, its shadow is a copy of its result. Tensors are identified by
    their storage: a view is the same part of the shadow of the storage.

    Args:
        model: the model. Its parameters and buffers are exact, unless `give` replaces them.
        inputs: inputs of the model.
        limits: kind -> largest error that is not a loss. Default: infinite.
        budget: number of elements to compute, after which `TooMuchError` is raised.

    Attributes:
        loss: first operation beyond its limit at more than a few positions.
        loss_of_few: first operation on activations beyond its limit at a few positions only.
        overflow: first operation with NaN or inf, if its shadow is finite.
        worst: kind -> largest error.
        uncast: places of products of float32 matrices while autocast is on.
    """

    def __init__(
        self, model: nn.Module, inputs: Tensor, limits: Mapping[Kind, float], budget: float = torch.inf
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(module): name for name, module in model.named_modules()}
        self._n_positions = inputs.shape[1] if inputs.ndim > 1 else 0
        self._limits, self._budget = limits, budget
        self._calls_of_user = _CallsOfUser(inputs.device.type)
        self._flat: dict[StorageWeakRef, tuple[Tensor, int]] = {}
        self._calls = 0
        self.loss: Loss | None = None
        self.loss_of_few: Loss | None = None
        self.overflow: Loss | None = None
        self.worst: dict[Kind, float] = dict.fromkeys(_KINDS, 0.0)
        self.uncast: list[str] = []
        for buffer in model.buffers():
            self.give(buffer, buffer, "table")
        for parameter in model.parameters():
            self.give(parameter, parameter, "parameter")
        self.give(inputs, inputs, "activation")

    def __enter__(self) -> Shadow:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._calls_of_user.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._calls_of_user.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def give(self, tensor: Tensor, exact: Tensor, kind: Kind) -> None:
        """Set the shadow of `tensor` to `exact`."""
        with torch.no_grad():
            self._keep(tensor.detach(), _wide(exact.detach()), _KINDS.index(kind))

    def of(self, tensor: Tensor) -> Tensor:
        """Return the shadow of a result."""
        return self._shadow(tensor.detach())[0].clone()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        storages = {_key(tensor) for tensor in tensors}
        returns = function._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            for tensor in tensors:
                self._shadow(tensor)
            return function(*args, **kwargs)
        self._note_uncast(function, tensors)
        shadows = [self._shadow(tensor) for tensor in tensors]
        exact = self._compute(function, leaves, [shadow for shadow, _ in shadows], structure)
        output = function(*args, **kwargs)
        outputs = [each for each in _flat(output) if isinstance(each, Tensor)]
        self._budget -= _OVERHEAD + sum(each.numel() for each in outputs)
        if self._budget < 0:
            raise TooMuchError
        self._store(function, outputs, exact, shadows, storages)
        return output

    def _store(
        self,
        function: Any,
        outputs: list[Tensor],
        exact: Any,
        shadows: list[tuple[Tensor, int]],
        storages: set[Any],
    ) -> None:
        """Store the shadow of each output. Measure the first one; the others are for the backward pass."""
        kind = _kind_of_result(function, shadows)
        any_inexact = any(_inexact(shadow) for shadow, _ in shadows)
        exacts: list[Tensor | None] = [each for each in _flat(exact) if isinstance(each, Tensor)]
        exacts = exacts or [None] * len(outputs)
        # A parameter that is only cast is stored in that dtype, which is not a loss of the computation.
        is_stored = _KINDS[kind] == "parameter" and _name(function) == "_to_copy"
        for index, (real, twin) in enumerate(zip(outputs, exacts, strict=False)):
            is_choice = any_inexact and not _inexact(real) and not _is_count(function, shadows)
            if twin is None or is_choice or is_stored:
                twin = _wide(real)
            key = _key(real)
            if key not in storages:
                self._keep(real, twin, kind)
            else:  # the operation changed a tensor in place, and its shadow as well if it has a result
                if exact is None:
                    self._shadow(real)[0].copy_(twin)
                self._flat[key] = (self._flat[key][0], kind)
            if index == 0:
                self._measure(_name(function), real, kind, shadows)

    def _compute(self, function: Any, leaves: list[Any], shadows: list[Tensor], structure: Any) -> Any:
        """Return the result of the operation on shadows, or None if it has none."""
        if torch.Tag.nondeterministic_seeded in function.tags and not _without_dropout(function, leaves):
            return None
        rest = iter(shadows)
        wide = [next(rest) if isinstance(leaf, Tensor) else _wide_dtype(leaf) for leaf in leaves]
        args, kwargs = tree_unflatten(wide, structure)
        try:
            return function(*args, **kwargs)
        except REFUSALS:
            return None

    def _shadow(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return the shadow of `tensor`, a view of the shadow of its storage, and its kind."""
        view = (tensor.shape, tensor.stride(), tensor.storage_offset())
        kind = 0
        if (known := self._flat.get(_key(tensor))) is not None:
            flat, kind = known
            if flat.is_complex() and not tensor.is_complex():
                flat = torch.view_as_real(flat).flatten()
            elif tensor.is_complex() and not flat.is_complex():
                flat = torch.view_as_complex(flat.view(-1, 2))
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            if flat.dtype == _wide_dtype(tensor.dtype) and flat.numel() == size:
                return flat.as_strided(*view), kind
        self._keep(tensor, _wide(tensor), kind)
        return self._flat[_key(tensor)][0].as_strided(*view), kind

    def _keep(self, tensor: Tensor, exact: Tensor, kind: int) -> None:
        self._calls += 1
        if self._calls % _PRUNE_EVERY == 0:
            self._flat = {key: value for key, value in self._flat.items() if not key.expired()}  # type: ignore[no-untyped-call]
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        dtype = _wide_dtype(tensor.dtype)
        if (
            exact.dtype == dtype
            and exact.stride() == tensor.stride()
            and exact.storage_offset() == tensor.storage_offset() == 0
            and exact.untyped_storage().nbytes() == size * exact.element_size()
        ):
            flat = exact.as_strided((size,), (1,))
        else:
            flat = torch.zeros(size, dtype=dtype, device=tensor.device)
            is_expanded = any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
            if is_expanded or tensor.numel() < size:
                storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                storage.set_(tensor.untyped_storage(), 0, (size,), (1,))
                flat.copy_(storage)
            if not is_expanded:
                flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(exact)
        self._flat[_key(tensor)] = (flat, kind)

    def _measure(self, name: str, real: Tensor, kind: int, operands: list[tuple[Tensor, int]]) -> None:
        if not _inexact(real) or real.numel() == 0 or name.startswith(_NOT_MEASURED):
            return
        exact = self._shadow(real)[0]
        off, size = exact - real, exact
        finite = off.abs().sum()
        if not finite.isfinite():
            seen = exact.isfinite()
            if self.overflow is None and not real[seen].isfinite().all():
                self.overflow = self._found(torch.inf, name, kind)
            both = seen & real.isfinite()
            off, size = off[both], exact[both]
            if off.numel() == 0:
                return
        least = _NEAR_ZERO * size.numel() ** 0.5 if name.rstrip("_") in _PERIODIC else _TINY
        error = (off.norm() / _spread(size, _KINDS[kind]).clamp(min=least)).item()
        self.worst[_KINDS[kind]] = max(self.worst[_KINDS[kind]], error)
        limit = self._limits.get(_KINDS[kind], torch.inf)
        if self.loss is not None or not error > limit:
            return
        if _KINDS[kind] == "activation" and _without_worst(real, exact, self._n_positions) <= limit:
            self.loss_of_few = self.loss_of_few or self._found(error, name, kind)
        else:
            angle = operands[0][0].abs().max().item() if name.rstrip("_") in _PERIODIC else 0.0
            self.loss = self._found(error, name, kind, angle)

    def _found(self, error: float, name: str, kind: int, angle: float = 0.0) -> Loss:
        return Loss(
            error,
            name.rstrip("_"),
            place_in_code(self._names),
            _KINDS[kind],
            any(each in name for each in _SHARP),
            name.rstrip("_") in ("add", "sub", "rsub"),
            angle,
        )

    def _note_uncast(self, function: Any, tensors: list[Tensor]) -> None:
        is_product = _name(function).rstrip("_") in _MATRIX_PRODUCTS and self._calls_of_user.autocasts
        if is_product and all(tensor.dtype == torch.float32 for tensor in tensors):
            self.uncast.append(place_in_code(self._names))


def _name(function: Any) -> str:
    return str(function._schema.name.partition("::")[2])


def _kind_of_result(function: Any, shadows: list[tuple[Tensor, int]]) -> int:
    kind = max((each for _, each in shadows), default=0)
    if _KINDS[kind] == "parameter" and _name(function) in _MATRIX_PRODUCTS:
        # A layer of a constant input, such as the embedding of a timestep, rounds like any layer.
        return _KINDS.index("activation")
    return kind


def _spread(exact: Tensor, kind: Kind) -> Tensor:
    """Return the norm of an activation. For weights and tables, return that of the distance from the mean."""
    is_activation = kind == "activation" or exact.numel() < 2 or not exact.std() > 0
    spread: Tensor = exact.norm() if is_activation else exact.std() * exact.numel() ** 0.5
    return spread


def place_in_code(names: dict[int, str]) -> str:
    """Return the innermost module of `names` (id -> name) and the innermost line of the user on the stack."""
    module = line = None
    frame: Any = sys._getframe(1)
    while frame is not None and (module is None or line is None):
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE, "<")):
            line = line or f"{file}:{frame.f_lineno}"
        owner = frame.f_locals.get("self") if module is None else None
        if isinstance(owner, nn.Module) and id(owner) in names:
            module = names[id(owner)] or type(owner).__name__
        frame = frame.f_back
    return ", ".join(part for part in (module, line) if part)


def _key(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide_dtype(value: Any) -> Any:
    if not isinstance(value, torch.dtype):
        return value
    return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_dtype(tensor.dtype), copy=True)


def _without_worst(real: Tensor, exact: Tensor, n_positions: int) -> float:
    """Return the error without the worst few positions of each axis of positions. inf: there is none."""
    axes = [axis for axis, size in enumerate(exact.shape) if size == n_positions]
    if not axes or n_positions < _ENOUGH_POSITIONS:
        return torch.inf
    finite = real.isfinite() & exact.isfinite()
    off, exact = (each.masked_fill(~finite, 0.0) for each in (exact - real, exact))
    for axis in axes:
        errors = off.movedim(axis, 0).reshape(n_positions, -1).norm(dim=1)
        worst = errors.topk(math.ceil(_FEW * n_positions)).indices
        off.index_fill_(axis, worst, 0.0)
        exact.index_fill_(axis, worst, 0.0)
    return float(off.norm() / exact.norm().clamp(min=_TINY))


def _is_count(function: Any, shadows: list[tuple[Tensor, int]]) -> bool:
    """Return True if whole numbers in floating point are cast to integers. This is not a choice."""
    if _name(function) != "_to_copy":
        return False
    value = shadows[0][0]
    return not value.is_complex() and bool((value == value.round()).all())


def _without_dropout(function: Any, leaves: list[Any]) -> bool:
    """Return True for attention with a dropout of 0."""
    if "scaled_dot_product" not in function._schema.name:
        return False
    return not any(isinstance(leaf, float) and 0 < leaf < 1 for leaf in leaves[3:5])
