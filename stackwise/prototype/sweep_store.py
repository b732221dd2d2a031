"""SweepStore: runs of a sweep as JSON lines, so that an interrupted sweep can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

from stackwise.prototype.sweep_run import PlannedRun, SweepRun
from stackwise.support.files import parse_json

__all__ = ["SweepStore"]


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
