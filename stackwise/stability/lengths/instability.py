"""Instability: signs of an unstable training of one seed at a length, and the limits for them."""

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
    "Instability",
    "InstabilityKind",
    "LengthLimits",
    "SeedRun",
    "find_instabilities",
    "reference_norms",
]

DIVERGENCE_STEPS = 8  # with fewer steps, a quarter has fewer than two losses

InstabilityKind = Literal["non-finite", "spike", "divergence", "gradient growth", "fault"]


@dataclass(frozen=True)
class Instability:
    """Sign of an unstable training.

    Attributes:
        kind: "non-finite": a loss, a gradient or a weight. "spike": gradient norm or loss. "divergence": the
            loss increases over the training. "gradient growth": the norms are much larger than at the
            shortest length. "fault": an injected fault was not handled.
        step: first step of the instability. None: it concerns the entire run.
        text: description with the numbers.
    """

    kind: InstabilityKind
    step: int | None
    text: str


@dataclass(frozen=True)
class LengthLimits:
    """Limits for the training at a length.

    Attributes:
        reference_norms: gradient norms of the shortest length, one per step: median of its seeds. Empty: no
            reference, so norms are compared with earlier norms only.
        gradient_factor: allowed ratio of gradient norms to the reference norms.
        loss_tolerance: allowed increase of the loss from the beginning to the end, in nats.
    """

    reference_norms: tuple[float, ...] = ()
    gradient_factor: float = 4.0
    loss_tolerance: float = 0.5


@dataclass(frozen=True)
class SeedRun:
    """Training of one seed.

    Attributes:
        seed: seed of weights and batches.
        run: result of the training.
        instabilities: instabilities of the training, at most one of each kind.
    """

    seed: int
    run: StabilityRun
    instabilities: tuple[Instability, ...]

    @property
    def gradient_norms(self) -> list[float]:
        """Global L2 norms before clipping, one per step. Infinite if not finite."""
        norms = (record.grad_norm for record in self.run.records)
        return [norm if math.isfinite(norm) else math.inf for norm in norms]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "seed": self.seed,
            "verdict": self.run.verdict,
            "instabilities": [asdict(each) for each in self.instabilities],
            "losses": [record.loss for record in self.run.records],
            "gradient_norms": self.gradient_norms,
        }


def find_instabilities(run: StabilityRun, limits: LengthLimits) -> tuple[Instability, ...]:
    """Return the instabilities of a run, at most one of each kind.

    A run in which a fault acted is judged by its own verdict, because its spikes are intended. For any other
    run, these are instabilities:

    - an alarm of the guard;
    - a gradient norm that is a spike by `SpikeDetector`, or 3 times above the growth of norms that is allowed
      at that step;
    - a median norm above the allowed growth;
    - a loss with a last quarter above the first one, if there are at least `DIVERGENCE_STEPS` losses;
    - weights that are not finite at the end, if there is no instability of another kind.
    """
    if run.fired:
        sound = run.verdict in ("caught", "recovered")
        return () if sound else (Instability("fault", None, f"training is {run.verdict}{_first_alarm(run)}"),)
    found = [*_told(run), *_spikes(run), *_growth(run, limits), *_divergence(run, limits.loss_tolerance)]
    if not found and run.verdict != "stable":
        found = [Instability("non-finite", None, "weights are not finite at the end")]
    kinds = dict.fromkeys(each.kind for each in found)
    return tuple(min((t for t in found if t.kind == kind), key=_place) for kind in kinds)


def reference_norms(runs: Sequence[SeedRun]) -> tuple[float, ...]:
    """Return the median norm of the stable seeds, at each step.

    Return () if all seeds are unstable.
    """
    columns = zip(*(each.gradient_norms for each in runs if not each.instabilities), strict=False)
    return tuple(statistics.median(column) for column in columns)


def _told(run: StabilityRun) -> list[Instability]:
    """Return the alarms of the guard as instabilities."""
    return [
        Instability("non-finite" if alarm.kind.startswith("non-finite") else "spike", alarm.step, str(alarm))
        for alarm in run.alarms
    ]


def _spikes(run: StabilityRun) -> list[Instability]:
    """Return the first norm that is far above the norms of healthy earlier steps."""
    detector = SpikeDetector()
    for record in run.records:
        if not math.isfinite(record.grad_norm) or record.skipped:
            continue
        limit = detector.limit()
        if limit is not None and record.grad_norm > limit:
            text = f"gradient norm {record.grad_norm:.4g} at step {record.step}"
            return [Instability("spike", record.step, f"{text}; by those before it {limit:.4g} at most")]
        detector.accept(record.grad_norm)
    return []


def _growth(run: StabilityRun, limits: LengthLimits) -> list[Instability]:
    """Compare norms with the shortest length's, step by step, because they change early in a training."""
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
        found.append(Instability("gradient growth", None, text))
    highest = factor * SpikeDetector().factor
    for step, ratio in pairs:
        if math.isfinite(ratio) and ratio > highest:
            text = f"gradient norm {ratio:.4g} times that of the shortest length at step {step}"
            found.append(Instability("spike", step, f"{text}; allowed {highest:g}"))
            break
    return found


def _divergence(run: StabilityRun, tolerance: float) -> list[Instability]:
    """Return a divergence if the loss rises over the training by more than its variation between steps."""
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
    return [Instability("divergence", None, text)]


def _place(found: Instability) -> float:
    return math.inf if found.step is None else found.step


def _first_alarm(run: StabilityRun) -> str:
    return f": {run.alarms[0]}" if run.alarms else ""
