"""Evaluation of one configuration under one seed in a search, and checks of configurations before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from stackwise.config import StackWiseConfig
from stackwise.data.create import create_data
from stackwise.model.build import create_rack_from_config
from stackwise.prototype.search.trial import TrialOutcome
from stackwise.support.arguments import check_sizes
from stackwise.training.objective import Objective
from stackwise.training.optimizer import create_optimizer
from stackwise.training.precision import check_precision

__all__ = [
    "Evaluate",
    "PrototypeEvaluation",
    "Report",
    "check_data",
    "check_trains",
    "data_settings",
    "unread_keys",
]

Report = Callable[[float, float], None]
# Keys that a run replaces or does not use. A section includes all its keys.
_UNREAD = {
    "training.seed": "it is that of `seeds`",
    "training.max_steps": "it is `steps`",
    "training.log_interval": "nothing is logged",
    "training.telemetry": "nothing is logged",
    "training.guard": "it would hide what is looked for",
    "training.checkpoint_dir": "no checkpoint is made",
    "training.checkpoint": "no checkpoint is made",
    "training.save_interval": "no checkpoint is made",
    "training.resume": "no checkpoint is made",
}


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


def check_trains(config: StackWiseConfig, device: str | None) -> None:
    """Raise ValueError for a configuration that `PrototypeEvaluation` cannot set up. Create no weights.

    Raises:
        ValueError: the message names the key or the argument.
        ImportError: a precision requires a library that is not installed.
    """
    from stackwise.prototype.prototype import ArchitecturePrototype

    prototype, settings = ArchitecturePrototype(config, device=device), config.training
    check_precision(settings.precision, prototype.device)
    changed = config.to_dict()
    changed["model"]["architecture"]["blocks_per_stack"] = 1  # all Blocks have the same type
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        rack = create_rack_from_config(changed)
    Objective(settings.objective, config.model.vocab_size).check(rack)
    create_optimizer(rack, settings.optimizer, masters=settings.precision == "bf16_weights")


def check_data(config: StackWiseConfig) -> None:
    """Raise an error for a configuration if its data cannot be created. The data is created for this check.

    Raises:
        ValueError: the message names the key.
        OSError: the file or the folder cannot be read.
        ImportError: the library of a tokenizer is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        create_data(config)


def data_settings(config: StackWiseConfig) -> str:
    """Return a text that is equal for configurations with the same result of `check_data`."""
    training = config.training
    read = (config.data, config.model.vocab_size, training.batch_size, training.seq_len, training.objective)
    return repr(read)


def unread_keys(keys: Iterable[str], device: str | None) -> Iterator[str]:
    """Yield a sentence for each of `keys` that has no effect in a run of `PrototypeEvaluation`.

    Args:
        keys: keys of a space.
        device: as in `PrototypeEvaluation`.
    """
    unread = _UNREAD | ({} if device is None else {"training.device": f"it is device={device!r}"})
    for key in keys:
        for name, why in unread.items():
            if key == name or key.startswith(f"{name}."):
                yield f"space.{key}: no trial reads it: {why}; allowed: keys that trials differ by"


def _planned_peak(config: StackWiseConfig) -> int:
    from stackwise.training.memory_planner import plan_memory

    # The plan does not depend on random numbers, but it builds a Rack, which draws some.
    with torch.random.fork_rng(devices=[]):
        return plan_memory(config, device="cpu").peak
