"""LengthProbe: tests one model at several lengths in turn, with the same number of tokens per step.

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
from stackwise.stability.lengths.instability import LengthLimits, SeedRun, find_instabilities, reference_norms
from stackwise.stability.lengths.point import LengthPoint
from stackwise.stability.run import StabilityRun, shortest_length, stability_run
from stackwise.subject.inference import is_sequence
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_number, check_sizes, require
from stackwise.support.device import release_freed_memory
from stackwise.support.random_state import choose_seeds, seeded
from stackwise.support.system_errors import is_out_of_memory

__all__ = ["LengthProbe", "seeds_of"]

_BATCH_SIZE = 4
# Distance between the seeds of runs. The batches of a run use the seeds after its own, and runs must not
# share any.
_BETWEEN_SEEDS = 100_003
# Without injected faults, a training ends at its second consecutive alarm. Later steps would add no
# information.
_POLICY = GuardPolicy(patience=1, rewinds=0, snapshot_interval=None)


class LengthProbe:
    """Test of a model at several lengths. Each length is compared with the first one.

    Args:
        spec: spec of the model.
        longest: maximum of the lengths.
        tokens_per_step: maximum of B * T at each length, filled with complete rows. None: `batch_size` rows.
        batch_size: B if `tokens_per_step` is None. None: 4.
        gradient_factor: allowed ratio of gradient norms to the norms of the first length.
        loss_tolerance: allowed increase of the loss from the beginning to the end of a training, in nats.
        device: device to run on.
        memory: True: measure the memory of the first seed in each test.
        arguments: arguments of `stability_run`. Without faults and a policy, a training ends at its second
            consecutive alarm.

    Raises:
        ValueError: the model does not accept the longest length, or this length has more tokens than a step.
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
        self._first: int | None = None  # reference length
        self._reference: tuple[float, ...] = ()
        # Refuse the longest length before the shorter ones are run.
        spec.batch(self.rows(longest), longest)

    def rows(self, seq_len: int) -> int:
        """Return B at a length."""
        return self._rows if self._tokens is None else self._tokens // seq_len

    def look(self, seq_len: int, seeds: Sequence[int]) -> LengthPoint:
        """Test the initial model and trainings at a length. The point may be "out of memory".

        Args:
            seq_len: T, at most the longest length.
            seeds: seeds of the trainings. The first seed is also used for the initial model.
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
        """Return the point of a length that is longer than one that did not fit into memory."""
        return LengthPoint(self._spec.name, seq_len, self.rows(seq_len), stopped="not run")

    def _look(self, seq_len: int, rows: int, seeds: Sequence[int]) -> LengthPoint:
        loss, logit_max, logit_rms = self._untouched(seq_len, seeds[0])
        self._warm_up(seq_len, rows, seeds[0])
        clock = _Clock(self._spec)
        # Memory depends on the shapes of a training, and not on its seed.
        trained = [
            self._train(clock, seq_len, rows, seed, watched=self._memory and number == 0)
            for number, seed in enumerate(seeds)
        ]
        limits = LengthLimits(self._reference, self._factor, self._tolerance)
        runs = tuple(
            SeedRun(seed, run, find_instabilities(run, limits))
            for seed, (run, _) in zip(seeds, trained, strict=True)
        )
        if self._first is None:
            self._first = seq_len
        # If all seeds of the first test were unstable, a second test at this length may have healthy ones.
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
        """Return the loss, the largest |logit| and the root mean square of the logits of the initial model.

        All lengths read prefixes of the same rows.
        """
        spec, device = self._spec, self._device
        model = spec.create(device, seed).eval()
        inputs = self._inputs(seq_len, seed).to(device)
        with torch.no_grad(), seeded(seed, device):
            loss = float(spec.loss_of(model, inputs))
            logits = spec.logits(model, inputs).float()
            return loss, float(logits.abs().max()), float(logits.square().mean().sqrt())

    def _inputs(self, seq_len: int, seed: int) -> Tensor:
        """Return the first positions of the rows of the longest length.

        Images are created for each length.
        """
        inputs = self._spec.batch(self.rows(self._longest), self._longest, seed=seed)
        if is_sequence(inputs):
            return inputs[:, :seq_len].contiguous()
        return self._spec.batch(self.rows(seq_len), seq_len, seed=seed)

    def _warm_up(self, seq_len: int, rows: int, seed: int) -> None:
        """Run one step before the first measurement of memory.

        The first step of a process allocates memory that does not belong to a length.
        """
        if self._memory and not self._warm:
            stability_run(
                self._spec, steps=1, seq_len=seq_len, batch_size=rows, device=self._device, seed=seed
            )
            self._warm = True

    def _train(
        self, clock: _Clock, seq_len: int, rows: int, seed: int, *, watched: bool
    ) -> tuple[StabilityRun, int | None]:
        """Return a training and its peak memory.

        The memory is None if it is not measured or cannot be read.
        """
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
                gc.collect()  # the previous model may still be in a reference cycle
            train()
            return made[0], None
        peak = peak_memory(train, self._device)
        return made[0], peak.host_added if self._device.type == "cpu" else peak.added

    def _free(self) -> None:
        """Free the memory of a failed attempt, so that it is available to later ones."""
        gc.collect()
        release_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def seeds_of(seeds: int | Sequence[int], first: int, key: str = "seeds") -> tuple[int, ...]:
    """Return a number of seeds from `first` on, or the listed seeds. Counted seeds do not share batches.

    Raises:
        ValueError: no seeds, or a repeated seed.
    """
    return choose_seeds(seeds, first, step=_BETWEEN_SEEDS, key=key)


class _Clock:
    """Start times of the steps of each run.

    A time is taken when the loss of a step is computed. By then, the guard has waited for the previous step.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._runs: list[list[float]] = []

        def loss(model: torch.nn.Module, inputs: Tensor) -> Tensor:
            self._runs[-1].append(time.perf_counter())
            return spec.loss_of(model, inputs)

        self.spec = ModelSpec.of(spec, loss=loss)

    def begin(self) -> None:
        """Start another run."""
        self._runs.append([])

    def step_seconds(self) -> float:
        """Return the median step time, without first steps.

        NaN if no run has two steps after its first one.
        """
        gaps = [b - a for times in self._runs for a, b in itertools.pairwise(times[1:])]
        return statistics.median(gaps) if gaps else math.nan
