"""LengthSweep: one model at many sequence lengths: loss, size of its logits, training, speed.

Shapes: B rows, T positions, V vocabulary or outputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stackwise.argument import check_number, check_sizes, require
from stackwise.seed import seeded
from stackwise.spec import ModelSpec
from stackwise.stability.run import StabilityRun, shortest_length, stability_run

__all__ = ["LengthPoint", "LengthSweep", "length_sweep"]


@dataclass(frozen=True)
class LengthPoint:
    """What a length showed.

    Attributes:
        seq_len: T.
        loss: mean of the untouched model in eval mode, in nats for tokens.
        logit_max: largest |logit|.
        logit_rms: root of the mean square of the logits.
        finite: whether loss and logits are.
        tokens_per_second: of the training steps behind the first, waiting for the device at each.
        run: the training at this length.
    """

    seq_len: int
    loss: float
    logit_max: float
    logit_rms: float
    finite: bool
    tokens_per_second: float
    run: StabilityRun

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        numbers = {key: value for key, value in vars(self).items() if key != "run"}
        return {**self.run.to_dict(), "length": numbers}


@dataclass(frozen=True)
class LengthSweep:
    """One model at several lengths, the shortest first.

    Attributes:
        model: the spec's name.
        points: one a length.
        trained_length: the longest that the weights have seen; None: they have seen none.
        loss_tolerance: how far the loss beyond the trained length may be above the loss at it, in nats.
        logit_factor: how much larger the largest logit of a length may be than that of the shortest.
    """

    model: str
    points: Sequence[LengthPoint]
    trained_length: int | None
    loss_tolerance: float
    logit_factor: float

    @property
    def growth(self) -> float:
        """The exponent a of logit_rms ~ T^a, fitted by least squares; NaN where nothing can be fitted."""
        pairs = [
            (math.log(p.seq_len), math.log(p.logit_rms)) for p in self.points if 0 < p.logit_rms < math.inf
        ]
        n = len(pairs)
        if n < 2:
            return math.nan
        x_mean, y_mean = (sum(column) / n for column in zip(*pairs, strict=True))
        spread = sum((x - x_mean) ** 2 for x, _ in pairs)
        return float(sum((x - x_mean) * (y - y_mean) for x, y in pairs) / spread)

    @property
    def problems(self) -> list[str]:
        """What is wrong at which length, a sentence each; []: nothing."""
        found = []
        known = self._known
        shortest = self.points[0]
        for point in self.points:
            here = f"T={point.seq_len}"
            if not point.finite:
                found.append(
                    f"{here}: loss {point.loss:.4g}, largest logit {point.logit_max:.4g}: not finite"
                )
                continue
            if point.run.verdict not in ("stable", "caught"):
                alarm = f": {point.run.alarms[0]}" if point.run.alarms else ""
                found.append(f"{here}: training is {point.run.verdict}{alarm}")
            if point.logit_max > self.logit_factor * shortest.logit_max:
                found.append(
                    f"{here}: largest logit {point.logit_max:.4g}, of T={shortest.seq_len} "
                    f"{shortest.logit_max:.4g}; allowed {self.logit_factor:g} times as much"
                )
            beyond = known is not None and point.seq_len > known.seq_len
            if known is not None and beyond and point.loss > known.loss + self.loss_tolerance:
                found.append(
                    f"{here}: loss {point.loss:.4g}, of the trained length {known.seq_len} "
                    f"{known.loss:.4g}; allowed {self.loss_tolerance:g} more"
                )
        return found

    @property
    def _known(self) -> LengthPoint | None:
        """The point of the trained length; else the longest within it."""
        within = [
            p for p in self.points if self.trained_length is not None and p.seq_len <= self.trained_length
        ]
        return within[-1] if within else None

    def __str__(self) -> str:
        lines = [f"{self.model}: logits grow as T^{self.growth:.2f}"]
        lines += [
            f"T={p.seq_len:<6} loss {p.loss:<8.4g} largest logit {p.logit_max:<8.4g} "
            f"{p.tokens_per_second:>10,.0f} tokens/s  {p.run.verdict}"
            for p in self.points
        ]
        return "\n".join([*lines, *self.problems])


def length_sweep(
    spec: ModelSpec,
    lengths: Sequence[int],
    *,
    trained_length: int | None = None,
    loss_tolerance: float = 0.5,
    logit_factor: float = 4.0,
    batch_size: int = 4,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **arguments: Any,
) -> LengthSweep:
    """Look at a model at each length: its loss and logits as it is, and a short training at that length.

    The rows of all lengths are those of the longest, cut: at each length the model reads the same beginning.

    Args:
        spec: the model.
        lengths: T, in any order.
        trained_length: the longest that its weights have seen; what is beyond has to be as good, up to
            `loss_tolerance`. None: losses are not compared, as of a model with new weights.
        loss_tolerance: in nats.
        logit_factor: a rise of the largest logit, from the shortest length on, that passes.
        batch_size: rows.
        device: where to run.
        seed: of weights and batches.
        **arguments: of `stability_run`, such as `steps`.

    Raises:
        ValueError: no length, the same twice, one that the model does not take, or a trained length below
            all of them.
    """
    lengths = tuple(lengths)
    require(bool(lengths), "lengths", lengths, "at least one")
    require(len(set(lengths)) == len(lengths), "lengths", lengths, "each once")
    for length in lengths:
        check_sizes(shortest_length(spec), lengths=length)
    check_sizes(batch_size=batch_size)
    check_number("loss_tolerance", loss_tolerance, "a number >= 0", lambda nats: nats >= 0)
    check_number("logit_factor", logit_factor, "a number >= 1", lambda factor: factor >= 1)
    lengths = tuple(sorted(lengths))
    if trained_length is not None:
        check_sizes(trained_length=trained_length)
        allowed = f"at least the shortest of the lengths, {lengths[0]}, which the others are held against"
        require(trained_length >= lengths[0], "trained_length", trained_length, allowed)
    device = torch.device(device)
    model = spec.create(device, seed).eval()
    rows = spec.batch(batch_size, lengths[-1], device=device, seed=seed)
    points = []
    for length in lengths:
        inputs = rows[:, :length]
        with torch.no_grad(), seeded(seed, device):
            loss = float(spec.loss_of(model, inputs))
            logits = spec.logits(model, inputs).float()
            logit_max, logit_rms = float(logits.abs().max()), float(logits.square().mean().sqrt())
        clock = _Clock(spec)
        run = stability_run(
            clock.spec, seq_len=length, batch_size=batch_size, device=device, seed=seed, **arguments
        )
        finite = all(map(math.isfinite, (loss, logit_max, logit_rms)))
        speed = clock.steps_per_second() * batch_size * length
        points.append(LengthPoint(length, loss, logit_max, logit_rms, finite, speed, run))
    return LengthSweep(spec.name, points, trained_length, loss_tolerance, logit_factor)


class _Clock:
    """When each step of a run began, as its loss is asked for; the guard has waited for the step before."""

    def __init__(self, spec: ModelSpec) -> None:
        self._times: list[float] = []

        def loss(model: torch.nn.Module, inputs: Tensor) -> Tensor:
            self._times.append(time.perf_counter())
            return spec.loss_of(model, inputs)

        self.spec = ModelSpec.of(spec, loss=loss)

    def steps_per_second(self) -> float:
        """By the median of the times between; NaN for fewer than two steps behind the first."""
        gaps = sorted(b - a for a, b in zip(self._times[1:], self._times[2:], strict=False))
        return 1 / gaps[len(gaps) // 2] if gaps and gaps[len(gaps) // 2] > 0 else math.nan
