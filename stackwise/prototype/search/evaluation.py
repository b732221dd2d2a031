"""Evaluation of one configuration under one seed in a search."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from stackwise.config import StackWiseConfig
from stackwise.prototype.search.trial import TrialOutcome
from stackwise.support.arguments import check_sizes

__all__ = ["Evaluate", "PrototypeEvaluation", "Report"]

Report = Callable[[float, float], None]


class Evaluate(Protocol):
    """Callable that evaluates a configuration.

    Its arguments are the configuration, a seed, and `report`. It must call `report` in order with the
    finished part of the training, from 0 to 1, and the loss. If the trial is pruned, `report` raises an
    exception, which must be passed on. Any other exception is the `error` of the trial, with two exceptions
    that end the search and requeue the trial, until the third time: an OSError (other than a TimeoutError) or
    ImportError before the first report of the first seed, and an error that leaves the device unusable. With
    several jobs, it is pickled, so it must be a function or a class of an importable module.
    """

    def __call__(self, config: StackWiseConfig, seed: int, report: Report) -> TrialOutcome:
        """Return the outcome of `config` with `seed`."""
        ...


@dataclass(frozen=True)
class PrototypeEvaluation:
    """Evaluation by `ArchitecturePrototype.run`.

    The loss is the validation loss, or, without validation data, that of the last tenth of training. The
    speed is that of the median update. On CUDA, the peak is the measured memory of an update. On the CPU, a
    process cannot separate tensors from its other memory, so the peak is the result of `plan_memory`: the
    bytes of all tensors of a step.

    Attributes:
        steps: number of updates per run.
        device: device to run on. None: the configured one.
    """

    steps: int = 1000
    device: str | None = None

    def __post_init__(self) -> None:
        check_sizes(steps=self.steps)

    def __call__(self, config: StackWiseConfig, seed: int, report: Report) -> TrialOutcome:
        """Train `config` with weights from `seed`, and return the outcome."""
        from stackwise.prototype.prototype import ArchitecturePrototype

        prototype = ArchitecturePrototype(config, device=self.device, seed=seed)

        def on_step(step: int, loss: float) -> None:
            if math.isfinite(loss):
                report((step + 1) / self.steps, loss)

        run = prototype.run(self.steps, on_step=on_step)
        reason = "" if run.status == "success" else f"{run.status} at step {run.step}"
        loss = run.final_loss if run.validation_loss is None else run.validation_loss
        return TrialOutcome(
            status=run.status,
            loss=loss if run.status in ("success", "spiky") else math.inf,
            tokens_per_second=run.tokens_per_second,
            peak_bytes=run.peak_bytes if prototype.device.type == "cuda" else _planned_peak(config),
            reason=reason,
        )


def _planned_peak(config: StackWiseConfig) -> int:
    from stackwise.training.memory_planner import plan_memory

    # The plan does not depend on random numbers, but it builds a Rack, which draws some.
    with torch.random.fork_rng(devices=[]):
        return plan_memory(config, device="cpu").peak
