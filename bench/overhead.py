"""`python -m bench.overhead`: what telemetry costs of a training step.

Our trainer, against the same step without any telemetry:

- bare: forwards, backwards, clipped, updated. Nothing is kept.
- trainer: `ArchitectureTrainer` itself, with loss, gradient norm, whether both are finite and the norm of
  every parameter, as a JSON line after each step.
- bare again: a second one, to show how far two measurements of one thing are apart here.

A loop of one's own, compiled, clipped by `clip_grad_norm_`, with torch's fused AdamW:

- loop: nothing is kept.
- monitored: `GradientMonitor` and `LossTracker`, whose norm clips.
- items: one `.item()` for the loss and one for the norm of every parameter.

Every round runs all of them, in random order; figures are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from bench import peer_models
from bench.claim import Bar, Claim, ratio
from bench.peer_models import Shape
from stackwise import ArchitectureTrainer, StackWiseConfig
from stackwise.model import Rack
from stackwise.model.compilation import compiled
from stackwise.stability.telemetry import (
    GradientMonitor,
    GradientRecord,
    LossRecord,
    LossTracker,
    clip_divisor,
)
from stackwise.training.objective import Objective, next_token_loss
from stackwise.training.phase_model import PhaseModel
from stackwise.training.precision import autocast
from stackwise.training.step import TrainStep

SHAPES = [
    Shape(512, 8, 8, 2, 1408, batch_size=4, seq_len=1024),
    Shape(384, 6, 6, 2, 1024, batch_size=2, seq_len=256),
]
QUICK = Shape(256, 4, 4, 2, 704, vocab_size=2048, batch_size=4, seq_len=256)
LR, CLIP = 1e-3, 1.0
LIMIT = 1.01
TRAINER = "trainer"
# Each call, and the one that it is compared with.
COMPARED = {TRAINER: "bare", "bare again": "bare", "monitored": "loop", "items": "loop"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small shape, few rounds")
    parser.add_argument("--rounds", type=int, default=41)
    arguments = parser.parse_args()
    claim = Claim("overhead", arguments.quick)
    for shape in [QUICK] if arguments.quick else SHAPES:
        measure(claim, shape, 11 if arguments.quick else arguments.rounds)
    return claim.conclude()


def measure(claim: Claim, shape: Shape, rounds: int, *, compile: bool = True) -> None:  # noqa: A002
    """All steps of one shape; the bars are the time of what keeps something over that of what does not."""
    torch.manual_seed(0)
    ids = torch.randint(shape.vocab_size, (shape.batch_size, shape.seq_len + 1))
    loop = Loop(shape, ids, compile=compile)
    calls: dict[str, Callable[[], object]] = {
        "bare": Bare(shape, ids, compile=compile).step,
        "bare again": Bare(shape, ids, compile=compile).step,
        "loop": loop.plain,
        "monitored": loop.monitored,
        "items": loop.items,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = trainer_config(shape, Path(folder) / "run.jsonl", compile=compile)
        around = Rounds(ids, calls, rounds)
        torch.manual_seed(0)
        with suppress(Measured):
            ArchitectureTrainer(config, progress=False).train_architecture(build(shape), around)
    ratios = {name: ratio(around.seconds[name], around.seconds[plain]) for name, plain in COMPARED.items()}
    parameters = len(list(loop.rack.parameters()))
    figures = {
        "parameters": parameters,
        "tokens": shape.batch_size * shape.seq_len,
        "times_plain": ratios,
        "seconds": around.seconds,
    }
    for name in (TRAINER, "monitored"):
        value = ratios[name]["median"]
        claim.enter(Bar(f"{name} {shape.name}", value, LIMIT, at_most=True, full_size=True), figures)
    print(f"\n{shape.name}, {parameters} parameters")
    for name, plain in COMPARED.items():
        each, seconds = ratios[name], median(around.seconds[plain])
        quartiles = f"[{each['quartile_low']:.4f}, {each['quartile_high']:.4f}]"
        print(f"  {name:<12} {each['median']:.4f} {quartiles} times {plain}, {seconds:.4f} s", flush=True)


class Rounds:
    """Training data, and a stopwatch: between the trainer's steps it runs all the others.

    The time of a step is the time until the next batch is asked for. In each round every call is made as
    often as takes about a third of a second. The data end with the last round.

    Args:
        ids: of every batch.
        calls: what runs beside the trainer.
        rounds: after the first calls, which compile.

    Attributes:
        seconds: of each call, one figure a round.
    """

    def __init__(self, ids: Tensor, calls: dict[str, Callable[[], object]], rounds: int) -> None:
        self.ids, self.calls, self.rounds = ids, calls, rounds
        self.seconds: dict[str, list[float]] = {name: [] for name in (*calls, TRAINER)}

    def __iter__(self) -> Iterator[Tensor]:
        took = [_seconds(call) for call in (*self.calls.values(), *self.calls.values())]
        for _ in range(2):
            start = time.perf_counter()
            yield self.ids
            took.append(time.perf_counter() - start)
        repeats, order = self.steps(median(took[len(self.calls) :])), list(self.seconds)
        shuffle = random.Random(0).shuffle
        gc.collect()
        gc.disable()
        try:
            for _ in range(self.rounds):
                shuffle(order)
                for name in order:
                    start = time.perf_counter()
                    for _ in range(repeats):
                        if name == TRAINER:
                            yield self.ids
                        else:
                            self.calls[name]()
                    self.seconds[name].append((time.perf_counter() - start) / repeats)
        finally:
            gc.enable()
        raise Measured

    def steps(self, seconds: float) -> int:
        """How many make one figure, where one takes so long."""
        return max(1, round(0.3 / seconds))


class Measured(Exception):  # noqa: N818
    """The last round is over."""


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def build(shape: Shape) -> Rack:
    """The same weights at each call after the same seed."""
    model, _ = peer_models.rack(shape)
    assert isinstance(model, Rack)
    return model.train()


def trainer_config(shape: Shape, jsonl: Path | None = None, *, compile: bool = True) -> StackWiseConfig:  # noqa: A002
    """Training as all of these do it; with `jsonl` everything is kept and written down after each step."""
    training = {
        "precision": "bf16_weights",
        "compile": compile,
        "grad_clip": CLIP,
        "device": "cpu",
        "max_steps": 1_000_000,
        "log_interval": 1,
        "optimizer": {"lr": LR},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "telemetry": {"parameter_norms": jsonl is not None, "jsonl": jsonl and str(jsonl)},
    }
    return StackWiseConfig.from_dict({"model": {"vocab_size": shape.vocab_size}, "training": training})


class Bare:
    """The trainer's step, and nothing of it kept: by hand, on what a `TrainStep` is made of."""

    def __init__(self, shape: Shape, ids: Tensor, *, compile: bool = True) -> None:  # noqa: A002
        torch.manual_seed(0)
        self.rack, self.ids = build(shape), ids
        self.settings = trainer_config(shape, compile=compile).training
        self.objective = Objective(self.settings.objective, shape.vocab_size)
        self._step = TrainStep(PhaseModel(self.rack, self.objective), self.settings, self.rack)
        self.optimizer = self._step.optimizer
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._norm = compiled(total_norm) if compile else total_norm

    def step(self) -> Tensor:
        """Its loss, on the device."""
        targets = self.objective.targets({"input_ids": self.ids}, ())
        for group in self.optimizer.param_groups:
            group["lr"] = LR * group["lr_multiplier"]
        # The trainer's own graph, called as it calls it: another would be compiled for another call.
        with autocast(self.settings.precision, self._step.device):
            total = self._step._total(self._step.model, targets, None)
        loss: Tensor = total / targets.count
        loss.backward()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        with torch.no_grad():
            self.optimizer.grad_scale = clip_divisor(self._norm(gradients), CLIP)
        self.optimizer.found_inf = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The least that clipping needs: one number, summed once."""
    return torch.stack([g.float().square().sum(-1).sum() for g in gradients]).sum().sqrt()


class Loop:
    """A training loop as people write it, and what may be watched of its steps."""

    def __init__(self, shape: Shape, ids: Tensor, *, compile: bool = True) -> None:  # noqa: A002
        torch.manual_seed(0)
        self.rack, self.batch = build(shape).to(ids.device), {"input_ids": ids}
        self._loss = compiled(next_token_loss) if compile else next_token_loss
        self.optimizer = torch.optim.AdamW(self.rack.parameters(), lr=LR, fused=True)
        self.monitor, self.tracker = GradientMonitor(self.rack), LossTracker()

    def plain(self) -> Tensor:
        """Nothing is kept; the loss is for `items`."""
        loss = self._backward()
        nn.utils.clip_grad_norm_(self.rack.parameters(), CLIP)
        return self._update(loss)

    def monitored(self) -> tuple[list[LossRecord], list[GradientRecord]]:
        """Everything is kept, and what has arrived is read."""
        loss = self._backward()
        state = self.monitor.observe()
        nn.utils.clip_grads_with_norm_(self.rack.parameters(), CLIP, state.total_norm)
        self.tracker.observe(loss)
        self._update(loss)
        return self.tracker.records(), self.monitor.records()

    def items(self) -> tuple[float, list[float]]:
        """The host asks for one number after the other."""
        loss = self._backward()
        norms = [p.grad.norm().item() for p in self.rack.parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(self.rack.parameters(), CLIP)
        return self._update(loss).item(), norms

    def _backward(self) -> Tensor:
        with torch.autocast(self.batch["input_ids"].device.type, dtype=torch.bfloat16):
            loss: Tensor = self._loss(self.rack, self.batch)
        loss.backward()
        return loss.detach()

    def _update(self, loss: Tensor) -> Tensor:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


if __name__ == "__main__":
    sys.exit(main())
