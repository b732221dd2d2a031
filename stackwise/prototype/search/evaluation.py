"""Evaluation: what a search does with one configuration under one seed, and what it is told meanwhile."""

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
# Keys that a run is told otherwise, or does without; a section stands for all that is in it.
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
    """Anything that says what a configuration does.

    Called with the configuration, a seed, and `report`: to be called with (part of the training that is done,
    from 0 to 1; loss), in order; what it raises where the trial is pruned must pass through. What this raises
    is the `error` of the trial; but an OSError (other than a TimeoutError) or ImportError before the first
    report of its first seed, and what leaves a device unusable, is none of it: it ends the search, and the
    trial is given back, until the third time.
    With several jobs it is pickled, so that it must be a function or a class of an importable module.
    """

    def __call__(self, config: StackWiseConfig, seed: int, report: Report) -> TrialOutcome:
        """What becomes of `config` under `seed`."""
        ...


@dataclass(frozen=True)
class PrototypeEvaluation:
    """Train as `ArchitecturePrototype.run` does.

    The loss is that of validation where there is validation data, of the last tenth of training elsewhere;
    the speed is that of the median update. The peak is what an update held on CUDA. On the CPU, where a
    process cannot tell tensors from the rest of its memory, it is what `plan_memory` counts: the bytes of
    all tensors of a step.

    Attributes:
        steps: updates of each run.
        device: where to run; None: as configured.
    """

    steps: int = 1000
    device: str | None = None

    def __post_init__(self) -> None:
        check_sizes(steps=self.steps)

    def __call__(self, config: StackWiseConfig, seed: int, report: Report) -> TrialOutcome:
        """Train `config` from weights of `seed`."""
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
    """Refuse a configuration that `PrototypeEvaluation` cannot set up; no weights are made for it.

    Raises:
        ValueError: naming the key, or the argument that it is.
        ImportError: a precision needs a library that is not installed.
    """
    from stackwise.prototype.prototype import ArchitecturePrototype

    prototype, settings = ArchitecturePrototype(config, device=device), config.training
    check_precision(settings.precision, prototype.device)
    changed = config.to_dict()
    changed["model"]["architecture"]["blocks_per_stack"] = 1  # all of them are of one kind
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        rack = create_rack_from_config(changed)
    Objective(settings.objective, config.model.vocab_size).check(rack)
    create_optimizer(rack, settings.optimizer, masters=settings.precision == "bf16_weights")


def check_data(config: StackWiseConfig) -> None:
    """Refuse a configuration whose data cannot be made, by making it.

    Raises:
        ValueError: naming the key.
        OSError: the file or the folder cannot be read.
        ImportError: a tokenizer whose library is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        create_data(config)


def data_settings(config: StackWiseConfig) -> str:
    """The same text for configurations that `check_data` says the same of."""
    training = config.training
    read = (config.data, config.model.vocab_size, training.batch_size, training.seq_len, training.objective)
    return repr(read)


def unread_keys(keys: Iterable[str], device: str | None) -> Iterator[str]:
    """Which of `keys` change nothing in a run of `PrototypeEvaluation`, and why: a sentence each.

    Args:
        keys: of a space.
        device: as of `PrototypeEvaluation`.
    """
    unread = _UNREAD | ({} if device is None else {"training.device": f"it is device={device!r}"})
    for key in keys:
        for name, why in unread.items():
            if key == name or key.startswith(f"{name}."):
                yield f"space.{key}: no trial reads it: {why}; allowed: keys that trials differ by"


def _planned_peak(config: StackWiseConfig) -> int:
    from stackwise.training.memory_planner import plan_memory

    # The plan draws nothing that counts, but it builds a Rack.
    with torch.random.fork_rng(devices=[]):
        return plan_memory(config, device="cpu").peak
