"""RecordLog: receivers of a run's records: JSON Lines, TensorBoard, and those of the user."""

from __future__ import annotations

import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from stackwise.checkpoint.folder import flush
from stackwise.config.training import TelemetryConfig
from stackwise.stability.guard import Alarm
from stackwise.stability.telemetry import StepRecord
from stackwise.support.arguments import require
from stackwise.support.files import parse_json, replacing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "ClosingLog",
    "JsonLinesLog",
    "LoggedLines",
    "RecordLog",
    "TensorBoardLog",
    "check_places",
    "read_json_lines",
]

_EVENT_FILES = "events.out.tfevents.*"  # names of the files of TensorBoard's writer
# JSON supports only finite numbers. Python's float() parses these names.
_NAMES = ("NaN", "Infinity", "-Infinity")


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

    def __exit__(self, *_: object) -> None:
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
        new = resumes or not any(folder.glob(_EVENT_FILES))
        require(new, key, telemetry.tensorboard, "a folder that has no events yet, so that no two runs mix")


class JsonLinesLog(ClosingLog):
    """Log with one JSON object per line, for each step and each alarm. Each `write` is flushed.

    The line of an alarm has `alarm`, its kind, and no `loss`. Non-finite numbers are written as "NaN",
    "Infinity" and "-Infinity". An incomplete last line of a killed run is removed when the file is opened.

    Args:
        path: file of the log. It is created with its folder; lines are appended to an existing file.
        first_step: first step of the resumed run. Lines of this step and later ones are removed from an
            existing file. A file without earlier lines, or with lines of another run, is renamed to the first
            free one of `run.jsonl.1`, `run.jsonl.2` and so on. None: every line stays.
        run: identity of the run, written into every line. None: none is written.

    Raises:
        ValueError: lines are to be removed from a file that contains lines of another format.
    """

    def __init__(
        self, path: str | os.PathLike[str], first_step: int | None = None, run: str | None = None
    ) -> None:
        self.path, self._run = Path(path), {} if run is None else {"run": run}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut_partial_line(self.path)
            if first_step is not None:
                _cut_steps(self.path, first_step, run)
        self._file = self.path.open("ab", buffering=0)
        self._whole = self._file.tell()  # bytes of complete lines

    def write(
        self,
        records: Sequence[StepRecord],
        figures: Mapping[str, float] | None = None,
        alarms: Sequence[Alarm] = (),
    ) -> None:
        """Append a line for each of `records` and each of `alarms`. `figures` go into the last record's line.

        If the disk returns an error, these lines are lost, with a warning. Later calls write again.
        """
        rows = [record.to_dict() for record in records]
        if rows and figures:
            rows[-1] |= figures
        rows += [{"step": alarm.step, "alarm": alarm.kind, **_alarm_values(alarm)} for alarm in alarms]
        # One system call for all lines: only a full disk or a kill during the call can leave an incomplete
        # line.
        lines = "".join(json.dumps(_named(row | self._run), allow_nan=False) + "\n" for row in rows).encode()
        try:
            if self._file.tell() != self._whole:
                self._file.truncate(self._whole)
            while lines:
                lines = lines[self._file.write(lines) :]
            self._whole = self._file.tell()
        except OSError as error:
            warnings.warn(f"{self.path}: lines are skipped: {error}", stacklevel=2)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LoggedLines(NamedTuple):
    """Content of a JSON Lines file.

    Attributes:
        lines: one mapping for each complete line, in file order.
        partial: incomplete last line; empty if the last line is complete.
    """

    lines: list[dict[str, Any]]
    partial: str


def read_json_lines(path: str | os.PathLike[str]) -> LoggedLines:
    """Read the lines that `JsonLinesLog` wrote. Non-finite numbers are converted back to floats.

    A rewind of the guard repeats steps. If a step has two lines, apart from alarms, the later one is valid.

    Raises:
        ValueError: a line is not a JSON object, unless it is an incomplete last line.
        FileNotFoundError: the file does not exist.
    """
    *whole, partial = Path(path).read_bytes().split(b"\n")
    lines = []
    for number, line in enumerate(whole, start=1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            text = line.decode(errors="replace")[:80]
            raise ValueError(f"{path}, line {number}: got {text!r}; allowed: a JSON object")
        lines.append(_numbered(row))
    return LoggedLines(lines, partial.decode(errors="replace"))


class TensorBoardLog(ClosingLog):
    """Scalars for TensorBoard: `train/...`, norms, `throughput/...`, `validation/loss`, `alarm/...`.

    TensorBoard's writer cannot recover from a disk error: after one, nothing more is written.

    Args:
        folder: folder of the event files.
        first_step: first step of the resumed run. TensorBoard hides this step and later ones of older files.
            With 0, and if they are of another run, older files are moved to the first free one of the folders
            `before-1`, `before-2` and so on in `folder`. None: all steps stay visible.
        run: identity of the run, appended to the names of event files. None: none is appended.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], first_step: int | None = None, run: str | None = None
    ) -> None:
        self.folder = Path(folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "training.telemetry.tensorboard needs tensorboard >= 2.18: "
                f"pip install 'stackwise[train]' ({error})"
            ) from error
        suffix = "" if run is None else f".{run}"
        older = [*self.folder.glob(_EVENT_FILES)]
        if first_step == 0:
            self._set_aside(older)
        elif first_step is not None:
            self._set_aside([file for file in older if not file.name.endswith(suffix)])
        self._writer: SummaryWriter | None = SummaryWriter(
            str(folder), purge_step=first_step, filename_suffix=suffix
        )

    def write(
        self,
        records: Sequence[StepRecord],
        figures: Mapping[str, float] | None = None,
        alarms: Sequence[Alarm] = (),
    ) -> None:
        """Queue scalars at the steps of `records`; a thread of the writer writes them to disk."""
        if self._writer is None:
            return
        try:
            self._add(self._writer, records, figures or {}, alarms)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Wait for the writer's thread, and close the file."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._give_up(error)

    def _set_aside(self, older: Sequence[Path]) -> None:
        if older:
            place = _free_place(self.folder / "before", "before-")
            place.mkdir()
            for file in older:
                file.rename(place / file.name)

    @staticmethod
    def _add(
        writer: SummaryWriter,
        records: Sequence[StepRecord],
        figures: Mapping[str, float],
        alarms: Sequence[Alarm],
    ) -> None:
        for record in records:
            scalars = record.to_dict()
            step, _ = scalars.pop("step"), scalars.pop("unit", None)
            for name, norm in scalars.pop("parameter_norms", {}).items():
                writer.add_scalar(f"gradient_norm/{name}", norm, step)
            for name, value in scalars.items():
                writer.add_scalar(f"train/{name}", float(value), step)
        if records:
            for name, value in figures.items():
                tag = "validation/loss" if name == "validation_loss" else f"throughput/{name}"
                writer.add_scalar(tag, value, records[-1].step)
        for alarm in alarms:
            writer.add_scalar(f"alarm/{alarm.kind.replace(' ', '_')}", alarm.value, alarm.step)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        warnings.warn(f"{self.folder}: nothing more is written: {error}", stacklevel=3)


def _alarm_values(alarm: Alarm) -> dict[str, Any]:
    values = alarm.to_dict()
    return {key: value for key, value in values.items() if key not in ("step", "kind") and value is not None}


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return _NAMES[0] if math.isnan(value) else _NAMES[1] if value > 0 else _NAMES[2]
    return value


def _numbered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbered(each) for key, each in value.items()}
    return float(value) if isinstance(value, str) and value in _NAMES else value


def _cut_steps(path: Path, first_step: int, run: str | None) -> None:
    """Keep the lines of steps before `first_step`. Rename the file if it has none, or is of another run."""
    lines, _ = read_json_lines(path)
    own = run is None or all(row.get("run", run) == run for row in lines)
    whole = path.read_bytes().splitlines(keepends=True)
    kept = [
        text
        for text, row in zip(whole, lines, strict=True)
        if own and (not isinstance(row.get("step"), int) or row["step"] < first_step)
    ]
    if len(kept) == len(whole):
        return
    if not kept:
        path.rename(_free_place(path, f"{path.name}."))
        return
    with replacing(path) as scratch:
        scratch.write_bytes(b"".join(kept))
        flush(scratch)


def _cut_partial_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def _free_place(beside: Path, name: str) -> Path:
    """Return the first path that does not exist of `name` + 1, 2 and so on, in the parent of `beside`."""
    places = (beside.with_name(f"{name}{number}") for number in count(1))
    return next(place for place in places if not place.exists())
