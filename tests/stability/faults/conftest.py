"""A hand-written loop that tests break, and what each of its steps showed."""

import pytest
import torch
from torch import nn

from stackwise.stability.faults import broken


class Training:
    """A small model in a loop of its own; `seen` has (loss, gradient norm, sum of weights) of each step."""

    def __init__(self, model, optimizer=None, *, vocab_size=29, micro=1, skipped=(), before=None):
        self.model = model
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.vocab_size, self.micro, self.skipped, self.before = vocab_size, micro, skipped, before
        self.seen = []

    def batches(self, steps):
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps * self.micro):
            ids = torch.randint(self.vocab_size, (4, 8), generator=generator)
            yield {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss(self, batch):
        logits = self.model(batch["input_ids"])
        logits = getattr(logits, "logits", logits)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def run(self, steps, batches=None):
        batches = iter(batches or self.batches(steps))
        for step in range(steps):
            if self.before:
                self.before(step)
            self.optimizer.zero_grad()
            losses = []
            for _ in range(self.micro):
                loss = self.loss(next(batches))
                loss.backward()
                losses.append(loss)
            norms = [p.grad.double().norm() for p in self.model.parameters() if p.grad is not None]
            norm = torch.stack(norms).norm().item()
            if step not in self.skipped:
                self.optimizer.step()
            total = sum(p.detach().double().sum() for p in self.model.parameters()).item()
            self.seen.append((sum(loss.item() for loss in losses), norm, total))
        return self.seen


def hooks_of(model):
    return [
        hook
        for m in model.modules()
        for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values(), *m._backward_hooks.values())
    ]


def same(a, b):
    """Bit for bit: a NaN is itself."""
    return repr(a) == repr(b)


def differing(a, b):
    return [step for step, (x, y) in enumerate(zip(a, b, strict=True)) if not same(x, y)]


@pytest.fixture
def train(subjects):
    """A whole training under faults: (training, injection)."""

    def run(faults, *, steps=6, make=None, seed=0, through_loader=True, **arguments):
        torch.manual_seed(seed)
        training = Training((make or subjects.tiny)(), **arguments)
        with broken((training.model, training.optimizer), faults) as injection:
            batches = training.batches(steps)
            training.run(steps, injection.batches(batches) if through_loader else batches)
        assert not hooks_of(training.model)
        return training, injection

    return run
