"""`python -m bench.guard_overhead`: what the guard costs of a training step.

A training loop as people write it, compiled, in bfloat16, clipped, with torch's fused AdamW:

- plain: nothing watches it.
- plain again: to show how far two measurements of one thing are apart here.
- guarded: `Guard` in its place, with its batches, clipping, and the default policy but for snapshots.

A snapshot is timed by itself, and its share of the steps from one to the next is added.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from statistics import median

import torch
from torch import Tensor

from bench.claim import Bar, Claim, interleave, ratio
from bench.overhead import CLIP, LR, QUICK, SHAPES, build
from bench.peer_models import Shape
from stackwise.model.compilation import compiled
from stackwise.stability.guard import Guard, GuardPolicy
from stackwise.stability.guard.snapshot import Snapshot
from stackwise.training.objective import next_token_loss

LIMIT = 1.02
_CPU = torch.device("cpu")


class Guarded:
    """A loop with a guard, and the same loop without one."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device = _CPU,
        *,
        compile: bool = True,  # noqa: A002
    ) -> None:
        torch.manual_seed(0)
        ids = torch.randint(shape.vocab_size, (shape.batch_size, shape.seq_len + 1), device=device)
        self.device, self.rack, self.batch = device, build(shape).to(device), {"input_ids": ids}
        self._loss = compiled(next_token_loss) if compile else next_token_loss
        self.optimizer = torch.optim.AdamW(self.rack.parameters(), lr=LR, fused=True)
        policy = GuardPolicy(clip=CLIP, snapshot_interval=None)
        self.guard = Guard(self.rack, self.optimizer, policy=policy, loss_of=self._loss_of)
        self._batches = self.guard.batches(itertools.repeat(self.batch))

    def plain(self) -> Tensor:
        """A step that nothing watches."""
        loss = self._loss_of(self.rack, self.batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.rack.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def guarded(self) -> Tensor:
        """A step that the guard judges and makes."""
        loss = self._loss_of(self.rack, next(self._batches))
        loss.backward()
        self.guard.step(loss)
        return loss

    def snapshot_seconds(self, times: int = 5) -> float:
        """Of a snapshot that is written over an older one."""
        snapshot, seconds = Snapshot(self.rack, self.optimizer), []
        snapshot.take()
        for _ in range(times):
            start = time.perf_counter()
            snapshot.take()
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    def _loss_of(self, model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss: Tensor = self._loss(model, batch)
        return loss


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small shape, few rounds")
    parser.add_argument("--rounds", type=int, default=41)
    arguments = parser.parse_args()
    claim = Claim("guard_overhead", arguments.quick)
    for shape in [QUICK] if arguments.quick else SHAPES:
        measure(claim, shape, 11 if arguments.quick else arguments.rounds)
    return claim.conclude()


def measure(claim: Claim, shape: Shape, rounds: int, *, compile: bool = True) -> None:  # noqa: A002
    """Enter bar and figures of one shape."""
    training = Guarded(shape, compile=compile)
    calls = {"plain": training.plain, "plain again": training.plain, "guarded": training.guarded}
    seconds = interleave(calls, rounds=rounds)
    ratios = {name: ratio(seconds[name], seconds["plain"]) for name in ("plain again", "guarded")}
    policy = GuardPolicy()
    assert policy.snapshot_interval is not None
    steps = policy.snapshot_interval - policy.patience  # from one snapshot to the next
    took = training.snapshot_seconds()
    share = took / (steps * median(seconds["plain"]))
    figures = {
        "tokens": shape.batch_size * shape.seq_len,
        "times_plain": ratios,
        "snapshot_seconds": took,
        "steps_per_snapshot": steps,
        "snapshot_share": share,
        "seconds": seconds,
    }
    value = ratios["guarded"]["median"] + share
    claim.enter(Bar(f"guard and snapshots {shape.name}", value, LIMIT, at_most=True, full_size=True), figures)
    print(f"\n{shape.name}: plain {median(seconds['plain']):.4f} s")
    for name, each in ratios.items():
        print(f"  {name:<12} {each['median']:.4f} [{each['quartile_low']:.4f}, {each['quartile_high']:.4f}]")
    print(f"  a snapshot every {steps} steps: {took:.4f} s, {share:.4f} of a step each", flush=True)


if __name__ == "__main__":
    sys.exit(main())
