"""FirstUnstable: the sequence length from which on training is unstable, found by bisection."""

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

_FRESH = 50_000_017  # away from those that are counted from the first seed on


@dataclass(frozen=True, repr=False)
class FirstUnstable:
    """Where training becomes unstable.

    Attributes:
        model: the spec's name.
        low: the shortest length that was asked about.
        high: the longest.
        step: how finely: lengths are low, low + step, ... high.
        first: the shortest unstable length; None: none was found, as far as memory lasted (`verdict`).
        points: of all lengths that were looked at, the shortest first, each with all its seeds.
        order: the lengths in the order of the looks; those that were looked at again are in it twice.
        notes: what does not fit one length from which on all are unstable; spiky lengths; what memory was too
            small for; lengths around the find that are not confirmed; that growth or divergence was not
            judged; rows that do not divide the tokens of a step.
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
        """The longest length looked at that is not unstable, below the first that is; None: `low` is."""
        stable = [p.seq_len for p in self.points if p.verdict in ("stable", "spiky")]
        return max((n for n in stable if self.first is None or n < self.first), default=None)

    @property
    def verdict(self) -> Literal["found", "stable", "unstable at low", "out of memory"]:
        """The answer in a word.

        "found": `first` is unstable, and the length one step below it is not. "stable": all that was looked
        at is, up to `high`. "unstable at low": `first` is `low`, and what is below was not asked about.
        "out of memory": stable as far as memory lasts.
        """
        if self.first is not None:
            return "unstable at low" if self.first == self.low else "found"
        return "out of memory" if any(point.stopped for point in self.points) else "stable"

    def point(self, seq_len: int) -> LengthPoint:
        """What a length showed.

        Raises:
            ValueError: it was not looked at.
        """
        found = next((point for point in self.points if point.seq_len == seq_len), None)
        looked = ", ".join(str(point.seq_len) for point in self.points)
        require(found is not None, "seq_len", seq_len, f"one that was looked at: {looked}")
        assert found is not None
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
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
        """Gradient norms over the length, with the find, as an SVG; the same file each time.

        Raises:
            ValueError: another ending than .svg, or no length was run.
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
    """The shortest length at which training is unstable, by bisection down to `step`.

    Bisection rests on training being unstable from some length on. That is looked at where it can be: at
    both ends, and around the find, where the length found and the one a step below it are trained again
    with fresh seeds. What then does not hold sends the bisection on from there; a longer length that is
    stable is noted. About log2((high - low) / step) + 2 lengths are looked at, and two of them twice.

    Where memory is too small for a length, the search goes on below it. Where it is for the fresh seeds
    alone, the find stays as the first ones showed it, with a note.

    Args:
        spec: a ModelSpec, or what `ModelSpec.of` takes.
        low: the shortest length; gradient norms of the others are held against those at it.
        high: the longest length.
        step: how finely; divides high - low.
        seeds: of each length: how many, from `seed` on; or which. Unstable is what is not finite in any of
            them, or in trouble in more than half.
        fresh_seeds: of the two lengths around the find; None: as many as `seeds`, and others.
        tokens_per_step: of each training step, whatever the length; None: `batch_size` rows at each length.
        batch_size: rows; None: 4, unless `tokens_per_step` is given.
        gradient_factor: a rise of the gradient norms, from `low` on, that passes.
        loss_tolerance: how far above its beginning the loss of a training may end, in nats.
        device: where to run.
        seed: of weights and batches.
        memory: whether the peak of a training at each length is measured: one step more, at the first.
        on_point: called with each length as it was looked at.
        **arguments: of `stability_run`, such as `steps`. Without faults and a policy, a training ends at its
            second broken step in a row.

    Raises:
        ValueError: lengths that the model does not take, a step that does not divide their distance, or
            fewer tokens per step than the longest has.
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
    """The bisection: what was looked at, and what is to be looked at next."""

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
        """The shortest length so far that is not good, if training is unstable there."""
        bad = self._bad()
        return bad if bad is not None and self.points[bad].verdict == "unstable" else None

    def run(self, low: int, high: int) -> None:
        """Look at both ends, then between, until an unstable length and a stable one are a step apart."""
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
            # More seeds make no room in memory.
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
            # It says nothing against what the first seeds showed.
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
