"""`python -m bench.same.collect FILE`: append the observations of this tree to a JSON Lines file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from bench.isolated import all_isolated
from bench.same.observations import GROUPS

SECONDS = 300.0  # time limit of one observation


def read(path: Path) -> dict[str, object]:
    """Return the stored values by "group/name/key". A last line that is incomplete is ignored."""
    values: dict[str, object] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        values |= {f"{record['name']}/{key}": value for key, value in record["values"].items()}
    return values


def collect(path: Path, groups: list[str], jobs: int) -> None:
    """Run every observation that the file lacks, and append its values."""
    done = {name.rpartition("/")[0] for name in read(path)}
    torch.set_num_threads(1)
    with path.open("a") as file:
        if path.stat().st_size:
            file.write("\n")  # after a line that an interrupted run left incomplete
        for group in groups:
            new = {name: each for name, each in GROUPS[group]().items() if f"{group}/{name}" not in done}
            for name, ended in all_isolated(new, jobs=jobs, seconds=SECONDS):
                values = {key: value for part in ended.values for key, value in part.items()}
                values["error"] = ended.error
                record = {"name": f"{group}/{name}", "seconds": round(ended.seconds, 2), "values": values}
                file.write(json.dumps(record) + "\n")
                file.flush()


def main() -> int:
    """Parse the command line and collect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    collect(arguments.file, arguments.groups.split(","), arguments.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
