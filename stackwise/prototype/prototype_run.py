"""PrototypeRun: what became of a representative run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from stackwise.support.units import byte_text

__all__ = ["PrototypeRun", "Status", "end_of"]

Status = Literal["success", "nan", "diverged", "spiky"]


@dataclass(frozen=True)
class PrototypeRun:
    """A training run, step by step, and its verdict.

    What is observed at a step is of the weights that this step's loss is of, before its update.

    Attributes:
        name: of the model.
        status: "success"; "nan", "diverged" or "spiky" as `stackwise.prototype.loss_verdict` says it.
        step: of the first trouble, counted from 0; None: a success.
        losses: of the training, in nats, or in the unit of the spec's own loss, one for each update, over its
            effective batch.
        gradient_norms: global L2 norm before clipping, one for each update.
        learning_rates: one for each update: that of the schedule, or of the optimizer's first group.
        logit_max: (step, largest absolute value of the model's output).
        attention_entropy: (step, by module the mean entropy of its rows of attention weights, each divided by
            the logarithm of the number of keys that the row sees: 0 to 1); empty where it was not seen.
        attention_logit_max: (step, by module the largest number that its softmax takes); empty where it was
            not seen.
        final_loss: mean of the last tenth of `losses`, of one at least; infinite of a run that ended in NaN
            or diverged.
        validation_loss: in nats, after the last update, of as many batches as `training.eval_batches` says
            beside an `eval_interval`, else of 50 at most; None: there was no validation data, or NaN.
        tokens: that were trained on.
        seconds: of all updates, without observation and validation.
        tokens_per_second: of the median update, the first one left out where there are more.
        peak_bytes: the most memory of the first two updates above what was in use before the model was made:
            on CUDA of tensors, on the CPU resident in the process; None: it cannot be told.
        notes: what a reader of the verdict ought to know.
        spikes: the steps at which a spike of the loss began.
        left_out: the steps whose update was left out, since gradients overflowed in float16 and a smaller
            loss scale was the answer. Their loss is finite, their gradient norm is not.
    """

    name: str
    status: Status
    step: int | None
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    learning_rates: tuple[float, ...]
    logit_max: tuple[tuple[int, float], ...]
    attention_entropy: tuple[tuple[int, dict[str, float]], ...]
    attention_logit_max: tuple[tuple[int, dict[str, float]], ...]
    final_loss: float
    validation_loss: float | None
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_bytes: int | None
    notes: tuple[str, ...] = ()
    spikes: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite stay what they are."""
        return asdict(self)

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        loss = f"loss {self.losses[0]:.4f} -> {self.final_loss:.4f}" if self.losses else "no step"
        lines = [f"{self.name}: {self.status}{at}; {len(self.losses)} steps, {loss}"]
        if self.validation_loss is not None:
            lines[0] += f", validation {self.validation_loss:.4f}"
        memory = "" if self.peak_bytes is None else f", {byte_text(self.peak_bytes)}"
        lines.append(f"  {self.tokens:,} tokens, {self.tokens_per_second:,.0f} tokens/s{memory}")
        norms = [norm for step, norm in enumerate(self.gradient_norms) if step not in self.left_out]
        if norms:
            lines.append(f"  gradient norm {norms[0]:.3g} -> {norms[-1]:.3g}, at most {max(norms):.3g}")
        if self.left_out:
            lines.append(f"  {len(self.left_out)} of the updates left out, for a smaller loss scale")
        if self.logit_max:
            lines.append(f"  largest logit {self.logit_max[0][1]:.3g} -> {self.logit_max[-1][1]:.3g}")
        for what, series, worst in (
            ("lowest attention entropy", self.attention_entropy, min),
            ("largest attention logit", self.attention_logit_max, max),
        ):
            if series:
                (_, first), (_, last) = series[0], series[-1]
                name = worst(last, key=last.__getitem__)
                before = f"{first[name]:.3g} -> " if name in first else ""
                lines.append(f"  {what} {before}{last[name]:.3g} in {name or 'the model'}")
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def end_of(losses: Sequence[float]) -> float:
    """What a training ends with: the mean of the last tenth of `losses`, of one at least."""
    return fmean(losses[-max(1, len(losses) // 10) :])
