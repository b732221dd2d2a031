"""`python -m bench.overhead`: what telemetry costs of a training step.

One model, one optimizer, one compiled graph, and steps that differ in what they keep of themselves:

- bare: forwards, backwards, clipped, updated. Nothing is kept.
- telemetry: the trainer's step with loss, gradient norm, whether both are finite and the norm of every
  parameter, through the ring buffer, as JSON lines every `LOG_INTERVAL` steps.
- naive: bare, with one `.item()` for the loss and one for the norm of every parameter.
- bare again: how far two measurements of one thing are apart here.

Every round runs all of them once, in random order; figures are medians over rounds of the ratio within a
round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bench.claim import Bar, Claim, interleave, ratio
from bench.peer_models import Shape
from stackwise import create_simple_rack
from stackwise.config import TrainingConfig
from stackwise.model.compilation import compiled
from stackwise.stability.telemetry import StepBuffer
from stackwise.training.objective import Objective
from stackwise.training.optimizer import clip_divisor
from stackwise.training.phase_model import PhaseModel
from stackwise.training.precision import autocast
from stackwise.training.record_log import JsonLinesLog
from stackwise.training.step import MicroBatch, TrainStep
from stackwise.training.throughput import ThroughputMeter

SHAPES = [
    Shape(512, 8, 8, 2, 1408, batch_size=4, seq_len=1024),
    Shape(384, 6, 6, 2, 1024, batch_size=2, seq_len=256),
]
QUICK = Shape(256, 4, 4, 2, 704, vocab_size=2048, batch_size=4, seq_len=256)
LR, CLIP, LOG_INTERVAL = 1e-3, 1.0, 10
LIMIT = 1.01


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


def measure(claim: Claim, shape: Shape, rounds: int) -> None:
    """All steps of one shape; the bar is the time of telemetry over that of bare."""
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(shape, Path(folder) / "run.jsonl")
        calls: dict[str, Callable[[], object]] = {
            "bare": watched.bare,
            "telemetry": watched.telemetry,
            "naive": watched.naive,
            "bare again": watched.bare,
        }
        samples = interleave(calls, rounds=rounds)
        watched.close()
    ratios = {name: ratio(samples[name], samples["bare"]) for name in calls if name != "bare"}
    figures = {
        "parameters": len(watched.parameters),
        "tokens": shape.batch_size * shape.seq_len,
        "log_interval": LOG_INTERVAL,
        "times_bare": ratios,
        "seconds": samples,
    }
    claim.enter(Bar(f"telemetry {shape.name}", ratios["telemetry"]["median"], LIMIT, at_most=True), figures)
    print(f"\n{shape.name}, {len(watched.parameters)} parameters: bare, {median(samples['bare']):.4f} s")
    for name, each in ratios.items():
        quartiles = f"[{each['quartile_low']:.4f}, {each['quartile_high']:.4f}]"
        print(f"  {name:<12} {each['median']:.4f} times that {quartiles}", flush=True)


class Watched:
    """A model and the steps it can be trained by.

    Args:
        shape: of the model and its batch.
        path: of the lines.
        compile: as the trainer's.
    """

    def __init__(self, shape: Shape, path: Path, *, compile: bool = True) -> None:  # noqa: A002
        torch.manual_seed(0)
        rack = create_simple_rack(
            1,
            shape.n_layers,
            d_model=shape.d_model,
            d_ff=shape.d_ff,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            vocab_size=shape.vocab_size,
            tie_embeddings=False,
        ).train()
        self.settings = TrainingConfig.from_dict(
            {"precision": "bf16_weights", "compile": compile, "grad_clip": CLIP, "device": "cpu"}
        )
        objective = Objective(self.settings.objective, shape.vocab_size)
        ids = torch.randint(shape.vocab_size, (shape.batch_size, shape.seq_len + 1))
        self.targets = objective.targets({"input_ids": ids}, ())
        self.step = TrainStep(PhaseModel(rack, objective), self.settings, rack)
        self.optimizer = self.step.optimizer
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._norm = compiled(total_norm) if compile else total_norm
        self._buffer = StepBuffer(2 * LOG_INTERVAL, self.step.device, len(self.parameters))
        self._meter, self._log = ThroughputMeter(self.step.device), JsonLinesLog(path)
        self._number = 0

    def bare(self) -> Tensor:
        """A step of which nothing is kept; the loss is for `naive`."""
        loss = self._backward()
        return self._update(loss)

    def naive(self) -> tuple[float, list[float]]:
        """As bare, and the host asks for one number after the other."""
        loss = self._backward()
        norms = [p.grad.float().norm().item() for p in self.parameters if p.grad is not None]
        return self._update(loss).item(), norms

    def telemetry(self) -> None:
        """The trainer's step and what `training.telemetry` has it keep."""
        outcome = self.step([MicroBatch(self.targets)], LR)
        self._buffer.write(
            self._number,
            LR,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            skipped=outcome.skipped,
            tokens=self.targets.input_ids.numel(),
            norms_P=outcome.norms_P,
            names=outcome.names,
        )
        self._number += 1
        if self._number % LOG_INTERVAL == 0:
            records = self._buffer.poll()
            self._meter.count(sum(record.tokens or 0 for record in records))
            self._log.write(records, self._meter.read().to_dict())

    def close(self) -> None:
        """End the file of lines."""
        self._log.close()

    def _backward(self) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = LR * group["lr_multiplier"]
        # The trainer's own graph, called as it calls it: another would be compiled for another call.
        with autocast(self.settings.precision, self.step.device):
            total = self.step._total(self.step.model, self.targets, None)
        loss: Tensor = total / self.targets.count
        loss.backward()
        return loss.detach()

    def _update(self, loss: Tensor) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        with torch.no_grad():
            self.optimizer.grad_scale = clip_divisor(self._norm(gradients), CLIP)
        self.optimizer.found_inf = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The least that clipping needs: one number, summed once."""
    return torch.stack([g.float().square().sum(-1).sum() for g in gradients]).sum().sqrt()


if __name__ == "__main__":
    sys.exit(main())
