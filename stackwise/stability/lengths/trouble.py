"""Trouble: what is wrong with one seed's training at a length, and what it is held against."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stackwise.stability.guard.detector import SpikeDetector
from stackwise.stability.run import StabilityRun

__all__ = [
    "DIVERGENCE_STEPS",
    "LengthLimits",
    "SeedRun",
    "Trouble",
    "TroubleKind",
    "reference_norms",
    "troubles_of",
]

DIVERGENCE_STEPS = 8  # with fewer, a quarter of them has no two losses

TroubleKind = Literal["non-finite", "spike", "divergence", "gradient growth", "fault"]


@dataclass(frozen=True)
class Trouble:
    """Something that no sound training has.

    Attributes:
        kind: "non-finite": a loss or a gradient. "spike": of the gradient norm or the loss. "divergence": the
            loss ends above where it began. "gradient growth": the norms are far above those of the shortest
            length. "fault": an injected one was not dealt with.
        step: the first of it; None: it is of the whole run.
        text: a clause with the numbers.
    """

    kind: TroubleKind
    step: int | None
    text: str


@dataclass(frozen=True)
class LengthLimits:
    """What the training at a length is held against.

    Attributes:
        reference_norms: gradient norms of the shortest length, one a step: the median of its seeds. Empty:
            there are none, and norms are only held against those before them.
        gradient_factor: how many times as large as the reference norms may be.
        loss_tolerance: how far above its beginning the loss may end, in nats.
    """

    reference_norms: tuple[float, ...] = ()
    gradient_factor: float = 4.0
    loss_tolerance: float = 0.5


@dataclass(frozen=True)
class SeedRun:
    """The training of one seed.

    Attributes:
        seed: of weights and batches.
        run: what happened.
        troubles: what was wrong with it, one of a kind; empty: nothing.
    """

    seed: int
    run: StabilityRun
    troubles: tuple[Trouble, ...]

    @property
    def gradient_norms(self) -> list[float]:
        """Global L2 norms before clipping, one a step as it was made; what is not a number is infinite."""
        return _norms(self.run)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "seed": self.seed,
            "verdict": self.run.verdict,
            "troubles": [asdict(trouble) for trouble in self.troubles],
            "losses": [record.loss for record in self.run.records],
            "gradient_norms": self.gradient_norms,
        }


def troubles_of(run: StabilityRun, limits: LengthLimits) -> tuple[Trouble, ...]:
    """What is wrong with a run, one of a kind.

    A run under faults is judged by its own verdict, since its spikes were asked for. Else: what its guard has
    told; a gradient norm that is a spike as `SpikeDetector` has it, or 3 times above what the growth of norms
    allows at that step; a median norm beyond that growth; a loss whose last quarter is above its first, of
    `DIVERGENCE_STEPS` or more.
    """
    if run.fired:
        sound = run.verdict in ("caught", "recovered")
        return () if sound else (Trouble("fault", None, f"training is {run.verdict}{_first_alarm(run)}"),)
    found = [*_told(run), *_spikes(run), *_growth(run, limits), *_divergence(run, limits.loss_tolerance)]
    if not found and run.verdict != "stable":
        found = [Trouble("non-finite", None, "weights are not finite at the end")]
    kinds = dict.fromkeys(trouble.kind for trouble in found)
    return tuple(min((t for t in found if t.kind == kind), key=_place) for kind in kinds)


def reference_norms(runs: Sequence[SeedRun]) -> tuple[float, ...]:
    """At each step the median of the seeds that have no trouble; empty where all have."""
    columns = zip(*(each.gradient_norms for each in runs if not each.troubles), strict=False)
    return tuple(statistics.median(column) for column in columns)


def _told(run: StabilityRun) -> list[Trouble]:
    """What the guard raised alarms of."""
    return [
        Trouble("non-finite" if alarm.kind.startswith("non-finite") else "spike", alarm.step, str(alarm))
        for alarm in run.alarms
    ]


def _spikes(run: StabilityRun) -> list[Trouble]:
    """The first norm that is far above those of sound steps before it."""
    detector = SpikeDetector()
    for record in run.records:
        if not math.isfinite(record.grad_norm) or record.skipped:
            continue
        limit = detector.limit()
        if limit is not None and record.grad_norm > limit:
            text = f"gradient norm {record.grad_norm:.4g} at step {record.step}"
            return [Trouble("spike", record.step, f"{text}; by those before it {limit:.4g} at most")]
        detector.accept(record.grad_norm)
    return []


def _growth(run: StabilityRun, limits: LengthLimits) -> list[Trouble]:
    """Norms against those of the shortest length, step by step: both settle as training begins."""
    factor = limits.gradient_factor
    pairs = [
        (record.step, record.grad_norm / limits.reference_norms[record.step])
        for record in run.records
        if record.step < len(limits.reference_norms) and limits.reference_norms[record.step] > 0
    ]
    ratios = [ratio if math.isfinite(ratio) else math.inf for _, ratio in pairs]
    found = []
    if ratios and (middle := statistics.median(ratios)) > factor and math.isfinite(middle):
        text = f"gradient norms {middle:.4g} times those of the shortest length; allowed {factor:g}"
        found.append(Trouble("gradient growth", None, text))
    highest = factor * SpikeDetector().factor
    for step, ratio in pairs:
        if math.isfinite(ratio) and ratio > highest:
            text = f"gradient norm {ratio:.4g} times that of the shortest length at step {step}"
            found.append(Trouble("spike", step, f"{text}; allowed {highest:g}"))
            break
    return found


def _divergence(run: StabilityRun, tolerance: float) -> list[Trouble]:
    """A loss that ends above its beginning, by more than it scatters."""
    losses = [record.loss for record in run.records if math.isfinite(record.loss)]
    if len(losses) < DIVERGENCE_STEPS:
        return []
    quarter = len(losses) // 4
    changes = [after - before for before, after in itertools.pairwise(losses)]
    center = statistics.median(changes)
    scatter = statistics.median(abs(change - center) for change in changes)
    begin, end = max(losses[:quarter]), statistics.median(losses[-quarter:])
    if end <= begin + max(tolerance, SpikeDetector().deviations * scatter):
        return []
    text = f"loss {begin:.4g} in the first quarter of the steps at most, {end:.4g} in the last"
    return [Trouble("divergence", None, text)]


def _place(trouble: Trouble) -> float:
    return math.inf if trouble.step is None else trouble.step


def _first_alarm(run: StabilityRun) -> str:
    return f": {run.alarms[0]}" if run.alarms else ""


def _norms(run: StabilityRun) -> list[float]:
    norms = (record.grad_norm for record in run.records)
    return [norm if math.isfinite(norm) else math.inf for norm in norms]
