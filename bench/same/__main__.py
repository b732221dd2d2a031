"""`python -m bench.same BASE`: show that the current tree behaves like an earlier revision.

Both trees are exported to build/same/TREE and observed there: losses and weights of the examples, logits,
check results, alarms of the guard, verdicts of the gate, and all public names. The results of a tree are
stored, so an interrupted run continues and a base is observed once. Differences that `changes.py` does not
list fail.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from bench.claim import Bar
from bench.same.changes import CHANGES, RENAMES
from bench.same.collect import read

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/same"
NOT_OBSERVED = ("bench/same/changes.py", "docs", "*.md")
SHOWN = 40  # differences in the terminal


def main() -> int:
    """Observe both trees, compare and print the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="revision to compare with")
    parser.add_argument("--groups", help="only these groups, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of both trees")
    arguments = parser.parse_args()
    trees = [_git("rev-parse", f"{arguments.base}^{{tree}}"), _current_tree()]
    groups = [] if arguments.groups is None else ["--groups", arguments.groups]
    base, current = _observe(list(dict.fromkeys(trees)), groups, arguments.jobs, trees)
    base = renamed(base, RENAMES)
    intended, unexplained = differences(base, current, CHANGES)
    for name in unexplained[:SHOWN]:
        print(f"{name}: {_short(base.get(name, 'absent'))} -> {_short(current.get(name, 'absent'))}")
    if len(unexplained) > SHOWN:
        print(f"and {len(unexplained) - SHOWN} more")
    for reason in sorted(set(intended.values())):
        print(f"intended: {sum(each == reason for each in intended.values())} values: {reason}")
    print(f"{len(base)} values of {arguments.base}, {len(current)} of the current tree")
    failed = [name for name, value in current.items() if name.endswith("/error") and value is not None]
    for name in failed:
        print(f"{name}: {current[name]}")
    bars = [
        Bar("observations that failed", len(failed), 0, at_most=True),
        Bar("unexplained differences", len(unexplained), 0, at_most=True),
        Bar("values compared", len(base.keys() & current.keys()), 1),
    ]
    for bar in bars:
        print(bar.line(quick=False))
    return int(any(bar.verdict != "PASS" for bar in bars))


def renamed(values: Mapping[str, object], renames: Mapping[str, str]) -> dict[str, object]:
    """Return the values of the base with the new names. A name is a whole part between two slashes."""
    return {
        "/".join(renames.get(part, part) for part in name.split("/")): value for name, value in values.items()
    }


def differences(
    base: Mapping[str, object], current: Mapping[str, object], changes: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the intended differences with their reasons, and the names of all others.

    A value that only one side has is a difference.
    """
    absent = object()
    names = sorted(base.keys() | current.keys())
    different = [name for name in names if base.get(name, absent) != current.get(name, absent)]
    reasons = {
        name: reason for name in different for pattern, reason in changes.items() if fnmatch(name, pattern)
    }
    return reasons, [name for name in different if name not in reasons]


def _git(*arguments: str, index: str | None = None) -> str:
    environment = os.environ if index is None else os.environ | {"GIT_INDEX_FILE": index}
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def _current_tree() -> str:
    """Return the git tree of the working folder, with files that are not committed.

    Pages and the list of changes are removed, so that an edit of them does not start a new observation.
    """
    with tempfile.TemporaryDirectory() as folder:
        index = f"{folder}/index"
        _git("read-tree", "HEAD", index=index)
        _git("add", "--all", index=index)
        _git("rm", "-r", "-q", "--cached", "--", *NOT_OBSERVED, index=index)
        return _git("write-tree", index=index)


def _observe(trees: list[str], groups: list[str], jobs: int, wanted: list[str]) -> list[dict[str, object]]:
    """Observe the trees at the same time and return the values of the wanted ones."""
    share = str(max(1, jobs // len(trees)))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    processes = []
    for tree in trees:
        folder = FOLDER / tree
        if not folder.exists():
            _export(tree, folder)
        command = [sys.executable, "-m", "bench.same.collect", str(_file(tree)), "--jobs", share, *groups]
        own = environment | {"PYTHONPATH": str(folder)}
        processes.append(subprocess.Popen(command, cwd=folder, env=own))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"an observation failed: exit codes {codes}")
    return [read(_file(tree)) for tree in wanted]


def _file(tree: str) -> Path:
    return FOLDER / f"{tree}.jsonl"


def _export(tree: str, folder: Path) -> None:
    command = ["git", "-C", str(ROOT), "archive", tree]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        file.extractall(folder, filter="data")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


if __name__ == "__main__":
    sys.exit(main())
