"""The repository's benchmarks under pytest, and what plugins write of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from bench.gate import command
from bench.gate.tools.tool import patience

__all__ = ["benchmarks_in", "call_of", "run_benchmarks"]

_FILE = "bench/test_speed.py"


def run_benchmarks(
    tree: Path,
    arguments: Sequence[str],
    *,
    without: Sequence[str],
    seconds: float,
    codes: Collection[int] = (0,),
) -> str:
    """What pytest prints of the benchmarks of a tree.

    Args:
        tree: a clone of the repository.
        arguments: of pytest.
        without: plugins of other tools, which processes of this one would load.
        seconds: that the comparison may take.
        codes: that pytest may end with.

    Raises:
        CommandFailedError: it ended with another, or took too long.
    """
    return command.run(
        [sys.executable, "-m", "pytest", _FILE, "-q", *arguments],
        tree,
        seconds=patience(seconds),
        codes=codes,
        environment={"PYTEST_ADDOPTS": " ".join(f"-p no:{plugin}" for plugin in without)},
    )


def benchmarks_in(path: Path) -> list[dict[str, Any]]:
    """What a file of pytest-benchmark, pytest-codspeed or pyperf has of each benchmark."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["benchmarks"]
    return found


def call_of(name: str) -> str:
    """The call that a test such as "bench/test_speed.py::test_speed[gemm]" makes."""
    return name.rpartition("[")[2].rstrip("]")
