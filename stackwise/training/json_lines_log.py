"""JsonLinesLog: log of a run's records as JSON Lines, and a function that reads it."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stackwise.checkpoint.folder import flush
from stackwise.stability.guard import Alarm
from stackwise.stability.telemetry import StepRecord
from stackwise.support.files import parse_json, replacing
from stackwise.training.record_log import ClosingLog, free_place

__all__ = ["JsonLinesLog", "LoggedLines", "read_json_lines"]

# JSON supports only finite numbers. Python's float() parses these names.
_NAMES = ("NaN", "Infinity", "-Infinity")


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
        _cut_partial_line(self.path)
        if first_step is not None and self.path.exists():
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
        rows += [{"step": alarm.step, "alarm": alarm.kind, **_told(alarm)} for alarm in alarms]
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
            warnings.warn(f"{self.path}: lines are left out: {error}", stacklevel=2)

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


def _told(alarm: Alarm) -> dict[str, Any]:
    told = alarm.to_dict()
    return {key: value for key, value in told.items() if key not in ("step", "kind") and value is not None}


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
        path.rename(free_place(path, f"{path.name}."))
        return
    with replacing(path) as scratch:
        scratch.write_bytes(b"".join(kept))
        flush(scratch)


def _cut_partial_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        # Backwards, one chunk at a time: the file may be long.
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
