"""LengthSweep: one model at several sequence lengths: loss, logits, training, memory and speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stackwise.stability.lengths.plot import write_length_plot
from stackwise.stability.lengths.point import LengthPoint, divergence_notes, reference_notes, token_notes
from stackwise.stability.lengths.probe import LengthProbe, seeds_of
from stackwise.stability.run import shortest_length
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["LengthSweep", "length_sweep"]


@dataclass(frozen=True, repr=False)
class LengthSweep:
    """Results of one model at several lengths, shortest first.

    Attributes:
        model: name of the spec.
        points: one point per length.
        trained_length: longest length that the weights were trained with. None: the weights are new.
        loss_tolerance: allowed increase of the loss beyond the trained length, in nats.
        logit_factor: allowed ratio of the largest logit to the largest logit at the shortest length.
        tokens_per_step: requested tokens per training step at each length. None: a fixed number of rows.
    """

    model: str
    points: Sequence[LengthPoint]
    trained_length: int | None
    loss_tolerance: float
    logit_factor: float
    tokens_per_step: int | None = None

    @property
    def first_unstable(self) -> int | None:
        """Shortest of the lengths that is unstable. None if no length that was run is unstable.

        `first_unstable_length` also tests lengths between them.
        """
        return next((point.seq_len for point in self.points if point.verdict == "unstable"), None)

    @property
    def growth(self) -> float:
        """Exponent a of logit_rms ~ T^a, fitted by least squares.

        NaN if fewer than two lengths have valid logits.
        """
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
        """Problems, one sentence each. [] if there are none.

        A length that was not run is a problem, because it may be unstable. The contents of `notes`, such as
        spiky lengths, are not problems.
        """
        found = []
        known = self._known
        shortest = self.points[0]
        for point in self.points:
            here = f"T={point.seq_len}"
            if point.stopped:
                found.append(f"{here}: {point.stopped}")
                continue
            if not point.finite:
                found.append(f"{here}: {point.why}")
                continue
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
            if point.verdict == "unstable":
                found.append(f"{here}: {point.why}")
        return found

    @property
    def notes(self) -> list[str]:
        """Remarks that are not problems, one sentence each."""
        said = [f"T={point.seq_len}: spiky: {point.why}" for point in self.points if point.verdict == "spiky"]
        said += [*reference_notes(self.points), *divergence_notes(self.points)]
        return said + token_notes(self.points, self.tokens_per_step)

    @property
    def _known(self) -> LengthPoint | None:
        """Point of the trained length or, if it was not tested, of the longest tested length below it."""
        within = [
            p for p in self.points if self.trained_length is not None and p.seq_len <= self.trained_length
        ]
        return within[-1] if within else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "model": self.model,
            "first_unstable": self.first_unstable,
            "growth": self.growth,
            "problems": self.problems,
            "notes": self.notes,
            "points": [point.to_dict() for point in self.points],
        }

    def plot(self, path: str | Path) -> Path:
        """Write a plot of gradient norms over the length as a reproducible SVG file.

        Raises:
            ValueError: the path does not end with .svg, or no length was run.
            ImportError: matplotlib is not installed.
        """
        return write_length_plot(path, self.points, self.model, self.first_unstable)

    def __str__(self) -> str:
        lines = [f"{self.model}: logits grow as T^{self.growth:.2f}"]
        return "\n".join([*lines, *map(str, self.points), *self.problems, *self.notes])

    def __repr__(self) -> str:
        points = ", ".join(f"T={point.seq_len} {point.verdict}" for point in self.points)
        return f"<LengthSweep of {self.model}: {points}>"


def length_sweep(
    spec: Any,
    lengths: Sequence[int],
    *,
    trained_length: int | None = None,
    loss_tolerance: float = 0.5,
    logit_factor: float = 4.0,
    gradient_factor: float = 4.0,
    tokens_per_step: int | None = None,
    batch_size: int | None = None,
    seeds: int | Sequence[int] = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
    memory: bool = True,
    **arguments: Any,
) -> LengthSweep:
    """Test a model at each length: loss and logits of the initial model, and a short training.

    All lengths read prefixes of the same rows, which have the longest length. The conditions of a healthy
    training are in `stackwise.stability.lengths.instability`. Use several seeds to distinguish an unstable
    length from a length that is spiky by chance.

    If a length does not fit into memory, the sweep ends. This length is "out of memory" and the longer ones
    are "not run". Both are `problems`. The shorter ones are returned unchanged.

    Args:
        spec: a ModelSpec, or an argument of `ModelSpec.of`.
        lengths: sequence lengths T, in any order.
        trained_length: longest length that the weights were trained with. The loss of longer ones must be the
            same within `loss_tolerance`. None: losses are not compared, for example because the weights are
            new.
        loss_tolerance: tolerance in nats. Also the allowed increase of the loss from the beginning to the end
            of a training.
        logit_factor: allowed ratio of the largest logit to the one at the shortest length.
        gradient_factor: allowed ratio of gradient norms to the norms at the shortest length.
        tokens_per_step: number of tokens of a training step at every length, which has tokens_per_step // T
            rows. If a length does not divide it, a note lists the numbers. None: `batch_size` rows at each
            length.
        batch_size: rows of a step. None: 4, unless `tokens_per_step` is set.
        seeds: number of seeds, counted from `seed`, or a list of seeds.
        device: device to run on.
        seed: seed of weights and batches.
        memory: True: measure the peak memory of a training at each length. The first length needs one more
            step.
        **arguments: arguments of `stability_run`, such as `steps`. Without faults and a policy, a training
            ends at its second consecutive alarm.

    Raises:
        ValueError: no length, a repeated length, a length that the model does not accept, a trained length
            below all lengths, or fewer tokens per step than the longest length.
    """
    spec = ModelSpec.of(spec)
    lengths = tuple(lengths)
    require(bool(lengths), "lengths", lengths, "at least one")
    require(len(set(lengths)) == len(lengths), "lengths", lengths, "each once")
    for length in lengths:
        check_sizes(shortest_length(spec), lengths=length)
    check_number("logit_factor", logit_factor, "a number >= 1", lambda factor: factor >= 1)
    lengths = tuple(sorted(lengths))
    if trained_length is not None:
        check_sizes(trained_length=trained_length)
        allowed = f"at least the shortest of the lengths, {lengths[0]}, which the others are held against"
        require(trained_length >= lengths[0], "trained_length", trained_length, allowed)
    chosen = seeds_of(seeds, seed)
    probe = LengthProbe(
        spec,
        lengths[-1],
        tokens_per_step=tokens_per_step,
        batch_size=batch_size,
        gradient_factor=gradient_factor,
        loss_tolerance=loss_tolerance,
        device=device,
        memory=memory,
        arguments=arguments,
    )
    points: list[LengthPoint] = []
    for length in lengths:
        full = bool(points) and bool(points[-1].stopped)
        points.append(probe.not_run(length) if full else probe.look(length, chosen))
    return LengthSweep(spec.name, points, trained_length, loss_tolerance, logit_factor, tokens_per_step)
