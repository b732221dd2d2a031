"""Trial: training of an architecture, step by step, with its result."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.benchmark.memory.peak import PeakMemory, watch_peak
from stackwise.benchmark.timing.clock import timing_event
from stackwise.prototype.loss_verdict import DivergenceRule, SpikeRule, in_place_of_a_nat, loss_verdict
from stackwise.prototype.observation import Observation
from stackwise.prototype.prototype_run import PrototypeRun, end_of
from stackwise.prototype.prototype_training import PrototypeTraining
from stackwise.stability.telemetry import StepBuffer, StepRecord
from stackwise.support.arguments import require

__all__ = ["ENOUGH", "OnStep", "Trial", "UpdateClock"]

OnStep = Callable[[int, float], object]

ENOUGH = 1000  # steps; in shorter runs, instabilities of a long training may not start
_READ_INTERVAL = 10
_MEMORY_UPDATES = 2  # the first creates the optimizer state, the second has it besides all other tensors


class Trial:
    """Single run, step by step."""

    def __init__(
        self,
        training: PrototypeTraining,
        steps: int,
        observe_every: int,
        device: torch.device,
        on_step: OnStep | None,
    ) -> None:
        self._training, self._steps, self._every = training, steps, observe_every
        self._device, self._on_step = device, on_step
        self._buffer = StepBuffer(2 * _READ_INTERVAL, device)
        self.rows: list[int] = []
        self.row_lengths: list[int] = []
        self._empty: Tensor | int = 0
        self._clock = UpdateClock(device)
        self._records: list[StepRecord] = []
        self._observations: list[tuple[int, Observation]] = []
        self._broken = False
        self._peaks: list[PeakMemory] = []

    def train(self) -> None:
        """Run all steps, or stop at the first step that is not finite."""
        for step in range(self._steps):
            if step % self._every == 0 or step == self._steps - 1:
                self._read(self._buffer.drain())
                if self._broken:
                    return
                self._observations.append((step, self._training.observe(step)))
            if step < _MEMORY_UPDATES:
                with watch_peak(self._device, collect=False) as watch:  # garbage was collected at creation
                    self._update(step)
                self._peaks.append(watch.peak)
            else:
                self._update(step)
            if self._buffer.full:
                self._read(self._buffer.drain())
            elif (step + 1) % _READ_INTERVAL == 0:
                self._read(self._buffer.poll())
            if self._broken:
                return
        self._read(self._buffer.drain())

    def result(
        self,
        making: PeakMemory,
        spike: SpikeRule | None,
        divergence: DivergenceRule | None,
        notes: Sequence[str],
    ) -> PrototypeRun:
        """Return the result of the run."""
        losses = [record.loss for record in self._records]
        sound = [0.0 if _was_answered(record) else record.grad_norm for record in self._records]
        made, empty = len(self.rows), int(self._empty)
        require(empty < made, "data: updates with a token to predict", 0, f"at least one of the {made}")
        in_nats = self._training.in_nats
        verdict = loss_verdict(losses, sound, spike=spike, divergence=divergence, in_nats=in_nats)
        nat = 1.0 if in_nats or (spike and divergence) else in_place_of_a_nat(losses)
        told = (*notes, *self._training.notes, *self._notes(nat, empty))
        return PrototypeRun(
            name=self._training.name,
            status=verdict.status,
            step=verdict.step,
            losses=tuple(losses),
            gradient_norms=tuple(record.grad_norm for record in self._records),
            learning_rates=tuple(record.lr for record in self._records),
            logit_max=tuple((step, each.logit_max) for step, each in self._observations),
            attention_entropy=self._observed("attention_entropy"),
            attention_logit_max=self._observed("attention_logit_max"),
            final_loss=math.inf if verdict.status in ("nan", "diverged") else end_of(losses),
            validation_loss=None if verdict.status == "nan" else self._training.validation_loss(),
            tokens=sum(record.tokens or 0 for record in self._records),
            seconds=sum(self._clock.seconds()),
            tokens_per_second=self._clock.tokens_per_second(),
            peak_bytes=_added([making, *self._peaks]),
            notes=told,
            spikes=verdict.spikes,
            left_out=tuple(record.step for record in self._records if _was_answered(record)),
        )

    def _observed(self, name: str) -> tuple[tuple[int, Any], ...]:
        """Return the steps and values of an attribute of the observations, without empty values."""
        values = ((step, getattr(each, name)) for step, each in self._observations)
        return tuple((step, value) for step, value in values if value)

    def _notes(self, nat: float, empty: int) -> Iterator[str]:
        """Yield the limits of the verdict, for an initial loss `nat` and `empty` updates without a target."""
        if self._steps < ENOUGH:
            yield f"{self._steps} steps: a verdict wants at least {ENOUGH}"
        if nat < 1:
            yield f"limits of the verdict: {nat:.3g} of those in nats, since the loss begins at that"
        if empty:
            yield f"data: nothing to predict in {empty} of {len(self.rows)} updates, whose loss is 0"
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self._training.model.modules()):
            yield "batch normalisation: its statistics are of micro-batches alone"
        if (self._training.passes or 0) > 1:
            yield f"data: in pass {self._training.passes} over it, so that some is learned by heart"
        for _, observation in self._observations[:1]:
            yield from observation.notes

    def _update(self, step: int) -> None:
        with self._clock.update():
            update = self._training.update(step)
        self._clock.count(update.tokens)
        self.rows.append(update.rows)
        self.row_lengths.append(update.row_length)
        self._empty = self._empty + update.empty
        trouble = ~(update.loss.isfinite() & update.grad_norm.isfinite())
        if update.answered is not None:  # an overflow that lowers the loss scale is normal
            trouble = trouble & ~update.answered
        self._buffer.write_step(
            step,
            update.lr,
            loss=update.loss,
            grad_norm=update.grad_norm,
            skipped=trouble,
            tokens=update.tokens,
        )

    def _read(self, arrived: Sequence[StepRecord]) -> None:
        for record in arrived:
            if self._broken:
                return
            self._records.append(record)
            self._broken = record.skipped
            if self._on_step is not None:
                self._on_step(record.step, record.loss)


def _was_answered(record: StepRecord) -> bool:
    """Return True if the update was skipped for a lower loss scale. `skipped` marks only real problems."""
    return not record.skipped and not math.isfinite(record.grad_norm)


def _added(peaks: Sequence[PeakMemory]) -> int | None:
    """Return the increase of memory from the start of the first peak to the maximum of the other peaks."""
    before, in_use = peaks[0].before, [peak.in_use for peak in peaks[1:]]
    if before is None or None in in_use:
        return None
    on_host = peaks[0].allocated is None
    mapped = sum(max(0, peak.mapped or 0) for peak in peaks) if on_host else 0  # newly loaded libraries
    return max(0, max(each for each in in_use if each is not None) - before - mapped)


class UpdateClock:
    """Clock for consecutive updates: between events on the stream on CUDA, on the host otherwise.

    Args:
        device: device of the updates.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    @contextmanager
    def update(self) -> Iterator[None]:
        """Time one update, which is the body of the context."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - start)
            return
        with torch.cuda.device(self._device):
            begin, end = timing_event(), timing_event()
            begin.record()
            yield
            end.record()
        self._events.append((begin, end))

    def count(self, tokens: int) -> None:
        """Record the number of tokens of the update."""
        self._tokens.append(tokens)

    def seconds(self) -> list[float]:
        """Return the seconds of each update. Wait for the device."""
        if self._events:
            torch.cuda.synchronize(self._device)
        return self._seconds + [begin.elapsed_time(end) * 1e-3 for begin, end in self._events]

    def tokens_per_second(self) -> float:
        """Return the median over updates, without the first one if possible. 0 without updates."""
        rates = [
            tokens / seconds
            for tokens, seconds in zip(self._tokens, self.seconds(), strict=True)
            if seconds > 0
        ]
        return statistics.median(rates[1:] or rates) if rates else 0.0
