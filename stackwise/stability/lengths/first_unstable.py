"""FirstUnstable: shortest sequence length at which training is unstable, found by bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stackwise.stability.lengths.plot import write_length_plot
from stackwise.stability.lengths.point import LengthPoint, divergence_notes, reference_notes, token_notes
from stackwise.stability.lengths.probe import LengthProbe, seeds_of
from stackwise.stability.run import shortest_length
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_sizes, require

__all__ = ["FirstUnstable", "first_unstable_length"]

_FRESH = 50_000_017  # offset of fresh seeds, so that they differ from the first ones


@dataclass(frozen=True, repr=False)
class FirstUnstable:
    """Result of the search for the shortest unstable length.

    Attributes:
        model: name of the spec.
        low: shortest length of the search.
        high: longest length of the search.
        step: resolution. The lengths are low, low + step, ... high.
        first: shortest unstable length. None: no tested length is unstable, see `verdict`.
        points: points of all tested lengths with all their seeds, shortest first.
        order: tested lengths in the order of the tests. A length that was tested twice occurs twice.
        notes: sentences about stable lengths above `first`, spiky lengths, lengths that do not fit into
            memory, unconfirmed lengths around the result, growth or divergence that was not judged, and
            lengths that do not divide the tokens of a step.
    """

    model: str
    low: int
    high: int
    step: int
    first: int | None
    points: Sequence[LengthPoint]
    order: Sequence[int]
    notes: Sequence[str]

    @property
    def stable_up_to(self) -> int | None:
        """Longest tested length below `first` that is not unstable. None if `low` is unstable."""
        stable = [p.seq_len for p in self.points if p.verdict in ("stable", "spiky")]
        return max((n for n in stable if self.first is None or n < self.first), default=None)

    @property
    def verdict(self) -> Literal["found", "stable", "unstable at low", "out of memory"]:
        """Result in a few words.

        - "found": `first` is unstable, and the length one step below it is not.
        - "stable": no tested length up to `high` is unstable.
        - "unstable at low": `first` is `low`. Shorter lengths were not tested.
        - "out of memory": stable up to the longest length that fits into memory.
        """
        if self.first is not None:
            return "unstable at low" if self.first == self.low else "found"
        return "out of memory" if any(point.stopped for point in self.points) else "stable"

    def point(self, seq_len: int) -> LengthPoint:
        """Return the point of a length.

        Raises:
            ValueError: the length was not tested.
        """
        points = {point.seq_len: point for point in self.points}
        looked = ", ".join(map(str, points))
        require(seq_len in points, "seq_len", seq_len, f"one that was looked at: {looked}")
        return points[seq_len]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "model": self.model,
            "low": self.low,
            "high": self.high,
            "step": self.step,
            "first": self.first,
            "verdict": self.verdict,
            "stable_up_to": self.stable_up_to,
            "order": list(self.order),
            "notes": list(self.notes),
            "points": [point.to_dict() for point in self.points],
        }

    def plot(self, path: str | Path) -> Path:
        """Write a plot of gradient norms over the length, with the result, as a reproducible SVG file.

        Raises:
            ValueError: the path does not end with .svg, or no length was run.
            ImportError: matplotlib is not installed.
        """
        return write_length_plot(path, self.points, self.model, self.first)

    def __str__(self) -> str:
        return "\n".join([self._sentence(), *map(str, self.points), *self.notes])

    def _sentence(self) -> str:
        match self.verdict:
            case "found":
                assert self.first is not None
                why = self.point(self.first).why
                said = f"unstable from {self.first} on ({why}); stable up to {self.stable_up_to}"
            case "unstable at low":
                why = self.point(self.low).why
                said = f"unstable at {self.low} already, the shortest length asked about ({why})"
            case "out of memory":
                tight = min(point.seq_len for point in self.points if point.stopped)
                upto = (
                    "nothing could be run"
                    if self.stable_up_to is None
                    else f"stable up to {self.stable_up_to}"
                )
                said = f"{upto}; out of memory at {tight}"
            case "stable":
                said = f"stable up to {self.high}"
        return f"{self.model}: {said}"

    def __repr__(self) -> str:
        return f"<FirstUnstable of {self._sentence()}>"


def first_unstable_length(
    spec: Any,
    low: int,
    high: int,
    *,
    step: int = 1,
    seeds: int | Sequence[int] = 3,
    fresh_seeds: int | Sequence[int] | None = None,
    tokens_per_step: int | None = None,
    batch_size: int | None = None,
    gradient_factor: float = 4.0,
    loss_tolerance: float = 0.5,
    device: torch.device | str = "cpu",
    seed: int = 0,
    memory: bool = True,
    on_point: Callable[[LengthPoint], None] | None = None,
    **arguments: Any,
) -> FirstUnstable:
    """Find the shortest length at which training is unstable, by bisection with resolution `step`.

    A bisection assumes that every length above the first unstable one is unstable. The search tests both
    ends. It trains the result and the length one step below it again with fresh seeds. If one of them is not
    confirmed, the bisection continues from there. A stable longer length is noted. About log2((high - low) /
    step) + 2 lengths are tested, and two of them twice.

    If a length does not fit into memory, the search continues below it. If only its fresh seeds do not fit,
    the result of the first seeds is used, with a note.

    Args:
        spec: a ModelSpec, or an argument of `ModelSpec.of`.
        low: shortest length. Gradient norms of all lengths are compared with the norms at this length.
        high: longest length.
        step: resolution, a divisor of high - low.
        seeds: seeds of each length: a number of seeds, counted from `seed`, or a list. A length is unstable
            if a value is not finite in any seed, or if more than half of the seeds are unstable.
        fresh_seeds: seeds for the two lengths around the result. None: as many new seeds as `seeds`.
        tokens_per_step: number of tokens of a training step at every length. None: `batch_size` rows.
        batch_size: rows of a step. None: 4, unless `tokens_per_step` is set.
        gradient_factor: allowed ratio of gradient norms to the norms at `low`.
        loss_tolerance: allowed increase of the loss from the beginning to the end of a training, in nats.
        device: device to run on.
        seed: seed of weights and batches.
        memory: True: measure the peak memory of a training at each length. The first length needs one more
            step.
        on_point: called with the point of each length after its test.
        **arguments: arguments of `stability_run`, such as `steps`. Without faults and a policy, a training
            ends at its second consecutive alarm.

    Raises:
        ValueError: the model does not accept a length, the step does not divide high - low, or the tokens per
            step are fewer than `high`.
    """
    spec = ModelSpec.of(spec)
    check_sizes(shortest_length(spec), low=low)
    check_sizes(low + 1, high=high)
    check_sizes(step=step)
    require((high - low) % step == 0, "step", step, f"a divisor of high - low, {high - low}")
    chosen = seeds_of(seeds, seed)
    fresh = seeds_of(len(chosen) if fresh_seeds is None else fresh_seeds, max(chosen) + _FRESH, "fresh_seeds")
    again = sorted(set(chosen) & set(fresh))
    require(not again, "fresh_seeds", again, "other ones than seeds")
    probe = LengthProbe(
        spec,
        high,
        tokens_per_step=tokens_per_step,
        batch_size=batch_size,
        gradient_factor=gradient_factor,
        loss_tolerance=loss_tolerance,
        device=device,
        memory=memory,
        arguments=arguments,
    )
    search = _Search(probe, chosen, fresh, step, on_point)
    search.run(low, high)
    points = [search.points[length] for length in sorted(search.points)]
    notes = _notes(points, search.first) + search.unconfirmed
    notes += reference_notes(points) + divergence_notes(points) + token_notes(points, tokens_per_step)
    return FirstUnstable(spec.name, low, high, step, search.first, points, search.order, notes)


class _Search:
    """State of a bisection: tested lengths, and choice of the next length."""

    def __init__(
        self,
        probe: LengthProbe,
        seeds: tuple[int, ...],
        fresh: tuple[int, ...],
        step: int,
        on_point: Callable[[LengthPoint], None] | None,
    ) -> None:
        self._probe, self._seeds, self._fresh, self._step = probe, seeds, fresh, step
        self._on_point = on_point
        self._confirmed = set[int]()
        self.unconfirmed: list[str] = []
        self.points: dict[int, LengthPoint] = {}
        self.order: list[int] = []

    @property
    def first(self) -> int | None:
        """Shortest tested length that is not stable or spiky, if it is unstable. Otherwise None."""
        bad = self._bad()
        return bad if bad is not None and self.points[bad].verdict == "unstable" else None

    def run(self, low: int, high: int) -> None:
        """Test both ends, then midpoints, until an unstable and a stable length are one step apart."""
        self._look(low)
        while True:
            bad = self._bad()
            if bad is None:
                if high in self.points:
                    return
                self._look(high)
                continue
            good = max((n for n in self.points if n < bad), default=None)
            if good is not None and bad - good > self._step:
                self._look(good + (bad - good) // self._step // 2 * self._step)
                continue
            around = [n for n in (bad, good) if n is not None and n not in self._confirmed]
            # More seeds would not fit into memory either.
            if not around or self.points[bad].stopped:
                return
            self._confirm(around[0])

    def _bad(self) -> int | None:
        return min((n for n in self.points if not self._good(n)), default=None)

    def _good(self, seq_len: int) -> bool:
        return self.points[seq_len].verdict in ("stable", "spiky")

    def _look(self, seq_len: int) -> None:
        self._keep(self._probe.look(seq_len, self._seeds))

    def _confirm(self, seq_len: int) -> None:
        self._confirmed.add(seq_len)
        again = self._probe.look(seq_len, self._fresh)
        if again.stopped:
            # The verdict of the first seeds stays valid.
            self.unconfirmed.append(f"T={seq_len}: {again.stopped} with fresh seeds: not confirmed")
            self._keep(self.points[seq_len])
        else:
            self._keep(self.points[seq_len].joined(again))

    def _keep(self, point: LengthPoint) -> None:
        self.points[point.seq_len] = point
        self.order.append(point.seq_len)
        if self._on_point is not None:
            self._on_point(point)


def _notes(points: Sequence[LengthPoint], first: int | None) -> list[str]:
    notes = []
    for point in points:
        if point.stopped:
            notes.append(f"T={point.seq_len}: {point.stopped}")
        elif point.verdict == "spiky":
            notes.append(f"T={point.seq_len}: spiky: {point.why}")
        if first is not None and point.seq_len > first and point.verdict in ("stable", "spiky"):
            text = f"T={point.seq_len}: {point.verdict}, though {first} is unstable: not all beyond it are"
            notes.append(text)
    return notes
