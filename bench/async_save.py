"""`python -m bench.async_save`: how long an asynchronous save holds up a training step.

A Rack and its AdamW, more than 200 MB of state, trains on. In each round, in random order:

- synchronous: `CheckpointManager.save` on the disk of the temporary folder, until it returns.
- asynchronous: the same state, by a manager with `asynchronous=True`, until `save` returns.
- overlapped: the same with `asynchronous="overlapped"`.

After both of the latter, training steps are timed while the thread writes, and compared with steps just
before. What holds the training up is the time in `save`, and with "overlapped" also the time for which an
optimizer waits for copies. The bar is of "overlapped": the median over rounds of both together, over the
time of the synchronous save of the round. The first save of each kind, which finds no memory to copy to
yet, is told apart.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bench import peer_models
from bench.claim import Bar, Claim, ratio
from bench.peer_models import Shape
from stackwise.checkpoint import CheckpointManager
from stackwise.model import Rack
from stackwise.training.objective import next_token_loss

SHAPE = Shape(512, 8, 8, 2, 1408, batch_size=2, seq_len=128)
QUICK = Shape(256, 4, 4, 2, 704, vocab_size=2048, batch_size=2, seq_len=128)
LIMIT = 0.05
LEAST_BYTES = 200 * 10**6
SYNCHRONOUS, ASYNCHRONOUS, OVERLAPPED = KINDS = ("synchronous", "asynchronous", "overlapped")


@dataclass
class Seconds:
    """What was measured, one figure a round and kind.

    Attributes:
        saves: in `save`.
        waits: of an optimizer, for what is copied.
        first: in the first `save`, which is not among the others.
        writing: from a `save` that has returned until its thread is through.
        alone: of a training step before a save.
        beside: of a training step while the thread writes.
    """

    saves: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    waits: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    first: dict[str, float] = field(default_factory=dict)
    writing: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS[1:]})
    alone: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS[1:]})
    beside: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS[1:]})

    def held_up(self, kind: str) -> list[float]:
        """Seconds of a round in which the training did not go on."""
        return [save + wait for save, wait in zip(self.saves[kind], self.waits[kind], strict=True)]


class Training:
    """A Rack, its optimizer with a state, and the step that both are used in."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        model, _ = peer_models.rack(shape)
        assert isinstance(model, Rack)
        self.rack = model.train()
        self.ids = torch.randint(shape.vocab_size, (shape.batch_size, shape.seq_len + 1))
        self.optimizer = torch.optim.AdamW(self.rack.parameters(), lr=1e-3, fused=True)
        self.objects = {"model": self.rack, "optimizer": self.optimizer}
        self.step()

    def step(self) -> None:
        loss: Tensor = next_token_loss(self.rack, {"input_ids": self.ids})
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        """Of weights and optimizer."""
        of_optimizer = (
            value for state in self.optimizer.state.values() for value in state.values() if value.ndim
        )
        return sum(t.numel() * t.element_size() for t in (*self.rack.parameters(), *of_optimizer))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small state, few rounds")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--folder", type=Path, help="where to save; None: a temporary folder")
    arguments = parser.parse_args()
    claim = Claim("async_save", arguments.quick)
    shape = QUICK if arguments.quick else SHAPE
    measure(claim, shape, 5 if arguments.quick else arguments.rounds, arguments.folder)
    return claim.conclude()


def measure(claim: Claim, shape: Shape, rounds: int, folder: Path | None = None) -> None:
    """Enter the bars and figures of one shape."""
    training = Training(shape)
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        found = seconds(training, Path(directory), rounds)
    held_up = {kind: ratio(found.held_up(kind), found.held_up(SYNCHRONOUS)) for kind in KINDS[1:]}
    slowed = {kind: ratio(found.beside[kind], found.alone[kind]) for kind in KINDS[1:]}
    size = training.state_bytes()
    figures = {
        "state_bytes": size,
        "tensors": 3 * len(list(training.rack.parameters())),
        "rounds": rounds,
        "held_up_over_synchronous": held_up,
        "step_beside_the_writer_over_alone": slowed,
        "seconds": asdict(found),
    }
    value = held_up[OVERLAPPED]["median"]
    claim.enter(Bar(f"held up, {shape.name}", value, LIMIT, at_most=True, full_size=True), figures)
    claim.enter(Bar("state in MB", size / 1e6, LEAST_BYTES / 1e6, full_size=True))
    print(f"{shape.name}: {size / 1e6:.0f} MB in {figures['tensors']} tensors, {rounds} rounds")
    print(f"  {SYNCHRONOUS:<13} save {median(found.saves[SYNCHRONOUS]):.3f} s")
    for kind in KINDS[1:]:
        each = held_up[kind]
        quartiles = f"[{each['quartile_low']:.4f}, {each['quartile_high']:.4f}]"
        print(
            f"  {kind:<13} held up {each['median']:.4f} {quartiles} of that: save "
            f"{median(found.saves[kind]):.4f} s, wait {median(found.waits[kind]):.4f} s; first save "
            f"{found.first[kind]:.3f} s; written after {median(found.writing[kind]):.3f} s, in which a step "
            f"takes {slowed[kind]['median']:.2f} times as long",
            flush=True,
        )


def seconds(training: Training, directory: Path, rounds: int) -> Seconds:
    """Save in all ways and train on, so many rounds."""
    found = Seconds()
    managers = {
        SYNCHRONOUS: CheckpointManager(directory / SYNCHRONOUS, keep_last=1),
        ASYNCHRONOUS: CheckpointManager(directory / ASYNCHRONOUS, keep_last=1, asynchronous=True),
        OVERLAPPED: CheckpointManager(directory / OVERLAPPED, keep_last=1, asynchronous=OVERLAPPED),
    }
    # One hook before that of the manager, which is there from its first save on, and one behind it.
    asked: list[float] = []
    waited: list[float] = []
    before = register_optimizer_step_pre_hook(lambda *_: asked.append(time.perf_counter()))
    for kind, manager in managers.items():
        found.first[kind] = _seconds(partial(manager.save, 0, training.objects))
        manager.wait()
    behind = register_optimizer_step_pre_hook(lambda *_: waited.append(time.perf_counter() - asked[-1]))
    order, shuffle = list(KINDS), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for number in range(1, rounds + 1):
            shuffle(order)
            for kind in order:
                alone = [_seconds(training.step) for _ in range(3)]
                waited.clear()
                found.saves[kind].append(_seconds(partial(managers[kind].save, number, training.objects)))
                if kind != SYNCHRONOUS:
                    found.alone[kind].append(median(alone))
                    _beside(training, managers[kind], found.beside[kind], found.writing[kind])
                found.waits[kind].append(sum(waited))
    finally:
        gc.enable()
        before.remove()
        behind.remove()
    for manager in managers.values():
        manager.close()
    return found


def _beside(training: Training, manager: CheckpointManager, steps: list[float], writing: list[float]) -> None:
    """Train while the thread writes. The last step, in which it ends, is left out where there are others."""
    began, taken = time.perf_counter(), list[float]()
    while manager.writing or not taken:
        taken.append(_seconds(training.step))
    writing.append(time.perf_counter() - began)
    steps.append(median(taken[:-1] or taken))
    manager.wait()


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
