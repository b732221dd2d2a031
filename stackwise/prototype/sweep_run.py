"""SweepRun: one training at one width, learning rate and seed, planned and made."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stackwise.config import StackWiseConfig
from stackwise.prototype.prototype import ArchitecturePrototype
from stackwise.prototype.prototype_run import PrototypeRun, Status, end_of
from stackwise.support.arguments import check_number

__all__ = ["PlannedRun", "SweepRun", "name_of"]


@dataclass(frozen=True)
class SweepRun:
    """What one training came to. Losses in nats.

    Attributes:
        width: how many times as wide as the subject.
        learning_rate: the largest of the schedule.
        seed: of weights and data.
        loss: of the validation data at the end; where there are none, the mean of the last tenth of the
            training losses, of which `z_loss` is a part. Infinite where the run was not finite to its end.
        initial_loss: of the first batch, before the first update, of which `z_loss` is a part as well.
        status: as of `PrototypeRun`.
        step: of the first trouble; None: success.
        seconds: that it took.
        logit_max: largest absolute value of the output before the last update; None: it was not finite, or
            the run did not get there.
        attention_logit_max: largest number that a softmax of the attention took there; None: as for
            `logit_max`, or not seen.
    """

    width: int
    learning_rate: float
    seed: int
    loss: float
    initial_loss: float
    status: Status
    step: int | None
    seconds: float
    logit_max: float | None = None
    attention_logit_max: float | None = None

    @classmethod
    def of(cls, run: PrototypeRun, width: int, learning_rate: float, seed: int) -> SweepRun:
        """Of a run as it ended.

        Raises:
            ValueError: it was not finite at its first step: no learning rate is to blame for that.
        """
        initial = run.losses[0]
        check_number("loss at initialisation", initial, "a finite number", lambda _: True)
        if run.status == "nan":
            loss = math.inf
        elif run.validation_loss is not None:
            loss = run.validation_loss
        else:
            loss = end_of(run.losses)
        loss = loss if math.isfinite(loss) else math.inf
        last = None if run.status == "nan" else len(run.losses) - 1
        logits = [largest for step, largest in run.logit_max if step == last]
        attention = [max(of.values()) for step, of in run.attention_logit_max if step == last]
        return cls(
            width,
            learning_rate,
            seed,
            loss,
            initial,
            run.status,
            run.step,
            run.seconds,
            _finite(logits[0]) if logits else None,
            _finite(attention[0]) if attention else None,
        )

    @property
    def counted(self) -> float:
        """The loss, at most that at initialisation: as it counts for the sensitivity."""
        return min(self.loss, self.initial_loss)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: a loss that is not finite is None."""
        return {**asdict(self), "loss": _finite(self.loss)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SweepRun:
        """What `to_dict` gave."""
        return cls(**{**values, "loss": math.inf if values["loss"] is None else values["loss"]})


@dataclass(frozen=True)
class PlannedRun:
    """A training that is to be made.

    Attributes:
        subject: what ArchitecturePrototype takes, at its width.
        width, learning_rate, seed, steps: of the run.
        sets_learning_rate: whether the learning rate is given to the prototype, or is in the subject already.
        options: further arguments of ArchitecturePrototype.
        data_name: what the data among them are called; None: they have no name.
    """

    subject: Any
    width: int
    learning_rate: float
    seed: int
    steps: int
    sets_learning_rate: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    data_name: str | None = None

    @property
    def name(self) -> str:
        """Which run of its sweep it is."""
        return f"width {self.width}, learning rate {self.learning_rate:.6g}, seed {self.seed}"

    @property
    def key(self) -> str:
        """The same for runs that come to the same.

        A configuration is known by all that it says; anything else by its name, and data by
        `data_name` alone.
        """
        subject = self.subject
        known = subject.to_dict() if isinstance(subject, StackWiseConfig) else name_of(subject)
        options = {key: value for key, value in self.options.items() if key != "data"}
        told = {"subject": known, "steps": self.steps, **options}
        if self.data_name is not None:
            told["data"] = self.data_name
        # The name has six digits of it, and a configuration all, as it says it itself.
        if not (self._says_learning_rate or float(f"{self.learning_rate:.6g}") == self.learning_rate):
            told["learning_rate"] = self.learning_rate
        text = json.dumps(told, sort_keys=True, default=str)
        return f"{self.name}; {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def _says_learning_rate(self) -> bool:
        """Whether it is in the subject, as it is."""
        subject = self.subject
        return isinstance(subject, StackWiseConfig) and subject.training.optimizer.lr == self.learning_rate

    def train(self) -> SweepRun:
        """Make the run, in this process."""
        learning_rate = self.learning_rate if self.sets_learning_rate else None
        prototype = ArchitecturePrototype(
            self.subject, learning_rate=learning_rate, seed=self.seed, **self.options
        )
        run = prototype.run(self.steps, observe_every=self.steps)  # before and after
        return SweepRun.of(run, self.width, self.learning_rate, self.seed)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def name_of(subject: Any) -> str:
    """What a spec, or a function that makes one, is called."""
    return str(getattr(subject, "name", None) or getattr(subject, "__name__", type(subject).__name__))
