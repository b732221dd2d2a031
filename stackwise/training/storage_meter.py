"""StorageMeter: memory and FLOPs of operations, measured when they are dispatched."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.benchmark.flops.counted import operation_flops
from stackwise.support.tensor_tree import tensors_of
from stackwise.training.phase_model import PhaseModel
from stackwise.training.step import TrainStep

__all__ = ["StepFacts", "StorageMeter", "uncollected", "watch"]


@dataclass
class StepFacts:
    """Bytes after the first forward pass and before the optimizer's update, and the FLOPs until then."""

    activations: int = 0
    loss: int = 0
    gradients: int = 0
    flops_forward: int = 0
    flops: int = 0


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of storages that operations allocate, until they are freed, and FLOPs.

    Attributes:
        held: bytes of allocated storages.
        peak: maximum of `held`.
        flops: FLOPs so far.
        living: bytes of each storage.
        before_next: called once, before the next operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = self.flops = 0
        self.living: dict[int, int] = {}
        self.before_next: Callable[[], None] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.before_next is not None:
            called, self.before_next = self.before_next, None
            called()
        given = {each.untyped_storage()._cdata for each in tensors_of((args, kwargs))}
        result = function(*args, **kwargs)
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self.living:
                self.living[key] = storage.nbytes()
                self.held += storage.nbytes()
                weakref.finalize(storage, self._ended, key)
        self.peak = max(self.peak, self.held)
        self.flops += operation_flops(function, args, kwargs, result)
        return result

    def _ended(self, key: int) -> None:
        self.held -= self.living.pop(key)


def watch(model: PhaseModel, step: TrainStep, meter: StorageMeter, seen: StepFacts) -> None:
    """Fill `seen` during the next step."""
    flops, first = 0, True
    before: set[int] = set()
    of_blocks: set[int] = set()

    def begins(*_: object) -> None:
        nonlocal flops
        flops = meter.flops
        if first:
            before.update(meter.living)

    def head_begins(*_: object) -> None:
        of_blocks.update(meter.living)

    def ends(_: nn.Module, __: object, total: Tensor) -> None:
        nonlocal first
        seen.flops_forward += meter.flops - flops
        if first:
            # Only after the forward pass autocast frees its copies of weights.
            meter.before_next = partial(left, total.nbytes)
        first = False

    def left(total: int) -> None:
        seen.activations = sum(size for key, size in meter.living.items() if key in of_blocks - before)
        seen.loss = sum(size for key, size in meter.living.items() if key not in of_blocks | before) - total

    model.register_forward_pre_hook(begins)
    model.register_forward_hook(ends)
    hook = model.final_norm.register_forward_pre_hook(head_begins)
    update = step.optimizer.step

    def step_begins() -> None:
        hook.remove()
        seen.flops = meter.flops
        parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
        seen.gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        update()

    step.optimizer.step = step_begins  # type: ignore[method-assign]


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in this context, so that the allocated memory depends only on the step."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
