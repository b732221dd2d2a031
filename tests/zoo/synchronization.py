"""Bugs of a step that makes the host wait."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.loop import Loop, loop_spec_of
from tests.zoo.mutant import mutant


class _Waitless(Loop):
    """One batch to a step, whose loss stays on the device."""

    accumulate = None

    def step(self, batch):
        self.train_mode()
        loss = self.loss(batch)
        self.backward(loss)
        self.update()
        self.advance()
        return loss.detach()


def waitless():
    """The clean twin that claims never to wait."""
    return loop_spec_of(_Waitless, never_waits=True)


def values_read(spec: TrainerSpec) -> int:
    """How often a step asks a tensor for its value, those that count its optimizer's steps included."""
    run, read = spec.create(), []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            read.append(function in (Tensor.item, Tensor.__bool__))
            return function(*args, **(kwargs or {}))

    torch.manual_seed(0)
    with Watch():
        run.step(spec.batch())
    return sum(read)


@mutant("S4", twin=waitless, family="synchronization", source="classic", observable=values_read)
def loss_read_in_each_step():
    """The loss is read in each step, to be added up on the host."""

    class Mutant(_Waitless):
        total = 0.0

        def step(self, batch):
            loss = super().step(batch)
            self.total += loss.item()
            return loss

    return loop_spec_of(Mutant, never_waits=True)


@mutant("S5", twin=waitless, family="synchronization", source="classic", observable=values_read)
def update_behind_a_condition():
    """The update is made only if the norm is finite, which the host has to read."""

    class Mutant(_Waitless):
        def update(self):
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
            if torch.isfinite(norm):
                super().update()

    return loop_spec_of(Mutant, never_waits=True)
