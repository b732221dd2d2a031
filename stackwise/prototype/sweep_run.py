"""SweepRun: one training at one width, learning rate and seed; its plan, and a file of runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stackwise.config import StackWiseConfig
from stackwise.prototype.prototype import ArchitecturePrototype
from stackwise.prototype.prototype_run import PrototypeRun, Status, end_of
from stackwise.support.arguments import check_number
from stackwise.support.files import parse_json

__all__ = ["PlannedRun", "SweepRun", "SweepStore", "name_of"]


@dataclass(frozen=True)
class SweepRun:
    """Result of one training. Losses are in nats.

    Attributes:
        width: width factor relative to the subject.
        learning_rate: peak learning rate of the schedule.
        seed: seed of weights and data.
        loss: final validation loss. Without validation data, the mean of the last tenth of the training
            losses, including `z_loss`. Infinite if the run became non-finite.
        initial_loss: loss of the first batch before the first update, including `z_loss`.
        status: as in `PrototypeRun`.
        step: step of the first problem. None: success.
        seconds: duration of the run.
        logit_max: largest absolute value of the output before the last update. None: not finite, or not
            reached.
        attention_logit_max: largest input of an attention softmax at that step. None: as in `logit_max`, or
            not observed.
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
        """Return the result of a finished run.

        Raises:
            ValueError: the first step was not finite, which no learning rate can cause.
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
        """Loss for the sensitivity, limited to the loss at initialization."""
        return min(self.loss, self.initial_loss)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. A loss that is not finite is None."""
        return {**asdict(self), "loss": _finite(self.loss)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SweepRun:
        """Return the run that `to_dict` encoded."""
        return cls(**{**values, "loss": math.inf if values["loss"] is None else values["loss"]})


@dataclass(frozen=True)
class PlannedRun:
    """Planned training.

    Attributes:
        subject: argument of ArchitecturePrototype at this width.
        width, learning_rate, seed, steps: values of the run.
        sets_learning_rate: True if the learning rate is an argument of the prototype. False: the subject
            already has it.
        options: further arguments of ArchitecturePrototype.
        data_name: name of the data in `options`. None: no name.
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
        """Name of the run within its sweep."""
        return f"width {self.width}, learning rate {self.learning_rate:.6g}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Identifier of the run. Runs with the same result have the same key.

        A configuration is identified by all its settings, another subject by its name, and data only by
        `data_name`.
        """
        subject = self.subject
        known = subject.to_dict() if isinstance(subject, StackWiseConfig) else name_of(subject)
        options = {key: value for key, value in self.options.items() if key != "data"}
        told = {"subject": known, "steps": self.steps, **options}
        if self.data_name is not None:
            told["data"] = self.data_name
        # The name has six digits of the learning rate. A configuration that states it has all digits.
        if not (self._says_learning_rate or float(f"{self.learning_rate:.6g}") == self.learning_rate):
            told["learning_rate"] = self.learning_rate
        text = json.dumps(told, sort_keys=True, default=str)
        return f"{self.name}; {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def _says_learning_rate(self) -> bool:
        """True if the subject is a configuration with exactly this learning rate."""
        subject = self.subject
        return isinstance(subject, StackWiseConfig) and subject.training.optimizer.lr == self.learning_rate

    def train(self) -> SweepRun:
        """Run the training in this process."""
        learning_rate = self.learning_rate if self.sets_learning_rate else None
        prototype = ArchitecturePrototype(
            self.subject, learning_rate=learning_rate, seed=self.seed, **self.options
        )
        run = prototype.run(self.steps, observe_every=self.steps)  # first and last step
        return SweepRun.of(run, self.width, self.learning_rate, self.seed)


class SweepStore:
    """Append-only file with one line per run. Each line is on disk before the next run is reported.

    An incomplete line, for example after a kill, is ignored, and does not affect the next line. A file may
    contain runs of several sweeps, which are identified by `PlannedRun.key`.

    Args:
        path: path of the file. The file and its folder are created when the first run is stored.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> dict[str, SweepRun]:
        """Return all complete runs by key. If a key occurs twice, the later run is used."""
        found = {}
        content = self.path.read_bytes() if self.path.exists() else b""
        for line in content.splitlines():
            try:
                record = parse_json(line)
            except ValueError:  # incomplete; if cut within a character, not valid UTF-8
                continue
            found[record["key"]] = SweepRun.from_dict(record["run"])
        return found

    def keep(self, plan: PlannedRun, run: SweepRun) -> None:
        """Append a run.

        Raises:
            OSError: the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        line = json.dumps({"key": plan.key, "run": run.to_dict()}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + line + "\n")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def name_of(subject: Any) -> str:
    """Return the name of a spec, or of a function that creates one."""
    return str(getattr(subject, "name", None) or getattr(subject, "__name__", type(subject).__name__))
