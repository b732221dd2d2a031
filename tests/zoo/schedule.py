"""Bugs of learning rate schedules and of the number of steps."""

from __future__ import annotations

import warnings

import torch

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.mutant import mutant


def rates(spec: TrainerSpec) -> list:
    """Of some updates of two micro-batches each."""
    run, seen = spec.create(), []
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    torch.manual_seed(0)
    for number in range(8):
        run.accumulate([spec.batch(seed=number)] * 2)
    return seen


def updates(spec: TrainerSpec) -> int:
    """Of a whole training."""
    run, seen = spec.create(), []
    run.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    torch.manual_seed(0)
    run.fit()
    return len(seen)


@mutant("75", twin=loop, family="schedule", source="accelerate#963", observable=rates)
def scheduler_per_micro_step():
    """The scheduler is stepped with each micro-batch: warm-up and decay are over too soon."""

    class Mutant(Loop):
        def accumulate(self, batches):
            mean = super().accumulate(batches)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in batches[1:]:
                    self.scheduler.step()
            return mean

    return loop_spec_of(Mutant)


class _SchedulerFirst(Loop):
    def update(self):
        self.clip()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.scheduler.step()
        self.optimizer.step()
        self.zero_grad()


@mutant("75", twin=loop, family="schedule", source="pytorch.org/docs optim, 1.1.0", observable=rates)
def scheduler_before_the_optimizer():
    """The scheduler is stepped before the optimizer: the first learning rate is never used."""
    return loop_spec_of(_SchedulerFirst)


@mutant("75", twin=loop, family="schedule", source="classic", observable=rates)
def scheduler_before_the_optimizer_without_a_claim():
    """The same where nothing is claimed of the schedule."""
    return loop_spec_of(_SchedulerFirst, learning_rate=None)


def unclaimed():
    """The clean twin of whose schedule nothing is claimed, and that only steps."""
    return loop_spec_of(_StepsAlone, learning_rate=None)


class _StepsAlone(Loop):
    accumulate = None

    def step(self, batch):
        return Loop.accumulate(self, [batch])


def step_rates(spec: TrainerSpec) -> list:
    """Of some updates."""
    run, seen = spec.create(), []
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    torch.manual_seed(0)
    for number in range(8):
        run.step(spec.batch(seed=number))
    return seen


@mutant("75", twin=unclaimed, family="schedule", source="classic", observable=step_rates)
def scheduler_stepped_twice():
    """The scheduler is stepped by the loop and by what it calls, where nothing else tells."""

    class Mutant(_StepsAlone):
        def advance(self):
            super().advance()
            self.scheduler.step()

    return loop_spec_of(Mutant, learning_rate=None)


@mutant("75", twin=loop, family="schedule", source="classic", observable=rates)
def scheduler_per_epoch():
    """The scheduler, made for steps, is stepped at the end of each epoch."""

    class Mutant(Loop):
        def update(self):
            self.clip()
            self.optimizer.step()
            self.zero_grad()

        def advance(self):
            super().advance()
            if self.batch_number == 0:
                self.scheduler.step()

    return loop_spec_of(Mutant)


@mutant("T19", twin=loop, family="schedule", source="transformers#33455", observable=updates)
def ends_too_early():
    """Micro-batches are counted as steps, and training ends at half its length."""

    class Mutant(Loop):
        def advance(self):
            super().advance()
            self.number += 1

    return loop_spec_of(Mutant)


@mutant("T19", twin=loop, family="schedule", source="classic", observable=rates)
def schedule_of_another_length():
    """The schedule is planned for half as many steps as are taken."""

    class Mutant(Loop):
        @classmethod
        def factor(cls, step):
            return super().factor(cls.warmup_steps + 2 * (step - cls.warmup_steps) if step > 4 else step)

    return loop_spec_of(Mutant)


@mutant("75", twin=loop, family="schedule", source="classic", observable=rates)
def warm_up_by_integer_division():
    """The warm-up is step // length: zero until it is over."""

    class Mutant(Loop):
        @classmethod
        def factor(cls, step):
            return (step + 1) // cls.warmup_steps if step < cls.warmup_steps else super().factor(step)

    return loop_spec_of(Mutant)
