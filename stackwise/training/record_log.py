"""RecordLog: who is given the records of a run, and where they may be written down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from stackwise.config.training import TelemetryConfig
from stackwise.stability.guard import Alarm
from stackwise.stability.telemetry import StepRecord
from stackwise.support.arguments import require

__all__ = ["EVENT_FILES", "ClosingLog", "RecordLog", "check_places", "free_place"]

# As TensorBoard's writer calls them.
EVENT_FILES = "events.out.tfevents.*"


class RecordLog(Protocol):
    """A reader of records. It gets numbers of the host, so nothing it does waits for the device."""

    def write(
        self,
        records: Sequence[StepRecord],
        figures: Mapping[str, float] | None = None,
        alarms: Sequence[Alarm] = (),
    ) -> None:
        """Write `records` down, `figures` as those of the last of them, and what the guard had to say.

        Figures are those of `Throughput.to_dict`, and after an evaluation `validation_loss`.
        """


class ClosingLog(ABC):
    """A log that is closed at the end of a `with` block. What a disk refuses is lost with a warning."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still held back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_places(telemetry: TelemetryConfig, *, resumes: bool) -> None:
    """Refuse where no log can be, and what another run has written, unless this one `resumes`.

    Raises:
        ValueError: naming the key.
    """
    if telemetry.jsonl is not None:
        key, file = "training.telemetry.jsonl", Path(telemetry.jsonl)
        require(not file.is_dir(), key, telemetry.jsonl, "a file, which a folder is not")
        new = resumes or not file.exists() or file.stat().st_size == 0
        require(new, key, telemetry.jsonl, "a file that has no lines yet, so that no two runs mix")
    if telemetry.tensorboard is not None:
        key, folder = "training.telemetry.tensorboard", Path(telemetry.tensorboard)
        require(folder.is_dir() or not folder.exists(), key, telemetry.tensorboard, "a folder")
        new = resumes or not any(folder.glob(EVENT_FILES))
        require(new, key, telemetry.tensorboard, "a folder that has no events yet, so that no two runs mix")


def free_place(beside: Path, name: str) -> Path:
    """The first that is not there of what is called `name` and 1, 2 and so on, in the folder of `beside`."""
    places = (beside.with_name(f"{name}{number}") for number in count(1))
    return next(place for place in places if not place.exists())
