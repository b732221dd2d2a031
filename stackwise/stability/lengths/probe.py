"""LengthProbe: looks at one model at one length after the other, at the same tokens per step.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stackwise.benchmark.memory import peak_memory
from stackwise.config import GuardPolicy
from stackwise.stability.lengths.point import LengthPoint
from stackwise.stability.lengths.trouble import LengthLimits, SeedRun, reference_norms, troubles_of
from stackwise.stability.run import StabilityRun, shortest_length, stability_run
from stackwise.subject.inference import is_sequence
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_number, check_sizes, require
from stackwise.support.device import release_freed_memory
from stackwise.support.random_state import choose_seeds, seeded
from stackwise.support.system_errors import is_out_of_memory

__all__ = ["LengthProbe", "seeds_of"]

_BATCH_SIZE = 4
# A run's batches have the seeds behind its own, which no other run is to have as well.
_BETWEEN_SEEDS = 100_003
# Where no fault is injected, a training that breaks twice in a row has shown all that there is to see.
_POLICY = GuardPolicy(patience=1, rewinds=0, snapshot_interval=None)


class LengthProbe:
    """Looks at lengths, each held against the first that was looked at.

    Args:
        spec: the model.
        longest: of the lengths to come.
        tokens_per_step: B * T of each length, or what whole rows make of it at most; None: `batch_size` rows.
        batch_size: B where `tokens_per_step` is None; None: 4.
        gradient_factor: how many times as large the gradient norms may be as those of the first length.
        loss_tolerance: how far above its beginning the loss of a training may end, in nats.
        device: where to run.
        memory: whether it is measured, of the first seed of each look.
        arguments: of `stability_run`. Without faults and a policy, a training ends at its second broken step
            in a row.

    Raises:
        ValueError: a longest length that the model does not take, or that has more tokens than a step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        longest: int,
        *,
        tokens_per_step: int | None = None,
        batch_size: int | None = None,
        gradient_factor: float = 4.0,
        loss_tolerance: float = 0.5,
        device: torch.device | str = "cpu",
        memory: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        allowed = "None with tokens_per_step, which makes it as many rows as fit"
        require(tokens_per_step is None or batch_size is None, "batch_size", batch_size, allowed)
        if tokens_per_step is not None:
            check_sizes(tokens_per_step=tokens_per_step)
            allowed = f"at least one row of the longest length, {longest}"
            require(tokens_per_step >= longest, "tokens_per_step", tokens_per_step, allowed)
        rows = _BATCH_SIZE if batch_size is None else batch_size
        check_sizes(batch_size=rows)
        check_sizes(shortest_length(spec), lengths=longest)
        check_number("gradient_factor", gradient_factor, "a number > 1", lambda factor: factor > 1)
        check_number("loss_tolerance", loss_tolerance, "a number >= 0", lambda nats: nats >= 0)
        self._spec, self._longest, self._device = spec, longest, torch.device(device)
        self._tokens, self._rows = tokens_per_step, rows
        self._factor, self._tolerance = gradient_factor, loss_tolerance
        self._memory, self._arguments = memory, dict(arguments or {})
        if not self._arguments.get("faults"):
            self._arguments.setdefault("policy", _POLICY)
        self._warm = False
        self._first: int | None = None  # the length that the others are held against
        self._reference: tuple[float, ...] = ()
        # Refused now, and not behind the lengths before it.
        spec.batch(self.rows(longest), longest)

    def rows(self, seq_len: int) -> int:
        """B at a length."""
        return self._rows if self._tokens is None else self._tokens // seq_len

    def look(self, seq_len: int, seeds: Sequence[int]) -> LengthPoint:
        """The model at a length, untouched and in training; or that memory is too small for it.

        Args:
            seq_len: T, at most the longest.
            seeds: of the trainings; the first also of the untouched model.
        """
        rows = self.rows(seq_len)
        try:
            point = self._look(seq_len, rows, seeds)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            point = LengthPoint(self._spec.name, seq_len, rows, stopped="out of memory")
        if point.stopped:
            self._free()
        return point

    def not_run(self, seq_len: int) -> LengthPoint:
        """A length behind one that memory was too small for."""
        return LengthPoint(self._spec.name, seq_len, self.rows(seq_len), stopped="not run")

    def _look(self, seq_len: int, rows: int, seeds: Sequence[int]) -> LengthPoint:
        loss, logit_max, logit_rms = self._untouched(seq_len, seeds[0])
        self._warm_up(seq_len, rows, seeds[0])
        clock = _Clock(self._spec)
        # What a training takes goes with its shapes, and not with its seed.
        trained = [
            self._train(clock, seq_len, rows, seed, watched=self._memory and number == 0)
            for number, seed in enumerate(seeds)
        ]
        limits = LengthLimits(self._reference, self._factor, self._tolerance)
        runs = tuple(
            SeedRun(seed, run, troubles_of(run, limits))
            for seed, (run, _) in zip(seeds, trained, strict=True)
        )
        if self._first is None:
            self._first = seq_len
        # Where all seeds of the first look were in trouble, a second one at that length may have sound ones.
        if seq_len == self._first and not self._reference:
            self._reference = reference_norms(runs)
        return LengthPoint(
            self._spec.name,
            seq_len,
            rows,
            loss,
            logit_max,
            logit_rms,
            clock.step_seconds(),
            runs,
            trained[0][1],
        )

    def _untouched(self, seq_len: int, seed: int) -> tuple[float, float, float]:
        """Loss, largest |logit| and root of their mean square; all lengths read the same beginning."""
        spec, device = self._spec, self._device
        model = spec.create(device, seed).eval()
        inputs = self._inputs(seq_len, seed).to(device)
        with torch.no_grad(), seeded(seed, device):
            loss = float(spec.loss_of(model, inputs))
            logits = spec.logits(model, inputs).float()
            return loss, float(logits.abs().max()), float(logits.square().mean().sqrt())

    def _inputs(self, seq_len: int, seed: int) -> Tensor:
        """Return the first positions of the rows of the longest length; images are made at each length."""
        inputs = self._spec.batch(self.rows(self._longest), self._longest, seed=seed)
        if is_sequence(inputs):
            return inputs[:, :seq_len].contiguous()
        return self._spec.batch(self.rows(seq_len), seq_len, seed=seed)

    def _warm_up(self, seq_len: int, rows: int, seed: int) -> None:
        """One step, once, where memory is measured: what the first of a process brings in is no length's."""
        if self._memory and not self._warm:
            stability_run(
                self._spec, steps=1, seq_len=seq_len, batch_size=rows, device=self._device, seed=seed
            )
            self._warm = True

    def _train(
        self, clock: _Clock, seq_len: int, rows: int, seed: int, *, watched: bool
    ) -> tuple[StabilityRun, int | None]:
        """A training, and the memory that it took; None: nobody watched, or it cannot be read."""
        made: list[StabilityRun] = []

        def train() -> None:
            clock.begin()
            made.append(
                stability_run(
                    clock.spec,
                    seq_len=seq_len,
                    batch_size=rows,
                    device=self._device,
                    seed=seed,
                    **self._arguments,
                )
            )

        if not watched:
            if self._device.type != "cpu":
                gc.collect()  # the model before this one, where a cycle still holds it
            train()
            return made[0], None
        peak = peak_memory(train, self._device)
        return made[0], peak.host_added if self._device.type == "cpu" else peak.added

    def _free(self) -> None:
        """Give back what a failed attempt has left, so that what comes after has all there is."""
        gc.collect()
        release_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def seeds_of(seeds: int | Sequence[int], first: int, key: str = "seeds") -> tuple[int, ...]:
    """So many seeds from `first` on, no two of which share batches; or those that are given.

    Raises:
        ValueError: none, or one of them twice.
    """
    return choose_seeds(seeds, first, step=_BETWEEN_SEEDS, key=key)


class _Clock:
    """When each step of a run began, as its loss is asked for; the guard has waited for the step before."""

    def __init__(self, spec: ModelSpec) -> None:
        self._runs: list[list[float]] = []

        def loss(model: torch.nn.Module, inputs: Tensor) -> Tensor:
            self._runs[-1].append(time.perf_counter())
            return spec.loss_of(model, inputs)

        self.spec = ModelSpec.of(spec, loss=loss)

    def begin(self) -> None:
        """Of another run."""
        self._runs.append([])

    def step_seconds(self) -> float:
        """The median of the times between; NaN for fewer than two steps behind the first."""
        gaps = [b - a for times in self._runs for a, b in itertools.pairwise(times[1:])]
        return statistics.median(gaps) if gaps else math.nan
