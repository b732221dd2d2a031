"""RecordLog: receivers of a run's records, and checks of their files."""

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

# Names of the files of TensorBoard's writer.
EVENT_FILES = "events.out.tfevents.*"


class RecordLog(Protocol):
    """Receiver of records. It gets numbers on the host, and needs no synchronisation with the device."""

    def write(
        self,
        records: Sequence[StepRecord],
        figures: Mapping[str, float] | None = None,
        alarms: Sequence[Alarm] = (),
    ) -> None:
        """Write `records` and `alarms`. `figures` belong to the last record.

        Figures come from `Throughput.to_dict`, with `validation_loss` after an evaluation.
        """


class ClosingLog(ABC):
    """Log that is closed at the end of a `with` block. After a disk error, lines are lost with a warning."""

    @abstractmethod
    def close(self) -> None:
        """Write the buffered records and close the log."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_places(telemetry: TelemetryConfig, *, resumes: bool) -> None:
    """Raise if a log cannot be written, or if its place has data of another run and this one does not resume.

    Raises:
        ValueError: names the key.
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
    """Return the first path that does not exist of `name` + 1, 2 and so on, in the parent of `beside`."""
    places = (beside.with_name(f"{name}{number}") for number in count(1))
    return next(place for place in places if not place.exists())
