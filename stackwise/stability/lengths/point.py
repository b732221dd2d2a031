"""LengthPoint: results of one sequence length: loss, logits, one training per seed, time and memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stackwise.stability.lengths.instability import DIVERGENCE_STEPS, SeedRun
from stackwise.stability.run import StabilityRun
from stackwise.support.units import byte_text

__all__ = ["LengthPoint", "LengthVerdict", "divergence_notes", "reference_notes", "token_notes"]

LengthVerdict = Literal["stable", "spiky", "unstable", "out of memory", "not run"]


@dataclass(frozen=True, repr=False)
class LengthPoint:
    """Results of one length.

    Attributes:
        model: name of the spec.
        seq_len: sequence length T.
        batch_size: rows of a training step.
        loss: mean loss of the initial model of the first seed in eval mode, in nats if inputs are tokens.
        logit_max: largest |logit|.
        logit_rms: root mean square of the logits.
        step_seconds: median time of a training step, with the device synchronised. It includes the steps
            after the first of all seeds that were run together. For joined points, it is the value of the
            first point.
        runs: trainings at this length, one per seed.
        peak_bytes: peak memory of one training, above the memory in use before it: of CUDA tensors, or of the
            process on the CPU. None: not measured, or not measurable.
        stopped: "out of memory" for the length that did not fit, "not run" for longer ones, otherwise "".
    """

    model: str
    seq_len: int
    batch_size: int
    loss: float = math.nan
    logit_max: float = math.nan
    logit_rms: float = math.nan
    step_seconds: float = math.nan
    runs: tuple[SeedRun, ...] = ()
    peak_bytes: int | None = None
    stopped: Literal["", "out of memory", "not run"] = ""

    @property
    def run(self) -> StabilityRun:
        """Training of the first seed.

        Raises:
            ValueError: the length was not run.
        """
        if not self.runs:
            raise ValueError(f"run: T={self.seq_len} has none: {self.stopped}")
        return self.runs[0].run

    @property
    def finite(self) -> bool:
        """True if loss and logits of the initial model are finite."""
        return all(map(math.isfinite, (self.loss, self.logit_max, self.logit_rms)))

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the training steps."""
        return self.batch_size * self.seq_len / self.step_seconds if self.step_seconds > 0 else math.nan

    @property
    def gradient_median(self) -> float:
        """Median gradient norm of all steps and seeds. NaN if there are no steps."""
        norms = self._gradient_norms
        return statistics.median(norms) if norms else math.nan

    @property
    def gradient_max(self) -> float:
        """Largest gradient norm of all steps and seeds.

        Infinite if one is not finite, NaN if there are no steps.
        """
        return max(self._gradient_norms, default=math.nan)

    @property
    def unstable_seeds(self) -> list[int]:
        """Seeds with an unstable training."""
        return [each.seed for each in self.runs if each.instabilities]

    @property
    def verdict(self) -> LengthVerdict:
        """Verdict on the length.

        A length is unstable if a value is not finite in any seed, or if more than half of the seeds are
        unstable. If fewer seeds are unstable, it is spiky, because other weights or batches train well. A
        single seed cannot distinguish the two. In this case, a spike without an alarm of the guard is treated
        as chance.
        """
        if self.stopped:
            return self.stopped
        found = [instability for each in self.runs for instability in each.instabilities]
        if not self.finite or any(each.kind in ("non-finite", "fault") for each in found):
            return "unstable"
        if not found:
            return "stable"
        if len(self.runs) == 1:
            chance = self.run.verdict == "stable" and all(each.kind == "spike" for each in found)
            return "spiky" if chance else "unstable"
        return "unstable" if 2 * len(self.unstable_seeds) > len(self.runs) else "spiky"

    @property
    def why(self) -> str:
        """Instabilities of the first unstable seed, and number of unstable seeds; "" if there are none."""
        if self.stopped:
            return self.stopped
        said = []
        if not self.finite:
            said.append(f"loss {self.loss:.4g}, largest logit {self.logit_max:.4g}: not finite")
        unstable = [each for each in self.runs if each.instabilities]
        if unstable:
            first = "; ".join(each.text for each in unstable[0].instabilities)
            said.append(f"training of seed {unstable[0].seed}: {first}")
            if len(self.runs) > 1:
                said.append(f"{len(unstable)} of {len(self.runs)} seeds")
        return "; ".join(said)

    @property
    def _gradient_norms(self) -> list[float]:
        return [norm for each in self.runs for norm in each.gradient_norms]

    def joined(self, other: LengthPoint) -> LengthPoint:
        """Return the point with the seeds of another point of the same length added."""
        assert self.seq_len == other.seq_len, (self.seq_len, other.seq_len)
        base = other if self.finite and not other.finite and not other.stopped else self
        peaks = [each for each in (self.peak_bytes, other.peak_bytes) if each is not None]
        return replace(
            base,
            runs=self.runs + other.runs,
            step_seconds=self.step_seconds,
            peak_bytes=max(peaks, default=None),
            stopped=self.stopped or other.stopped,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON.

        They are the values of the first seed's training, and "length" with the values of this point.
        """
        numbers = {key: value for key, value in vars(self).items() if key != "runs"}
        numbers |= {
            "finite": self.finite,
            "tokens_per_second": self.tokens_per_second,
            "gradient_median": self.gradient_median,
            "gradient_max": self.gradient_max,
            "why": self.why,
            "seeds": [each.to_dict() for each in self.runs],
        }
        return {**self._first(), "length": numbers}

    def _first(self) -> dict[str, Any]:
        if not self.runs:
            told = {"model": self.model, "seq_len": self.seq_len, "verdict": self.verdict}
            empty = {key: list[Any]() for key in ("faults", "fired", "alarms", "records")}
            return told | empty | {"stopped": self.stopped}
        first = self.run.to_dict()
        return first if self.verdict == "stable" else first | {"verdict": self.verdict}

    def __str__(self) -> str:
        if not self.runs:
            return f"T={self.seq_len:<6} {self.verdict}"
        memory = "" if self.peak_bytes is None else f"{byte_text(self.peak_bytes):>12} "
        return (
            f"T={self.seq_len:<6} {self.batch_size:>4} rows  loss {self.loss:<8.4g} "
            f"largest logit {self.logit_max:<8.4g} gradient norm {self.gradient_median:<8.4g} "
            f"at most {self.gradient_max:<8.4g} {self.tokens_per_second:>10,.0f} tokens/s "
            f"{memory} {self.verdict}"
        )

    def __repr__(self) -> str:
        return f"<T={self.seq_len}: {self.verdict}>"


def token_notes(points: Sequence[LengthPoint], tokens_per_step: int | None) -> list[str]:
    """Return one sentence about the lengths that do not divide the tokens of a step.

    Return [] if there are none.
    """
    rows = [(p.seq_len, p.batch_size, p.batch_size * p.seq_len) for p in points if p.stopped != "not run"]
    other = [f"{n} x {length} = {tokens}" for length, n, tokens in rows if tokens != tokens_per_step]
    if tokens_per_step is None or not other:
        return []
    return [f"not {tokens_per_step} tokens a step, which they do not divide: {', '.join(other)}"]


def reference_notes(points: Sequence[LengthPoint]) -> list[str]:
    """Return one sentence if gradient growth was not judged. Return [] if it was judged or did not apply.

    Args:
        points: points, with the shortest length first. The rest is compared with it.
    """
    shortest, *others = points
    unstable = bool(shortest.runs) and all(each.instabilities for each in shortest.runs)
    if not unstable or not any(point.runs for point in others):
        return []
    where = f"T={shortest.seq_len}, where every seed is unstable itself"
    return [f"gradient growth is not judged: it is held against {where}"]


def divergence_notes(points: Sequence[LengthPoint]) -> list[str]:
    """Return one sentence if stable trainings were too short to judge divergence.

    Otherwise return [].
    """
    sound = [
        each.run for point in points for each in point.runs if not each.instabilities and not each.run.fired
    ]
    steps = min((len(run.records) for run in sound), default=DIVERGENCE_STEPS)
    if steps >= DIVERGENCE_STEPS:
        return []
    return [f"divergence is not judged: it takes {DIVERGENCE_STEPS} steps, and got {steps}"]
