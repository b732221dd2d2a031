"""JsonLinesLog: a run's records as lines of JSON, and how they are read again."""

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

# JSON has no other numbers than finite ones. Python's float() takes these names back.
_NAMES = ("NaN", "Infinity", "-Infinity")


class JsonLinesLog(ClosingLog):
    """Log with one JSON object a line, for each step and each alarm, flushed at each `write`.

    The line of an alarm has `alarm`, its kind, and no `loss`. Numbers that are not finite are written as
    "NaN", "Infinity" and "-Infinity". A line that a killed run has not finished is removed when the file is
    opened again.

    Args:
        path: file. It is created with its folder; an existing file is continued.
        first_step: first step of the resumed run. Lines of this step and later ones are removed from an
            existing file. A file without earlier lines, or with lines of another run, is renamed to the first
            free one of `run.jsonl.1`, `run.jsonl.2` and so on. None: every line stays.
        run: identity of the run, written into every line. None: none is written.

    Raises:
        ValueError: lines are to be removed from a file that has other lines than this class writes.
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
        self._whole = self._file.tell()  # bytes of lines that were written to their end

    def write(
        self,
        records: Sequence[StepRecord],
        figures: Mapping[str, float] | None = None,
        alarms: Sequence[Alarm] = (),
    ) -> None:
        """Append a line for each of `records`, `figures` in the last one, and for each of `alarms`.

        Lines that the disk refuses are left out; those of later calls are written again.
        """
        rows = [record.to_dict() for record in records]
        if rows and figures:
            rows[-1] |= figures
        rows += [{"step": alarm.step, "alarm": alarm.kind, **_told(alarm)} for alarm in alarms]
        # One call of the system for all of them: none is torn but by a full disk or a kill within it.
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
    """A file of JSON lines.

    Attributes:
        lines: one mapping for each whole line, in their order.
        partial: the last line as far as it was written; empty: the file ends with a whole one.
    """

    lines: list[dict[str, Any]]
    partial: str


def read_json_lines(path: str | os.PathLike[str]) -> LoggedLines:
    """What `JsonLinesLog` wrote, with numbers that are not finite as such.

    A guard that goes back repeats steps: of two lines of one step, alarms apart, the later one holds.

    Raises:
        ValueError: a line that is no JSON object, unless it is the last and was never ended.
        FileNotFoundError: no such file.
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
    """Keep the lines of steps before `first_step`. Rename the file if there are none, or of another run."""
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
        # From behind, a piece at a time: the file may be long.
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
