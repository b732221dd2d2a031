"""PrototypeRun: result of a representative training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from stackwise.benchmark.timing.measurement import Measurement
from stackwise.support.units import byte_text

__all__ = ["ForwardPass", "PrototypeRun", "Status", "end_of"]

Status = Literal["success", "nan", "diverged", "spiky"]


@dataclass(frozen=True)
class PrototypeRun:
    """Training run, step by step, with its verdict.

    An observation at a step shows the weights before the update of that step, like the loss of that step.

    Attributes:
        name: name of the model.
        status: "success", "nan", "diverged" or "spiky"; see `stackwise.prototype.loss_verdict`.
        step: step of the first problem, counted from 0. None: success.
        losses: training loss of each update over its effective batch, in nats, or in the unit of the spec's
            own loss.
        gradient_norms: global L2 norm of each update before clipping.
        learning_rates: learning rate of each update: that of the schedule, or of the optimizer's first group.
        logit_max: (step, largest absolute value of the model's output).
        attention_entropy: (step, mean entropy of attention rows by module, divided by the logarithm of the
            number of visible keys: 0 to 1). Empty if it could not be observed.
        attention_logit_max: (step, largest input of the softmax by module). Empty if it could not be
            observed.
        final_loss: mean of the last tenth of `losses`, at least of one. Infinite for the status "nan" or
            "diverged".
        validation_loss: validation loss in nats after the last update. The number of batches is
            `training.eval_batches` if `eval_interval` is set, otherwise at most 50. None: no validation data,
            or the status "nan".
        tokens: number of training tokens.
        seconds: total time of the updates, without observation and validation.
        tokens_per_second: median over updates, without the first one if possible.
        peak_bytes: peak memory of the first two updates above the memory before the model was created:
            tensors on CUDA, resident memory of the process on the CPU. None: unknown.
        notes: notes for the reader of the verdict.
        spikes: steps at which a spike of the loss started.
        left_out: steps with a skipped update, because gradients overflowed in float16 and the loss scale was
            lowered. Their loss is finite, but their gradient norm is not.
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
        """Return plain values. Numbers that are not finite are unchanged."""
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


@dataclass(frozen=True)
class ForwardPass:
    """Measured forward pass in eval mode without gradients.

    Attributes:
        name: name of the model.
        batch_size: number of rows.
        seq_len: number of positions per row.
        measurement: raw samples and their conditions.
        parameters: number of parameters of the model. A tied weight counts once.
    """

    name: str
    batch_size: int
    seq_len: int
    measurement: Measurement
    parameters: int

    @property
    def seconds(self) -> float:
        """Median seconds of a pass."""
        return self.measurement.median

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """95 % confidence interval of the median seconds. None: too few samples for that end."""
        return self.measurement.p50.low, self.measurement.p50.high

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a pass divided by its median seconds."""
        return self.batch_size * self.seq_len / self.seconds

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory during a pass: tensors on CUDA, the entire process on the CPU."""
        return self.measurement.peak_memory_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the reader about the samples."""
        return tuple(self.measurement.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        low, high = self.interval
        return {
            "name": self.name,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "parameters": self.parameters,
            "seconds": self.seconds,
            "low": low,
            "high": high,
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes": self.peak_bytes,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        low, high = self.interval
        within = "" if low is None or high is None else f" ({low * 1e3:.3g} to {high * 1e3:.3g})"
        memory = "" if self.peak_bytes is None else f", peak {byte_text(self.peak_bytes)}"
        return (
            f"{self.name}: {self.batch_size} x {self.seq_len} tokens forward in {self.seconds * 1e3:.3g} ms"
            f"{within}, {self.tokens_per_second:,.0f} tokens/s{memory}"
        )


def end_of(losses: Sequence[float]) -> float:
    """Return the final loss of a training: the mean of the last tenth of `losses`, at least of one."""
    return fmean(losses[-max(1, len(losses) // 10) :])
