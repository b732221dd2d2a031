"""Bugs of gradient accumulation."""

from __future__ import annotations

import torch

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.loop import Loop, loop_spec_of
from tests.zoo.mutant import mutant
from tests.zoo.optimizer import update_gradients


class _Unclipped(Loop):
    """Without clipping, which would hide the size of a gradient."""

    max_norm = 1e9


def accumulating():
    """The clean twin."""
    return loop_spec_of(_Unclipped)


def gradient(spec: TrainerSpec) -> list:
    """Of two micro-batches, the second with two targets."""
    run, seen = spec.create(), []
    run.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in run.model.parameters())
    )
    torch.manual_seed(0)
    second = spec.batch(seed=1)
    second["labels"][1:] = second["labels"][:, :-2] = -100
    run.accumulate([spec.batch(), second])
    return seen


@mutant("57", twin=accumulating, family="accumulation", source="transformers#34191", observable=gradient)
def mean_of_means():
    """Each micro-batch is averaged alone, so that tokens of short ones weigh more."""

    class Mutant(_Unclipped):
        def weight(self, batch, batches, total):
            return 1 / len(batches)

    return loop_spec_of(Mutant)


@mutant("57", twin=accumulating, family="accumulation", source="transformers#35203", observable=gradient)
def targets_of_the_last_micro_batch():
    """The sum is divided by the number of targets of the last micro-batch."""

    class Mutant(_Unclipped):
        def weight(self, batch, batches, total):
            return self.targets(batch) / max(self.targets(batches[-1]), 1)

    return loop_spec_of(Mutant)


@mutant("57", twin=accumulating, family="accumulation", source="classic", observable=gradient)
def sum_of_means():
    """The means of micro-batches are added up and not divided."""

    class Mutant(_Unclipped):
        def weight(self, batch, batches, total):
            return 1.0

    return loop_spec_of(Mutant)


@mutant("58", twin=accumulating, family="accumulation", source="ms-swift#10084", observable=gradient)
def window_divided_by_its_full_count():
    """A window is divided by four micro-batches, also where the last of an epoch has fewer."""

    class Mutant(_Unclipped):
        def weight(self, batch, batches, total):
            return self.targets(batch) / max(total, 1) * len(batches) / 4

    return loop_spec_of(Mutant)


@mutant("57", twin=accumulating, family="accumulation", source="classic", observable=gradient)
def cleared_between_micro_batches():
    """Gradients are cleared before each micro-batch: only the last one counts."""

    class Mutant(_Unclipped):
        def backward(self, loss):
            self.zero_grad()
            super().backward(loss)

    return loop_spec_of(Mutant)


@mutant("57", twin=accumulating, family="accumulation", source="classic", observable=gradient)
def short_micro_batches_count_more_targets():
    """Each micro-batch counts a least number of targets, so that short ones shrink the others."""

    class Mutant(_Unclipped):
        def accumulate(self, batches):
            self.floor = sum(max(self.targets(batch), 8) for batch in batches)
            return super().accumulate(batches)

        def weight(self, batch, batches, total):
            return self.targets(batch) / self.floor

    return loop_spec_of(Mutant)


@mutant("57", twin=accumulating, family="accumulation", source="classic", observable=gradient)
def update_for_each_micro_batch():
    """The optimizer is stepped after each micro-batch."""

    class Mutant(_Unclipped):
        def accumulate(self, batches):
            if len(batches) == 1:
                return super().accumulate(batches)
            return sum(self.accumulate([batch]) for batch in batches) / len(batches)

    return loop_spec_of(Mutant)


class Splitting(_Unclipped):
    """Splits the batch of a step into two micro-batches."""

    def step(self, batch):
        parts = zip(*(value.chunk(2) for value in batch.values()), strict=True)
        return self.accumulate([dict(zip(batch, part, strict=True)) for part in parts])


def splitting():
    return loop_spec_of(Splitting)


@mutant("57", twin=splitting, family="accumulation", source="bytetriper/RAE#67", observable=update_gradients)
def cleared_before_each_micro_batch():
    """Gradients are cleared before each micro-batch of a step, so that only the last one counts."""

    class Mutant(Splitting):
        def loss(self, batch):
            self.zero_grad()
            return super().loss(batch)

    return loop_spec_of(Mutant)
