"""Evaluation of one configuration in a search, under one or several seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from stackwise.config import StackWiseConfig
from stackwise.prototype.search.pruner import LossReports
from stackwise.prototype.search.storage import import_optuna
from stackwise.prototype.search.trial import TrialOutcome
from stackwise.support.arguments import check_sizes
from stackwise.support.system_errors import is_out_of_memory

__all__ = ["Evaluate", "PrototypeEvaluation", "error_text", "evaluate_seeds", "leaves_unusable"]

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


class _NoOutcomeError(TypeError):
    """Error for an evaluation that returned no outcome."""


def evaluate_seeds(
    evaluate: Evaluate,
    config: StackWiseConfig,
    seeds: Sequence[int],
    reports: LossReports,
    outcomes: list[TrialOutcome],
) -> None:
    """Run a configuration with each seed, until one fails.

    Args:
        evaluate: evaluation of a configuration.
        config: configuration to train.
        seeds: seeds of the runs.
        reports: losses for the pruner.
        outcomes: list to which the outcomes are added.

    Raises:
        optuna.TrialPruned: the pruner stops the trial.
        TypeError: `evaluate` returned no outcome.
        OSError: raised before the first report, usually for the data. A TimeoutError is excluded.
        ImportError: raised before the first report.
        torch.AcceleratorError: the device is unusable in this process.
    """
    try:
        for number, seed in enumerate(seeds):
            outcome = evaluate(config, seed, reports.report)
            if not isinstance(outcome, TrialOutcome):
                raise _NoOutcomeError(
                    f"evaluate: returned {type(outcome).__name__}, {outcome!r}; wanted a TrialOutcome"
                )
            outcomes.append(outcome)
            if not math.isfinite(outcome.loss) or outcome.status not in ("success", "spiky"):
                break
            reports.finish_run(number, outcome.loss, is_last=number + 1 == len(seeds))
    except (import_optuna().TrialPruned, _NoOutcomeError):
        raise
    except Exception as error:  # a configuration that cannot be trained is a result
        # A missing file or library is noticed before the first loss.
        is_early = not outcomes and not reports.was_called
        is_missing = isinstance(error, OSError | ImportError) and not isinstance(error, TimeoutError)
        if leaves_unusable(error) or (is_early and is_missing):
            raise
        outcomes.append(TrialOutcome("error", math.inf, reason=error_text(error)))


def error_text(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    told = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {told}"


def leaves_unusable(error: BaseException) -> bool:
    """Return True if everything that the process does on a device after this error fails."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def _planned_peak(config: StackWiseConfig) -> int:
    from stackwise.training.memory_planner import plan_memory

    # The plan does not depend on random numbers, but it builds a Rack, which draws some.
    with torch.random.fork_rng(devices=[]):
        return plan_memory(config, device="cpu").peak
