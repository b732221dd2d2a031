"""LengthSweep: one model at many sequence lengths: loss, logits, gradient norms, training, memory, speed."""

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
    """One model at several lengths, the shortest first.

    Attributes:
        model: the spec's name.
        points: one a length.
        trained_length: the longest that the weights have seen; None: they have seen none.
        loss_tolerance: how far the loss beyond the trained length may be above the loss at it, in nats.
        logit_factor: how much larger the largest logit of a length may be than that of the shortest.
        tokens_per_step: of a training step at each length, as asked for; None: so many rows at each.
    """

    model: str
    points: Sequence[LengthPoint]
    trained_length: int | None
    loss_tolerance: float
    logit_factor: float
    tokens_per_step: int | None = None

    @property
    def first_unstable(self) -> int | None:
        """The shortest of the lengths that is unstable; None: none of those that were run.

        `first_unstable_length` looks between.
        """
        return next((point.seq_len for point in self.points if point.verdict == "unstable"), None)

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
        """What is wrong at which length, a sentence each; []: nothing.

        A length that was not run is one: nothing says that it is sound. Not among them is what `notes` tells
        of, as a length that is spiky in a few seeds.
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
        """What is to be known of it but is no problem, a sentence each."""
        said = [f"T={point.seq_len}: spiky: {point.why}" for point in self.points if point.verdict == "spiky"]
        said += [*reference_notes(self.points), *divergence_notes(self.points)]
        return said + token_notes(self.points, self.tokens_per_step)

    @property
    def _known(self) -> LengthPoint | None:
        """The point of the trained length; else the longest within it."""
        within = [
            p for p in self.points if self.trained_length is not None and p.seq_len <= self.trained_length
        ]
        return within[-1] if within else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": self.model,
            "first_unstable": self.first_unstable,
            "growth": self.growth,
            "problems": self.problems,
            "notes": self.notes,
            "points": [point.to_dict() for point in self.points],
        }

    def plot(self, path: str | Path) -> Path:
        """Gradient norms over the length, as an SVG; the same file each time.

        Raises:
            ValueError: another ending than .svg, or no length was run.
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
    """Look at a model at each length: its loss and logits as it is, and a short training at that length.

    The rows of all lengths are those of the longest, cut: at each length the model reads the same beginning.
    What a training is held against is told in `stackwise.stability.lengths.trouble`; several seeds tell an
    unstable length from one that is spiky by chance.

    Where memory is too small for a length, the sweep ends there: the length is "out of memory", the longer
    ones are "not run", which are `problems`, and the shorter ones are returned as they are.

    Args:
        spec: a ModelSpec, or what `ModelSpec.of` takes.
        lengths: T, in any order.
        trained_length: the longest that its weights have seen; what is beyond has to be as good, up to
            `loss_tolerance`. None: losses are not compared, as of a model with new weights.
        loss_tolerance: in nats; also how far above its beginning the loss of a training may end.
        logit_factor: a rise of the largest logit, from the shortest length on, that passes.
        gradient_factor: the same of the gradient norms.
        tokens_per_step: of each training step, whatever the length: it has tokens_per_step // T rows. What
            does not divide is noted with its numbers. None: `batch_size` rows at each length.
        batch_size: rows; None: 4, unless `tokens_per_step` is given.
        seeds: how many, from `seed` on; or which.
        device: where to run.
        seed: of weights and batches.
        memory: whether the peak of a training at each length is measured: one step more, at the first.
        **arguments: of `stability_run`, such as `steps`. Without faults and a policy, a training ends at its
            second broken step in a row.

    Raises:
        ValueError: no length, the same twice, one that the model does not take, a trained length below
            all of them, or fewer tokens per step than the longest has.
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
