"""SweepStore: the runs of a sweep as lines of JSON, so that a sweep that was ended goes on."""

from __future__ import annotations

import json
from pathlib import Path

from stackwise.prototype.sweep_run import PlannedRun, SweepRun
from stackwise.support.files import parse_json

__all__ = ["SweepStore"]


class SweepStore:
    """A file that only grows: one line a run, each on disk before the next run is told of.

    A line that was cut off, as by a kill, is not read, and the line after it is whole. Runs of several sweeps
    may be in one file; each is found by `PlannedRun.key`.

    Args:
        path: of the file. It is made when the first run is kept, its folder too.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> dict[str, SweepRun]:
        """All whole runs by their key; of two with the same key the later one."""
        found = {}
        content = self.path.read_bytes() if self.path.exists() else b""
        for line in content.splitlines():
            try:
                record = parse_json(line)
            except ValueError:  # cut off; within a character, it is no UTF-8 either
                continue
            found[record["key"]] = SweepRun.from_dict(record["run"])
        return found

    def keep(self, plan: PlannedRun, run: SweepRun) -> None:
        """Add a run.

        Raises:
            OSError: it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        line = json.dumps({"key": plan.key, "run": run.to_dict()}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + line + "\n")
