"""The tools, each by its own command line.

A tool is given an effort, which its command lines turn into seconds of measuring, and hands over for each
call what its rules say of it and what they said it from. Rules of others are theirs.
"""

from __future__ import annotations

import importlib.metadata

from bench.gate.tools.asv import Asv
from bench.gate.tools.codspeed import Codspeed
from bench.gate.tools.pyperf import Pyperf
from bench.gate.tools.pytest_benchmark import PytestBenchmark
from bench.gate.tools.stackwise import OURS, Stackwise
from bench.gate.tools.tool import Tool

__all__ = ["OURS", "TOOLS", "missing_tools", "versions"]

TOOLS: tuple[Tool, ...] = (Stackwise(), PytestBenchmark(), Asv(), Pyperf(), Codspeed())


def missing_tools() -> list[str]:
    """Packages of tools that are not installed."""
    return [package for package, version in versions().items() if version is None]


def versions() -> dict[str, str | None]:
    """Of the packages of all tools; None: it is not installed."""
    return {package: _version(package) for tool in TOOLS for package in tool.packages}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
