"""`python -m bench.async_save`: how long an asynchronous save holds up a training step.

A Rack and its AdamW, more than 200 MB of state, trains on. In each round, in random order:

- synchronous: `CheckpointManager.save` on the disk of the temporary folder, until it returns.
- asynchronous: the same state, by a manager with `asynchronous=True`, until `save` returns.

After the latter, training steps are timed while the thread writes, and compared with steps just before. The
bar is the median over rounds of the time of the asynchronous save, over the time of the synchronous save of
the round. The first save of each kind, which allocates the memory of the copies, is reported separately.
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
SYNCHRONOUS, ASYNCHRONOUS = KINDS = ("synchronous", "asynchronous")


@dataclass
class Seconds:
    """Measured seconds, one value a round.

    Attributes:
        saves: seconds in `save`, of each kind.
        first: seconds in the first `save`, which is not among the others.
        writing: seconds from the return of `save` until the thread has finished.
        alone: seconds of a training step before a save.
        beside: seconds of a training step while the thread writes.
    """

    saves: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    first: dict[str, float] = field(default_factory=dict)
    writing: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


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
    held_up = ratio(found.saves[ASYNCHRONOUS], found.saves[SYNCHRONOUS])
    slowed = ratio(found.beside, found.alone)
    size = training.state_bytes()
    figures = {
        "state_bytes": size,
        "tensors": 3 * len(list(training.rack.parameters())),
        "rounds": rounds,
        "held_up_over_synchronous": held_up,
        "step_beside_the_writer_over_alone": slowed,
        "seconds": asdict(found),
    }
    claim.enter(
        Bar(f"held up, {shape.name}", held_up["median"], LIMIT, at_most=True, full_size=True), figures
    )
    claim.enter(Bar("state in MB", size / 1e6, LEAST_BYTES / 1e6, full_size=True))
    print(f"{shape.name}: {size / 1e6:.0f} MB in {figures['tensors']} tensors, {rounds} rounds")
    for kind in KINDS:
        print(f"  {kind:<13} save {median(found.saves[kind]):.4f} s, the first one {found.first[kind]:.3f} s")
    quartiles = f"[{held_up['quartile_low']:.4f}, {held_up['quartile_high']:.4f}]"
    print(
        f"  held up {held_up['median']:.4f} {quartiles} of a synchronous save; written after "
        f"{median(found.writing):.3f} s, in which a step takes {slowed['median']:.2f} times as long",
        flush=True,
    )


def seconds(training: Training, directory: Path, rounds: int) -> Seconds:
    """Save in both ways and train on, so many rounds."""
    found = Seconds()
    managers = {
        kind: CheckpointManager(directory / kind, keep_last=1, asynchronous=kind == ASYNCHRONOUS)
        for kind in KINDS
    }
    for kind, manager in managers.items():
        found.first[kind] = _seconds(partial(manager.save, 0, training.objects))
        manager.wait()
    order, shuffle = list(KINDS), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for number in range(1, rounds + 1):
            shuffle(order)
            for kind in order:
                alone = [_seconds(training.step) for _ in range(3)]
                found.saves[kind].append(_seconds(partial(managers[kind].save, number, training.objects)))
                if kind == ASYNCHRONOUS:
                    found.alone.append(median(alone))
                    _beside(training, managers[kind], found)
    finally:
        gc.enable()
    for manager in managers.values():
        manager.close()
    return found


def _beside(training: Training, manager: CheckpointManager, found: Seconds) -> None:
    """Train while the thread writes. The last step, in which it ends, is left out where there are others."""
    began, taken = time.perf_counter(), list[float]()
    while manager.writing or not taken:
        taken.append(_seconds(training.step))
    found.writing.append(time.perf_counter() - began)
    found.beside.append(median(taken[:-1] or taken))
    manager.wait()


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
