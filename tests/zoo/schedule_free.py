"""A training loop with a schedule-free optimizer (arXiv:2405.15682), and a bug of its evaluation."""

from __future__ import annotations

import copy

import torch

from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.loop import Loop, loop_spec_of
from tests.zoo.mutant import mutant


class ScheduleFree(torch.optim.Optimizer):
    """SGD that trains between the base sequence z and its average x. eval() shows x, and train() goes back.

    Both interpolate in place, so going there and back rounds.
    """

    beta = 0.9

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "count": 0, "training": True})

    def change_mode(self, training, weight):
        for group in self.param_groups:
            if group["training"] != training:
                group["training"] = training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight)

    def eval(self):
        self.change_mode(False, 1 - 1 / self.beta)

    def train(self):
        self.change_mode(True, 1 - self.beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            share = 1 / group["count"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (self.beta * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class EvaluatesTheAverage(Loop):
    """A schedule-free run: evaluation and checkpoints contain the average."""

    def create_optimizer(self):
        return ScheduleFree(self.model.parameters())

    def create_scheduler(self):
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def accumulate(self, batches):
        self.optimizer.train()
        return super().accumulate(batches)

    def evaluate(self, batches):
        self.optimizer.eval()
        result = super().evaluate(batches)
        self.optimizer.train()
        return result

    def state(self):
        self.optimizer.eval()
        state = copy.deepcopy(super().state())
        self.optimizer.train()
        return state

    def restore(self, state):
        super().restore(state)
        self.optimizer.train()


def schedule_free():
    return loop_spec_of(EvaluatesTheAverage, learning_rate=None, decayed=None)


def loss_after_steps(spec: TrainerSpec) -> float:
    """Evaluated after three steps."""
    run = spec.create()
    torch.manual_seed(0)
    for number in range(3):
        run.step(spec.batch(seed=number))
    return run.evaluate([spec.batch()])


@mutant("99", twin=schedule_free, family="evaluation", source="accelerate#4161", observable=loss_after_steps)
def optimizer_stays_in_train_mode():
    """Evaluation uses the weights of train mode instead of their average."""

    class Mutant(EvaluatesTheAverage):
        def evaluate(self, batches):
            return Loop.evaluate(self, batches)

    return loop_spec_of(Mutant, learning_rate=None, decayed=None)
