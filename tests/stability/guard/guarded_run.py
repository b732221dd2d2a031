"""A guarded run of a small model, and what breaks in it."""

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from stackwise.stability.guard import Guard, GuardError, GuardPolicy
from stackwise.support.random_state import set_random_states

VOCAB, N = 16, 100

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "calm sgd": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, fused=True),
}

POLICY = GuardPolicy(snapshot_interval=20)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """Predicts the next of a noisy cycle. Buffers and random choices are there to be put back."""

    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.statistics = nn.BatchNorm1d(width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        x = self.statistics(self.embedding(ids))
        for layer in self.layers:
            x = self.dropout(layer(x))
        return self.head(x)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make_data(seed=0, count=N, rows=128):
    generator = torch.Generator().manual_seed(seed)
    cycle = torch.randperm(VOCAB, generator=generator)
    batches = []
    for _ in range(count):
        ids = torch.randint(VOCAB, (rows,), generator=generator)
        noisy = torch.rand(rows, generator=generator) < 0.3
        batches.append(
            (ids, torch.where(noisy, torch.randint(VOCAB, (rows,), generator=generator), cycle[ids]))
        )
    return batches


@dataclass
class Outcome:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: object
    guard: Guard | None = None
    seen: list = field(default_factory=list)  # the step of each batch that was given
    losses: list = field(default_factory=list)
    error: GuardError | None = None
    kept: dict = field(default_factory=dict)  # states before steps, where they were asked for

    @property
    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "rate": self.optimizer.param_groups[0]["lr"],
            "scheduler": {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"},
        }


def made(optimizer, seed, dropout=0.0):
    torch.manual_seed(seed)
    model = Small(dropout=dropout)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) / (1 + step / 100)
    )
    torch.manual_seed(1000 + seed)
    return Outcome(model, optimizer, scheduler)


def guarded(
    optimizer, fault=None, *, seed=0, data=None, policy=POLICY, dropout=0.0, watch=None, epochs=1, **arguments
):
    """Train under a guard. `fault(run, step)` is called before `guard.step`, `watch` before the loss."""
    run = made(optimizer, seed, dropout)
    guard = Guard(run.model, run.optimizer, scheduler=run.scheduler, policy=policy, **arguments)
    run.guard = guard
    data = make_data(seed) if data is None else data
    compute = arguments.get("loss_of", loss_of)
    try:
        for _ in range(epochs):
            for batch in guard.batches(data):
                step = guard.steps
                if watch is not None:
                    watch(run, step)
                loss = compute(run.model, batch)
                loss.backward()
                if fault is not None:
                    fault(run, step)
                run.seen.append(step)
                run.losses.append(loss.item())
                guard.step(loss)
    except GuardError as error:
        run.error = error
    return run


def plain(optimizer, fault=None, *, data=None, leave_out=(), compute=loss_of, **settings):
    """The same without a guard. Steps of `leave_out` are not there at all; it ends before step `before`.

    Many tests hold theirs against the same one, which is trained once.
    """
    if fault is None and data is None and compute is loss_of:
        return _known(optimizer, tuple(leave_out), **settings)
    return _trained(optimizer, fault, data, leave_out, compute, **settings)


@functools.cache
def _known(optimizer, leave_out, **settings):
    return _trained(optimizer, None, None, leave_out, loss_of, **settings)


def _trained(optimizer, fault, data, leave_out, compute, seed=0, dropout=0.0, before=None):
    run = made(optimizer, seed, dropout)
    data = make_data(seed) if data is None else data
    for step, batch in enumerate(data[:before]):
        if step in leave_out:
            continue
        loss = compute(run.model, batch)
        loss.backward()
        if fault is not None:
            fault(run, step)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    return run


def times(factor, *steps):
    """Gradients multiplied at `steps`."""

    def fault(run, step):
        if step in steps:
            with torch.no_grad():
                for p in run.model.parameters():
                    p.grad.mul_(factor)

    return fault


def element(value, *steps):
    """One element of one gradient."""

    def fault(run, step):
        if step in steps:
            run.model.layers[1].up.weight.grad.view(-1)[7] = value

    return fault


def same(a, b):
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


FAULTS = {
    "x10": lambda s: (times(10, s), [s], "gradient spike", "all modules (gradients x"),
    "nan ten times": lambda s: (
        times(math.nan, *range(s, s + 10)),
        list(range(s, s + 10)),
        "non-finite gradient",
        "all modules (non-finite gradients)",
    ),
    "x1000": lambda s: (times(1000, s), [s], "gradient spike", "all modules (gradients x"),
    "nan": lambda s: (element(math.nan, s), [s], "non-finite gradient", "layers.1.up.weight"),
    "inf": lambda s: (element(-math.inf, s), [s], "non-finite gradient", "layers.1.up.weight"),
}


def resumed(state, data, fault, **arguments):
    """The run of a new process from `state`."""
    again = made("fused sgd", 99, dropout=0.1)
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.scheduler.load_state_dict(state["scheduler"])
    guard = again.guard = Guard(
        again.model, again.optimizer, scheduler=again.scheduler, policy=POLICY, **arguments
    )
    guard.load_state_dict(state["guard"])
    set_random_states(state["random"])
    for batch in guard.batches(data, fast_forward=True):
        step = guard.steps
        loss = loss_of(again.model, batch)
        loss.backward()
        fault(again, step)
        again.seen.append(step)
        guard.step(loss)
    return again
