"""BrokenSteps: batches and losses of a model that is trained under a guard with injected faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from stackwise.stability.faults import Acted, Anatomy, Fault, TargetNotReachedError
from stackwise.stability.recomputation import is_reference
from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded

__all__ = ["BrokenSteps"]


class BrokenSteps:
    """Batches and losses of a training under a guard, which may compute the loss of a batch more than once.

    Args:
        spec: description of the model.
        faults: faults to inject.
        batch_size: number of rows.
        seq_len: number of positions.
        device: device of the batches.
        seed: seed of batches and dropout.

    Raises:
        ValueError: a fault without a target.
    """

    def __init__(
        self,
        spec: ModelSpec,
        faults: Sequence[Fault],
        *,
        batch_size: int,
        seq_len: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._spec, self._device, self._seed = spec, device, seed
        self._shape = batch_size, seq_len
        self.faults = self._resolved(faults)
        self._given: dict[int, tuple[int, Tensor]] = {}  # step and batch, by identity of the batch
        self._begun: set[int] = set()
        self._acted: set[tuple[int, Fault]] = set()

    @property
    def fired(self) -> list[int]:
        """Steps at which a fault acted."""
        return sorted({step for step, _ in self._acted})

    def batches(self, steps: int) -> Iterator[Tensor]:
        """Yield one batch for each step, all of them different."""
        for step in range(steps):
            inputs = self._batch(self._seed + 1 + step)
            self._given[id(inputs)] = step, inputs
            yield inputs

    def step_of(self, inputs: Tensor) -> int:
        """Return the number of the step of a batch."""
        return self._given[id(inputs)][0]

    def begin(self, step: int) -> list[Fault]:
        """Return the active faults of weights and gradients for this execution; none if it is a replay."""
        again = step in self._begun
        self._begun.add(step)
        return [] if again else self._active(step)

    def before_step(
        self, step: int, active: Sequence[Fault], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Apply faults before the forward pass."""
        for fault in active:
            fault.before_step(model, optimizer, self._noting(step, fault))

    def loss_of(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the loss of a batch. Its faults act each time, unless it is a healthy reference."""
        step = self.step_of(inputs)
        active = [] if is_reference() else self._active(step)
        inputs = inputs.clone()
        with ExitStack() as stack:
            for fault in active:
                inputs = fault.on_batch(inputs, self._noting(step, fault))
                stack.enter_context(fault.around_forward(model, self._noting(step, fault)))
            stack.enter_context(seeded(self._seed + 1 + step, self._device))
            loss = self._spec.loss_of(model, inputs)
        for fault in active:
            loss = fault.on_loss(loss, self._noting(step, fault))
        return loss

    def after_backward(self, step: int, active: Sequence[Fault], model: nn.Module) -> None:
        """Apply faults to the gradients.

        Raises:
            TargetNotReachedError: a fault has not acted in this step.
        """
        for fault in active:
            fault.on_gradients(model, self._noting(step, fault))
            if (step, fault) not in self._acted:
                raise TargetNotReachedError(
                    f"{fault}: it did not act at step {step}: its target was not reached, or cannot be "
                    "changed by it"
                )

    def _active(self, step: int) -> list[Fault]:
        return [fault.at(step) for fault in self.faults if step in fault.steps]

    def _noting(self, step: int, fault: Fault) -> Acted:
        return partial(self._acted.add, (step, fault))

    def _batch(self, seed: int) -> Tensor:
        return self._spec.batch(*self._shape, device=self._device, seed=seed)

    def _resolved(self, faults: Sequence[Fault]) -> tuple[Fault, ...]:
        """Return the faults with explicit targets, found with one step of a temporary model."""
        if not faults:
            return ()
        spec, device, seed = self._spec, self._device, self._seed
        twin = spec.create(device, seed).train()
        inputs = self._batch(seed)
        optimizer = None
        if any(fault.damages for fault in faults):  # its state exists after an update only
            optimizer = spec.optimizer([p for p in twin.parameters() if p.requires_grad])
        with torch.enable_grad(), seeded(seed, device):
            anatomy = Anatomy.of(
                twin,
                lambda: spec.loss_of(twin, inputs).backward(),  # type: ignore[no-untyped-call]
                optimizer,
            )
        resolved = tuple(fault.resolve(anatomy) for fault in faults)
        for fault in resolved:
            fault.on_batch(inputs, lambda: None)
        return resolved
